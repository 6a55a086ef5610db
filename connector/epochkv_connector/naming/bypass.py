"""Where an engine stands with its pool, why, and the one line that its log gets when that changes.

Every way into bypass has a name and a remedy here. An operator who finds an engine without caches reads the reason in its log.
"""

from __future__ import annotations

import enum
import logging
from dataclasses import dataclass

logger = logging.getLogger("vllm.epochkv.fence")


class Why(enum.Enum):
    """What decides between the pool's root and bypass, by precedence."""

    OVERWRITTEN = "overwritten"  # somebody else bound vLLM's global
    FORBIDDEN = "forbidden"  # this engine may never share; said at start
    NO_WEIGHTS = "weights unknown"  # said by `weights.watch`
    NO_HUB = "no hub"  # said at start
    UNASSIGNED = "unassigned"  # no grant yet
    LOCAL_RESET = "local reset"
    WEIGHTS_ENDED = "weights ended"
    NO_LEASE = "no lease"
    IN_USE = "in use"


@dataclass(frozen=True, slots=True)
class Standing:
    """One state: `epoch` is the highest granted in this boot, -1 before the first."""

    why: Why
    epoch: int = -1


class Herald:
    """Logs each change of standing once."""

    def __init__(self) -> None:
        self._told = Standing(Why.UNASSIGNED)

    def tell(self, standing: Standing) -> None:
        """Say what has changed; nothing if nothing has."""
        before = self._told
        if standing.why is Why.NO_LEASE and standing.epoch != before.epoch:
            return  # an adoption: the lease of its grant begins when the epoch is bound
        self._told = standing
        said = standing == before or standing.why is before.why is Why.OVERWRITTEN
        if said or standing.why in (Why.FORBIDDEN, Why.NO_WEIGHTS, Why.NO_HUB, Why.UNASSIGNED):
            return
        level, text = self._line(before, standing)
        logger.log(level, "EpochKV: %s", text)

    def _line(self, before: Standing, now: Standing) -> tuple[int, str]:
        epoch = now.epoch
        match now.why:
            case Why.IN_USE:
                back = ", back from bypass" if before.why in (Why.LOCAL_RESET, Why.NO_LEASE, Why.WEIGHTS_ENDED) else ""
                return logging.INFO, f"epoch {epoch} in use{back}"
            case Why.LOCAL_RESET:
                return (
                    logging.INFO,
                    f"the caches of this engine were reset: bypass until the pool's next epoch, {epoch + 1}, which is asked for",
                )
            case Why.WEIGHTS_ENDED:
                return logging.WARNING, (
                    f"blocks of epoch {epoch} were computed with other weights than they are named after: bypass with these weights "
                    "until the pool's next epoch, which is asked for"
                )
            case Why.NO_LEASE:
                return logging.WARNING, f"the lease on epoch {epoch} is over (no grant from the hub in time): bypass until the next one"
            case _:
                return logging.WARNING, (
                    "vLLM's block-hash root (kv_cache_utils.NONE_HASH) was overwritten by somebody else, such as a second engine "
                    "in this process: bypass until this process is restarted"
                )
