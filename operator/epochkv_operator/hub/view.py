"""From the hub's snapshot of a pool to what planning and metrics take. Pure."""

from __future__ import annotations

from datetime import UTC, datetime

from epochkv_fence.messages import Mode
from epochkv_fence.pool import EngineView, PoolSnapshot
from epochkv_operator import metrics
from epochkv_operator.planning import HubEngine, HubView


def view_of(snapshot: PoolSnapshot) -> HubView | None:
    """The snapshot for planning; None while the hub does not lead this pool, when it knows nothing that counts."""
    if not snapshot.leading:
        return None
    counted = [engine for engine in snapshot.engines if engine.alive or not engine.converged]
    done = snapshot.published_at is not None and snapshot.published >= snapshot.target
    started = snapshot.started_at
    return HubView(
        target=snapshot.target,
        published=snapshot.published,
        engines=tuple(_engine(engine) for engine in counted),
        laggards=tuple(_laggard(engine) for engine in snapshot.engines if not engine.converged),
        reset_epoch=snapshot.target if started is not None and (done or snapshot.target > snapshot.published) else None,
        reset_started=_moment(started),
        reset_completed=_moment(snapshot.published_at) if done else None,
        reset_milliseconds=round(snapshot.reset_seconds * 1e3) if done and snapshot.reset_seconds is not None else None,
    )


def state_of(engine: EngineView) -> str:
    """One word for metrics: silent, behind, use or bypass."""
    if not engine.alive:
        return "silent"
    if not engine.converged:
        return "behind"
    return "use" if engine.mode is Mode.USE else "bypass"


def export(namespace: str, pool: str, snapshot: PoolSnapshot) -> None:
    """Set the pool's gauges."""
    metrics.TARGET_EPOCH.labels(namespace=namespace, pool=pool).set(snapshot.target)
    metrics.PUBLISHED_EPOCH.labels(namespace=namespace, pool=pool).set(snapshot.published)
    states = [state_of(engine) for engine in snapshot.engines]
    for state in metrics.ENGINE_STATES:
        metrics.POOL_ENGINES.labels(namespace=namespace, pool=pool, state=state).set(states.count(state))


def _engine(engine: EngineView) -> HubEngine:
    return HubEngine(
        engine=engine.engine,
        pod=engine.pod,
        rank=engine.rank,
        epoch=engine.epoch,
        mode="Use" if engine.mode is Mode.USE else "Bypass",
        carried=engine.carried,
    )


def _laggard(engine: EngineView) -> tuple[str, str]:
    name = engine.pod or engine.engine or engine.boot.hex()
    return f"{name}/{engine.rank}" if engine.rank else name, "Behind" if engine.alive else "Silent"


def _moment(unix_seconds: float | None) -> datetime | None:
    return None if unix_seconds is None else datetime.fromtimestamp(unix_seconds, UTC)
