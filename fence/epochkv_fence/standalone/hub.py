"""The hub without Kubernetes: what `epochkv hub` is told, checked before anything is made, and the hub that it starts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from epochkv_fence.common import bracketed, end, own_address
from epochkv_fence.connection import ConfigurationError, check_endpoint
from epochkv_fence.metrics import MetricsServer, exposition
from epochkv_fence.mooncake_admin import MooncakeAdmin, StoreAdmin, check_admin_url
from epochkv_fence.net.server import HubServer
from epochkv_fence.protocol.messages import MAX_NAME
from epochkv_fence.protocol.pool import PoolConfig, PoolSnapshot, ReclaimPolicy
from epochkv_fence.standalone.authority import SqliteAuthority
from epochkv_fence.standalone.credentials import Keys, KeyWatch, ensure_keys, write_client
from epochkv_fence.standalone.report import compare

NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""A DNS-1123 subdomain, as the name of a KVCachePool: a pool keeps its name when it moves to Kubernetes, or from there."""


@dataclass(frozen=True, slots=True)
class HubOptions:
    """What `epochkv hub` is told; its help says what each option means. Empty: not given."""

    pool: str
    listen: str
    state: Path
    lease_seconds: float = 30.0
    reclaim: ReclaimPolicy = "Delete"
    store_admin: tuple[str, ...] = ()
    advertise: str = ""
    metrics: str = ""

    def checked(self) -> HubOptions:
        """With addresses in their usual form.

        Raises:
            ConfigurationError, ValueError: an option cannot be meant.
        """
        if len(self.pool) > MAX_NAME or NAME.fullmatch(self.pool) is None:
            raise ConfigurationError(
                f"--pool is {self.pool!r}; give a name as Kubernetes has them: at most {MAX_NAME} characters, lower-case letters, digits, "
                "- and ., each part between dots beginning and ending with a letter or digit, such as policy"
            )
        if self.state == Path():
            raise ConfigurationError("--state is empty, or the current directory; name a directory of its own: keys are written to it")
        split_listen(self.listen)
        if self.advertise:
            check_endpoint(self.advertise, "--advertise")
        urls = tuple(check_admin_url(url) for url in self.store_admin)
        if self.reclaim == "RemoveAll" and not urls:
            raise ConfigurationError(
                "--reclaim RemoveAll needs --store-admin: the hub itself empties the store, which only this pool may use"
            )
        if self.metrics:
            split_address(self.metrics)
        return replace(self, store_admin=urls)


def split_listen(listen: str) -> tuple[str, int]:
    """Host and port of `tcp://HOST:PORT`; `ConfigurationError` for anything else."""
    scheme, _, address = listen.partition("://")
    with contextlib.suppress(ConfigurationError):
        if scheme == "tcp":
            return split_address(address)
    raise ConfigurationError(f"--listen is {listen!r}; it must look like tcp://0.0.0.0:7700, or tcp://[::]:7700")


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, as --metrics has it; `ConfigurationError` for anything else."""
    host, _, port = address.rpartition(":")
    valid = bool(host) and host.isprintable() and " " not in host and (":" not in host or host.startswith("["))
    if not valid or not port.isascii() or not port.isdecimal() or not 0 <= int(port) < 65536:
        raise ConfigurationError(f"--metrics is {address!r}; it must look like 0.0.0.0:9090, or [::]:9090")
    return host, int(port)


def advertised(bound: str, listen: str) -> str:
    """What clients dial when nobody says: the address that was bound, or this machine's name if that was every address."""
    port = bound.rpartition(":")[2]
    host, _ = split_listen(listen)
    if host not in ("*", "0.0.0.0", "[::]"):
        return f"tcp://{host}:{port}"
    name = socket.gethostname()
    with contextlib.suppress(OSError):
        socket.getaddrinfo(name, None)
        return f"tcp://{name}:{port}"
    return f"tcp://{bracketed(own_address() or '127.0.0.1')}:{port}"


# ----------------------------------------------------------------------------------------------------------------------
# The hub of one pool without Kubernetes: the production `HubServer` over a directory. `epochkv hub` runs it in a process.
#
# Whoever holds the directory leads; whoever loses it (it was removed or replaced under the process) ends, because a hub that
# cannot prove its leadership must not pretend to serve.


logger = logging.getLogger("epochkv.hub")

REPORT_SECONDS: Final = 0.1
REPORT_SHARE: Final = 20
"""A snapshot of thousands of engines takes time that the hub needs: pause this many times as long as it took."""
RENDER_SECONDS: Final = 2.0
END_SECONDS: Final = 2.0


