"""Joins `watch.Watch` to a running vLLM engine: every call to its workers, every step, and the time when it idles."""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

from epochkv_connector.engine.patches import around, keeping_requests_out, wake, wrap
from epochkv_connector.weights import rank
from epochkv_connector.weights.adapters import ADAPTER_CALLS, Adapters
from epochkv_connector.weights.watch import Wanted, Watch, is_harmless
from epochkv_connector.wire import RankLayout

logger = logging.getLogger("vllm.epochkv.weights")

UNMAPPING = ("sleep", "discard")
"""Before one rank unmaps the memory of KV, all have ended their copies: one that cannot must not be alone. A rank that is told in another
way ends its own (`rank.Held.sleep`)."""
MIN_RING_SECONDS = 0.05
"""A busy engine takes its inputs between steps, and looks with its next step anyway."""


def _nobody(*_: Any, **__: Any) -> list[Any]:
    raise RuntimeError("this scheduler has no engine whose ranks could be asked")


class EngineRanks:
    """The ranks behind an executor of vLLM (`watch.Ranks`); None: a scheduler without an engine, which can ask nobody."""

    def __init__(self, executor: Any | None, engine_id: str) -> None:
        self._executor = executor
        self._rpc = _nobody if executor is None else executor.collective_rpc  # as it was before `join` put the watch in front of it
        self._held = rank.held_by(engine_id)

    @property
    def num_writes(self) -> int:
        """Of the rank in this process, if there is one."""
        return self._held.writes

    def layouts(self) -> list[RankLayout]:
        """How KV and its host slots lie on every rank."""
        return list(self._rpc(rank.layout)) if self._executor is not None else []

    def digest_weights(self, number: int) -> Sequence[dict[str, Any]]:
        return list(self._rpc(rank.digest_weights, args=(number,)))

    def digest_adapters(self, number: int, wanted: Wanted, afresh: bool) -> Sequence[dict[str, Any]]:
        return list(self._rpc(rank.digest_adapters, args=(number, wanted, afresh)))

    def are_asleep(self) -> bool:
        return any(self._rpc(rank.is_asleep))

    def are_unchanged(self, number: int) -> bool:
        return all(self._rpc(rank.is_unchanged, args=(number,)))

    def join_domain(self) -> str:
        """`rank.join_domain` on every rank: why one cannot; empty: all have."""
        return next(filter(None, self._rpc(rank.join_domain)), "")

    def see_domain(self, number: int, anew: bool) -> Sequence[dict[str, Any]]:
        return list(self._rpc(rank.see_domain, args=(number, anew)))

    def end_device_work(self) -> None:
        self._rpc(rank.end_device_work)

    def end_copies(self) -> None:
        """Before sleep. Raises RuntimeError, and lets all copy again: some have not ended."""
        if late := sum(self._rpc(rank.settle_for_sleep)):
            self._rpc(rank.woken)
            rank.check_settled(late)


def join(
    core: Any, scheduler: Any, ranks: EngineRanks, watch: Watch, adapters: Adapters, guarded: Callable[[Callable[[], None]], None]
) -> None:
    """Put the watches in front of the executor's calls and the scheduler's steps.

    Args:
        core: vLLM's EngineCore, whose executor is there already; `ranks` are that executor's.
        guarded: runs what must not raise into vLLM.
    """
    alarm = _Alarm(core, watch)

    def collective_rpc(call: Callable[..., Any], method: Any, *args: Any, **kwargs: Any) -> Any:
        if method == "execute_dummy_batch":
            guarded(watch.before_pass)
            answer = call(method, *args, **kwargs)
            guarded(watch.passed)
            return answer
        if is_harmless(method):
            return harmless(call, method, *args, **kwargs)
        guarded(adapters.suspect_all)
        guarded(lambda: watch.calling(method))
        failed = True
        try:
            if method in UNMAPPING:
                ranks.end_copies()
            answer = call(method, *args, **kwargs)
            failed = False
            return answer
        finally:
            guarded(lambda: watch.called(idle=not scheduler.has_requests(), failed=failed))
            alarm.set()

    def harmless(call: Callable[..., Any], method: str, *args: Any, **kwargs: Any) -> Any:
        """It leaves the weights of the model alone; it may load, replace or unload an adapter."""
        if method not in ADAPTER_CALLS:
            return call(method, *args, **kwargs)
        what = next(iter(kwargs.get("args") or (args[1] if len(args) > 1 else ())), None)  # the first argument for the workers
        guarded(lambda: adapters.calling(method, what))
        try:
            done = call(method, *args, **kwargs)
        except BaseException:
            guarded(adapters.suspect_all)
            raise
        guarded(adapters.ask)
        return done

    def schedule(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        guarded(watch.before_schedule)
        guarded(adapters.before_schedule)
        with keeping_requests_out(scheduler) if watch.awaits else nullcontext():
            return function(*args, **kwargs)

    def update(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        guarded(watch.stepped)
        return function(*args, **kwargs)

    def handle(function: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """The engine is told something; if it idles, see whether it is time to look."""
        function(*args, **kwargs)
        if watch.pending and not scheduler.has_requests():
            guarded(watch.when_idle)

    around(core.model_executor, "collective_rpc", collective_rpc)
    around(scheduler, "schedule", schedule)
    around(scheduler, "update_from_output", update)
    wrap(core, "_handle_client_request", handle)  # in the process of its user, an engine has none


class _Alarm:
    """Wakes an engine that waits for work, so that it looks at its weights on its own thread soon after a push.

    An engine in the process of its user has no queue of inputs: it looks with its next step.
    """

    def __init__(self, core: Any, watch: Watch) -> None:
        self._core = core
        self._watch = watch
        self._lock = threading.Lock()
        self._armed = False

    def set(self) -> None:
        """Ring when the engine should look."""
        with self._lock:
            if self._armed or getattr(self._core, "input_queue", None) is None:
                return
            self._armed = True
        threading.Thread(target=self._ring, name="epochkv-weights", daemon=True).start()

    def _ring(self) -> None:
        while True:
            time.sleep(max(MIN_RING_SECONDS, self._watch.quiet_at() - time.monotonic()))
            with self._lock:
                if not self._watch.pending:
                    self._armed = False
                    return
            wake(self._core)
