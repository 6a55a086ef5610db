"""What the trainer client raises. Every message says what is known about the epoch, and what to do with the engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epochkv_fence.client.results import Reset
    from epochkv_fence.messages import OpenUpdate


class PoolError(Exception):
    """Base of everything that this client raises for reasons outside the caller's code."""


class HubUnreachable(PoolError):
    """No hub answered in time. Whether something was asked for and recorded is unknown: keep engines paused, try again."""


class KeyRefused(HubUnreachable):
    """A hub answers and does not take our key (or is not the hub whose key we have)."""


class WrongPool(PoolError):
    """The key speaks for another pool than the one the configuration names. Nothing was asked of it."""


class ResetNotRecorded(HubUnreachable):
    """No hub recorded the epoch in time, so nobody fences the engines: keep them paused and ask again.

    Attributes:
        epoch: what was asked for; None: not even the pool's epoch is known. Asking again is harmless.
    """

    def __init__(self, text: str, epoch: int | None) -> None:
        super().__init__(text)
        self.epoch = epoch


class ResetTimeout(PoolError):
    """The epoch is recorded and not published in time. Engines that did not acknowledge are fenced by their leases.

    Attributes:
        reset: what is known, with the laggards by name.
    """

    def __init__(self, text: str, reset: Reset) -> None:
        super().__init__(text)
        self.reset = reset


class UpdateInProgress(PoolError):
    """Another trainer has a weight update of the pool open: wait until it has ended. Raised on entry, before anything is
    asked or pushed; and at the end of an update that was taken for dead meanwhile, which then counts as failed.

    Attributes:
        open: the other one (`holder`, `version`, `since_seconds`, `left_seconds`); None: it has ended.
        pushed: raised at the end, after a push of ours. False: on entry, so nothing was pushed: try again later.
    """

    def __init__(self, text: str, found: OpenUpdate | None) -> None:
        super().__init__(text)
        self.open = found
        self.pushed = False


class PoolClosed(PoolError):
    """This object was closed, or belongs to the process that forked this one: connect again."""
