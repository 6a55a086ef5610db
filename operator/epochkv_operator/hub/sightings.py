"""Since when can an epoch have been asked for? The proof on which boots may join by their age.

A watch says what happened, never when: its events wait in sockets while this process is frozen, and come minutes late
after a silent cut. A boot that started meanwhile, with base weights, would look old enough. So the time of an ask is
never when it was heard of, but when the pool was last *read*, from the API server's newest state, still asking for less:
it was asked for after that read began, whatever happened since.

A boot may join when it was old enough at that time, so one read after it has become old enough serves it for good: a
steady pool is not read at all. Missing reads let fewer boots join, never a wrong one.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class _Seen:
    epoch: int
    at: float  # when the latest read that showed `epoch` began
    before: float | None = None  # when the latest read that showed less began


class Sightings:
    """What reads showed, by pool uid. Times are seconds on this process's monotonic clock."""

    def __init__(self) -> None:
        self._seen: dict[str, _Seen] = {}

    def shown(self, pool_uid: str, epoch: int, at: float) -> None:
        """A read that began at `at`, and that cannot have been answered from an older state, showed this `resetEpoch`."""
        seen = self._seen.get(pool_uid)
        if seen is None:
            self._seen[pool_uid] = _Seen(epoch, at)
        elif epoch > seen.epoch:
            self._seen[pool_uid] = _Seen(epoch, at, seen.at)
        elif epoch == seen.epoch:
            seen.at = max(seen.at, at)

    def since(self, pool_uid: str, epoch: int) -> float | None:
        """A time at which `epoch` was not asked for yet; None when there is no proof."""
        seen = self._seen.get(pool_uid)
        if seen is None or epoch < seen.epoch:
            return None
        return seen.at if epoch > seen.epoch else seen.before

    def at(self, pool_uid: str) -> float | None:
        """When the latest read began."""
        seen = self._seen.get(pool_uid)
        return None if seen is None else seen.at

    def forget(self, pool_uid: str) -> None:
        """The pool is gone."""
        self._seen.pop(pool_uid, None)
