"""From snapshots to what status shows: counts belong to a reset, old keys to engines, silence to nobody."""

from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import msgspec
import pytest

from epochkv_fence.protocol.pool import EngineView, PoolConfig, PoolRecord, PoolSnapshot
from epochkv_operator.hub import service as hub_service
from epochkv_operator.hub.service import HubService, PoolHistory, _Served, export, old_key_users, view_of
from epochkv_operator.kube.store import pool_key
from epochkv_operator.metrics import REGISTRY, forget_pool
from epochkv_operator.planning.context import HubView, KeysView

A, B = b"a" * 16, b"b" * 16
EMPTY = PoolSnapshot()


def engine(name: str, epoch: int | None = 1, **changes: object) -> EngineView:
    view = EngineView(name.encode().ljust(16), epoch, True, True, engine=name, weights=A)
    return msgspec.structs.replace(view, **changes)


def seen(snapshot: PoolSnapshot, history: PoolHistory | None = None, now: float = 0.0) -> HubView:
    view = view_of(snapshot, history or PoolHistory(), now)
    assert view is not None
    return view


def test_what_was_removed_is_counted_per_reset() -> None:
    history = PoolHistory()
    for keys, num_bytes, reclaimed in ((0, 0, 0), (5, 500, 0), (7, 700, 1)):
        history.take(replace(EMPTY, target=1, published=1, reclaimed_keys=keys, reclaimed_bytes=num_bytes, reclaimed=reclaimed), 1e9)
    view = seen(replace(EMPTY, target=1, published=1), history)
    assert (view.reclaimed, view.reclaimed_keys, view.reclaimed_bytes, view.reclaimed_at) == (1, 7, 700, 1e9)
    history.take(replace(EMPTY, target=2, published=1, reclaimed_keys=7, reclaimed_bytes=700, reclaimed=1), 2e9)
    history.take(replace(EMPTY, target=2, published=2, reclaimed_keys=9, reclaimed_bytes=800, reclaimed=2), 3e9)
    view = seen(replace(EMPTY, target=2, published=2), history)
    assert (view.reclaimed, view.reclaimed_keys, view.reclaimed_bytes) == (2, 2, 100)


def test_a_reconciler_or_scrape_in_between_keeps_no_news_back() -> None:
    history, open_, done = PoolHistory(), replace(EMPTY, target=2, published=1), replace(EMPTY, target=2, published=2)
    assert history.news(replace(EMPTY, target=1, published=1)) == (True, False)
    assert history.news(open_) == (True, False)
    history.take(done, 1e9)
    assert history.news(done) == (True, True)
    assert history.news(done) == (False, False)


def test_planning_sees_who_lives_and_who_is_waited_for_while_the_hub_leads() -> None:
    gone = engine("gone", alive=False)
    snapshot = replace(EMPTY, engines=[engine("first"), gone, engine("late", alive=False, converged=False)])
    assert [view.engine for view in seen(snapshot).engines] == ["first", "late"]
    assert view_of(replace(snapshot, leading=False), PoolHistory(), 0.0) is None


def test_how_long_engines_differ_is_counted_over_whoever_differs() -> None:
    """An engine whose weights change all the time is found, and a push that comes through begins the minute anew."""
    history, late, other = PoolHistory(), engine("late", weights=B, majority=A), engine("other", weights=b"c" * 16, majority=A)
    differ = replace(EMPTY, engines=[engine("first"), late])

    def overdue(snapshot: PoolSnapshot, now: float) -> bool:
        history.take(snapshot, 1e9, now)
        return seen(snapshot, history, now).overdue

    assert [overdue(differ, now) for now in (100.0, 159.9, 160.0)] == [False, False, True]
    assert overdue(replace(EMPTY, engines=[engine("first"), other]), 161.0)
    assert not overdue(EMPTY, 162.0)
    assert history.overdue_in(162.0) is None
    assert not overdue(differ, 163.0)
    assert history.overdue_in(200.0) == 23.0


def test_while_an_engine_takes_weights_the_time_does_not_run() -> None:
    history, writing = PoolHistory(), engine("p0", weights=None, stats={"weights_updating": 1.0})
    late = engine("late", weights=B, majority=A)
    differ = replace(EMPTY, engines=[late])
    history.take(differ, 1e9, 100.0)
    for seconds in (110.0, 160.0, 185.0):
        history.take(replace(differ, engines=[late, writing]), 1e9, seconds)
        assert history.overdue_in(seconds) is None
    history.take(replace(differ, engines=[late, msgspec.structs.replace(writing, alive=False)]), 1e9, 190.0)
    assert history.overdue_in(200.0) == 50.0


