"""One connection to the Mooncake store: settings, the client, and the state machine that keeps it alive.

Several of Mooncake's limits exist only as environment variables, and their defaults turn a lost packet into minutes:
they are set here before the library is imported.

Facts that shape `MooncakeClient`, which alone calls the library, measured on the pinned version:

- `setup` and `close` hold the GIL.
- Most calls on a client that was closed, or whose `setup` failed, are a crash. So a `MooncakeClient` exists only between a successful
  `setup` and `close`, and its owner (`StoreConnection`) keeps calls and `close` apart.
- A client of another version connects and then fails silently, so each proves itself with a canary before it is used.

States: NEW -> PROBING <-> READY -> DRAINING -> CLOSED. Store calls run only in READY (the canary alone in PROBING).
The first sign that the master is gone opens the breaker (READY -> PROBING); a TCP probe looks for the master with
growing pauses, for ever, and a canary closes the breaker. A master that is absent at start is the same case.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import importlib.util
import logging
import mmap
import os
import random
import re
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Container, Sequence
from ctypes import addressof, c_char
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from epochkv_connector.config import ConnectorConfig
from epochkv_fence.common import Seldom, is_name
from epochkv_fence.launch import CLIENT_ENVIRONMENT

logger = logging.getLogger(__name__)


class Counters:
    """Named numbers that only grow. Any thread may add."""

    def __init__(self) -> None:
        self._values: defaultdict[str, float] = defaultdict(float)
        self._lock = threading.Lock()

    def add(self, name: str, amount: float = 1) -> None:
        with self._lock:
            self._values[name] += amount

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._values)


AGAIN_SECONDS = 60.0  # between two warnings of one kind


class StoreOutcome(enum.StrEnum):
    """What became of one object of a request. Everything but OK is a miss for a get and a dropped save for a put."""

    OK = "ok"
    ABSENT = "absent"  # no such key
    PENDING = "pending"  # its put has not ended
    EXPIRED = "expired"  # the read outlived its lease: the bytes may be another object's
    TRANSFER = "transfer"  # segment owner gone or hung
    FULL = "full"  # no space in the store now, or backing off because of that
    UNREACHABLE = "unreachable"  # master gone or hung; opens the breaker
    SIZE = "size"  # another length than asked for
    FOREIGN = "foreign"  # header, trailer or checksum are not those of this key (counted by `client.Defect`)
    TIMEOUT = "timeout"  # deadline of the request
    DROPPED = "dropped"  # no room for it in the queue
    CANCELLED = "cancelled"  # the caller gave up before it began
    DOWN = "down"  # not connected, or the breaker is open
    CLOSED = "closed"  # the client is closing
    ERROR = "error"  # anything else; logged once per code


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """How to reach the store and how patient to be.

    Attributes:
        master_address: `host:port`, or `etcd://h1:2379;h2:2379` for a replicated master.
        metadata_server, protocol, device_name: Mooncake's `setup` arguments of these names.
        cluster_id, gid_index: what Mooncake reads from its environment; None: what that says.
        local_hostname: address of this process for its peers; None: `POD_IP`, else the address the master is reached from.
        verify_payload: checksum of the whole payload on put and get, not only header and trailer.
        get_threads: store calls that may fetch at the same time (a call to a hung peer blocks for seconds).
        min_call_keys, max_call_keys, max_call_bytes: one store call carries as many objects at first and after a call that
            failed or was slow, and never more than this. A call to a hung peer blocks for a status timeout and more (measured with 2 s: 4
            keys 2.0 s, 8 keys 4-6 s, 16 keys 12 s, 32 keys 23 s, and 60 s at the most), and buffers are out of use until it returns.
        fast_call_seconds: a call that took no longer allows the next one of its kind to carry four times as many objects.
        max_queued_puts: objects that wait to be put; beyond it no more are taken.
        max_exists_keys: one existence query never asks for more.
        hung_call_seconds, quarantine_seconds: Mooncake's own batch limit, and not its socket, has ended a failed transfer call that
            lasted at least the former. Its buffers stay out of use for the latter (Mooncake's progress timeout is 5 s).
        probe_timeout_seconds, min_backoff_seconds, max_backoff_seconds: reaching the master while it is away.
        setup_backoff_seconds: first and longest pause after a `setup` that failed, or whose client did not work. It holds the GIL for
            about a second, in which the engine stands still, and so does every repetition (measured with a master slower than
            an RPC's limit: 1.1 s in every 6 s, for each client).
    """

    master_address: str
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device_name: str = ""
    cluster_id: str | None = None
    gid_index: int | None = None
    local_hostname: str | None = None
    verify_payload: bool = True
    get_threads: int = 2
    min_call_keys: int = 4
    max_call_keys: int = 512
    max_call_bytes: int = 32 << 20
    fast_call_seconds: float = 0.25
    max_queued_puts: int = 4096
    max_exists_keys: int = 1024
    hung_call_seconds: float = 25.0
    quarantine_seconds: float = 8.0
    probe_timeout_seconds: float = 0.5
    min_backoff_seconds: float = 0.1
    max_backoff_seconds: float = 5.0
    setup_backoff_seconds: tuple[float, float] = (2.0, 120.0)

    @classmethod
    def of(cls, config: ConnectorConfig) -> StoreSettings | None:
        """The L2 tier of a connector configuration; None: it has none."""
        if config.distributed is None:
            return None
        return cls(**msgspec.structs.asdict(config.distributed), verify_payload=config.verify == "full")


_RDMA = Path("/sys/class/infiniband")
_GO_PROXY = re.compile(rb"(?:^|\0)(HTTPS_PROXY|https_proxy)=")


def prepare_environment(settings: StoreSettings) -> None:
    """Set what the operator did not set, before Mooncake is imported. What it dials is no matter for proxies."""
    hosts: list[str] = []
    parts = re.split("[;,]", settings.metadata_server.removeprefix("P2PHANDSHAKE"))
    with contextlib.suppress(ValueError):  # of what is no address
        hosts += filter(None, (urlsplit(part if "://" in part else f"//{part}").hostname for part in parts))
    if hosts:
        known = (rule for name in ("no_proxy", "NO_PROXY") for rule in os.environ.get(name, "").split(",") if rule)
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(dict.fromkeys([*known, *hosts]))
    if hosts or settings.master_address.startswith("etcd://"):
        with contextlib.suppress(OSError, ValueError, IndexError):  # without a Linux' /proc, say
            _hide_proxies_from_go()
    given = {"MC_STORE_CLUSTER_ID": settings.cluster_id, "MC_GID_INDEX": settings.gid_index}
    ours = {name: str(value) for name, value in given.items() if value is not None}
    # Below level 1, every setup writes a page of INFO lines to stderr.
    for name, value in {**CLIENT_ENVIRONMENT, **ours, "GLOG_minloglevel": "1"}.items():
        os.environ.setdefault(name, value)


def _hide_proxies_from_go() -> None:
    """Mooncake's client of etcd is written in Go. It reads the environment that the process began with, whatever became of it since, and
    asks a proxy for etcd for ever, without a word. In that memory, the proxies' names are blotted out. All others still find them.
    """
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[47]), int(fields[48])  # env_start, env_end
    for name in ("HTTPS_PROXY", "https_proxy"):
        if name in os.environ:
            os.environ[name] = os.environ[name]  # a copy elsewhere, for C
    memory = (c_char * (end - start)).from_address(start)
    for found in _GO_PROXY.finditer(memory.raw):
        memory[found.start(1)] = b"_"


OUTCOMES = {
    0: StoreOutcome.OK,
    -200: StoreOutcome.FULL,
    -703: StoreOutcome.PENDING,
    -704: StoreOutcome.ABSENT,
    -707: StoreOutcome.EXPIRED,
    -714: StoreOutcome.PENDING,
    -800: StoreOutcome.TRANSFER,
    -801: StoreOutcome.FOREIGN,
    -900: StoreOutcome.UNREACHABLE,
    -901: StoreOutcome.UNREACHABLE,
}
"""Mooncake's return codes; everything else is `StoreOutcome.ERROR`."""

_CANARY_BYTES = 2048
_CLIENT_PORTS = 2


class SetupFailed(RuntimeError):
    """`setup` or the registration of memory was refused; the message has the code."""


def outcome_of(code: int) -> StoreOutcome:
    return OUTCOMES.get(code, StoreOutcome.ERROR)


def probe_master(address: str, timeout: float) -> str | None:
    """Find out without Mooncake whether the master answers: its calls block for seconds, and `setup` holds the GIL meanwhile.

    A half-closed TCP connection is closed in turn by a live process within a millisecond; the kernel of a hung one
    accepts and says nothing. Returns the address of this host as the master sees it, or None when no master answers.
    """
    half_close = "://" not in address
    for endpoint in address.split("://", 1)[-1].split(";"):
        host, _, port = endpoint.rpartition(":")
        with contextlib.suppress(OSError, ValueError):
            with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout) as connection:
                local = str(connection.getsockname()[0])
                if half_close:
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(1)
                return local
    return None


def mooncake_version() -> str:
    """Version of the wheel that Mooncake's module came with, whose name differs by accelerator; nothing is imported."""
    spec = importlib.util.find_spec("mooncake")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for info in Path(folder).parent.glob("mooncake_transfer_engine*.dist-info"):
            return info.name.removesuffix(".dist-info").rpartition("-")[2]
    return ""


def why_setup_failed(settings: StoreSettings, hostname: str, local_address: str) -> str:
    """What to look at, from what this process can see: Mooncake answers -1 to all of it. `local_address`: as in `MooncakeClient`."""
    first, last = map(_port, ("MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT"))
    family = socket.AF_INET6 if ":" in hostname else socket.AF_INET
    free = sum(_is_free(port, family) for port in range(first, last + 1))
    if free < _CLIENT_PORTS:
        return (
            f"of the ports {first} to {last} {free} are free, and a client needs {_CLIENT_PORTS}: end what listens there (ss -ltnp), or"
            " move the range with MC_MIN_RPC_PORT and MC_MAX_RPC_PORT"
        )
    devices = sorted(path.name for path in _RDMA.glob("*"))
    if settings.protocol == "rdma" and not (set(settings.device_name.split(",")) & set(devices) if settings.device_name else devices):
        return f"protocol is rdma, and this machine has {', '.join(devices) or 'no RDMA device'}: set device_name, or use tcp"
    found = []
    if settings.metadata_server != "P2PHANDSHAKE":
        found.append(f"does the metadata server {settings.metadata_server} answer?")
    if not is_name(hostname) and (":" in hostname) != (":" in local_address):
        found.append(f"peers are told {hostname}, and the master is reached from {local_address}: give Mooncake addresses of one family")
    if "://" not in settings.master_address:
        found.append(f"it takes connections: is it a Mooncake master, of version {mooncake_version() or '?'} as here?")
        return "; ".join(found)
    cluster = os.environ.get("MC_STORE_CLUSTER_ID") or "mooncake_cluster"
    found.append(f"etcd takes connections: does a master lead (GET /leader at its admin port), with --cluster_id={cluster}?")
    return "; ".join(found)


def _port(variable: str) -> int:
    given = os.environ.get(variable, "")
    return int(given if given.isdecimal() else CLIENT_ENVIRONMENT[variable])


def _is_free(port: int, family: socket.AddressFamily) -> bool:
    try:
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("", port))
    except OSError:
        return False
    return True


