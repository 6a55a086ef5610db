"""From the hub's snapshot of a pool to what planning and metrics take. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from epochkv_fence.metrics import POOL_GAUGES
from epochkv_fence.protocol.pool import ENGINE_STATES, EngineView, PoolSnapshot
from epochkv_operator import metrics
from epochkv_operator.planning.context import PUSH_SECONDS, HubView, KeysView, Outlier, ReclaimView, WeightsGroup, name_of


@dataclass
class PoolHistory:
    """What of a pool's snapshots has to be remembered between two of them.

    Attributes:
        epochs: target and published, as last seen; None before the first.
        base: keys and bytes that the hub had removed in all when its target was last raised.
        total: the same, now.
        led_since: when the hub was first seen leading in its term (monotonic); None: it does not lead.
        differ_since: since when live engines of one fingerprint hold different weights (monotonic); None: they do not.
        reclaimed: highest epoch below which nothing is left, and when that was first seen (Unix seconds).
    """

    epochs: tuple[int, int] | None = None
    base: tuple[int, int] = (0, 0)
    total: tuple[int, int] = (0, 0)
    reclaimed: int = 0
    reclaimed_at: float | None = None
    led_since: float | None = None
    differ_since: float | None = None

    def take(self, snapshot: PoolSnapshot, unix_seconds: float, now: float = 0.0) -> None:
        """Take a newer snapshot in; `now` is monotonic."""
        if not snapshot.leading:
            self.led_since = None
        elif self.led_since is None:
            self.led_since = now
        if not snapshot.diverged:
            self.differ_since = None
        elif self.differ_since is None:
            self.differ_since = now
        if self.epochs is not None and snapshot.target > self.epochs[0]:
            self.base = self.total
        self.epochs = (snapshot.target, snapshot.published)
        self.total = (snapshot.reclaimed_keys, snapshot.reclaimed_bytes)
        if snapshot.reclaimed > self.reclaimed:
            self.reclaimed, self.reclaimed_at = snapshot.reclaimed, unix_seconds

    def overdue_in(self, now: float) -> float | None:
        """How much longer engines may hold different weights as in a push; 0.0: it is too long, None: they do not."""
        return None if self.differ_since is None else max(0.0, self.differ_since + PUSH_SECONDS - now)


def view_of(
    snapshot: PoolSnapshot, history: PoolHistory, unix_seconds: float, now: float, keys: KeysView | None = None, *, complete: bool = True
) -> HubView | None:
    """The snapshot for planning; None while the hub does not lead this pool, when it knows nothing that counts."""
    if not snapshot.leading:
        return None
    counted = [engine for engine in snapshot.engines if engine.alive or not engine.converged]
    done = snapshot.published_at is not None and snapshot.published >= snapshot.target
    started = snapshot.started_at
    return HubView(
        target=snapshot.target,
        published=snapshot.published,
        complete=complete,
        engines=tuple(counted),
        laggards=tuple(_laggard(engine) for engine in snapshot.engines if not engine.converged),
        reset_epoch=snapshot.target if started is not None and (done or snapshot.target > snapshot.published) else None,
        reset_started=_moment(started),
        reset_completed=_moment(snapshot.published_at) if done else None,
        reset_milliseconds=round(snapshot.reset_seconds * 1e3) if done and snapshot.reset_seconds is not None else None,
        origin=snapshot.origin.value if snapshot.origin is not None else None,
        weights=tuple(
            WeightsGroup(group.weights.hex(), group.engines, datetime.fromtimestamp(unix_seconds - group.since_seconds, UTC), group.label)
            for group in snapshot.weights
        ),
        outliers=tuple(_outliers(snapshot)),
        overdue=history.overdue_in(now) == 0.0,
        reclaim=ReclaimView(
            epoch=history.reclaimed,
            keys=max(0, history.total[0] - history.base[0]),
            bytes=max(0, history.total[1] - history.base[1]),
            completed=_moment(history.reclaimed_at),
            wipe_failed=snapshot.wipe_failed,
        ),
        keys=keys,
    )


def key_view(snapshot: PoolSnapshot, generation: int, accepted: int) -> KeysView:
    """The client keys, and who still uses the older of two."""
    old = [name_of(engine) for engine in snapshot.engines if engine.alive and engine.key_index > 0]
    return KeysView(generation, accepted, tuple(old) if accepted > 1 else ())


def export(namespace: str, pool: str, snapshot: PoolSnapshot, lease_seconds: float, now: float) -> None:
    """Set the pool's gauges. `now`: Unix seconds."""
    for name, (_, value) in POOL_GAUGES.items():
        metrics.GAUGES[name].labels(namespace=namespace, pool=pool).set(value(snapshot, lease_seconds, now))
    states = [engine.state for engine in snapshot.engines]
    for state in ENGINE_STATES:
        metrics.POOL_ENGINES.labels(namespace=namespace, pool=pool, state=state).set(states.count(state))


def _outliers(snapshot: PoolSnapshot) -> Iterator[Outlier]:
    apart = {engine.instance for engine in snapshot.diverged}
    most = {
        engine.fingerprint: engine.weights
        for engine in snapshot.engines
        if engine.alive and engine.weights is not None and engine.instance not in apart
    }
    for engine in snapshot.diverged:
        wanted = most.get(engine.fingerprint)
        if engine.weights is not None and wanted is not None:
            yield Outlier(name_of(engine), engine.weights.hex(), wanted.hex())


def _laggard(engine: EngineView) -> tuple[str, str]:
    return name_of(engine), "Behind" if engine.alive else "Silent"


def _moment(unix_seconds: float | None) -> datetime | None:
    return None if unix_seconds is None else datetime.fromtimestamp(unix_seconds, UTC)
