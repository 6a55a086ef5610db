"""When an epoch was asked for, by whom, and for which weights: what decides whether the age of a boot proves anything."""

from __future__ import annotations

from dataclasses import dataclass

from epochkv_fence.authority import Origin
from epochkv_fence.messages import MAX_EPOCH, Moment, Source


@dataclass(slots=True)
class Ask:
    """One ask for an epoch.

    Attributes:
        at: when it was made, on the hub's clock, or earlier; None: unknown.
        seen: when the hub first saw it, for status.
        origin: who made it, and for which weights.
        listed: made with a list of boots.
        ready: False: nobody may use the epoch until the same owner asks again with True.
        request: of the trainer's `Bump`.
        heirs: who may use the epoch because it may use the one before, whose weights are the same.
        restated: the pool's owner names the same weights as before, or none: that says nothing new of them.
    """

    epoch: int
    at: float | None
    seen: float
    origin: Origin
    listed: bool = False
    ready: bool = True
    request: int | None = None
    heirs: frozenset[bytes] = frozenset()
    restated: bool = False

    @property
    def possible(self) -> bool:
        """An epoch that every part of the system can carry."""
        return 0 <= self.epoch <= MAX_EPOCH

    def refines(self, request: int | None, at: float | None) -> bool:
        """This is the repetition of `request`, whose time was unknown, and it proves one.

        Only of the very same request: another one for the same epoch may have been made much later than the first.
        """
        return self.request is not None and self.request == request and at is None and self.at is not None and not self.listed

    def brings_weights(self, known: str) -> bool:
        """It names weights, and others than those of the target, `known`: an update of its own."""
        return bool(self.origin.weights_version) and self.origin.weights_version != known and not self.restated

    def releases(self) -> bool:
        """The pool's owner says that the weights are ready; nobody else can."""
        return self.ready and self.origin.source is Source.SPEC


def asked_at(moment: Moment | None, instance: bytes | None, ago_seconds: float, max_rate: float, now: float) -> float | None:
    """A lower bound for when something was asked for, on this hub's clock, from the moment that came with it.

    Args:
        moment: what the asker gave back.
        instance: of this hub process; None: it gives no moments.
        ago_seconds: from the ask until the asker received `moment`, by its clock.
        max_rate: how much slower than ours that clock may run.

    Returns:
        None when nothing is proved: no moment, one of another process, or one that has not been yet.
    """
    if moment is None or instance is None or moment.hub != instance or moment.at > now:
        return None
    return moment.at - ago_seconds * max_rate