class StandaloneHub:
    """Start, wait until it has `lost`, stop. Everything runs on one event loop.

    Attributes:
        uid: of the pool, once started.
        endpoint: what clients dial, once started.
        connection_file: what they join with.
        stores: reaches the pool's store.
        lost: set when it has lost its state. The log says why; it cannot lead again in this process.
        server, keys: the hub itself, and what watches its keys, once started.
    """

    server: HubServer
    keys: KeyWatch

    def __init__(self, options: HubOptions) -> None:
        self.options = options.checked()
        self.uid = ""
        self.endpoint = ""
        self.connection_file = Path()
        self.metrics_port = 0
        urls = list(self.options.store_admin)
        self.stores: StoreAdmin | None = MooncakeAdmin(lambda uid: urls) if urls else None
        self._opened = contextlib.AsyncExitStack()
        self._changed = asyncio.Event()
        self.lost = asyncio.Event()

    async def start(self) -> None:
        """Take the state, listen, lead.

        Raises:
            ConfigurationError: the address cannot be listened on.
            StateError: the state cannot be used.
        """
        options = self.options
        async with self._opened as opened:  # unless all of it succeeds, nothing stays open
            authority = await SqliteAuthority.open(options.state)
            self._opened.push_async_callback(authority.close)
            directory = authority.directory
            self.uid = await authority.ensure_pool(options.pool, options.lease_seconds)
            keys = await asyncio.to_thread(ensure_keys, directory, self.uid)
            server = await self._listen(keys, authority)
            config = PoolConfig(
                self.uid, options.pool, keys.accepted, options.lease_seconds, options.reclaim, store_admin=bool(options.store_admin)
            )
            self.keys = KeyWatch(directory, server, config)
            server.set_pool(self.keys.config)
            self.endpoint = options.advertise or advertised(server.endpoint, options.listen)
            self.connection_file = await asyncio.to_thread(write_client, directory, options.pool, self.endpoint)
            self._serve_metrics(server)
            server.lead(await authority.acquire())
            for work in (self._report(server), self.keys.run()):
                self._opened.push_async_callback(end, [asyncio.create_task(work)], END_SECONDS)
            self._opened = opened.pop_all()

    async def _listen(self, keys: Keys, authority: SqliteAuthority) -> HubServer:
        self.server = server = HubServer(
            self.options.listen,
            keys.hub,
            authority,
            on_change=lambda uid: self._changed.set(),
            on_step_down=self.lost.set,
            why_deposed=lambda: authority.why_deposed,
            stores=self.stores,
        )
        self._opened.push_async_callback(server.stop)
        try:
            await server.start()
        except OSError as error:
            why = (error.strerror or str(error)).removeprefix(f"hub cannot listen on {self.options.listen}: ").partition(" (addr=")[0]
            raise ConfigurationError(
                f"--listen {self.options.listen} cannot be listened on: {why}; give an address of this machine and a free port"
            ) from error
        return server

    def _serve_metrics(self, server: HubServer) -> None:
        if not self.options.metrics:
            return
        loop = asyncio.get_running_loop()

        async def taken() -> tuple[PoolSnapshot, dict[str, int]]:
            return server.snapshot(self.uid), dict(server.counters)

        def render() -> str:
            """On a metrics thread: the snapshot is taken on the loop."""
            snapshot, counters = asyncio.run_coroutine_threadsafe(taken(), loop).result(RENDER_SECONDS)
            return exposition(self.options.pool, snapshot, counters, self.options.lease_seconds, time.time())

        try:
            metrics = MetricsServer(split_address(self.options.metrics), render, lambda: server.leading)
        except OSError as error:
            raise ConfigurationError(f"--metrics {self.options.metrics} cannot be listened on: {error.strerror or error}") from error
        self._opened.push_async_callback(asyncio.to_thread, metrics.stop)
        self.metrics_port = metrics.port

    async def _report(self, server: HubServer) -> None:
        """Log what has changed, at most ten times a second; also what time alone changes, such as silence."""
        check_seconds = max(0.5, self.options.lease_seconds / 4)
        before: PoolSnapshot | None = None
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(check_seconds):
                    await self._changed.wait()
            self._changed.clear()
            began = time.monotonic()
            now = server.snapshot(self.uid)
            for line in compare(before, now):
                logger.log(line.level, line.text, extra={"fields": {"pool": self.options.pool, **line.fields}})
            before = now
            await asyncio.sleep(max(REPORT_SECONDS, REPORT_SHARE * (time.monotonic() - began)))

    async def stop(self) -> None:
        """Step down, hang up and give the state back; engines keep their leases. Returns within seconds. Safe to call twice."""
        await self._opened.aclose()
