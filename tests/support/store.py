"""Real `mooncake_master` and store processes on loopback, and registered memory to talk to them with.

Every process has a session of its own and is ended by its own pid. Faults are real signals to real processes.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import mooncake

from epochkv_connector.store import ENVIRONMENT, StoreSettings, Transfer

END_BYTES = 128
"""Header and trailer of a stored object, by the format's definition."""


def free_port() -> int:
    """A TCP port nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], object], timeout: float, what: str) -> None:
    """Poll until `condition()` is true; fail the test after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout} s: {what}")
        time.sleep(0.02)


@dataclass
class Process:
    """One child process in a session of its own."""

    command: list[str]
    log: Path
    environ: dict[str, str] = field(default_factory=dict)
    child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start (or start again)."""
        environ = {**os.environ, **ENVIRONMENT, **self.environ}
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, env=environ, start_new_session=True, cwd=self.log.parent
            )

    @property
    def pid(self) -> int:
        assert self.child is not None
        return self.child.pid

    def freeze(self) -> None:
        """SIGSTOP, and wait until the kernel says that it is stopped."""
        os.kill(self.pid, signal.SIGSTOP)
        wait_until(lambda: self.run_state() == "T", 5, f"{self.command[0]} stopped")

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)
        wait_until(lambda: self.run_state() != "T", 5, f"{self.command[0]} continued")

    def run_state(self) -> str:
        """The kernel's letter: R, S, T (stopped), Z."""
        return Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]

    def kill(self) -> None:
        """SIGKILL and wait for the end."""
        if self.child is not None and self.child.poll() is None:
            self.child.kill()
            self.child.wait(10)
        assert self.child is None or self.child.poll() is not None


