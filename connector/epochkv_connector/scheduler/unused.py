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

NOTHING, NO_LOADS, NO_SAVES = "no tier is used", "loads are off", "saves are off"


class Unused(NamedTuple):
    """`what`: is not used, in words; `why`: with what to change; `reason`: for status; None: the user asked for it."""

    what: str
    why: str
    reason: TierReason | None


BROKEN = Unused(NOTHING, "an error turned the tiers off; restart the engine, and report the error in its log", "TiersBroken")
"""While the engine runs (`SharedState.broken`)."""


def find_unused(
    config: ConnectorConfig,
    vllm_config: Any,
    *,
    policy: str,
    no_weights: str | None,
    error: str,
    layout_problem: str | None,
    refusals: Sequence[str],
    random_hashes: str | None,
) -> list[Unused]:
    """Everything at once, so that one restart is enough.

    Args:
        policy: the `kv_load_failure_policy` that vLLM follows.
        no_weights: see `limits.why_no_weights`.
        error: why the tiers could not be built; empty: they were, or there are none.
        layout_problem: see `CacheLayout.problem`.
        refusals: why a rank takes no job, by rank; empty where it does.
        random_hashes: algorithm of block hashes with a random seed, which other engines cannot look up; None: they can.
    """
    found = [Unused("the engine serves without caches", no_weights, "TiersOff")] if no_weights is not None else []
    if not config.has_tiers:
        return found
    if (why := why_no_tiers(vllm_config)) is not None:
        found.append(Unused(NOTHING, why, "TiersOff"))
    if layout_problem is not None:
        found.append(Unused(NOTHING, layout_problem, "LayoutUnsupported"))
    if error:
        found.append(Unused(NOTHING, f"the tiers could not be built ({error}); remove the cause, and restart the engine", "TiersBroken"))
    if refusing := [(rank, why) for rank, why in enumerate(refusals) if why]:
        rank, why = refusing[0]
        which = f"rank {rank}" if len(refusing) == 1 else f"{len(refusing)} ranks, such as rank {rank},"
        text = f"{which} cannot copy KV blocks ({why}); remove the cause, and restart the engine"
        found.append(Unused(NOTHING, text, "TiersBroken"))
    role = getattr(vllm_config.kv_transfer_config, "kv_role", None)
    if role == "kv_producer":
        found.append(Unused(NO_LOADS, "kv_role is 'kv_producer', which saves only; set it to 'kv_both' to load as well", None))
    elif policy != "recompute":
        text = (
            f"kv_load_failure_policy is {policy!r}, so a lost block would fail the request; set it to 'recompute' "
            "(with a MultiConnector: in its own configuration, where vLLM reads it)"
        )
        found.append(Unused(NO_LOADS, text, "SavesOnly"))
    if role == "kv_consumer":
        found.append(Unused(NO_SAVES, "kv_role is 'kv_consumer', which loads only; set it to 'kv_both' to save as well", None))
    if random_hashes is not None and config.distributed is not None:
        text = (
            f"block hashes ({random_hashes}) have a random seed in each process; "
            "set PYTHONHASHSEED to one value in the whole pool, or use --prefix-caching-hash-algo sha256"
        )
        found.append(Unused("L2 is off", text, "L1Only" if config.local is not None else "TiersOff"))
    return found


def line(unused: Iterable[Unused]) -> str:
    return "; ".join(f"{one.what}: {one.why}" for one in unused)


def told(unused: Iterable[Unused]) -> tuple[str, str]:
    """What status shows: the worst reason, and a sentence. Both empty: nothing but what the user asked for."""
    problems = [one for one in unused if one.reason is not None]
    worst = next((reason for reason in TIER_REASONS if any(one.reason == reason for one in problems)), "")
    return worst, line(problems)
