"""The whole status of pools and engines, and what of it outlives operators and hubs."""

from dataclasses import replace
from datetime import timedelta

from epochkv_operator.planning.context import HubView, Observed, Problem, ReclaimView
from epochkv_operator.planning.status import engine_status, pool_status
from tests.support.planning import CONTEXT
from tests.unit.operator.cluster_state import (
    CONVERGED,
    NOW,
    PODS,
    POLICY,
    ROLLOUT,
    engine_children,
    engine_pod,
    pool_children,
    rank,
    ready,
    waiting,
)


def test_reset_of_a_status_that_knows_more_is_left_alone() -> None:
    """The authority writes target and origin first; a view from before must not put the older reset back."""
    before = {"targetEpoch": 8, "epoch": 7, "weightsLabels": [{"id": "a" * 32, "label": "a"}], "reset": {"epoch": 8, "origin": "Trainer"}}
    stale = HubView(7, 7, reset_epoch=7, reset_started=NOW, reset_completed=NOW, origin="Spec")
    status = pool_status(POLICY, Observed(pool_children(), (), stale), CONTEXT, before, NOW)
    assert (status["reset"], status["targetEpoch"], status["weightsLabels"]) == (before["reset"], 8, before["weightsLabels"])
    # A hub that does not know the origin.
    newer = HubView(8, 8, reset_epoch=8, reset_started=NOW, reset_completed=NOW, reset_milliseconds=9)
    status = pool_status(POLICY, Observed(pool_children(), (), newer), CONTEXT, before, NOW)
    assert status["reset"] == {
        "epoch": 8,
        "origin": "Trainer",
        "startTime": "2026-03-01T12:00:00.123Z",
        "completionTime": "2026-03-01T12:00:00.123Z",
        "durationMilliseconds": 9,
    }


def test_external_engines_of_one_name_are_told_apart() -> None:
    ranks = [rank("", engine="ray", rank=number, instance=bytes([number])) for number in range(2)]
    twins = [rank("", epoch, engine="sim", instance=instance) for epoch, instance in ((7, b"\xaa" * 16), (6, b"\xbb" * 16))]
    status = pool_status(POLICY, Observed(pool_children(), (), HubView(7, 6, [*ranks, *twins])), CONTEXT, {}, NOW)
    assert [(engine["name"], engine["epoch"]) for engine in status["externalEngines"]] == [
        ("ray", 7),
        ("ray/1", 7),
        ("sim#aaaaaaaa", 7),
        ("sim#bbbbbbbb", 6),
    ]
    assert status["engines"]["summary"] == "3/4"


def test_what_was_reclaimed_survives_a_new_operator() -> None:
    done = HubView(7, 7, reclaim=ReclaimView(7, 12, 4096, NOW))
    first = pool_status(POLICY, Observed(pool_children(), (), done), CONTEXT, {}, NOW)
    assert first["reclaim"] == {"policy": "Delete", "epoch": 7, "keys": 12, "bytes": 4096, "completionTime": "2026-03-01T12:00:00Z"}
    again = pool_status(POLICY, Observed(pool_children(), (), HubView(7, 7)), CONTEXT, first, NOW)
    assert again["reclaim"] == first["reclaim"]
    assert next(item for item in again["conditions"] if item["type"] == "Reclaimed")["status"] == "True"
    later = pool_status(POLICY, Observed(pool_children(), (), HubView(8, 8)), CONTEXT, first, NOW)
    assert later["reclaim"] == {"policy": "Delete", "epoch": 7, "keys": 0, "bytes": 0}


def test_transition_times_move_only_on_change() -> None:
    observed = Observed(pool_children(), (), HubView(7, 6, reclaim=ReclaimView(epoch=6)))
    first = pool_status(POLICY, observed, CONTEXT, {}, NOW)
    later = NOW + timedelta(seconds=90)
    assert pool_status(POLICY, observed, CONTEXT, first, later) == first
    nothing_left = replace(CONVERGED, reclaim=ReclaimView(epoch=7))
    done = pool_status(POLICY, Observed(pool_children(), (), nothing_left), CONTEXT, first, later)
    times = {condition["type"]: condition["lastTransitionTime"] for condition in done["conditions"]}
    assert times == {
        "Ready": "2026-03-01T12:01:30Z",
        "EpochConverged": "2026-03-01T12:01:30Z",
        "MasterAvailable": "2026-03-01T12:00:00Z",
        "StoreAvailable": "2026-03-01T12:00:00Z",
        "WeightsConverged": "2026-03-01T12:00:00Z",
        "TiersUsable": "2026-03-01T12:00:00Z",
        "Drained": "2026-03-01T12:00:00Z",
        "Reclaimed": "2026-03-01T12:00:00Z",
    }


