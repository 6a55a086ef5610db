"""The hub of one pool without Kubernetes: the production `HubServer` over a directory. `epochkv hub` runs it in a process.

Whoever holds the directory leads; whoever loses it (it was removed or replaced under the process) ends, because a hub that
cannot prove its leadership must not pretend to serve.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import os
import re
import shutil
import socket
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from epochkv_fence.connection import ConfigurationError, check_endpoint
from epochkv_fence.net import HubServer
from epochkv_fence.protocol.pool import PoolConfig, PoolSnapshot, ReclaimPolicy
from epochkv_fence.standalone.authority import FileAuthority, StateError
from epochkv_fence.standalone.metrics import MetricsServer, exposition
from epochkv_fence.standalone.report import compare
from epochkv_fence.standalone.state import Keys, ensure_keys, exposed_files, is_new, read_keys, repair_client, retire_previous, write_client
from epochkv_fence.stores.admin import StoreAdmin
from epochkv_fence.stores.mooncake import MooncakeAdmin, check_admin_url

logger = logging.getLogger("epochkv.hub")

KEYS_LOOK_SECONDS: Final = 1.0
REPORT_SECONDS: Final = 0.1
REPORT_SHARE: Final = 20
"""Looking at thousands of engines takes time that the hub needs: pause this many times as long as it took."""
DEFAULT_GRACE_SECONDS: Final = 86_400.0
MAX_NAME: Final = 253
NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
"""A DNS-1123 subdomain, as the name of a KVCachePool: a pool keeps its name when it moves to Kubernetes, or from there."""


class HubError(Exception):
    """The hub cannot be started as asked; the message names the option and the remedy."""


@dataclass(frozen=True, slots=True)
class HubOptions:
    """What `epochkv hub` is told.

    Attributes:
        listen: `tcp://HOST:PORT`; `*` or `0.0.0.0` for every address, port 0 for a free one.
        state: directory of the record and the keys.
        advertise: what engines and trainers dial; empty: derived from `listen`.
        store_admin: admin URLs of the store's masters; empty: none.
        metrics: `HOST:PORT` of /metrics and /healthz; empty: none.
    """

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
            HubError: an option cannot be meant.
        """
        if len(self.pool) > MAX_NAME or NAME.fullmatch(self.pool) is None:
            raise HubError(
                f"--pool is {self.pool!r}; give a name as Kubernetes has them: at most {MAX_NAME} characters, lower-case letters, digits, "
                "- and ., each part between dots beginning and ending with a letter or digit, such as policy"
            )
        split_listen(self.listen)
        try:
            if self.advertise:
                check_endpoint(self.advertise, "--advertise")
            urls = tuple(check_admin_url(url) for url in self.store_admin)
        except (ConfigurationError, ValueError) as error:
            raise HubError(str(error)) from error
        if self.reclaim == "RemoveAll" and not urls:
            raise HubError("--reclaim RemoveAll needs --store-admin: the hub itself empties the store, which must be this pool's alone")
        if self.metrics:
            split_address(self.metrics)
        return replace(self, store_admin=urls)