class MooncakeClient:
    """A client that is set up, with registered memory. Blocking; not to be closed while a call runs."""

    def __init__(self, settings: StoreSettings, regions: Sequence[tuple[int, int]], local_address: str) -> None:
        """Set a client up and register `regions` of (address, bytes) with it. Raises SetupFailed."""
        hostname = settings.local_hostname or os.environ.get("POD_IP") or local_address
        if ":" in hostname:  # read when the library is loaded; without it `setup` succeeds, and every transfer fails
            os.environ.setdefault("MC_USE_IPV6", "1")
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise SetupFailed(f"Mooncake cannot be imported ({error}); install the connector extra") from error
        self._scratch = mmap.mmap(-1, 2 * _CANARY_BYTES)
        self._scratch_address = addressof(c_char.from_buffer(self._scratch))
        self._client: Any = MooncakeDistributedStore()
        code = self._client.setup(
            hostname, settings.metadata_server, 0, 0, settings.protocol, settings.device_name, settings.master_address
        )
        if code != 0:
            why = why_setup_failed(settings, hostname, local_address)
            raise SetupFailed(f"Mooncake setup as {hostname} with master {settings.master_address} returned {code}; {why}")
        for address, num_bytes in (*regions, (self._scratch_address, 2 * _CANARY_BYTES)):
            code = self._client.register_buffer(address, num_bytes)
            if code != 0:
                self._client.close()
                raise SetupFailed(f"Mooncake register_buffer of {num_bytes} bytes returned {code}")

    def put(self, keys: list[str], addresses: list[int], sizes: list[int], defective: Container[str] = ()) -> list[int]:
        """0 or a negative code per key; an existing key is 0 and keeps its bytes, unless it is `defective`: those go, leased or not."""
        codes = _complete(self._client.batch_put_from(keys, addresses, sizes), len(keys))
        if bad := [index for index, key in enumerate(keys) if key in defective]:
            columns = [[column[index] for index in bad] for column in (keys, addresses, sizes)]
            for index, code in zip(bad, _complete(self._client.batch_upsert_from(*columns), len(bad)), strict=True):
                codes[index] = code
        return codes

    def get(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        """Bytes read, or a negative code, per key."""
        return _complete(self._client.batch_get_into(keys, addresses, sizes), len(keys))

    def exists(self, keys: list[str]) -> list[int]:
        """1, 0 or a negative code per key. Every hit is leased (10 s by default)."""
        return _complete(self._client.batch_is_exist(keys), len(keys))

    def remove_matching(self, pattern: str) -> int:
        """Remove what matches and is not leased; number removed, or a negative code."""
        return int(self._client.remove_by_regex(pattern, False))

    def canary(self) -> tuple[StoreOutcome, str]:
        """Write, read, compare and remove a small object.

        Returns:
            OK; FULL (no space: the master answers, writing cannot be proved); TRANSFER (the segment owner of the
            canary is away); anything else means that this connection must not be used. And a word for the log.
        """
        key = f"epochkv-canary/{secrets.token_hex(16)}"
        value = random.randbytes(_CANARY_BYTES)
        self._scratch[:_CANARY_BYTES] = value
        self._scratch[_CANARY_BYTES:] = bytes(_CANARY_BYTES)
        code = self.put([key], [self._scratch_address], [_CANARY_BYTES])[0]
        if code != 0:
            return outcome_of(code), f"canary put returned {code}"
        try:
            code = self.get([key], [self._scratch_address + _CANARY_BYTES], [_CANARY_BYTES])[0]
            if code != _CANARY_BYTES:
                return (outcome_of(code) if code < 0 else StoreOutcome.SIZE), f"canary get returned {code}"
            if self._scratch[_CANARY_BYTES:] != value:
                return StoreOutcome.FOREIGN, "canary came back with other bytes"
        finally:
            self._client.remove(key, True)  # nobody else knows the key, so nobody can be reading it
        return StoreOutcome.OK, "canary written, read and compared"

    def close(self) -> None:
        """Give the client back; takes about a second and holds the GIL. No call may be running, and none may follow."""
        self._client.close()


def _complete(codes: Sequence[int], expected: int) -> list[int]:
    """The library answers `[]` when it is not usable; make that an error per key."""
    return [int(code) for code in codes] if len(codes) == expected else [-600] * expected


_UNCLOSED: set[StoreConnection] = set()
"""Connections that are not closed; `_close_at_exit` tries once more."""

_EXIT_SECONDS = 33.0
_MAX_CANARY_FAILURES = 3
_RENEW_WAIT_SECONDS = 5.0


class StoreState(enum.IntEnum):
    """Life of a client. The number is exported as a metric."""

    NEW = 0
    PROBING = 1
    READY = 2
    DRAINING = 3
    CLOSED = 4


class StoreConnection:
    """Owner of the library's client. Methods may be called from any thread; `call` blocks for as long as the store call does.

    Attributes:
        in_flight: store calls that have not returned.
    """

    def __init__(
        self, settings: StoreSettings, regions: Sequence[tuple[int, int]], counters: Counters, warn: Seldom, on_down: Callable[[], None]
    ) -> None:
        """`on_down` runs once whenever the breaker opens, on the thread that noticed."""
        self._settings = settings
        self._regions = tuple(regions)
        self._counters = counters
        self._warn = warn
        self._on_down = on_down
        self._changed = threading.Condition()  # guards everything below
        self.state = StoreState.NEW
        self._client: MooncakeClient | None = None
        self.in_flight = 0
        self._renew = False
        self._setup_pause, self._next_setup = settings.setup_backoff_seconds[0], 0.0  # manager thread only
        self._canary_failures = 0
        self._manager = threading.Thread(target=self._manage, name="epochkv-store-manager", daemon=True)

    def start(self) -> bool:
        """Connect in the background; returns at once, also when there is no master. False: it was started before."""
        with self._changed:
            if self.state is not StoreState.NEW:
                return False
            self.state = StoreState.PROBING
        prepare_environment(self._settings)
        _UNCLOSED.add(self)
        self._manager.start()
        return True

    def wait_ready(self, timeout: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: self.state is StoreState.READY, timeout)

    def begin_close(self) -> bool:
        """Let no further call begin. False: closing (or closed) already."""
        with self._changed:
            if self.state >= StoreState.DRAINING:
                return False
            self.state = StoreState.DRAINING
            self._changed.notify_all()
        return True

    def finish_close(self, timeout: float) -> bool:
        """Wait for the manager and for calls in flight, then close. After `begin_close`; may be called again.

        Returns:
            False if a call was still in flight after `timeout` seconds, or memory still being registered: closing would be a crash, so the
            client stays open and the end of the process tries again.
        """
        if self._manager.is_alive():
            self._manager.join(timeout)
        with self._changed:
            idle = self._changed.wait_for(lambda: self.in_flight == 0, timeout) and not self._manager.is_alive()
            if idle:
                client, self._client = self._client, None
        if idle:
            if client is not None:
                client.close()
            _UNCLOSED.discard(self)
        else:
            logger.warning("the store client still has a call in flight after %.1f s; it is left open", timeout)
        with self._changed:
            self.state = StoreState.CLOSED
            self._changed.notify_all()
        return idle

    def call(self, kind: str, function: Callable[[MooncakeClient], list[int]], *, probing: bool = False) -> list[int] | StoreOutcome:
        """Run one store call if the state allows it; opens the breaker when the master does not answer."""
        with self._changed:
            allowed = StoreState.PROBING if probing else StoreState.READY
            client = self._client
            if self.state is not allowed or client is None:
                return StoreOutcome.DOWN if self.state < StoreState.DRAINING else StoreOutcome.CLOSED
            self.in_flight += 1
        began = time.monotonic()
        try:
            codes = function(client)
        finally:
            with self._changed:
                self.in_flight -= 1
                self._changed.notify_all()
        self._counters.add(f"{kind}_calls")
        self._counters.add(f"{kind}_call_seconds", time.monotonic() - began)
        if StoreOutcome.UNREACHABLE in map(OUTCOMES.get, codes):
            self._open(client, f"{kind} returned {min(codes)}")
            return StoreOutcome.UNREACHABLE
        return codes

    def _open(self, client: MooncakeClient, reason: str) -> None:
        with self._changed:
            if self.state is not StoreState.READY or self._client is not client:
                return
            self.state = StoreState.PROBING
            self._changed.notify_all()
        self._counters.add("breaker_opened")
        logger.warning("L2 store unavailable (%s): serving without it until the master answers", reason)
        self._on_down()

    def _manage(self) -> None:
        pause = self._settings.min_backoff_seconds
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self.state is not StoreState.READY)
                if self.state >= StoreState.DRAINING:
                    return
            try:
                settled = self._recover()
            except Exception:  # the manager must outlive anything the library does
                self._warn("manager", logging.WARNING, "the store client failed to connect unexpectedly", exc_info=True)
                settled = False
            if settled:
                pause = self._settings.min_backoff_seconds
                continue
            with self._changed:
                self._changed.wait_for(lambda: self.state >= StoreState.DRAINING, pause)
            pause = min(pause * 2, self._settings.max_backoff_seconds)

    def _recover(self) -> bool:
        """One attempt PROBING -> READY."""
        master = self._settings.master_address
        local = probe_master(master, self._settings.probe_timeout_seconds)
        if local is None:
            self._warn("away", logging.WARNING, "no Mooncake master answers at %s; serving without L2 until it does", master)
            return False
        if (self._client is None or self._renew) and not self._reconnect(local):
            return False
        outcome, detail = self._canary()
        # FULL and TRANSFER prove that the master understands this client; there is no space, or one segment owner is away.
        if outcome not in (StoreOutcome.OK, StoreOutcome.FULL, StoreOutcome.TRANSFER):
            self._counters.add("canary_failed")
            self._canary_failures += 1
            self._renew = self._renew or self._canary_failures % _MAX_CANARY_FAILURES == 0
            text = "the L2 master at %s answers but %s (%s); L2 stays off"
            self._warn(f"canary {outcome}", logging.WARNING, text, master, detail or outcome.value, _advice(outcome))
            return False
        with self._changed:
            if self.state is not StoreState.PROBING:
                return False
            self.state = StoreState.READY
            self._canary_failures = 0
            self._changed.notify_all()
        self._setup_pause, self._next_setup = self._settings.setup_backoff_seconds[0], 0.0
        self._warn.forget()
        self._counters.add("connected")
        if outcome is StoreOutcome.OK:
            logger.info("L2 store ready at %s (%s)", master, detail)
        else:
            logger.warning("the L2 master at %s accepts connections, but %s (%s)", master, detail, _advice(outcome))
        return True

    def _canary(self) -> tuple[StoreOutcome, str]:
        result = (StoreOutcome.DOWN, "")

        def run(client: MooncakeClient) -> list[int]:
            nonlocal result
            result = client.canary()
            return []

        self.call("canary", run, probing=True)
        return result

    def _reconnect(self, local: str) -> bool:
        """Replace the client; only while no call is in flight, and not soon after an attempt that was in vain."""
        if time.monotonic() < self._next_setup:
            return False
        with self._changed:
            idle = self._changed.wait_for(lambda: self.in_flight == 0 or self.state >= StoreState.DRAINING, _RENEW_WAIT_SECONDS)
            if not idle or self.state is not StoreState.PROBING:
                return False
            old, self._client = self._client, None
        if old is not None:
            old.close()
        self._next_setup = time.monotonic() + self._setup_pause
        self._setup_pause = min(2 * self._setup_pause, self._settings.setup_backoff_seconds[1])
        try:
            client = MooncakeClient(self._settings, self._regions, local)
        except SetupFailed as error:
            self._counters.add("setup_failed")
            self._warn("setup", logging.WARNING, "%s; serving without L2, and trying again", error)
            return False
        self._counters.add("setups")
        with self._changed:
            if self.state is StoreState.PROBING:
                self._client = client
                self._renew = False
                return True
        client.close()  # this connection was closed meanwhile
        return False


def _advice(canary: StoreOutcome) -> str:
    """What a canary that did not come back says, for the log."""
    match canary:
        case StoreOutcome.UNREACHABLE | StoreOutcome.DOWN:
            return "no answer in time; trying again"
        case StoreOutcome.FULL:
            return "no space is left, or no store is mounted; what is saved is dropped until there is some"
        case StoreOutcome.TRANSFER:
            return "a store node does not answer: can it be reached from here, and have both addresses of one family, IPv4 or IPv6?"
    return "are master, store and engine one Mooncake version?"


@atexit.register
def _close_at_exit() -> None:
    """Let calls in flight return before the interpreter goes: the library would close its clients under them, which is a crash.

    Calls are small (`StoreSettings.max_call_keys`), so a hung peer holds one for six status timeouts at the most, 30 s by default.
    """
    deadline = time.monotonic() + _EXIT_SECONDS
    for connection in list(_UNCLOSED):
        connection.begin_close()
        connection.finish_close(max(0.1, deadline - time.monotonic()))
