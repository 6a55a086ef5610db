"""Keeps one connection to the store alive: state machine, circuit breaker, calls in flight.

States: NEW -> PROBING <-> READY -> DRAINING -> CLOSED. Store calls run only in READY (the canary alone in PROBING).
The first sign that the master is gone opens the breaker (READY -> PROBING); a TCP probe looks for the master with
growing pauses, for ever, and a canary closes the breaker. A master that is absent at start is the same case.
"""

from __future__ import annotations

import atexit
import enum
import logging
import threading
import time
from collections.abc import Callable, Sequence

from epochkv_connector.store.counters import Counters, Notices
from epochkv_connector.store.mooncake import MooncakeClient, SetupFailed, probe_master
from epochkv_connector.store.queues import StoreOutcome
from epochkv_connector.store.settings import StoreSettings, prepare_environment

logger = logging.getLogger(__name__)

Call = Callable[[MooncakeClient], list[int]]

_UNCLOSED: set[StoreConnection] = set()
"""Connections that are not closed; `_close_at_exit` tries once more."""

_EXIT_SECONDS = 33.0
_MAX_CANARY_FAILURES = 3
_RPC_FAILURES = frozenset((-900, -901))
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
        self,
        settings: StoreSettings,
        regions: Sequence[tuple[int, int]],
        counters: Counters,
        notices: Notices,
        on_down: Callable[[], None],
    ) -> None:
        """`on_down` runs once whenever the breaker opens, on the thread that noticed."""
        self._settings = settings
        self._regions = tuple(regions)
        self._counters = counters
        self._notices = notices
        self._on_down = on_down
        self._changed = threading.Condition()  # guards everything below
        self.state = StoreState.NEW
        self._client: MooncakeClient | None = None
        self.in_flight = 0
        self._renew = False
        self._setup_pause, self._next_setup = settings.setup_backoff_seconds[0], 0.0  # manager thread only
        self._streak_calls, self._streak_began, self._streak_key = 0, 0.0, ""
        self._canary_failures = 0
        self._manager = threading.Thread(target=self._manage, name="epochkv-store-manager", daemon=True)

    def start(self) -> bool:
        """Connect in the background; returns at once, also when there is no master. False: it was started before."""
        with self._changed:
            if self.state is not StoreState.NEW:
                return False
            self.state = StoreState.PROBING
        missing = prepare_environment(load_seconds=self._settings.load_seconds)
        if missing:
            logger.info("Mooncake variables not set in the environment, using defaults: %s", ", ".join(missing))
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
        """Wait for calls in flight, then close. After `begin_close`; may be called again.

        Returns:
            False if a call was still in flight after `timeout` seconds: closing would be a crash, so the client stays open
            and the end of the process tries again.
        """
        with self._changed:
            idle = self._changed.wait_for(lambda: self.in_flight == 0, timeout)
            client = self._client
            if idle:
                self._client = None
        if idle and client is not None:
            client.close()
        if idle:
            _UNCLOSED.discard(self)
        else:
            logger.warning("the store client still has a call in flight after %.1f s; it is left open", timeout)
        if self._manager.is_alive():
            self._manager.join(timeout)
        with self._changed:
            self.state = StoreState.CLOSED
            self._changed.notify_all()
        return idle

    def call(self, kind: str, function: Call, *, probing: bool = False) -> list[int] | StoreOutcome:
        """Run one store call if the state allows it; opens the breaker when the master does not answer."""
        with self._changed:
            allowed = StoreState.PROBING if probing else StoreState.READY
            client = self._client
            if self.state is not allowed or client is None:
                return StoreOutcome.DOWN if self.state < StoreState.DRAINING else StoreOutcome.CLOSED
            self.in_flight += 1
        try:
            codes = function(client)
        finally:
            with self._changed:
                self.in_flight -= 1
                self._changed.notify_all()
        self._counters.add(f"{kind}_calls")
        if not _RPC_FAILURES.isdisjoint(codes):
            self._open(client, f"{kind} returned {min(codes)}")
            return StoreOutcome.UNREACHABLE
        return codes

    def note_transfers(self, *, failed_key: str | None, succeeded: bool, seconds: float) -> None:
        """Tell how a call that moved bytes went; feeds the search for a poisoned client.

        Args:
            failed_key: a key whose transfer failed ("": a put, whose key does not exist); None: none failed.
            succeeded: at least one transfer succeeded.
            seconds: how long the call took.
        """
        with self._changed:
            if succeeded:
                self._streak_calls = 0
            if failed_key is None:
                return
            if not self._streak_calls:
                self._streak_began = time.monotonic() - seconds
            self._streak_calls += 1
            self._streak_key = failed_key
            self._changed.notify_all()

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
                while self.state is StoreState.READY and (wait := self._poison_check_in()) != 0:
                    self._changed.wait(wait)
                if self.state >= StoreState.DRAINING:
                    return
                ready = self.state is StoreState.READY
            try:
                settled = self._check_poison() if ready else self._recover()
            except Exception:  # the manager must outlive anything the library does
                self._notices.say("manager", "the store client failed to connect unexpectedly", exc_info=True)
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
            self._notices.say("away", "no Mooncake master answers at %s; serving without L2 until it does", master)
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
            self._notices.say(f"canary {outcome}", text, master, detail or outcome.value, _advice(outcome))
            return False
        with self._changed:
            if self.state is not StoreState.PROBING:
                return False
            self.state = StoreState.READY
            self._streak_calls = self._canary_failures = 0
            self._changed.notify_all()
        self._setup_pause, self._next_setup = self._settings.setup_backoff_seconds[0], 0.0
        self._notices.forget()
        self._counters.add("connected")
        if outcome is StoreOutcome.OK:
            logger.info("L2 store ready at %s (%s)", master, detail)
        else:
            logger.warning("the L2 master at %s takes requests but %s (%s)", master, detail, _advice(outcome))
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
            self._notices.say("setup", "%s; trying again", error)
            return False
        self._counters.add("setups")
        with self._changed:
            if self.state is StoreState.PROBING:
                self._client = client
                self._renew = False
                return True
        client.close()  # this connection was closed meanwhile
        return False

    def _poison_check_in(self) -> float | None:
        """Seconds until the client is suspected; 0: now; None: no reason to."""
        if self._streak_calls < self._settings.poison_calls:
            return None
        return max(0.0, self._streak_began + self._settings.poison_seconds - time.monotonic())

    def _check_poison(self) -> bool:
        """Start over with a new client if transfers fail although the master lists the objects.

        A queue overflow inside Mooncake fails every later transfer to that peer and only a new client heals it. A dead
        segment owner looks the same until the master drops its segment; then its keys no longer exist.
        """
        with self._changed:
            key, self._streak_calls = self._streak_key, 0
            client = self._client
        if key:
            codes = self.call("exists", lambda c: c.exists([key]))
            if isinstance(codes, StoreOutcome) or codes[0] != 1:
                return True
        self._counters.add("renewed")
        with self._changed:
            self._renew = True
        if client is not None:
            self._open(client, "every transfer fails although the objects exist; starting over")
        return True


def _advice(canary: StoreOutcome) -> str:
    """What a canary that did not come back says, for the log."""
    match canary:
        case StoreOutcome.UNREACHABLE | StoreOutcome.DOWN:
            return "no answer in time; trying again"
        case StoreOutcome.FULL:
            return "no space is left, or no store is mounted; what is saved is dropped until there is some"
        case StoreOutcome.TRANSFER:
            return "a store node does not answer"
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
