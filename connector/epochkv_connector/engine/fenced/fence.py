"""Drives the scheduler role, without tiers, from vLLM's own scheduler: what our connector is told, this finds out by wrapping.

Requests are named where they enter the scheduler (`add_request`), and again before vLLM looks for them in its own cache. Its
connectors are asked after that, so they look under the same names. The promise: a request that arrives after an adoption, or that
waits then without blocks, finds nothing from before it. A request that holds blocks, or whose load is under way, ends on what it had.

No exception of ours reaches vLLM: a request that cannot be named gets random names. Knows of vLLM 0.30 to 0.33: the methods of
`Scheduler`, `KVCacheManager` and connectors that `_join_*` wrap, on the objects of one engine alone.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from epochkv_connector.config.connector_config import ConnectorConfig
from epochkv_connector.engine import logs, patches
from epochkv_connector.engine.fenced import connectors, switch
from epochkv_connector.engine.version import UnsupportedEngine
from epochkv_connector.guard import Guard
from epochkv_connector.metrics.reporter import Reporter
from epochkv_connector.naming.pins import brings_kv
from epochkv_connector.scheduler.role import SchedulerRole
from epochkv_fence.connection import FENCE_ENV

logger = logging.getLogger("vllm.epochkv")

ATTRIBUTE = "epochkv_fence"
"""Of a scheduler: its fence."""

_NOTHING = (False, None)


def install() -> None:
    """Fence every scheduler that this process makes, if the environment asks for it."""
    if switch.is_asked_for():
        patches.after_scheduler(fence)


def fence(scheduler: Any) -> None:
    """Put the fence under this scheduler, which has just been made: vLLM's global root is not set yet, and no request has come.

    Raises:
        ConfigError, UnsupportedEngine: it cannot be fenced; `switch.check` said so before the model was loaded.
    """
    config = switch.check(scheduler.vllm_config)
    if config is not None:
        logs.share_log_handlers()
        connectors.prepare(scheduler.connector)
        setattr(scheduler, ATTRIBUTE, Fence(scheduler, config))


def _around(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Put what `make` makes of this method in its place, on this object alone."""
    method = getattr(owner, name, None)
    if method is None:
        raise UnsupportedEngine(f"{FENCE_ENV} is set and {type(owner).__name__} of this vLLM has no {name}; unset the variable")
    setattr(owner, name, functools.wraps(method)(make(method)))