class Cluster:
    """One master and store processes of one test."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.rpc_port, self.admin_port = free_port(), free_port()
        self.master: Process | None = None
        self.stores: list[Process] = []

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.rpc_port}"

    def start_master(self, *flags: str) -> Process:
        """Start a master (empty) on this cluster's ports and wait until its port is open."""
        if self.master is None:
            binary = Path(mooncake.__file__).parent / "mooncake_master"
            command = [
                str(binary),
                "--rpc_address=127.0.0.1",
                f"--rpc_port={self.rpc_port}",
                "--metrics_host=127.0.0.1",
                f"--metrics_port={self.admin_port}",
                "--enable_metric_reporting=false",
                "--logtostderr=true",
                *flags,
            ]
            self.master = Process(command, self.directory / "master.log")
        self.master.start()
        wait_until(self.master_answers, 10, "master port open")
        return self.master

    def master_answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.rpc_port), 0.2).close()
        except OSError:
            return False
        return True

    def start_store(self, segment_bytes: int = 64 << 20) -> Process:
        """Start a store process and wait until the master lists its segment."""
        environ = {
            "MOONCAKE_MASTER": self.address,
            "MOONCAKE_TE_META_DATA_SERVER": "P2PHANDSHAKE",
            "MOONCAKE_GLOBAL_SEGMENT_SIZE": str(segment_bytes),
            "MOONCAKE_LOCAL_HOSTNAME": "127.0.0.1",
            "MOONCAKE_PROTOCOL": "tcp",
        }
        command = [sys.executable, "-m", "epochkv_connector.storenode", "--port", str(free_port())]
        store = Process(command, self.directory / f"store{len(self.stores)}.log", environ)
        mounted = set(self.segments())  # of which the master may drop a dead one meanwhile
        store.start()
        self.stores.append(store)
        wait_until(lambda: set(self.segments()) - mounted, 60, "store segment mounted")
        return store

    def admin(self, path: str, method: str = "GET") -> str:
        """Call the master's admin port."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.admin_port}{path}", method=method)
        with urllib.request.urlopen(request, timeout=5) as response:
            return response.read().decode()

    def segments(self) -> list[str]:
        return self.admin("/get_all_segments").split()

    def keys(self) -> list[str]:
        return self.admin("/get_all_keys").split()

    def flush(self) -> None:
        """Remove everything by force, also what is being read."""
        self.admin("/api/v1/remove_all?force=true", "POST")

    def stop(self) -> None:
        for process in (*self.stores, *([self.master] if self.master else [])):
            if process.child is not None and process.child.poll() is None:
                os.kill(process.pid, signal.SIGCONT)
            process.kill()


@contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    """A cluster whose processes end with the block."""
    made = Cluster(directory)
    try:
        yield made
    finally:
        made.stop()


def settings(address: str, **changes: object) -> StoreSettings:
    """Settings for a store on this machine."""
    soon = {"max_backoff_seconds": 0.5, "setup_backoff_seconds": (0.5, 0.5)}
    return StoreSettings(master_address=address, local_hostname="127.0.0.1", **{**soon, **changes})  # type: ignore[arg-type]


class Memory:
    """Memory of `slots` objects of `payload_bytes` each, to register with a client."""

    def __init__(self, slots: int, payload_bytes: int) -> None:
        self.payload_bytes = payload_bytes
        self.object_bytes = payload_bytes + 2 * END_BYTES
        self._map = mmap.mmap(-1, slots * self.object_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.region = (self.address, len(self._map))
        self._view = memoryview(self._map)

    def object(self, slot: int) -> memoryview:
        return self._view[slot * self.object_bytes : (slot + 1) * self.object_bytes]

    def payload(self, slot: int) -> memoryview:
        return self.object(slot)[END_BYTES:-END_BYTES]

    def fill(self, slot: int, seed: int) -> bytes:
        """Write bytes that differ at every position and for every seed; returns them."""
        value = pattern(seed, self.payload_bytes)
        self.payload(slot)[:] = value
        return value

    def clear(self) -> None:
        self._view[:] = bytes(len(self._map))

    def transfer(self, key: str, slot: int) -> Transfer:
        return Transfer(key, self.address + slot * self.object_bytes, self.object(slot))


def pattern(seed: int, num_bytes: int) -> bytes:
    """Reproducible pseudo-random bytes."""
    import random

    return random.Random(seed).randbytes(num_bytes)


class RawClient:
    """Mooncake's own client, without our envelope: writes what an enemy, or another version, might write."""

    def __init__(self, address: str, num_bytes: int = 32 << 20) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._map = mmap.mmap(-1, num_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._client = MooncakeDistributedStore()
        assert self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", address) == 0
        assert self._client.register_buffer(self._address, num_bytes) == 0

    def put(self, key: str, value: bytes) -> None:
        self._map[: len(value)] = value
        assert self._client.batch_put_from([key], [self._address], [len(value)]) == [0]

    def put_all(self, values: dict[str, bytes]) -> None:
        """One call for all, whatever becomes of it."""
        places, end = [], 0
        for value in values.values():
            self._map[end : end + len(value)] = value
            places.append(self._address + end)
            end += len(value)
        self._client.batch_put_from(list(values), places, [len(value) for value in values.values()])

    def get(self, key: str, num_bytes: int) -> bytes:
        assert self._client.batch_get_into([key], [self._address], [num_bytes]) == [num_bytes]
        return self._map[:num_bytes]

    def offer(self, key: str, value: bytes) -> bool:
        """Put; False if the store takes no more."""
        self._map[: len(value)] = value
        codes: list[int] = self._client.batch_put_from([key], [self._address], [len(value)])
        return codes == [0]

    def lease(self, keys: Sequence[str]) -> None:
        """Ask whether they are there: what was asked for is not evicted for a while."""
        self._client.batch_is_exist(list(keys))

    def remove(self, key: str) -> bool:
        """By force, also what is being read; False if there was none."""
        code: int = self._client.remove(key, True)
        return code == 0

    def close(self) -> None:
        self._client.close()


class RelayProcess:
    """`hack.standalone.relay` in a process of its own: Mooncake's `setup` holds the GIL, so a relay in this one would stand still."""

    _SOURCE = (
        "import sys; from hack.standalone.relay import Relay\n"
        "relay = Relay(sys.argv[1]); print(relay.address, flush=True)\n"
        "for line in sys.stdin: relay.delay_seconds = float(line); print('done', flush=True)\n"
    )

    def __init__(self, address: str) -> None:
        command = [sys.executable, "-c", self._SOURCE, address]
        root = Path(__file__).resolve().parents[2]
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root)
        self.address = self._line()

    def delay(self, seconds: float) -> None:
        """Every chunk, in either direction."""
        assert self._child.stdin
        self._child.stdin.write(f"{seconds}\n")
        self._child.stdin.flush()
        self._line()

    def _line(self) -> str:
        assert self._child.stdout
        return self._child.stdout.readline().strip()

    def close(self) -> None:
        self._child.kill()
        self._child.wait(10)
        for pipe in (self._child.stdin, self._child.stdout):
            if pipe:
                pipe.close()