class FileHub:
    """Start, `wait`, stop. Everything runs on one event loop.

    Attributes:
        uid: of the pool, once started.
        endpoint: what clients dial, once started.
        connection_file: what they join with.
    """

    def __init__(self, options: HubOptions, stores: StoreAdmin | None = None) -> None:
        """`stores`: reaches the pool's store in another way than `options.store_admin`."""
        self.options = options.checked()
        self._stores = stores
        self._changes: dict[str, Any] = {}
        self.uid = ""
        self.endpoint = ""
        self.connection_file = Path()
        self.metrics_port = 0
        self._authority: FileAuthority | None = None
        self._server: HubServer | None = None
        self._keys: Keys | None = None
        self._config: PoolConfig | None = None
        self._metrics: MetricsServer | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self._lost = asyncio.Event()
        self._seen: PoolSnapshot | None = None

    async def start(self) -> None:
        """Take the state, listen, lead. A state that was made for a hub that cannot listen is removed again.

        Raises:
            HubError: the address cannot be listened on.
            StateError: the state cannot be used.
        """
        made = await asyncio.to_thread(_absent, self.options.state)
        try:
            await self._start()
        except BaseException as error:
            if isinstance(error, HubError) and self._authority is not None:
                await asyncio.to_thread(_remove, made)  # while it is held: nobody else can have begun to use it
            await self.stop()
            raise

    async def _start(self) -> None:
        options = self.options
        state = options.state
        self._authority = await FileAuthority.open(state)
        self.uid = await self._authority.ensure_pool(options.pool, options.lease_seconds)
        new = await asyncio.to_thread(is_new, self._authority.directory)
        self._keys = await asyncio.to_thread(ensure_keys, self._authority.directory, self.uid)
        server = await self._listen(self._keys)
        self._config = self._pool_config(self._keys)
        server.set_pool(self._config)
        self.endpoint = options.advertise or advertised(server.endpoint, options.listen)
        self.connection_file = await asyncio.to_thread(write_client, self._authority.directory, self._keys, options.pool, self.endpoint)
        for path, mode in await asyncio.to_thread(exposed_files, self._authority.directory):
            logger.warning(
                "%s can be read by others (mode %04o), and whoever has it speaks for the pool; chmod go-rwx %s", path, mode, path
            )
        server.lead(await self._authority.acquire())
        loop = asyncio.get_running_loop()
        if options.metrics:
            try:
                self._metrics = MetricsServer(split_address(options.metrics), self._render, lambda: server.leading)
            except OSError as error:
                raise HubError(f"--metrics {options.metrics} cannot be listened on: {error.strerror or error}") from error
            self.metrics_port = self._metrics.port
        if new:  # said when nothing can remove them again
            logger.info("made the keys of a new pool in %s", self._authority.directory)
        self._tasks = [loop.create_task(self._report()), loop.create_task(self._watch_keys())]

    async def _listen(self, keys: Keys) -> HubServer:
        authority = self._authority
        assert authority is not None
        urls = list(self.options.store_admin)
        stores = self._stores if self._stores is not None or not urls else MooncakeAdmin(lambda uid: urls)
        server = self._server = HubServer(
            self.options.listen,
            keys.hub_keys,
            authority,
            on_change=lambda uid: self._changed.set(),
            on_step_down=self._lost.set,
            why_deposed=lambda: authority.why_deposed,
            stores=stores,
        )
        try:
            await server.start()
        except OSError as error:
            why = (error.strerror or str(error)).removeprefix(f"hub cannot listen on {self.options.listen}: ").partition(" (addr=")[0]
            raise HubError(
                f"--listen {self.options.listen} cannot be listened on: {why}; give an address of this machine and a free port"
            ) from error
        return server

    def _pool_config(self, keys: Keys) -> PoolConfig:
        options = self.options
        try:
            config = PoolConfig(
                self.uid,
                options.pool,
                keys.accepted,
                lease_seconds=options.lease_seconds,
                reclaim=options.reclaim,
                store_admin=bool(options.store_admin),
            )
            return replace(config, **self._changes)
        except ValueError as error:
            raise HubError(str(error)) from error

    def configure(self, **changes: Any) -> None:
        """Change fields of the pool's `PoolConfig` from now on, as an owner does who edits a spec; on the event loop.

        Raises:
            HubError: this hub is not started, or a value is impossible.
        """
        if self._keys is None:
            raise HubError(f"the hub of pool {self.options.pool} is not started")
        self._changes.update(changes)
        self._config = self._pool_config(self._keys)
        self.server.set_pool(self._config)

    async def wait(self) -> None:
        """Return when this hub has lost its state.

        The reason is in the log; it cannot lead again in this process.
        """
        await self._lost.wait()

    async def stop(self) -> None:
        """Step down, hang up and give the state back; engines keep their leases. Returns within seconds. Safe to call twice."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        metrics, self._metrics = self._metrics, None
        if metrics is not None:
            await asyncio.to_thread(metrics.stop)
        server, self._server = self._server, None
        if server is not None:
            await server.stop()
        authority, self._authority = self._authority, None
        if authority is not None:
            await authority.close()

    # ------------------------------------------------------------------ looking

    def snapshot(self) -> PoolSnapshot:
        """The pool right now; on the event loop.

        Raises:
            HubError: this hub is not started, or stopped.
        """
        if self._server is None:
            raise HubError(f"the hub of pool {self.options.pool} is stopped")
        return self._server.snapshot(self.uid)

    @property
    def server(self) -> HubServer:
        """The hub itself, for asking as its owner does."""
        if self._server is None:
            raise HubError(f"the hub of pool {self.options.pool} is stopped")
        return self._server

    @property
    def accepted_keys(self) -> tuple[str, ...]:
        """Client keys, the newest first."""
        return self._config.client_public_keys if self._config is not None else ()

    def _render(self) -> str:
        """On the metrics thread: the snapshot is taken on the loop."""
        server = self._server
        if server is None or not self._tasks:
            raise HubError("stopping")
        loop = self._tasks[0].get_loop()

        async def look() -> tuple[PoolSnapshot, dict[str, int]]:
            return server.snapshot(self.uid), dict(server.counters)

        snapshot, counters = asyncio.run_coroutine_threadsafe(look(), loop).result(2.0)
        return exposition(self.options.pool, snapshot, counters)

    async def _report(self) -> None:
        """Log what has changed, at most ten times a second; also what time alone changes, such as silence."""
        look_seconds = max(0.5, self.options.lease_seconds / 4)
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(look_seconds):
                    await self._changed.wait()
            self._changed.clear()
            began = time.monotonic()
            if self._server is not None:
                now = self._server.snapshot(self.uid)
                for line in compare(self._seen, now):
                    logger.log(line.level, line.text, extra={"fields": {"pool": self.options.pool, **line.fields}})
                self._seen = now
            await asyncio.sleep(max(REPORT_SECONDS, REPORT_SHARE * (time.monotonic() - began)))

    # ------------------------------------------------------------------ keys

    async def _watch_keys(self) -> None:
        """Notice a rotation; let the key before go when nobody uses it any more."""
        problem = ""
        while True:
            await asyncio.sleep(KEYS_LOOK_SECONDS)
            try:
                await self._look_at_keys()
                problem = ""
            except (StateError, OSError, ValueError) as error:
                if str(error) != problem:
                    problem = str(error)
                    logger.error("keys: %s", error)

    async def _look_at_keys(self) -> None:
        authority, server, config = self._authority, self._server, self._config
        if authority is None or server is None or config is None:
            return
        keys = await asyncio.to_thread(read_keys, authority.directory)
        if keys is None or keys.pool_uid != self.uid:
            raise StateError(f"{authority.directory}: the keys are gone; those in use go on, and a restart makes new ones")
        self._accept(keys, server)
        if await asyncio.to_thread(repair_client, authority.directory, keys):  # or the only key that is accepted could be nobody's
            logger.warning(
                "the client folder did not have the pool's keys (removed, changed, or a rotation was killed); they are written again"
            )
        if keys.previous is not None and (why := self._retired(keys, config)):
            judged = keys.previous.public
            keys = await asyncio.to_thread(retire_previous, authority.directory, judged)
            self._accept(keys, server, why)

    def _accept(self, keys: Keys, server: HubServer, why: str = "`epochkv keys retire`") -> None:
        """`why`: what ended the key before, if one has ended."""
        assert self._config is not None
        before = self._config.client_public_keys
        self._keys = keys
        if keys.accepted == before:
            return
        self._config = self._pool_config(keys)
        server.set_pool(self._config)
        if keys.accepted[0] != before[0]:
            logger.info(
                "a new client key is accepted"
                + ("; the one before as well, until no engine uses it or its grace is over" if keys.previous else "")
            )
        if set(before) - set(keys.accepted):
            logger.info(
                "the client key before is not accepted any more: %s. Who still has it is refused, and needs the client folder again", why
            )

    def _retired(self, keys: Keys, config: PoolConfig) -> str:
        """Why the previous key may go; empty: it may not yet.

        It stays for two leases at least, for some minutes for the sake of trainers, whose keys are not known, and as long
        as a live engine uses it: an engine re-reads its keys when their files change, one that cannot (keys in its
        environment) needs a restart.
        """
        assert keys.previous is not None
        now = time.time()
        if now >= keys.previous.retire_at:
            return "its grace is over"
        keep_until = max(keys.previous.keep_until, keys.previous.rotated_at + 2 * config.hold_seconds)
        if keys.accepted != config.client_public_keys or now < keep_until:
            return ""
        users = sum(view.alive and view.key_index > 0 for view in self.snapshot().engines)
        return "" if users else "no engine uses it"


# ------------------------------------------------------------------------------------------------------------ addresses


def split_listen(listen: str) -> tuple[str, int]:
    """Host and port of `tcp://HOST:PORT`.

    Raises:
        HubError: it is none.
    """
    scheme, _, address = listen.partition("://")
    if scheme != "tcp" or not address:
        raise HubError(f"--listen is {listen!r}; it must look like tcp://0.0.0.0:7700")
    try:
        return split_address(address)
    except HubError as error:
        if _bare_ipv6(address):
            raise HubError(f"--listen is {listen!r}; an IPv6 address needs brackets, such as tcp://[::]:7700") from error
        raise HubError(f"--listen is {listen!r}; it must look like tcp://0.0.0.0:7700") from error


def split_address(address: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`.

    Raises:
        HubError: it is none.
    """
    host, _, port = address.rpartition(":")
    if _bare_ipv6(address):
        raise HubError(f"{address!r} is no address; an IPv6 address needs brackets, such as [::]:9090")
    if not host or not port.isascii() or not port.isdecimal() or not 0 <= int(port) < 65536 or not host.isprintable() or " " in host:
        raise HubError(f"{address!r} is no address; it must look like 0.0.0.0:9090")
    return host, int(port)


def _bare_ipv6(address: str) -> bool:
    """An IPv6 address without brackets, with a port or without one."""
    for text in (address, address.rpartition(":")[0]):
        with contextlib.suppress(ValueError):
            return ipaddress.ip_address(text).version == 6
    return False


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
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))  # sends nothing; the kernel chooses our address
        return f"tcp://{probe.getsockname()[0]}:{port}"
    return f"tcp://127.0.0.1:{port}"


# ----------------------------------------------------------------------------------------------------------------- folders


def _absent(directory: Path) -> tuple[Path, ...]:
    """What is not there of a directory and those above it, the deepest first."""
    path = directory.absolute()
    return tuple(folder for folder in (path, *path.parents) if not folder.exists())


def _remove(made: tuple[Path, ...]) -> None:
    """Remove a state directory that this start has made, and the empty folders above it that it made for it."""
    for number, folder in enumerate(made):
        if number == 0:
            shutil.rmtree(folder, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                folder.rmdir()


def joined_environment(connection_file: Path) -> str:
    """The line that lets an engine or trainer on this machine join."""
    return f"export EPOCHKV_CONFIG={os.fspath(connection_file)}"
