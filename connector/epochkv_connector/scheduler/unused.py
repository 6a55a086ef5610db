"""What of its tiers an engine does not use, and why: found out in one place, when the engine starts.

The log says it in one line. What the user did not ask for also goes to the hub, which shows it in status and conditions, and
makes the gauge `tiers_off` 1. Each sentence ends with what to change.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from epochkv_connector.config import ConnectorConfig
from epochkv_connector.engine.limits import why_no_tiers
from epochkv_fence.protocol.messages import TIER_REASONS, TierReason

NOTHING = "no tier is used"


class Unused(NamedTuple):
    """`what`: is not used, in words; `why`: with what to change; `reason`: for status; None: the user asked for it."""

    what: str
    why: str
    reason: TierReason | None


BROKEN = Unused(NOTHING, "an error turned the tiers off; restart the engine, and report the error in its log", "TiersBroken")
"""While the engine runs (`SharedState.broken`)."""


class Built(NamedTuple):
    """What has become of the tiers when they were built.

    Attributes:
        error: why they could not be; empty: they were, or there are none.
        layout_problem: see `CacheLayout.problem`.
        refusals: why a rank takes no job, by rank; empty where it does.
        hash_algorithm: of block hashes with a random seed, which other engines cannot look up; None: they can.
    """

    error: str
    layout_problem: str | None
    refusals: Sequence[str]
    hash_algorithm: str | None


def why_no_loads(vllm_config: Any, policy: str) -> str | None:
    """Why this engine must not load, and what to change; None: it may. `policy`: the `kv_load_failure_policy` that vLLM follows."""
    found = _loads_off(vllm_config, policy)
    return found.why if found is not None else why_no_tiers(vllm_config)


def why_no_saves(vllm_config: Any) -> str | None:
    """Why this engine must not save, and what to change; None: it may."""
    found = _saves_off(vllm_config)
    return found.why if found is not None else why_no_tiers(vllm_config)


def find_unused(config: ConnectorConfig, vllm_config: Any, policy: str, no_weights: str | None, built: Built) -> list[Unused]:
    """Everything at once, so that one restart is enough. `policy`: see `why_no_loads`; `no_weights`: see `limits.why_no_weights`."""
    found = [Unused("the engine serves without caches", no_weights, "TiersOff")] if no_weights is not None else []
    if not config.has_tiers:
        return found
    settings = _loads_off(vllm_config, policy), _saves_off(vllm_config), _l2_off(config, built)
    return [*found, *_all_off(vllm_config, built), *(one for one in settings if one is not None)]


def line(unused: Iterable[Unused]) -> str:
    return "; ".join(f"{one.what}: {one.why}" for one in unused)


def told(unused: Iterable[Unused]) -> tuple[str, str]:
    """What status shows: the worst reason, and a sentence. Both empty: nothing but what the user asked for."""
    problems = [one for one in unused if one.reason is not None]
    worst = next((reason for reason in TIER_REASONS if any(one.reason == reason for one in problems)), "")
    return worst, line(problems)


def _all_off(vllm_config: Any, built: Built) -> Iterable[Unused]:
    why = why_no_tiers(vllm_config)
    if why is not None:
        yield Unused(NOTHING, why, "TiersOff")
    if built.layout_problem is not None:
        yield Unused(NOTHING, built.layout_problem, "LayoutUnsupported")
    if built.error:
        yield Unused(NOTHING, f"the tiers could not be built ({built.error}); remove the cause, and restart the engine", "TiersBroken")
    refusing = {rank: why for rank, why in enumerate(built.refusals) if why}
    if refusing:
        rank, why = next(iter(refusing.items()))
        which = f"rank {rank}" if len(refusing) == 1 else f"{len(refusing)} ranks, such as rank {rank},"
        text = f"{which} cannot copy KV blocks ({why}); remove the cause, and restart the engine"
        yield Unused(NOTHING, text, "TiersBroken")


def _loads_off(vllm_config: Any, policy: str) -> Unused | None:
    if getattr(vllm_config.kv_transfer_config, "kv_role", None) == "kv_producer":
        return Unused("loads are off", "kv_role is 'kv_producer', which saves only; set it to 'kv_both' to load as well", None)
    if policy != "recompute":
        why = (
            f"kv_load_failure_policy is {policy!r}, so a lost block would fail the request; set it to 'recompute' "
            "(with a MultiConnector: in its own configuration, where vLLM reads it)"
        )
        return Unused("loads are off", why, "SavesOnly")
    return None


def _saves_off(vllm_config: Any) -> Unused | None:
    if getattr(vllm_config.kv_transfer_config, "kv_role", None) == "kv_consumer":
        return Unused("saves are off", "kv_role is 'kv_consumer', which loads only; set it to 'kv_both' to save as well", None)
    return None


def _l2_off(config: ConnectorConfig, built: Built) -> Unused | None:
    if built.hash_algorithm is None or config.distributed is None:
        return None
    why = (
        f"block hashes ({built.hash_algorithm}) have a random seed in each process; "
        "set PYTHONHASHSEED to one value in the whole pool, or use --prefix-caching-hash-algo sha256"
    )
    return Unused("L2 is off", why, "L1Only" if config.local is not None else "TiersOff")
