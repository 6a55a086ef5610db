"""Our fence in an engine that has vLLM's own connectors, or none: `EPOCHKV_FENCE=1`, and this package's plugin.

`check` says whether an engine wants the fence and can have it, before its model loads. `KNOWN` are the connectors of vLLM that can
stand behind it: most keep KV under vLLM's block hashes, so whoever names the hashes names the keys. Some copy hashes of a request,
and have to copy them again when the request is named anew.

`Fence` drives the scheduler role, without tiers, from vLLM's scheduler: what our connector is told, it finds out by wrapping.
Requests are named where they enter the scheduler (`add_request`), and again before vLLM looks for them in its own cache. Its
connectors are asked after that, so they look under the same names. The promise: a request that arrives after an adoption, or that
waits then without blocks, finds nothing from before it. A request that holds blocks, or whose load is under way, ends on what it had.
No exception of ours reaches vLLM: a request that cannot be named gets random names.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from epochkv_connector.config import ConnectorConfig
from epochkv_connector.engine import describe, limits, patches
from epochkv_connector.engine.interface import UnsupportedEngine, check_version
from epochkv_connector.engine.limits import MULTI
from epochkv_connector.guard import Guard
from epochkv_connector.naming.root import brings_kv
from epochkv_connector.scheduler.role import SchedulerRole
from epochkv_connector.stats import Reporter
from epochkv_connector.weights.rank import forget
from epochkv_fence.connection import CONFIG_ENV, FENCE_ENV, ConfigurationError
from epochkv_fence.launch import NAME

logger = logging.getLogger("vllm.epochkv")

_REMEDY = "use EpochKVConnector, MooncakeStoreConnector or OffloadingConnector in its place, or unset EPOCHKV_FENCE"

_UNKNOWN = "its keys may be made of tokens alone, so that no name of ours reaches them and KV of older weights would be found"


def why_refused(name: str, module: str) -> str | None:
    """Why an engine with this connector cannot be fenced, and what to do; None: it can. `module`: its `kv_connector_module_path`."""
    if module:
        remedy = f"remove kv_connector_module_path for vLLM's own {name}, or unset EPOCHKV_FENCE" if name in KNOWN else _REMEDY
        return f"kv_connector_module_path is {module}: {_UNKNOWN}; {remedy}"
    return None if name in (*KNOWN, MULTI) else f"{_UNKNOWN}; {_REMEDY}"


def leaves(connector: Any | None) -> Iterator[Any]:
    """The connector itself, or all that a MultiConnector holds."""
    children = getattr(connector, "sub_connectors", None)
    if children is not None:
        for child in children:
            yield from leaves(child)
    elif connector is not None:
        yield connector


def _rename_offloaded(connector: Any, request: Any, num_kept: int) -> None:
    """It copies a request's hashes, each once. It copies again what is not there, before it looks or stores."""
    side = connector.connector_scheduler
    status = side._req_status.get(request.request_id)
    if status is None:
        return
    for group, state in zip(side.config.kv_group_configs, status.group_states, strict=True):
        kept = num_kept // group.hashes_per_chunk
        del state.offload_keys[kept:]
        state.next_stored_chunk_idx = min(state.next_stored_chunk_idx, kept)


def _rename_in_mooncake(connector: Any, request: Any, num_kept: int) -> None:
    """Its look-up may be under way, or answered, under the names before. What it stores, it names when it stores."""
    if num_kept == 0:
        connector.connector_scheduler.client.discard(request.request_id)
        connector.connector_scheduler.load_specs.pop(request.request_id, None)


def _keeps_no_names(connector: Any, request: Any, num_kept: int) -> None:
    """It brings blocks of one request from another engine (P/D), whose tag says whether they may have our names (`naming.root`). Or it
    looks up by a request's hashes of that moment, and stores under vLLM's name of the block."""


KNOWN: dict[str, Callable[[Any, Any, int], None]] = {
    "MooncakeConnector": _keeps_no_names,
    "MooncakeStoreConnector": _rename_in_mooncake,
    "MoRIIOConnector": _keeps_no_names,
    "NixlConnector": _keeps_no_names,
    "NixlPullConnector": _keeps_no_names,
    "NixlPushConnector": _keeps_no_names,
    "OffloadingConnector": _rename_offloaded,
    "SimpleCPUOffloadConnector": _keeps_no_names,
}
"""Connectors that names of ours can stand under, and how each forgets the names of a request but those of the first so many hash blocks.
Their keys are vLLM's block hashes, or they bring blocks of one request."""
REFUSED_KEYS = {"spec_module_path": _UNKNOWN, "read_mode": "it loads for requests that bring no KV, under names that others find"}
"""Of their `kv_connector_extra_config`: what no name of ours stands under, and why."""


