"""Why an engine uses its pool's root or stays in bypass, and the one line that its log gets when that changes.

Every way into bypass has a name and a remedy here. An operator who finds an engine without caches reads the reason in its log.
"""

from __future__ import annotations

import enum
import logging

logger = logging.getLogger("vllm.epochkv.fence")


class Reason(enum.Enum):
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


_SAID_ELSEWHERE = (Reason.FORBIDDEN, Reason.NO_WEIGHTS, Reason.NO_HUB, Reason.UNASSIGNED)


class BypassLog:
    """Logs each change of (reason, highest epoch granted in this boot or -1) once.

    Attributes:
        over: the engine ends, and a lease that it gives back is no news.
    """

    def __init__(self) -> None:
        self.over = False
        self._told = (Reason.UNASSIGNED, -1)

    def tell(self, reason: Reason, epoch: int) -> None:
        """Say what has changed; nothing if nothing has."""
        before, epoch_before = self._told
        if reason is Reason.NO_LEASE and epoch != epoch_before:
            return  # an adoption: the lease of its grant begins when the epoch is bound
        self._told = (reason, epoch)
        said = self.over or (reason, epoch) == (before, epoch_before) or reason is before is Reason.OVERWRITTEN
        if said or reason in _SAID_ELSEWHERE:
            return
        back = reason is Reason.IN_USE and before in (Reason.LOCAL_RESET, Reason.NO_LEASE, Reason.WEIGHTS_ENDED)
        level = logging.INFO if reason in (Reason.IN_USE, Reason.LOCAL_RESET) else logging.WARNING
        logger.log(level, "EpochKV: %s%s", _line(reason, epoch), ", back from bypass" if back else "")


def _line(reason: Reason, epoch: int) -> str:
    match reason:
        case Reason.IN_USE:
            return f"epoch {epoch} in use"
        case Reason.LOCAL_RESET:
            return f"the caches of this engine were reset: bypass until the pool's next epoch, {epoch + 1}, which is asked for"
        case Reason.WEIGHTS_ENDED:
            return (
                f"blocks of epoch {epoch} were computed with other weights than they are named after: bypass with these weights "
                "until the pool's next epoch, which is asked for"
            )
        case Reason.NO_LEASE:
            return f"the lease on epoch {epoch} is over (no grant from the hub in time): bypass until the next one"
        case _:
            return (
                "vLLM's block-hash root (kv_cache_utils.NONE_HASH) was overwritten by somebody else, such as a second engine "
                "in this process: bypass until this process is restarted"
            )
