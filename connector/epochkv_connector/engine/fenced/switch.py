"""Whether an engine asks for the fence without our connector, and whether it can have it; if not, one sentence before its model loads.

Knows of vLLM 0.30 to 0.33: fields of its configurations.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from epochkv_connector.config.connector_config import NAME, ConfigError, ConnectorConfig
from epochkv_connector.engine import limits
from epochkv_connector.engine.fenced import connectors
from epochkv_connector.engine.version import UnsupportedEngine, check_version
from epochkv_fence.connection import CONFIG_ENV, FENCE_ENV


def is_asked_for(environ: Mapping[str, str] | None = None) -> bool:
    """Whether the environment asks for the fence, or says something that `check` refuses."""
    return (os.environ if environ is None else environ).get(FENCE_ENV, "").strip() not in ("", "0")


def check(vllm_config: Any, environ: Mapping[str, str] | None = None) -> ConnectorConfig | None:
    """The pool that this engine is fenced for; None: nobody asks for the fence, or the engine has our connector, which brings it.

    Raises:
        ConfigError, UnsupportedEngine: it cannot be fenced; the message says what to change.
    """
    variables = os.environ if environ is None else environ
    if not is_asked_for(variables):
        return None
    value = variables[FENCE_ENV].strip()
    if value != "1":
        raise ConfigError(f"{FENCE_ENV} is {value!r}; it must be 1 for the fence under the engine's own caches, or 0")
    given = limits.connectors_of(vllm_config.kv_transfer_config)
    if any(one.get("kv_connector") == NAME for one in given):
        return None
    if not variables.get(CONFIG_ENV, "").strip():
        raise ConfigError(f"{FENCE_ENV} is set and {CONFIG_ENV} is not; set it to the pool's connection.json, or to its text")
    config = ConnectorConfig.parse({}, variables)
    check_version(config.allow_untested_vllm)
    for one in given:
        why = connectors.why_refused(str(one.get("kv_connector")), str(one.get("kv_connector_module_path") or ""))
        if why is not None:
            raise UnsupportedEngine(f"{FENCE_ENV} is set and the engine has {one.get('kv_connector')}: {why}")
    _check_engine(vllm_config)
    return msgspec.structs.replace(config, local=None, distributed=None, tracker=False)


def _check_engine(vllm_config: Any) -> None:
    from vllm.v1.core.sched.scheduler import Scheduler

    parallel = vllm_config.parallel_config
    if limits.schedules_for_itself(parallel.distributed_executor_backend, int(parallel.world_size)):
        raise UnsupportedEngine(
            f"{FENCE_ENV} is set and distributed_executor_backend is external_launcher with {parallel.world_size} ranks: each process "
            "schedules for its own rank, and an epoch that comes between two of them would make them schedule differently and hang; "
            "use 'mp' or 'ray', or start one engine of one rank in each process"
        )
    try:
        limits.check_encoder_transfer(vllm_config)
    except UnsupportedEngine as error:
        raise UnsupportedEngine(f"{FENCE_ENV} is set and {error}") from None
    kind = vllm_config.scheduler_config.get_scheduler_cls()
    if not (isinstance(kind, type) and issubclass(kind, Scheduler)):
        raise UnsupportedEngine(
            f"{FENCE_ENV} is set and scheduler_cls is {kind!r}, which is not derived from vLLM's Scheduler, where requests are named; "
            "derive it, or leave it out"
        )
