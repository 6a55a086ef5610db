"""Before engines are started: what the block asks for, whether it is there, and what `on_failure` makes of its absence."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from typing import Any, Final

from epochkv_connector.config import schema
from epochkv_connector.verl.block import WHERE, BlockError, parse, plain
from epochkv_connector.verl.expand import Expansion, expand
from epochkv_fence.doctor.finding import Level
from epochkv_fence.doctor.looking import NoHub, look_at_hub
from epochkv_fence.doctor.running import apart
from epochkv_fence.doctor.store import look_at_master

logger = logging.getLogger(__name__)

TRANSFER: Final = "kv_transfer_config"


class StoreUnreachable(RuntimeError):
    """Hub or master does not answer, and `on_failure` is crash."""


def resolve(given: Any, rollout: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> dict[str, Any] | None:
    """The `kv_transfer_config` that the block stands for; None: engines run without a connector.

    Args:
        given: the block.
        rollout: what it stands in; of interest are `name`, `engine_kwargs` and `disaggregation`.

    Raises:
        BlockError: the block cannot be meant.
        StoreUnreachable: see there.
    """
    block = parse(given)
    if not block.enable:
        return None
    _check_beside(rollout)
    expansion = expand(block, environ)
    problem, _ = apart(lambda: find_problem(expansion))
    if problem is None:
        if not expansion.has_tiers:
            logger.warning("EpochKV: %s: %s names no tier; add local or distributed to it or to extra_config", WHERE, expansion.source)
        return expansion.transfer
    if block.on_failure == "crash":
        raise StoreUnreachable(f"{WHERE}: {problem}; on_failure is crash; start it, or set on_failure to fallback to train without it")
    logger.warning("EpochKV: %s: %s; on_failure is fallback, so rollout engines run without the connector", WHERE, problem)
    return None


async def find_problem(expansion: Expansion) -> str | None:
    """What does not answer, in words; None: all does.

    Raises:
        BlockError: the hub serves another pool.
    """
    if expansion.connection is not None:
        look = await look_at_hub(expansion.connection, apart_seconds=0.0)
        if isinstance(look, NoHub):
            if look.trouble == "pool":
                raise BlockError(f"{WHERE}: {expansion.source} names another pool than its hub serves: {look.text}")
            return f"the hub {look.endpoint} cannot be used: {look.text}"
    if expansion.master is not None:
        (finding,) = await look_at_master(expansion.master)
        if finding.level is Level.WRONG:
            return f"the Mooncake master {expansion.master} cannot be used: {finding.text.partition(';')[0]}"
    return None


def _check_beside(rollout: Mapping[str, Any]) -> None:
    """Raise `BlockError` where verl would ignore or overwrite what the block stands for."""
    name = rollout.get("name")
    if name != "vllm":
        raise BlockError(f"{WHERE}: enable is true, but rollout.name is {schema.shown(name)}; it must be vllm, or set enable to false")
    engine = (plain(rollout.get("engine_kwargs") or {}).get("vllm") or {}).get(TRANSFER)
    if engine is not None:
        raise BlockError(f"{WHERE}: enable is true, but rollout.engine_kwargs.vllm has a {TRANSFER}, too; remove one of them")
    disaggregation = rollout.get("disaggregation")
    if disaggregation is not None and disaggregation.get("enabled"):
        raise BlockError(
            f"{WHERE}: enable is true, but rollout.disaggregation.enabled, too, and verl then sets its own {TRANSFER}; turn one of them off"
        )