@pytest.mark.parametrize(
    ("engines", "apart", "older"),
    [
        # A push has just begun: two are ahead.
        ([("p0", B, 5.0, True), ("p1", B, 3.0, True), *((f"p{n}", A, 900.0, True) for n in (2, 3, 4))], ["p0", "p1"], ["p2", "p3", "p4"]),
        # It has missed one, which tells of the same weights ever since.
        ([("p0", B, 70.0, True), ("p1", B, 60.0, True), ("p2", A, 900.0, True)], ["p2"], ["p2"]),
        # One has started again, with what its files hold.
        ([("p0", B, 70.0, True), ("p1", B, 60.0, True), ("p2", A, 1.0, False)], ["p2"], ["p2"]),
        # All but one have.
        ([("p0", A, 2.0, False), ("p1", A, 1.0, False), ("p2", B, 900.0, True)], ["p2"], ["p0", "p1"]),
        # This hub has seen no push.
        ([("p0", A, 90.0, False), ("p1", A, 90.0, False), ("p2", B, 10.0, False)], ["p2"], ["p2"]),
    ],
)
def test_who_holds_the_older_weights(engines: list[tuple[str, bytes, float, bool]], apart: list[str], older: list[str]) -> None:
    views = [engine(name, weights=weights, weights_since=since, pushed=pushed) for name, weights, since, pushed in engines]
    (most,) = {view.weights for view in views if view.engine not in apart}
    views = [msgspec.structs.replace(view, majority=most) if view.engine in apart else view for view in views]
    views += [engine("other", weights=B, fingerprint="tp4"), engine("gone", weights=b"c" * 16, alive=False)]
    assert seen(replace(EMPTY, engines=views)).older == older


def test_engines_by_state_and_those_that_differ_are_counted() -> None:
    late = engine("late", weights=B, majority=A)
    engines = [engine("fine"), late, engine("alone", isolated=True), engine("asleep", weights=None), engine("slow", converged=False)]
    engines += [engine("limited", tiers_off="TiersOff"), engine("gone", tiers_off="TiersOff", alive=False)]
    open_since = replace(EMPTY, target=2, published=1, behind_since=100.0, engines=engines)
    export("rl", "gauges", open_since, 30.0, 140.0)

    def gauge(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(f"epochkv_pool_{name}", {"namespace": "rl", "pool": "gauges", **labels})

    expected = {"sharing": 3.0, "isolated": 1.0, "unknown": 1.0, "behind": 1.0, "silent": 1.0}
    assert {state: gauge("engines", state=state) for state in expected} == expected
    others = ("weights_diverged_engines", "tiers_off_engines", "reset_overdue_seconds")
    assert [gauge(name) for name in others] == [1.0, 1.0, 7.0]
    forget_pool("rl", "gauges")
    assert (gauge("engines", state="isolated"), gauge("tiers_off_engines")) == (None, None)


def test_old_keys_are_named_while_there_are_two_and_their_users_live() -> None:
    engines = [engine("new"), engine("old", key_index=1), engine("dead", key_index=1, alive=False)]
    snapshot = replace(EMPTY, engines=engines)
    assert old_key_users(snapshot) == ("old",)


def test_engines_of_a_pool_share_a_look_until_there_is_news(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look is at all of them, on the thread that grants: a thousand looks at a thousand took nine seconds."""
    service, looks = HubService.__new__(HubService), list[str]()
    config = PoolConfig("u", "rl/policy", ("key",))
    service._served = {"u": _Served(pool_key("rl", "policy"), config, KeysView(0), PoolHistory(), 0.0)}
    service._server = SimpleNamespace(snapshot=lambda uid: looks.append(uid) or replace(EMPTY, leading=False))  # type: ignore[assignment]
    service._wake = lambda *_: None
    monkeypatch.setattr(hub_service, "LOOK_SECONDS", 1e9)
    for _ in range(1000):
        service.snapshot("u")
    assert len(looks) == 1
    service.snapshot("u", {})
    service.snapshot("u", {})
    assert len(looks) == 3, "gates go by it"
    service._changed("u")
    service.snapshot("u")
    assert len(looks) == 5
    service._server = server = Mock()
    status = {"targetEpoch": 4, "epoch": 4, "granting": True, "weightsLabels": [{"id": "0a", "label": "step-1"}]}
    service.seen({"metadata": {"uid": "u"}, "status": status})
    server.observe.assert_called_once_with("u", PoolRecord(4, labels={b"\n": "step-1"}))  # no proof of anything
