"""From snapshots to what status shows: counts belong to a reset, old keys to engines, silence to nobody."""

from __future__ import annotations

from dataclasses import replace

from epochkv_fence.authority import Origin
from epochkv_fence.messages import Mode, Source
from epochkv_fence.pool import EngineView, PoolSnapshot
from epochkv_operator.hub.view import Told, export, key_view, view_of
from epochkv_operator.metrics import REGISTRY, forget_pool

EMPTY = PoolSnapshot("u", True, 0, 0, 0, [], [], 0, None, None, None, 0)


def engine(name: str, epoch: int | None = 1, **changes: object) -> EngineView:
    view = EngineView(name.encode().ljust(16), name, "", 0, epoch, Mode.USE, True, True, 0, 9.0, 0.0, "")
    return replace(view, **changes)  # type: ignore[arg-type]


def test_what_was_removed_is_counted_per_reset() -> None:
    told = Told()
    for target, published, keys, num_bytes, reclaimed in ((1, 1, 0, 0, 0), (1, 1, 5, 500, 0), (1, 1, 7, 700, 1)):
        told.take(
            replace(EMPTY, target=target, published=published, reclaimed_keys=keys, reclaimed_bytes=num_bytes, reclaimed=reclaimed), 1e9
        )
    view = view_of(replace(EMPTY, target=1, published=1), told, "Pushed")
    assert view is not None
    assert (view.reclaim.epoch, view.reclaim.keys, view.reclaim.bytes) == (1, 7, 700)
    assert view.reclaim.completed is not None
    assert view.reclaim.completed.timestamp() == 1e9
    told.take(replace(EMPTY, target=2, published=1, reclaimed_keys=7, reclaimed_bytes=700, reclaimed=1), 2e9)
    told.take(replace(EMPTY, target=2, published=2, reclaimed_keys=9, reclaimed_bytes=800, reclaimed=2), 3e9)
    view = view_of(replace(EMPTY, target=2, published=2), told, "Pushed")
    assert view is not None
    assert (view.reclaim.epoch, view.reclaim.keys, view.reclaim.bytes) == (2, 2, 100)


def test_origin_weights_and_pending_engines() -> None:
    young = engine("young", mode=Mode.BYPASS)
    snapshot = replace(
        EMPTY,
        target=1,
        published=1,
        engines=[engine("old"), young],
        weights_pending=[young],
        origin=Origin(Source.TRAINER, "step-3"),
        weights_version="step-3",
        held=True,
    )
    view = view_of(snapshot, Told(), "Pushed")
    assert view is not None
    assert (view.origin, view.weights_version, view.held, view.pending) == ("Trainer", "step-3", True, ["young"])
    assert [item.pending for item in view.engines] == [False, True]
    assert view_of(replace(snapshot, leading=False), Told(), "Pushed") is None


def test_engines_that_were_reset_alone() -> None:
    engines = [engine("fine"), engine("alone", private=True), engine("young", mode=Mode.BYPASS, private=True)]
    snapshot = replace(EMPTY, target=1, published=1, asked=1, engines=engines)
    view = view_of(snapshot, Told(), "Pushed")
    assert view is not None
    assert [item.private for item in view.engines] == [False, True, True]
    assert view.alone(view.engines) == ["alone"]
    raising = view_of(replace(snapshot, asked=2), Told(), "Pushed")
    assert raising is not None
    assert raising.alone(raising.engines) == [], "the remedy is under way"
    export("rl", "gauges", snapshot, Told())

    def gauge(state: str) -> float | None:
        return REGISTRY.get_sample_value("epochkv_pool_engines", {"namespace": "rl", "pool": "gauges", "state": state})

    assert {state: gauge(state) for state in ("use", "bypass", "private", "behind", "silent")} == {
        "use": 1.0,
        "bypass": 1.0,
        "private": 1.0,
        "behind": 0.0,
        "silent": 0.0,
    }
    forget_pool("rl", "gauges")
    assert gauge("private") is None


def test_old_keys_are_named_while_there_are_two_and_their_users_live() -> None:
    engines = [engine("new"), engine("old", key_index=1), engine("dead", key_index=1, alive=False)]
    snapshot = replace(EMPTY, engines=engines)
    assert key_view(snapshot, 3, 2).old_users == ("old",)
    assert key_view(snapshot, 3, 1).old_users == ()
