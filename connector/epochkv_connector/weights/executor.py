"""Joins `watch.Watch` to a running vLLM engine: every call to its workers, every step, and the time when it idles."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from epochkv_connector.engine.patches import keeping_requests_out, wake
from epochkv_connector.weights import rank
from epochkv_connector.weights.adapters import ADAPTER_CALLS, Adapters
from epochkv_connector.weights.watch import Wanted, Watch, is_harmless
from epochkv_connector.wire import RankLayout

logger = logging.getLogger("vllm.epochkv.weights")

UNMAPPING = ("sleep", "discard")
"""Calls that take the memory of KV from under copies. From 0.33 on vLLM also tells connectors (`unregister_kv_caches`), on the rank, when
another rank may have gone on already; here all ranks have ended their copies before one begins.
"""
MEMORY = frozenset(("weights", "kv_cache"))
"""vLLM's tags of what it unmaps."""
MIN_RING_SECONDS = 0.05
"""A busy engine takes its inputs between steps, and looks with its next step anyway."""


def _nobody(*_: Any, **__: Any) -> list[Any]:
    raise RuntimeError("this scheduler has no engine whose ranks could be asked")


class EngineRanks:
    """The ranks behind an executor of vLLM (`watch.Ranks`); None: a scheduler without an engine, which can ask nobody.

    Attributes:
        unmapped: memory of theirs that a call has unmapped, from before it begins (vLLM's own word comes after it) until one has mapped it.
    """

    def __init__(self, executor: Any | None, engine_id: str) -> None:
        self._executor = executor
        self._rpc = _nobody if executor is None else executor.collective_rpc  # as it was before `join` put the watch in front of it
        self._held = rank.held_by(engine_id)
        self.unmapped: frozenset[str] = frozenset()

    @property
    def asleep(self) -> bool:
        return bool(self.unmapped)

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

    def are_unchanged(self, number: int) -> bool:
        return all(self._rpc(rank.is_unchanged, args=(number,)))

    def join_domain(self) -> str:
        """`rank.join_domain` on every rank: why one cannot; empty: all have."""
        return next(filter(None, self._rpc(rank.join_domain)), "")

    def see_domain(self, number: int) -> Sequence[dict[str, Any]]:
        return list(self._rpc(rank.see_domain, args=(number,)))

    def end_device_work(self) -> None:
        self._rpc(rank.end_device_work)


def join(
    core: Any, scheduler: Any, ranks: EngineRanks, watch: Watch, adapters: Adapters, guarded: Callable[[Callable[[], None]], None]
) -> None:
    """Put the watches in front of the executor's calls and the scheduler's steps.

    Args:
        core: vLLM's EngineCore, whose executor is there already; `ranks` are that executor's.
        guarded: runs what must not raise into vLLM.
    """
    executor = core.model_executor
    call = executor.collective_rpc
    alarm = _Alarm(core, watch, guarded)

    @functools.wraps(call)
    def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
        if method == "execute_dummy_batch":
            guarded(watch.before_pass)
            answer = call(method, *args, **kwargs)
            guarded(watch.passed)
            return answer
        if is_harmless(method):
            return _calling_adapters(adapters, call, method, args, kwargs, guarded)
        guarded(adapters.suspect_all)
        guarded(lambda: watch.calling(method))
        before, failed = ranks.unmapped, True
        tags = _tags(args, kwargs) if method in (*UNMAPPING, "wake_up") else frozenset()
        try:
            if method in UNMAPPING:
                ranks.unmapped = before | tags
                if "kv_cache" in tags:
                    rank.check_settled(sum(call(rank.settle_for_sleep)))
            answer = call(method, *args, **kwargs)
            failed = False
            if method == "wake_up":
                ranks.unmapped = before - tags
            return answer
        finally:
            if failed:
                ranks.unmapped = before
            if "kv_cache" in tags - ranks.unmapped:
                guarded(lambda: call(rank.woken))
            guarded(lambda: watch.called(idle=not scheduler.has_requests(), failed=failed))
            alarm.set()

    executor.collective_rpc = collective_rpc
    schedule = scheduler.schedule

    @functools.wraps(schedule)
    def scheduling(*args: Any, **kwargs: Any) -> Any:
        guarded(watch.before_schedule)
        guarded(adapters.before_schedule)
        if not watch.awaits:
            return schedule(*args, **kwargs)
        with keeping_requests_out(scheduler):
            return schedule(*args, **kwargs)

    update = scheduler.update_from_output

    @functools.wraps(update)
    def updating(*args: Any, **kwargs: Any) -> Any:
        guarded(watch.stepped)
        return update(*args, **kwargs)

    scheduler.schedule, scheduler.update_from_output = scheduling, updating
    alarm.listen()


def _first(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The first argument that a call of the executor's has for the workers."""
    return next(iter(kwargs.get("args") or (args[1] if len(args) > 1 else ())), None)


def _tags(args: tuple[Any, ...], kwargs: dict[str, Any]) -> frozenset[str]:
    """The memory that a call is about: all where it does not say."""
    tags = (kwargs.get("kwargs") or {}).get("tags") or _first(args, kwargs)
    return frozenset(tags) if tags and isinstance(tags, list | tuple) else MEMORY


def _calling_adapters(
    adapters: Adapters,
    call: Callable[..., Any],
    method: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    guarded: Callable[[Callable[[], None]], None],
) -> Any:
    """A call that leaves the weights of the model alone; it may load, replace or unload an adapter."""
    if method not in ADAPTER_CALLS:
        return call(method, *args, **kwargs)
    what = _first(args, kwargs)
    guarded(lambda: adapters.calling(method, what))
    try:
        done = call(method, *args, **kwargs)
    except BaseException:
        guarded(adapters.suspect_all)
        raise
    guarded(adapters.ask)
    return done


class _Alarm:
    """Wakes an engine that waits for work, so that it looks at its weights on its own thread soon after a push.

    An engine in the process of its user has no queue of inputs: it looks with its next step.
    """

    def __init__(self, core: Any, watch: Watch, guarded: Callable[[Callable[[], None]], None]) -> None:
        self._core = core
        self._watch = watch
        self._guarded = guarded
        self._lock = threading.Lock()
        self._armed = False

    def listen(self) -> None:
        """After each thing that the idle engine is told, see whether it is time to look."""
        handle = getattr(self._core, "_handle_client_request", None)
        if handle is None:
            return

        @functools.wraps(handle)
        def handling(*args: Any, **kwargs: Any) -> None:
            handle(*args, **kwargs)
            if self._watch.pending and not self._core.scheduler.has_requests():
                self._guarded(self._watch.when_idle)

        self._core._handle_client_request = handling

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
