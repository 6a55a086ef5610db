"""What a hub was told of weights, kept apart from the hub: what it shows and what it has removed is compared with this.

One `HubHistory` per hub process. It takes the heartbeats that reach this process, as they reach it, and knows nothing else.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from epochkv_fence.protocol.messages import MAX_LABELS, Heartbeat, Reclaim, Status

if TYPE_CHECKING:
    from epochkv_fence.hub.machine import Hub
    from epochkv_fence.protocol.pool import PoolSnapshot

LITTLE = 1e-6


@dataclass(slots=True)
class Instance:
    """What one engine instance said last, by the numbers of its heartbeats; times are on the hub's clock.

    Attributes:
        heard_at: of any heartbeat, also one that came late.
        since: for how long it says so.
    """

    seq: int
    weights: bytes | None
    note: str
    fingerprint: str
    heard_at: float
    since: float


@dataclass(slots=True)
class HubHistory:
    """To one hub process.

    Attributes:
        instances: those that it remembers.
        reported: when weights were last reported, by a heartbeat that was an engine instance's newest when it came.
        led_at, found: when it acquired leadership last, and the epoch that was published by then.
    """

    instances: dict[bytes, Instance] = field(default_factory=dict)
    departed: set[bytes] = field(default_factory=set)
    reported: dict[bytes, float] = field(default_factory=dict)
    led_at: float = float("inf")
    found: int = 0

    def hear(self, beat: Heartbeat, known: bool, now: float) -> bool:
        """A heartbeat comes; `known`: the hub remembers its instance. Returns whether what it says of weights is new."""
        if beat.instance in self.departed:
            return False
        instance = self.instances.get(beat.instance) if known else None
        if instance is None:
            instance = self.instances[beat.instance] = Instance(-1, None, "", "", now, now)
        instance.heard_at = now
        if beat.seq <= instance.seq:
            return False
        new = instance.seq < 0 or (instance.weights, instance.note) != (beat.weights, beat.weights_note)
        if instance.seq < 0 or instance.weights != beat.weights:
            instance.since = now - beat.weights_age_seconds
        instance.seq, instance.weights, instance.note, instance.fingerprint = beat.seq, beat.weights, beat.weights_note, beat.fingerprint
        if beat.weights is not None:
            self.reported[beat.weights] = now
        return new

    def leave(self, instance: bytes) -> None:
        self.departed.add(instance)
        self.instances.pop(instance, None)

    def compare(self, hub: Hub) -> None:
        """After a step: instances that the hub has forgotten count no more."""
        if len(self.instances) != len(hub.state.instances.known):
            self.instances = {name: instance for name, instance in self.instances.items() if name in hub.state.instances.known}

    def live(self, hub: Hub, now: float) -> dict[bytes, Instance]:
        """Heard from within the last lease, and remembered."""
        lease = hub.state.config.lease_seconds
        return {name: instance for name, instance in self.instances.items() if now < instance.heard_at + lease}

    # ------------------------------------------------------------------ what a hub may have removed

    def wrong_sweep(self, hub: Hub, order: Reclaim, now: float) -> str:
        """Why these keys may not be removed; empty: they may."""
        if hub.state.config.reclaim == "Retain":
            return "the pool's policy is Retain"
        if not order.keep:
            return ""
        grace = hub.state.config.grace_seconds
        if now < self.led_at + grace:
            return f"it leads for {now - self.led_at:.2f} s, less than the {grace:g} s for which weights are kept"
        silent = [name for name, instance in self.live(hub, now).items() if instance.weights is None]
        if silent:
            return f"instance {silent[0].hex()[-4:]} cannot say which weights it holds"
        for weights, at in self.reported.items():
            if now < at + grace and weights not in order.keep:
                return f"weights {weights.hex()[-4:]} were reported {now - at:.2f} s ago"
        return ""

    # ------------------------------------------------------------------ what a hub shows

    def wrong_view(self, hub: Hub, shown: PoolSnapshot, now: float) -> str:
        """Where what a hub shows of weights is not what it was told; empty: nowhere."""
        live = self.live(hub, now)
        if {view.instance for view in shown.engines if view.alive} != set(live):
            return "other instances are alive"
        for view in shown.engines:
            instance = self.instances[view.instance]
            if (view.weights, view.weights_note) != (instance.weights, instance.note):
                said = instance.weights, instance.note
                return f"instance {view.instance.hex()[-4:]} said {said!r}, shown is {view.weights!r} {view.weights_note!r}"
            if abs(view.weights_since - (now - instance.since)) > LITTLE:
                return f"instance {view.instance.hex()[-4:]} says so for {now - instance.since:.2f} s, shown are {view.weights_since:.2f} s"
        return self._wrong_groups(live, shown, now) or self._wrong_diverged(live, shown, now) or self._wrong_labels(shown)

    @staticmethod
    def _wrong_groups(live: dict[bytes, Instance], shown: PoolSnapshot, now: float) -> str:
        groups: dict[bytes, list[Instance]] = {}
        for instance in live.values():
            if instance.weights is not None:
                groups.setdefault(instance.weights, []).append(instance)
        told = {weights: (len(instances), now - min(instance.since for instance in instances)) for weights, instances in groups.items()}
        views = {view.weights: (view.engines, view.since_seconds) for view in shown.weights}
        if set(told) != set(views) or len(views) != len(shown.weights):
            return f"weights {told} were told, shown are {views}"
        for weights, (engines, since) in told.items():
            if views[weights][0] != engines or abs(views[weights][1] - since) > LITTLE:
                return f"weights {told} were told, shown are {views}"
        order = [(-view.engines, view.since_seconds) for view in shown.weights]
        return "" if order == sorted(order) else f"weights are shown in the order {order}"

    def _wrong_diverged(self, live: dict[bytes, Instance], shown: PoolSnapshot, now: float) -> str:
        wrong = {view.instance: view for view in shown.diverged}
        for fingerprint in {instance.fingerprint for instance in live.values()}:
            held = {name: one for name, one in live.items() if one.fingerprint == fingerprint and one.weights is not None}
            counts = Counter(instance.weights for instance in held.values())
            others = {name for name in held if name not in wrong}
            agreed = {held[name].weights for name in others}
            if len(agreed) != min(1, len(held)) or {name for name in held if held[name].weights not in agreed} != set(held) - others:
                return f"of {dict(counts)} these are shown as diverged: {[name.hex()[-4:] for name in wrong]}"
            if not agreed:
                continue
            most = next(iter(agreed))
            if any(wrong[name].majority != most for name in set(held) & set(wrong)):
                return f"{most!r} is what most hold, and instances differ from others"
            if counts[most] < max(counts.values()):
                return f"of {dict(counts)} {most!r} counts as what most hold"
            newest = {weights: min(instance.since for instance in held.values() if instance.weights == weights) for weights in counts}
            older = [weights for weights in counts if counts[weights] == counts[most] and newest[weights] > newest[most]]
            if older:
                return f"of {dict(counts)} {most!r} counts as what most hold, and {older} are newer"
        if not set(wrong) <= {name for name, instance in live.items() if instance.weights is not None}:
            return "an engine instance that is silent or cannot say what it holds is shown as diverged"
        return ""

    @staticmethod
    def _wrong_labels(shown: PoolSnapshot) -> str:
        if len(shown.labels) > MAX_LABELS:
            return f"{len(shown.labels)} labels are remembered"
        wrong = [view for view in shown.weights if view.label != shown.labels.get(view.weights, "")]
        return f"{wrong[0]} is not called so in {shown.labels}" if wrong else ""

    def wrong_status(self, hub: Hub, page: Status, now: float) -> str:
        """The same of an answer to a trainer."""
        live = self.live(hub, now)
        if page.total != len(live):
            return f"{page.total} instances of {len(live)} are told"
        for engine in page.engines:
            instance = live.get(engine.instance)
            if instance is None or (engine.weights, engine.weights_note) != (instance.weights, instance.note):
                return f"instance {engine.instance.hex()[-4:]} is told with {engine.weights!r} {engine.weights_note!r}"
        if page.after is None and page.labels != {weights.hex(): label for weights, label in hub.snapshot(now).labels.items()}:
            return f"labels are told as {page.labels}"
        return ""
