"""What the trainer client raises. Every message says what is known, and what to do with the engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epochkv_fence.client.results import Reset
    from epochkv_fence.client.weights import WeightsReport


class PoolError(Exception):
    """Base of everything that this client raises for reasons outside the caller's code."""


class HubUnreachable(PoolError):
    """No hub answered in time. Whether something was asked for and recorded is unknown: ask again."""


class KeyRefused(HubUnreachable):
    """A hub answers and does not take our key (or is not the hub whose key we have)."""


class WrongPool(PoolError):
    """The key speaks for another pool than the one the configuration names. Nothing was asked of it."""


class ResetNotRecorded(HubUnreachable):
    """No hub recorded the epoch in time, so engines go on with the KV they have: ask again.

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


class WeightsDiverged(PoolError):
    """Engines do not hold the same, new weights in time. No wrong KV comes of it: each shares with its equals alone.

    Attributes:
        engines: names of those that do not hold what they should; of a name that was given and that no engine has, that name.
        report: who held what when the time was over.
    """

    def __init__(self, text: str, engines: tuple[str, ...], report: WeightsReport) -> None:
        super().__init__(text)
        self.engines = engines
        self.report = report


class PoolClosed(PoolError):
    """This object was closed, or belongs to the process that forked this one: connect again."""
