"""The watch in front of an executor's calls and a scheduler's steps: what happens in which order, and how an idle engine is woken."""

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequestType

from epochkv_connector.weights import rank, watch
from epochkv_connector.weights.adapters import Adapters
from epochkv_connector.weights.executor import EngineRanks, join
from epochkv_connector.weights.watch import QUIET_SECONDS, Watch
from epochkv_fence.protocol.messages import ASLEEP

LONG = 10.0


class Executor:
    """As vLLM's: everything goes through `collective_rpc`, also its own methods."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.held = b"a" * 32
        self.is_sleeping = False
        self.late_copies = 0
        self.fails = ""

    def collective_rpc(self, method: Any, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None) -> list[Any]:
        """The order of calls is the point."""
        name = method if isinstance(method, str) else method.__name__
        self.calls.append(name)
        if name == self.fails:
            raise RuntimeError(f"{name} has failed")
        if method is rank.digest_weights:
            return [{"number": args[0], "weights": b"" if self.is_sleeping else self.held, "note": "", "rank": 0, "naps": 0, "alone": ""}]
        if method is rank.is_asleep:
            return [False, self.is_sleeping]
        if method is rank.settle_for_sleep:
            return [0, self.late_copies]
        return [True, True]

    def sleep(self, level: int) -> None:
        self.collective_rpc("sleep", kwargs={"level": level})
        self.is_sleeping = True


class Scheduler:
    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.requests = 0

    def has_requests(self) -> bool:
        return self.requests > 0

    def schedule(self) -> None:
        self._executor.calls.append("schedule")

    def update_from_output(self) -> None:
        """As vLLM's."""


class Core:
    """As vLLM's in a process of its own: inputs come through a queue."""

    def __init__(self, executor: Executor, scheduler: Scheduler) -> None:
        self.model_executor = executor
        self.scheduler = scheduler
        self.input_queue: queue.Queue[Any] = queue.Queue()

    def _handle_client_request(self, kind: Any, request: Any) -> None:
        self.model_executor.calls.append(f"handled {kind.name}")

    def idle(self, seconds: float = 2.0) -> None:
        """What vLLM does without requests, until nothing comes any more."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            try:
                self._handle_client_request(*self.input_queue.get(timeout=min(left, 1.0)))
            except queue.Empty:
                return


class Joined:
    def __init__(self, core: type[Core] = Core) -> None:
        self.executor = Executor()
        self.scheduler = Scheduler(self.executor)
        self.core = core(self.executor, self.scheduler)
        self.ranks = EngineRanks(self.executor, "an engine of this test")
        self.watch = Watch(self.ranks, self, 1, time.monotonic)
        join(self.core, self.scheduler, self.ranks, self.watch, Adapters(self.ranks, 1, time.monotonic), lambda work: work())
        self.watch.before_schedule()
        self.watch._digest_at = 0.0  # a machine that stood still during the first look owes the next one no pause
        self.executor.calls.clear()

    def hold(self, *_: object, **__: object) -> None:
        """Nobody listens, and nothing is named here."""

    def end(self, *_: object, **__: object) -> None:
        raise AssertionError("not here")

    keep_own = lost_blocks = end

    def clear_encoder(self) -> bool:
        return True


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[Joined]:
    """On a machine that stands still, no call is a lone one that comes long after the last look."""
    monkeypatch.setattr(watch, "PAUSE_SECONDS", 1e6)
    made = Joined()
    yield made
    made.watch._suspicion = ""  # else its alarm rings on


def test_a_call_that_fails_still_raises_and_is_looked_at(joined: Joined) -> None:
    joined.executor.collective_rpc("start_weight_update")
    joined.executor.fails = "update_weights"
    with pytest.raises(RuntimeError, match="update_weights has failed"):
        joined.executor.collective_rpc("update_weights")
    joined.executor.calls.clear()
    joined.scheduler.schedule()
    assert joined.executor.calls == ["digest_weights", "schedule"]  # it does not wait for the end of that transfer


@pytest.mark.parametrize("method", ["sleep", "discard"])
def test_copies_end_before_memory_is_unmapped(joined: Joined, method: str) -> None:
    joined.executor.collective_rpc(method)
    assert joined.executor.calls == ["end_device_work", "settle_for_sleep", method, "is_asleep"]


def test_sleep_is_refused_while_copies_still_run(joined: Joined) -> None:
    joined.executor.late_copies = 2
    with pytest.raises(RuntimeError, match="2 copies of KV blocks still run"):
        joined.executor.sleep(1)
    assert "sleep" not in joined.executor.calls
    assert joined.watch.pending
    assert joined.executor.calls[-2] == "woken", "ranks that have ended theirs copy again"


def test_an_engine_that_sleeps_says_so_until_its_ranks_are_awake(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "PAUSE_SECONDS", 0.0)
    joined.executor.is_sleeping = True
    for method in ("nap", "update_weights"):
        joined.executor.collective_rpc(method)
        assert (joined.watch.told, joined.watch.pending) == ((None, ASLEEP), False)
    joined.executor.is_sleeping = False
    joined.executor.collective_rpc("end_the_nap")
    assert joined.watch.value is not None


# ---------------------------------------------------------------------------------------------- idle engines
def test_an_idle_engine_is_woken_and_looks_by_itself(joined: Joined) -> None:
    joined.executor.collective_rpc("update_weights")
    joined.executor.held = b"b" * 32
    joined.core.idle()
    assert "digest_weights" in joined.executor.calls
    assert "handled WAKEUP" in joined.executor.calls
    assert joined.watch.value is not None
    assert not joined.watch.pending
    assert joined.core.input_queue.empty()


def test_an_engine_with_requests_looks_with_its_next_step(joined: Joined) -> None:
    joined.scheduler.requests = 1
    joined.executor.collective_rpc("update_weight")
    time.sleep(QUIET_SECONDS * 1.2)
    joined.core._handle_client_request(EngineCoreRequestType.WAKEUP, None)
    assert "digest_weights" not in joined.executor.calls
    joined.scheduler.schedule()
    assert "digest_weights" in joined.executor.calls


def test_there_is_one_alarm_at_a_time_and_another_after_it(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    thread = threading.Thread

    def counted(*args: Any, **kwargs: Any) -> Any:
        started.append(kwargs)
        return thread(*args, **kwargs)

    monkeypatch.setattr(threading, "Thread", counted)
    for _ in range(10):
        joined.executor.collective_rpc("update_weight")
    assert len(started) == 1
    joined.core.idle()
    deadline = time.monotonic() + LONG
    while len(started) < 2 and time.monotonic() < deadline:
        joined.executor.collective_rpc("update_weight")
        time.sleep(0.02)
    assert len(started) == 2
    joined.core.idle()
