"""A Mooncake master and store nodes on loopback, with the flags the operator gives them (ports and leases apart)."""

from __future__ import annotations

import sys
import urllib.request
from pathlib import Path
from typing import Self

from epochkv_fence import launch
from hack.loopback import free_port, free_ports, port_open
from hack.standalone.process import Process

CLIENT_ENVIRONMENT = {name: value for name, value in launch.CLIENT_ENVIRONMENT.items() if "RPC_PORT" not in name}


class Mooncake:
    """One master and `num_stores` store nodes of `segment_bytes` each.

    A key that was asked for or read is leased for `lease_seconds`; a node that was not heard of for `client_ttl_seconds` is
    dropped. `python` has Mooncake beside it; `host` is the master's address, and `admin_port` its own for administration.

    Attributes:
        address: host:port of the master.
        store_ports: where the nodes answer HTTP requests, in order of their start.
    """

    def __init__(
        self,
        directory: Path,
        num_stores: int = 1,
        segment_bytes: int = 256 << 20,
        lease_seconds: float = 10.0,
        client_ttl_seconds: int = 10,
        *,
        host: str = "127.0.0.1",
        admin_port: int = 0,
        python: Path | str = sys.executable,
    ) -> None:
        self.directory, self.num_stores, self.segment_bytes = directory, num_stores, segment_bytes
        self.lease_seconds, self.client_ttl_seconds = lease_seconds, client_ttl_seconds
        self.host, (self.rpc_port, spare) = host, free_ports(2)
        self.admin_port = admin_port or spare
        self.address = f"{host}:{self.rpc_port}"
        self.master: Process | None = None
        self.stores: list[Process] = []
        self.store_ports: list[int] = []
        self._python = Path(python)

    def start_master(self) -> Process:
        """Start (or start again) the master, which is empty; returns once it accepts connections."""
        command = [
            str(self._python.parent / "mooncake_master"), f"--rpc_address={self.host}", f"--rpc_port={self.rpc_port}", "--rpc_thread_num=2",
            f"--metrics_host={self.host}", f"--metrics_port={self.admin_port}", f"--client_ttl={self.client_ttl_seconds}",
            f"--default_kv_lease_ttl={int(self.lease_seconds * 1000)}", "--eviction_high_watermark_ratio=0.85",
            "--eviction_ratio=0.10", "--put_start_discard_timeout_sec=30", "--logtostderr=true",
        ]  # fmt: skip
        self.master = Process("mooncake_master", command, self.directory / "master.log")
        self.master.wait_until(self.answers, 20, "accepting connections")
        return self.master

    def answers(self) -> bool:
        return port_open(self.rpc_port, self.host)

    def start_store(self, segment_bytes: int = 0, wait: bool = True, host: str = "127.0.0.1") -> Process:
        """Add a store node, of another size or address if given; with `wait`, return once its segment is mounted."""
        self.store_ports.append(free_port())
        environ = {
            **CLIENT_ENVIRONMENT,
            "MOONCAKE_MASTER": self.address,
            "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
            "MOONCAKE_LOCAL_HOSTNAME": host,
            "MOONCAKE_PROTOCOL": "tcp",
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(segment_bytes or self.segment_bytes),
            "MOONCAKE_LOCAL_BUFFER_SIZE": str(16 << 20),
        }
        service = ["-m", "epochkv_connector.storenode", "--port", str(self.store_ports[-1]), "--max-wait-time", "60"]
        name = f"mooncake store {len(self.stores)}"
        store = Process(name, [str(self._python), *service], self.directory / f"store-{len(self.stores)}.log", environ)
        self.stores.append(store)
        if wait:
            # Not by the master's list: a successor may have the very port, and so the name, of a node that was killed.
            store.wait_until(lambda: "bytes of filled memory" in store.log.read_text(errors="replace"), 60, "mounted")
        return store

    def keys(self) -> list[str]:
        """Every key in the store.

        Raises:
            OSError: the master does not answer, which is no empty store.
        """
        return self.admin("get_all_keys").split()

    def flush(self) -> None:
        """Remove everything by force, also what is being read. Raises as `keys`."""
        self.admin("api/v1/remove_all?force=true", "POST")

    def admin(self, path: str, method: str = "GET") -> str:
        """One call of the master's admin port; the text of its answer. Raises as `keys`."""
        request = urllib.request.Request(f"http://{self.host}:{self.admin_port}/{path}", method=method)
        with urllib.request.urlopen(request, timeout=5) as answer:
            text: str = answer.read().decode()
            return text

    def __enter__(self) -> Self:
        try:
            self.start_master()
            for _ in range(self.num_stores):
                self.start_store()
        except BaseException:  # no `__exit__` follows
            self.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        for process in [*self.stores, *([self.master] if self.master else [])]:
            process.end(5.0)