def test_pool_status_in_full() -> None:
    hub = HubView(
        target=8,
        published=7,
        engines=[
            rank("p0", 8, old_epoch_requests=2),
            rank("p1", 7),
            rank("ray-1", None, engine="trainer-a", rank=3, old_epoch_requests=1, alive=False, weights="c" * 32),
            rank("", 8, engine="trainer-b", weights="b" * 32),
        ],
        laggards=[("p1", "Behind"), ("ray-1/3", "NotAssigned")],
        reset_epoch=8,
        reset_started=NOW,
    )
    status = pool_status(POLICY, Observed(pool_children(), PODS, hub), CONTEXT, {"targetEpoch": 7, "epoch": 7, "granting": True}, NOW)
    assert (status["targetEpoch"], status["epoch"], status["granting"]) == (8, 7, True)
    assert status["engines"] == {"total": 4, "converged": 2, "external": 2, "oldEpochRequests": 3, "summary": "2/4"}
    assert status["externalEngines"] == [
        {"name": "ray-1/3", "pod": "ray-1", "rank": 3, "oldEpochRequests": 1},
        {"name": "trainer-b", "weights": "bbbbbbbb", "epoch": 8, "rank": 0, "oldEpochRequests": 0},
    ]
    assert status["reset"] == {
        "epoch": 8,
        "startTime": "2026-03-01T12:00:00.123Z",
        "laggards": [{"name": "p1", "reason": "Behind"}, {"name": "ray-1/3", "reason": "NotAssigned"}],
    }
    assert status["master"] == {"replicas": 1, "readyReplicas": 1, "address": "policy-master.rl.svc:50051"}
    assert status["store"]["selector"] == "app.kubernetes.io/component=store,epochkv.io/pool=policy"
    assert status["endpoints"] == {
        "hub": CONTEXT.settings.endpoint,
        "master": "policy-master.rl.svc:50051",
        "configMap": "policy-connection",
        "secret": "policy-fence",
    }
    done = replace(hub, published=8, laggards=[], reset_completed=NOW + timedelta(milliseconds=57), reset_milliseconds=57)
    after = pool_status(POLICY, Observed(pool_children(), PODS, done), CONTEXT, status, NOW)
    assert after["reset"] == {
        "epoch": 8,
        "startTime": "2026-03-01T12:00:00.123Z",
        "completionTime": "2026-03-01T12:00:00.180Z",
        "durationMilliseconds": 57,
    }


def test_a_hub_that_knows_less_takes_nothing_away() -> None:
    """After a restart the hub has heard of no engine and led no reset; without a hub nothing is known at all."""
    before = {
        "targetEpoch": 9,
        "epoch": 9,
        "granting": True,
        "engines": {"total": 2, "summary": "2/2"},
        "reset": {"epoch": 9, "startTime": "a", "completionTime": "b", "durationMilliseconds": 3},
    }
    fresh = pool_status(POLICY, Observed(pool_children(), (), HubView(0, 0)), CONTEXT, before, NOW)
    assert (fresh["targetEpoch"], fresh["epoch"], fresh["granting"], fresh["reset"]) == (9, 9, True, before["reset"])
    none = pool_status(POLICY, Observed(pool_children()), CONTEXT, before, NOW)
    assert {key: none[key] for key in before} == before


def test_a_hub_that_has_just_begun_to_lead_reports_nobody_as_gone() -> None:
    """An operator that restarts would otherwise say that all engines left, and a moment later that they came."""
    some = [rank("p0", old_epoch_requests=3), rank("", engine="ray", weights="b" * 32, tiers_off="TiersOff", tiers_note="why")]
    before = pool_status(POLICY, Observed(pool_children(), PODS, HubView(7, 7, some)), CONTEXT, {}, NOW)
    later = NOW + timedelta(seconds=5)
    for known in ([], some[:1]):
        young = HubView(7, 7, known, complete=False)
        assert pool_status(POLICY, Observed(pool_children(), PODS, young), CONTEXT, before, later) == before
    told = pool_status(POLICY, Observed(pool_children(), PODS, HubView(7, 7, some, complete=False)), CONTEXT, before, later)
    assert told == before
    gone = pool_status(POLICY, Observed(pool_children(), PODS, HubView(7, 7)), CONTEXT, before, later)
    assert gone["engines"]["total"] == 0
    assert {item["type"]: item["status"] for item in gone["conditions"]}["WeightsConverged"] == "True"

    children = engine_children(ready(2))
    limited = rank("p1", tiers_off="TiersOff", tiers_note="why")
    before = engine_status(ROLLOUT, POLICY, Observed(children, PODS, HubView(7, 7, [rank("p0"), limited])), {}, NOW)
    young = HubView(7, 7, [rank("p0")], complete=False)
    assert engine_status(ROLLOUT, POLICY, Observed(children, PODS, young), before, later) == before
    lost = engine_status(ROLLOUT, POLICY, Observed(children, PODS, HubView(7, 7, [rank("p0")])), before, later)
    assert {item["type"]: item["reason"] for item in lost["conditions"]}["EpochCurrent"] == "NotReporting"
    # What has nothing to do with the hub is told at once.
    trouble = engine_children({"replicas": 2, "updatedReplicas": 2})
    failing = [engine_pod("p0", **waiting("engine", "ImagePullBackOff")), PODS[1]]
    told = engine_status(ROLLOUT, POLICY, Observed(trouble, failing, young), before, later)
    assert {item["type"]: item["reason"] for item in told["conditions"]}["Ready"] == "ImagePullFailed"


