"""What a hub may do, rule by rule: the design page "fence", section 4. `hub` does it.

Each method is one rule, so that the model tests can take it away and show that it is needed.
"""

from __future__ import annotations

from epochkv_fence.hub.boots import BootRecord
from epochkv_fence.hub.state import PoolState


class HubRules(PoolState):
    """The conditions, all of them pure: nothing here changes anything."""

    # ------------------------------------------------------------------ granting

    def _may_grant(self) -> bool:
        """The note must be durable before the read that a grant rests on, or a later hub would not see it."""
        return self._noted

    def _hold(self) -> float:
        """After this a grant made now is dead: the lease, and the margin for clocks at different rates."""
        return self.config.hold_seconds

    def _may_tell(self, epoch: int) -> bool:
        """A trainer that is told of its target counts on it when publication does not come in time: after a lease nobody
        uses older epochs. So it must not hear of a target that only a deposed hub knows, whose Record landed late, while
        the one that leads goes on granting the epoch before: a read that began after it was durable shows that we lead."""
        return self.target <= self._proven or epoch <= self.published

    # ------------------------------------------------------------------ publication

    def _may_publish(self, now: float) -> bool:
        """Nobody can be using an epoch below the target any more, by anybody's grants."""
        return self._reset_due(now) and all(self._fenced(self._boots[boot], now) for boot in self._behind)

    def _reset_due(self, now: float) -> bool:
        """The target is durable and unpublished, no write is under way, and no grant of an older hub can be live."""
        return (
            self._durable >= self.target > self._stored
            and self._publishing is None
            and now >= self._retry_at
            and self._led_long_enough(now)
        )

    def _led_long_enough(self, now: float) -> bool:
        return now >= self._lead_until

    def _fenced(self, record: BootRecord, now: float) -> bool:
        """Only grants *below* the target count: grants of the target never delay publication."""
        return now >= record.below_until

    def _lead_wait(self) -> float:
        """How long a new leader waits: every grant of an older leader answers a heartbeat sent before now."""
        return self.config.hold_seconds

    # ------------------------------------------------------------------ the store

    def _can_reclaim(self, record: BootRecord, now: float) -> bool:
        """It names its keys with the published epoch, or a later one, and is there to be asked."""
        return record.at_least(self.published) and record.alive(self.config, now)

    def _kept(self, now: float) -> list[bytes]:
        """The weights whose keys stay: all that somebody may hold. Empty: that cannot be said now."""
        held = self._reported.within(self.config.grace_seconds, now)
        return held if held is not None and self._knows_engines(now) and self._knows_weights(now) else []

    def _knows_engines(self, now: float) -> bool:
        """Whoever was there when this hub began to lead, or came back since, has had the time to say what he holds."""
        return now >= self._led_at + self.config.grace_seconds

    def _knows_weights(self, now: float) -> bool:
        """Every live engine says what it holds: one that cannot say may hold anything."""
        return all(record.newest.weights is not None for record in self._boots.values() if record.alive(self.config, now))
