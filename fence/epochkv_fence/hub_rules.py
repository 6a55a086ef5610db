"""What a hub may do, rule by rule: the design page "fence", sections 4 and 5. `hub` does it.

Each method is one rule, so that the model tests can take it away and show that it is needed.
"""

from __future__ import annotations

from dataclasses import replace

from epochkv_fence.asks import Ask
from epochkv_fence.authority import Origin
from epochkv_fence.boots import BootRecord, Gate
from epochkv_fence.messages import Mode, Source
from epochkv_fence.pool_state import PoolState, Round
from epochkv_fence.trainers import same_weights
from epochkv_fence.wipe import WIPE_LANDS_SECONDS


class HubRules(PoolState):
    """The conditions, all of them pure: nothing here changes anything."""

    # ------------------------------------------------------------------ granting

    def _may_grant(self) -> bool:
        """The note must be durable before the read that a grant rests on, or a later hub would not see it."""
        return self._noted

    def _mode(self, record: BootRecord, now: float) -> Mode:
        """What a boot gets at the target: everyone gets the epoch, who has its weights may use it."""
        return Mode.BYPASS if self._holds_loads(now) else self._gate.mode(record, self.target, self.config)

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
        """Nobody can be using an epoch below the target any more, by anybody's grants; nor is the store to be wiped first,
        nor can a wipe land after loads were released."""
        return self._fence_holds(now) and not self._wiper.open and now >= self._wiper.landed_at()

    def _fence_holds(self, now: float) -> bool:
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

    # ------------------------------------------------------------------ weights

    def _own_ask(self, target: int) -> Ask | None:
        """Only of an epoch that this hub itself tried to record is it known how old a boot was when it was asked for (the
        write may be seen before it answers, or long after it failed to). Any other target that is found recorded may have
        been asked for at any time, so no boot's age proves anything.
        """
        return self._ask if self._ask is not None and self._ask.epoch == target <= self._tried else None

    def _gate_of(self, ask: Ask | None, target: int) -> Gate:
        """A list counts alone, for the weights that the target came with; without one the ask's age rule, if it has any."""
        marks = self._trainers.marked(target)
        gate = Gate() if ask is None else Gate(ask.at, request=ask.request)
        if self._ask is not None and self._ask.epoch == target and not self._ask.ready:  # also of an ask of unknown time
            gate.held, gate.held_for = True, self._ask.origin.weights_version
        if marks is not None or (ask is not None and ask.listed):
            gate.close()
        if marks is not None and self._same_weights(marks.version):
            gate.marked = marks.boots
        elif marks is None and ask is not None:
            gate.marked = set(ask.heirs)
        return gate

    def _goes_on(self, ask: Ask | None) -> bool:
        """`ask` brings no weights: a plain reset of weights that somebody has listed, or that are on their way in the middle of
        an update. The epoch moves, and nobody new may use it."""
        if ask is None or ask.listed or self.config.weights_source != "Pushed" or self.target == 0:
            return False
        gate = self._gate
        if gate.held:
            ready = ask.releases() and ask.origin.weights_version == gate.held_for
            return not ready and not self._brings_weights(ask)
        if self._brings_weights(ask):
            return False
        if self._listed() and ask.origin.source is not Source.ENGINE:
            return True
        return (gate.listed or self._listed()) and not self._heirs()

    def _brings_weights(self, ask: Ask) -> bool:
        """It is an update of its own: it names others than those of the target, or says that the named ones are to come."""
        if self._gate.held:
            return ask.brings_weights(self._weights_version() or self._gate.held_for)
        return not ask.ready or ask.brings_weights(self._weights_version())

    def _listed(self) -> bool:
        """A trainer has listed who has the weights of the target."""
        return self._origin is not None and bool(self._origin.listed)

    def _origin_of(self, ask: Ask) -> Origin:
        """What is recorded with the epoch of `ask`, so that every later hub knows whether a list decides."""
        if self._pushed_meanwhile(ask) or (ask.listed and ask.origin.source is not Source.ENGINE):
            return replace(ask.origin, listed=True)
        brings = not ask.listed and self._brings_weights(ask)
        return replace(ask.origin, listed=False if brings else None)

    def _may_push(self, number: bytes, since_seconds: float, current: Round) -> bool:
        """Whoever opens an update is told so by a round that began when the record said it: every hub that leads after this
        one then reads it there. One that pushes already is not to be stopped."""
        return since_seconds > 0 or current.noted == number

    def _pushed_meanwhile(self, ask: Ask | None) -> bool:
        """`ask` has no list, and somebody pushes weights, or died while he did: age proves nothing, nor does it that a boot may
        use the epoch before. A name that a client gives is a label; the pool's owner means what he says of weights."""
        if ask is None or self.config.weights_source != "Pushed" or not self._trainers.updates.unsettled(self.target):
            return False
        if ask.origin.source is Source.ENGINE:
            return True
        named = ask.origin.source is Source.SPEC and ask.brings_weights(self._weights_version())
        return not ask.listed and not named

    def _gate_after(self, ask: Ask | None, target: int, before: int, heirs: frozenset[bytes] | None, *, unknown: bool) -> Gate:
        """The gate of a target that follows `before`: its own, unless (`heirs`) it goes on with weights on their way, or nobody
        knows what engines hold."""
        gate, old = self._gate_of(ask, target), self._gate
        if self._listed():
            gate.close()
        if self._trainers.marked(target) is not None:
            return gate
        if unknown:
            gate.close()
            gate.marked = set()
            return gate
        if heirs is None:
            return gate
        if old.held:
            gate.asked_at, gate.held, gate.held_for, gate.request = old.asked_at, True, old.held_for, None
        else:
            gate.close()
        gate.marked, gate.goes_on_from = set(heirs), before
        return gate

    def _vouched(self) -> bool:
        """Somebody says who has the weights of the target, or that they are on their way. Clearing one engine's caches
        brings weights to nobody, so an engine's proposal must not open to age what a trainer keeps closed. A new hub knows
        this of the target's origin alone: a trainer's, or one that names weights."""
        origin = self._origin
        trained = origin is not None and (origin.source is Source.TRAINER or bool(origin.weights_version))
        return self.config.weights_source == "Pushed" and self.target > 0 and (self._gate.listed or self._gate.held or trained)

    def _heirs(self) -> frozenset[bytes]:
        """Who may use the target may use the epoch that an engine proposes after it: they have the same weights."""
        known = {boot for boot, record in self._boots.items() if self._gate.mode(record, self.target, self.config) is Mode.USE}
        return frozenset(known | self._gate.marked)

    def _same_weights(self, version: str) -> bool:
        """A list is for the weights that the target came with: of two trainers that push different ones for one epoch only
        one can be right, and the other sees in every answer that the epoch is not its own."""
        return same_weights(self._weights_version(), version)

    def _invited(self, record: BootRecord, now: float) -> bool:
        """It may use the target by now and does not know it."""
        return record.alive(self.config, now) and self._in_bypass(record) and not self._weights_pending(record)

    # ------------------------------------------------------------------ the store

    def _can_reclaim(self, record: BootRecord, now: float) -> bool:
        """It names its keys with the published epoch, or a later one, and is there to be asked."""
        return record.at_least(self.published) and record.alive(self.config, now)

    # ------------------------------------------------------------------ RemoveAll: hold, drain, wipe, publish

    def _holds_loads(self, now: float) -> bool:
        """Until the store is empty and the epoch published, every grant is Bypass; and as long as a wipe may land."""
        if now < self._wiper.landed_at():
            return True
        return self.target > self.published and (self._wiper.needed or self._others_may_wipe(now))

    def _others_may_wipe(self, now: float) -> bool:
        """The hub before may have asked for a wipe and died, under a policy of its own. Only while the epoch is unpublished:
        whoever publishes has waited until no wipe can begin any more, its own or an older hub's."""
        return now < self._others_wipe_until

    def _drained(self, record: BootRecord) -> bool:
        """Its newest heartbeat says so: at the target, in bypass, no load open. Not to know it counts as loading."""
        return record.drained(self.target)

    def _quiet(self, record: BootRecord, now: float) -> bool:
        """It says nothing of the kind, but cannot read any more: all its grants are dead, or never allowed a read."""
        return now >= record.quiet_at()

    def _may_wipe(self, now: float) -> bool:
        """Nobody reads from the store, by anybody's grants."""
        return (
            self._wiper.open
            and now >= self._wiper.ready_at()
            and self._reset_due(now)
            and all(self._quiet(self._boots[boot], now) for boot in self._reading)
        )

    def _wipe_lands(self) -> float:
        """Another hub leads at the earliest when our read began, and waits for a lease before it releases any load."""
        return min(WIPE_LANDS_SECONDS, self.config.lease_seconds)

    def _others_wipe_lands(self) -> float:
        """The same by our clock, of a wipe that rests on a read before we led; shorter than `_lead_wait`."""
        return self._wipe_lands() * self.config.max_clock_rate