def test_times_of_a_reset_are_written_once() -> None:
    """Wall clocks are adjusted all the time; and another hub's clock says nothing about how long a reset took."""
    opened = HubView(7, 6, reset_epoch=7, reset_started=NOW, laggards=[("p0", "Behind")])
    first = pool_status(POLICY, Observed(pool_children(), (), opened), CONTEXT, {}, NOW)
    slewed = replace(
        opened, published=7, laggards=[], reset_started=NOW + timedelta(milliseconds=2), reset_completed=NOW, reset_milliseconds=9
    )
    done = pool_status(POLICY, Observed(pool_children(), (), slewed), CONTEXT, first, NOW)
    assert done["reset"] == {
        "epoch": 7,
        "startTime": "2026-03-01T12:00:00.123Z",
        "completionTime": "2026-03-01T12:00:00.123Z",
        "durationMilliseconds": 9,
    }
    again = replace(slewed, reset_completed=NOW + timedelta(milliseconds=3))
    assert pool_status(POLICY, Observed(pool_children(), (), again), CONTEXT, done, NOW)["reset"] == done["reset"]
    successor = replace(slewed, reset_started=NOW + timedelta(seconds=20), reset_completed=NOW + timedelta(seconds=21))
    after = pool_status(POLICY, Observed(pool_children(), (), successor), CONTEXT, first, NOW)
    assert after["reset"] == {"epoch": 7, "startTime": "2026-03-01T12:00:00.123Z", "completionTime": "2026-03-01T12:00:21.123Z"}
    # The hub that published it died before it could say so: no reset looks open for ever.
    later = NOW + timedelta(seconds=30)
    orphan = pool_status(POLICY, Observed(pool_children(), (), HubView(7, 7)), CONTEXT, first, later)
    assert orphan["reset"] == {"epoch": 7, "startTime": "2026-03-01T12:00:00.123Z", "completionTime": "2026-03-01T12:00:30.123Z"}
    assert (
        pool_status(POLICY, Observed(pool_children(), (), HubView(7, 7)), CONTEXT, orphan, later + timedelta(hours=1))["reset"]
        == orphan["reset"]
    )


def test_limits_of_lists_and_messages() -> None:
    crowd = [rank("", engine=f"e{n:03}") for n in range(100)]
    hub = HubView(7, 6, crowd, laggards=[(f"e{n:03}", "Slow" * 40) for n in range(40)], reset_epoch=7, reset_started=NOW)
    trouble = Problem("InvalidTemplate", "x" * 9999)
    status = pool_status(POLICY, Observed(pool_children(), (), hub, trouble), CONTEXT, {}, NOW)
    assert len(status["externalEngines"]) == 64
    assert len(status["reset"]["laggards"]) == 16
    assert max(len(entry["reason"]) for entry in status["reset"]["laggards"]) <= 64
    assert max(len(condition["message"]) for condition in status["conditions"]) <= 4096


def test_engine_status() -> None:
    hub = HubView(7, 6, [rank("p0"), rank("p1", 6), rank("elsewhere", 1)])
    status = engine_status(ROLLOUT, POLICY, Observed(engine_children(ready(2)), PODS, hub), {}, NOW)
    assert {key: status[key] for key in ("replicas", "readyReplicas", "updatedReplicas", "epochReplicas", "epoch")} == {
        "replicas": 2,
        "readyReplicas": 2,
        "updatedReplicas": 2,
        "epochReplicas": 1,
        "epoch": 6,
    }
    assert status["selector"] == "app.kubernetes.io/component=engine,epochkv.io/engine=rollout"
    assert "epochReplicas" not in engine_status(ROLLOUT, None, Observed(engine_children(ready(2)), PODS), {}, NOW)
