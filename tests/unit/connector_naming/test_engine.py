"""The watch in front of an executor's calls and a scheduler's steps: what happens in which order, and how an idle engine is woken."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from vllm.v1.engine import EngineCoreRequestType

from epochkv_connector.weights import rank, watch
from epochkv_connector.weights.adapters import Adapters
from epochkv_connector.weights.executor import EngineRanks, join
from epochkv_connector.weights.watch import QUIET_SECONDS, Watch
from epochkv_connector.wire import RankLayout

LONG = 10.0
LAYOUTS = [RankLayout(b"\x01\x02", 7, {0: 100}), RankLayout(b"\x03", 5, {0: 140})]


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
            return [{"number": args[0], "weights": self.held, "note": "", "rank": 0}]
        if method is rank.settle_for_sleep:
            return [0, self.late_copies]
        if method is rank.layout:
            return LAYOUTS
        return [True, method is not rank.is_unchanged or args[0] >= 0]

    def execute_model(self, *args: Any) -> Any:
        """As vLLM's."""
        return self.collective_rpc("execute_model", args=args)

    def sleep(self, level: int) -> None:
        """As vLLM's."""
        self.collective_rpc("sleep", kwargs={"level": level})
        self.is_sleeping = True


class Scheduler:
    """As vLLM's."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.requests = 0

    def has_requests(self) -> bool:
        return self.requests > 0

    def schedule(self, throttle: bool = False) -> str:
        """Takes an argument, as vLLM's may."""
        self._executor.calls.append(f"schedule{throttle}")
        return "output"


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
    """All of it."""

    def __init__(self, core: type[Core] = Core) -> None:
        self.executor = Executor()
        self.scheduler = Scheduler(self.executor)
        self.core = core(self.executor, self.scheduler)
        self.ranks = EngineRanks(self.executor, "an engine of this test")
        self.errors: list[Exception] = []
        self.told: list[bytes | None] = []
        self.watch = Watch(self.ranks, self, 1, time.monotonic)
        join(self.core, self.scheduler, self.watch, Adapters(self.ranks, 1, time.monotonic), self.guarded)
        self.watch.before_schedule()
        self.watch._digest_at = 0.0  # a machine that stood still during the first look owes the next one no pause
        self.executor.calls.clear()

    def tell(self) -> None:
        """Nobody listens."""

    def guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:
            self.errors.append(error)

    def hold(self, weights: bytes | None) -> None:
        self.told.append(weights)

    def end(self, weights: bytes) -> None:
        raise AssertionError("not here")

    def clear_encoder(self) -> bool:
        return True


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[Joined]:
    """On a machine that stands still, no call is a lone one that comes long after the last look."""
    monkeypatch.setattr(watch, "PAUSE_SECONDS", 1e6)
    made = Joined()
    yield made
    made.watch.refuse("the test is over")  # else its alarm rings on


def test_a_push_is_marked_then_the_device_is_waited_for_then_it_is_delegated(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    calling = joined.watch.calling

    def marking(method: Any) -> None:
        joined.executor.calls.append(f"mark {method}")
        calling(method)

    monkeypatch.setattr(joined.watch, "calling", marking)
    joined.scheduler.schedule()
    assert joined.executor.collective_rpc("update_weights", args=(1,)) == [True, True]
    assert joined.watch.pending
    assert joined.executor.calls == ["scheduleFalse", "mark update_weights", "end_device_work", "update_weights"]


def test_the_next_step_asks_before_it_is_scheduled(joined: Joined) -> None:
    joined.executor.collective_rpc("update_weights")
    joined.executor.held = b"b" * 32
    joined.executor.calls.clear()
    assert joined.scheduler.schedule(True) == "output"
    assert joined.executor.calls == ["digest_weights", "scheduleTrue"]
    joined.scheduler.schedule()
    assert joined.executor.calls[2:] == ["scheduleFalse"]
    assert len(set(joined.told)) == 2


def test_harmless_calls_go_through_untouched(joined: Joined) -> None:
    joined.executor.execute_model(1)
    joined.executor.collective_rpc("check_health", timeout=1.0)
    assert joined.executor.calls == ["execute_model", "check_health"]
    assert not joined.watch.pending
    assert joined.core.input_queue.empty()


def test_our_own_questions_are_no_suspicion(joined: Joined) -> None:
    joined.ranks.digest_weights(1)
    joined.ranks.are_unchanged(1)
    joined.ranks.end_device_work()
    joined.ranks.layouts()
    assert not joined.watch.pending


def test_a_call_that_fails_still_raises_and_is_looked_at(joined: Joined) -> None:
    joined.executor.collective_rpc("start_weight_update")
    joined.executor.fails = "update_weights"
    with pytest.raises(RuntimeError, match="update_weights has failed"):
        joined.executor.collective_rpc("update_weights")
    joined.executor.calls.clear()
    joined.scheduler.schedule()
    assert joined.executor.calls == ["digest_weights", "scheduleFalse"]  # it does not wait for the end of that transfer


def test_an_error_of_ours_stops_neither_the_call_nor_the_step(joined: Joined, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("ours")

    for name in ("calling", "called", "before_schedule"):
        monkeypatch.setattr(joined.watch, name, broken)
    assert joined.executor.collective_rpc("update_weights") == [True, True]
    joined.executor.fails = "update_weights"
    with pytest.raises(RuntimeError, match="has failed"):
        joined.executor.collective_rpc("update_weights")
    assert joined.scheduler.schedule() == "output"
    assert [str(error) for error in joined.errors] == ["ours"] * 5


def test_copies_end_before_sleep_unmaps_memory(joined: Joined) -> None:
    joined.executor.sleep(2)
    assert joined.executor.calls == ["end_device_work", "settle_for_sleep", "sleep"]


def test_sleep_is_refused_while_copies_still_run(joined: Joined) -> None:
    joined.executor.late_copies = 2
    with pytest.raises(RuntimeError, match="2 copies of KV blocks still run"):
        joined.executor.sleep(1)
    assert "sleep" not in joined.executor.calls
    assert joined.watch.pending


def test_what_an_executor_says_of_its_ranks(joined: Joined) -> None:
    assert joined.ranks.layouts() == LAYOUTS
    assert joined.ranks.are_unchanged(1)
    assert not joined.ranks.are_unchanged(-1)  # one rank says no
    assert not joined.ranks.asleep
    joined.executor.is_sleeping = True
    assert joined.ranks.asleep


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


def test_it_does_not_look_while_the_push_goes_on(joined: Joined) -> None:
    joined.watch._clock = lambda: joined.watch._digested_at  # no time passes, however slow the machine is
    joined.executor.collective_rpc("update_weight")
    joined.core._handle_client_request(EngineCoreRequestType.UTILITY, None)
    assert "digest_weights" not in joined.executor.calls


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


def test_a_sleeping_engine_is_left_alone(joined: Joined) -> None:
    joined.executor.sleep(1)
    joined.executor.calls.clear()
    joined.core.idle()
    assert joined.executor.calls == []


def test_an_engine_in_its_users_process_has_no_queue_and_looks_with_its_next_step() -> None:
    class InProcess(Core):
        _handle_client_request = None  # type: ignore[assignment]

        def __init__(self, executor: Executor, scheduler: Scheduler) -> None:
            super().__init__(executor, scheduler)
            del self.input_queue

    joined = Joined(InProcess)
    joined.executor.collective_rpc("update_weights")
    joined.scheduler.schedule()
    assert "digest_weights" in joined.executor.calls