class Fence:
    """One per scheduler; its thread only, but for what the agent's thread asks of `role`.

    Attributes:
        guard: counts our errors.
        role: ours, without tiers.
    """

    def __init__(self, scheduler: Any, config: ConnectorConfig) -> None:
        self._scheduler = scheduler
        self.guard = Guard()
        reporter = Reporter(self.guard.errors)
        self.role = SchedulerRole(config, scheduler.vllm_config, scheduler.kv_cache_config, self.guard, reporter, lambda: None)
        self.role.pins.on_rename = self._renamed
        self.role.bind(scheduler.kv_cache_manager)
        self._join_names(scheduler)
        self._join_steps(scheduler)
        if scheduler.connector is not None:
            self._join_connector(scheduler.connector)
        names = [type(one).__name__ for one in connectors.leaves(scheduler.connector)]
        logger.info("EpochKV: the caches of this engine are fenced: %s", ", ".join(["vLLM's own", *names]))

    def _join_names(self, scheduler: Any) -> None:
        """Where requests are named: on their way in, and before vLLM looks for them."""
        role, guard = self.role, self.guard

        def adding(add: Callable[..., Any]) -> Callable[..., Any]:
            def add_request(request: Any) -> Any:
                if request.request_id not in scheduler.requests:  # else the next input of a session, which keeps its pin
                    guard.run("on_new_request", lambda: role.on_new_request(request), lambda: self._isolate(request))
                return add(request)

            return add_request

        def looking(look: Callable[..., Any]) -> Callable[..., Any]:
            def get_computed_blocks(request: Any) -> Any:
                guard.run("lookup", lambda: self._name(request), lambda: self._isolate(request))
                return look(request)

            return get_computed_blocks

        _around(scheduler, "add_request", adding)
        _around(scheduler.kv_cache_manager, "get_computed_blocks", looking)
        if hasattr(scheduler.kv_cache_manager, "get_computed_blocks_for_connector"):
            _around(scheduler.kv_cache_manager, "get_computed_blocks_for_connector", looking)

    def _join_steps(self, scheduler: Any) -> None:
        """What becomes of requests: steps, their end, resets, and the scheduler's own end."""
        role, guard = self.role, self.guard

        def scheduling(schedule: Callable[..., Any]) -> Callable[..., Any]:
            def scheduled(*args: Any, **kwargs: Any) -> Any:
                try:
                    output = schedule(*args, **kwargs)
                    guard.run("schedule", lambda: self._admit(output), lambda: None)
                    return output
                finally:
                    role.pins.leave_schedule()

            return scheduled

        def finishing(finish: Callable[..., Any]) -> Callable[..., Any]:
            def connector_finished(request: Any) -> Any:
                delay, params = finish(request)
                _, ours = guard.run("request_finished", lambda: role.request_finished(request), lambda: _NOTHING)
                return delay, {**params, **ours} if params and ours else params

            return connector_finished

        def resetting(reset: Callable[..., Any]) -> Callable[..., Any]:
            def reset_connector_cache() -> Any:
                return guard.run("reset_cache", role.reset_cache, lambda: False) and reset()

            return reset_connector_cache

        def stopping(stop: Callable[..., Any]) -> Callable[..., Any]:
            def shutdown() -> None:
                role.stop()
                stop()

            return shutdown

        _around(scheduler, "schedule", scheduling)
        _around(scheduler, "_connector_finished", finishing)
        _around(scheduler, "reset_connector_cache", resetting)
        _around(scheduler, "shutdown", stopping)

    def _join_connector(self, connector: Any) -> None:
        guard = self.guard

        def allocating(allocated: Callable[..., Any]) -> Callable[..., Any]:
            def update_state_after_alloc(request: Any, blocks: Any, num_external_tokens: int) -> Any:
                done = allocated(request, blocks, num_external_tokens)
                guard.run("allocate", lambda: self.role.admission.allocate(request, blocks, 0), lambda: None)  # no hit of ours
                return done

            return update_state_after_alloc

        def taking(take: Callable[..., Any]) -> Callable[..., Any]:
            def update_connector_output(output: Any) -> Any:
                guard.run("take", lambda: self._take(output), self.role.weights.break_off)
                return take(output)

            return update_connector_output

        _around(connector, "update_state_after_alloc", allocating)
        _around(connector, "update_connector_output", taking)

    def _name(self, request: Any) -> None:
        """vLLM is about to look for the request in its own cache, and goes on with it whatever we say: nothing may be deferred."""
        self.role.admission.name(request, must=True)

    def _isolate(self, request: Any) -> None:
        self.guard.run("isolate", lambda: self.role.admission.isolate(request), lambda: False)

    def _renamed(self, request: Any, num_kept: int) -> None:
        """A connector that kept names would save KV under wrong ones, so an error here ends the names of this engine."""
        self.guard.run("renamed", lambda: connectors.renamed(self._scheduler.connector, request, num_kept), self.role.weights.break_off)

    def _admit(self, output: Any) -> None:
        """Tokens of these requests are computed: they keep what they have over an adoption."""
        role = self.role
        role.requests.schedule(output.num_scheduled_tokens)
        resumed = output.scheduled_cached_reqs.resumed_req_ids
        for request_id in (*(new.req_id for new in output.scheduled_new_reqs), *resumed):
            request = role.requests.vllm(request_id)
            if request is not None:
                role.admission.admit(request)

    def _take(self, output: Any) -> None:
        """What another engine has handed over has our names only while its tag is good, when it arrives as well."""
        failed = set(output.failed_recving or ())
        for request_id in tuple(output.finished_recving or ()):
            record = self.role.requests.report(request_id, failed=request_id in failed)
            if record is not None and request_id not in failed and brings_kv(record.vllm):
                self.role.steps.doubt(record.vllm)