def is_asked_for(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the environment asks for the fence, or says something that `check` refuses."""
    return environ.get(FENCE_ENV, "").strip() not in ("", "0")


def check(vllm_config: Any, environ: Mapping[str, str] = os.environ) -> ConnectorConfig | None:
    """The pool that this engine is fenced for; None: nobody asks for the fence, or the engine has our connector, which brings it.

    Raises:
        ConfigurationError, UnsupportedEngine: it cannot be fenced; the message says what to change.
    """
    if not is_asked_for(environ):
        return None
    value = environ[FENCE_ENV].strip()
    if value != "1":
        raise ConfigurationError(f"{FENCE_ENV} is {value!r}; it must be 1 for the fence under the engine's own caches, or 0")
    given = limits.all_connectors(vllm_config.kv_transfer_config)
    if any(one.get("kv_connector") == NAME for one in given):
        return None
    if not environ.get(CONFIG_ENV, "").strip():
        raise ConfigurationError(f"{FENCE_ENV} is set and {CONFIG_ENV} is not; set it to the pool's connection.json, or to its text")
    config = ConnectorConfig.parse({}, environ)
    check_version(config.allow_untested_vllm)
    for one in given:
        name, extra = str(one.get("kv_connector")), one.get("kv_connector_extra_config") or {}
        why = why_refused(name, str(one.get("kv_connector_module_path") or ""))
        for key, lost in REFUSED_KEYS.items():
            if why is None and str(extra.get(key) or "0").strip().lower() not in ("0", "false"):
                why = f"{key} is set, with which {lost}; leave it out"
        if why is not None:
            raise UnsupportedEngine(f"{FENCE_ENV} is set and the engine has {name}: {why}")
    _check_engine(vllm_config)
    return msgspec.structs.replace(config, local=None, distributed=None)


def _check_engine(vllm_config: Any) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    limits.check_parallel(vllm_config.parallel_config)
    limits.check_encoder_transfer(vllm_config)
    if hasattr(drafts := vllm_config.speculative_config, "disable_lookahead_block_hashes"):
        drafts.disable_lookahead_block_hashes = True  # 0.33: a block's hash would be of tokens after it, too, as our names are not
    kind = vllm_config.scheduler_config.get_scheduler_cls()
    if not (isinstance(kind, type) and issubclass(kind, Scheduler)):
        raise UnsupportedEngine(
            f"{FENCE_ENV} is set and scheduler_cls is {kind!r}, which is not derived from vLLM's Scheduler, where requests are named; "
            "derive it, or leave it out"
        )


def install() -> None:
    """Fence every scheduler that this process makes, if the environment asks for it."""
    if is_asked_for():
        patches.after_scheduler(fence)


def fence(scheduler: Any) -> None:
    """Put the fence under this scheduler, which has just been made: vLLM's global root is not set yet, and no request has come. Raises
    as `check` did before the model was loaded."""
    config = check(scheduler.vllm_config)
    if config is not None:
        patches.share_log_handlers()
        for connector in leaves(scheduler.connector):
            if type(connector).__name__ == "MooncakeStoreConnector":  # its reset empties the whole master, under every other engine
                connector.reset_cache = lambda: True  # names do what the reset is for
        scheduler.epochkv_fence = Fence(scheduler, config)


class Fence:
    """One per scheduler, with a scheduler role of ours that has no tiers. The scheduler's thread only, but for what the agent's thread asks
    of `role`."""

    def __init__(self, scheduler: Any, config: ConnectorConfig) -> None:
        self._scheduler = scheduler
        self.guard = Guard()
        reporter = Reporter(self.guard.errors)
        self.role = SchedulerRole(config, scheduler.vllm_config, scheduler.kv_cache_config, self.guard, reporter, lambda: None, fenced=True)
        self.role.pins.on_rename = self._renamed
        self.role.bind(scheduler.kv_cache_manager)
        self._join_names(scheduler)
        self._join_steps(scheduler)
        if scheduler.connector is not None:
            self._join_connector(scheduler.connector)
        names = [type(one).__name__ for one in leaves(scheduler.connector)]
        logger.info("EpochKV: the caches of this engine are fenced: %s", ", ".join(["vLLM's own", *names]))

    def _join_names(self, scheduler: Any) -> None:
        """Where requests are named: on their way in, and before vLLM looks for them."""
        role, guard = self.role, self.guard

        def add(function: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
            if request.request_id not in scheduler.requests:  # else the next input of a session, which keeps its pin
                guard.run("on_new_request", lambda: role.on_new_request(request), lambda: self._isolate(request))
            return function(request, *args, **kwargs)

        def look(function: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
            # vLLM goes on with the request whatever we say: nothing may be deferred.
            guard.run("lookup", lambda: role.admission.name(request, must=True), lambda: self._isolate(request))
            return function(request, *args, **kwargs)

        patches.around(scheduler, "add_request", add)
        patches.around(scheduler.kv_cache_manager, "get_computed_blocks", look)
        patches.wrap(scheduler.kv_cache_manager, "get_computed_blocks_for_connector", look)  # which only some versions have

    def _join_steps(self, scheduler: Any) -> None:
        """What becomes of requests: steps, their end, resets, and the scheduler's own end."""
        role, guard = self.role, self.guard

        def schedule(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            try:
                guard.run("schedule", role.state.apply, role.weights.break_off)
                output = function(*args, **kwargs)
                guard.run("schedule", lambda: self._admit(output), lambda: None)
                return output
            finally:
                role.pins.leave_schedule()

        def finish(function: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
            delay, params = function(request, *args, **kwargs)
            _, ours = guard.run("request_finished", lambda: role.request_finished(request), lambda: (False, None))
            return delay, {**params, **ours} if params and ours else params

        def reset(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            return guard.run("reset_cache", role.reset_cache, lambda: False) and function(*args, **kwargs)

        def has_requests(function: Callable[[], bool]) -> bool:
            return function() or role.state.must_tell

        def shutdown(function: Callable[[], None]) -> None:
            role.stop()
            forget(describe.engine_id(scheduler.vllm_config))
            function()

        patches.around(scheduler, "schedule", schedule)
        patches.around(scheduler, "_connector_finished", finish)
        patches.around(scheduler, "reset_connector_cache", reset)
        patches.around(scheduler, "has_requests", has_requests)
        patches.around(scheduler, "shutdown", shutdown)

    def _join_connector(self, connector: Any) -> None:
        role, guard = self.role, self.guard

        def allocate(function: Callable[..., Any], request: Any, blocks: Any, num_external_tokens: int) -> Any:
            done = function(request, blocks, num_external_tokens)
            guard.run("allocate", lambda: role.admission.allocate(request, blocks, 0), lambda: None)  # no hit of ours
            return done

        def take(function: Callable[..., Any], output: Any) -> Any:
            guard.run("take", lambda: self._take(output), role.weights.break_off)
            return function(output)

        def build(function: Callable[..., Any], output: Any) -> Any:
            guard.run("build_connector_meta", lambda: self._forget_blocks(output), role.weights.break_off)
            return function(output)

        def drop(function: Callable[[], Any]) -> tuple[()]:
            """They tell of old names behind a clearing, and of names that one request has alone."""
            list(function() or ())  # else they pile up where they are made
            return ()

        patches.around(connector, "take_events", drop)
        patches.around(connector, "build_connector_meta", build)
        patches.around(connector, "update_state_after_alloc", allocate)
        patches.around(connector, "update_connector_output", take)

    def _isolate(self, request: Any) -> None:
        self.guard.run("isolate", lambda: self.role.admission.isolate(request), lambda: False)

    def _renamed(self, request: Any, num_kept: int) -> None:
        """A connector that kept names would save KV under wrong ones, so an error here ends the names of this engine."""

        def tell() -> None:
            for connector in leaves(self._scheduler.connector):
                KNOWN[type(connector).__name__](connector, request, num_kept)

        self.guard.run("renamed", tell, self.role.weights.break_off)

    def _forget_blocks(self, output: Any) -> None:
        """The next input of a session comes with its whole block table, which OffloadingConnector would add to the one it has."""
        for connector in leaves(self._scheduler.connector):
            if type(connector).__name__ == "OffloadingConnector":
                known = connector.connector_scheduler._req_status
                for status in filter(None, (known.get(new.req_id) for new in output.scheduled_new_reqs)):
                    for state in status.group_states:
                        state.block_ids.clear()

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
