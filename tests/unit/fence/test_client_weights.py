"""Pushes of weights against real hubs and agents: what counts as arrived, who is named when one did not, and every way to fail."""

from __future__ import annotations

from epochkv_fence.client import Engine, UnknownWeights, WeightsReport, WeightsStanding
from epochkv_fence.client.results import outliers, report
from epochkv_fence.net import EngineIdentity
from hack.waiting import eventually
from tests.support.fence import NEW, OLD, OTHER, Running, engine_with, push
from tests.support.hub import HubWorld
from tests.unit.fence.weights_world import EVERYBODY, diverged, groups, holding, missed

HUB_OPTIONS = {"lease_seconds": 2.0}


# ------------------------------------------------------------------------------------------------------------- it arrived


def test_a_push_that_reaches_everybody_is_proved_and_called(world: HubWorld) -> None:
    engines, pool = holding(world), world.connect()
    assert groups(pool.weights()) == [(OLD.hex(), "", EVERYBODY)]
    with pool.weight_update("step-42", timeout_s=20) as update:
        assert groups(update.before) == [(OLD.hex(), "", EVERYBODY)]
        assert (update.other_than, update.report) == ({OLD.hex()}, None)
        push(engines, NEW)
    assert groups(update.report) == groups(pool.weights()) == [(NEW.hex(), "step-42", EVERYBODY)]
    assert pool.weights().equal
    assert pool.status().labels == {NEW.hex(): "step-42"}
    assert {(engine.weights, engine.state) for engine in pool.engines()} == {(NEW.hex(), "sharing")}
    assert world.snapshot().target == 0, "a push asks for no epoch"


def test_engines_that_take_them_one_after_the_other(world: HubWorld) -> None:
    """As an engine does that digests its weights long after the push has returned."""
    engines, pool = holding(world), world.connect()
    told: list[WeightsStanding] = []

    def next_one(standing: WeightsStanding) -> None:
        told.append(standing)
        names = [f"engine-{index}" for index in range(3) if engines[index][1].holds == OLD]
        if standing.waits_for == tuple(names):  # it is known by now what was pushed last
            push([engines[3 - len(names)]], NEW)

    report = pool.wait_weights(timeout_s=30, label="step-1", other_than=pool.weights().common, progress=next_one)
    assert groups(report) == [(NEW.hex(), "step-1", EVERYBODY)]
    assert told[0].waits_for == EVERYBODY
    assert ("engine-2",) in [standing.waits_for for standing in told]


def test_the_engine_that_a_push_missed_gets_it_from_a_second_one(world: HubWorld) -> None:
    """The weights that most engines hold already are new, then."""
    engines, pool = holding(world), world.connect()
    push(engines[:2], NEW)
    eventually(lambda: pool.weights().ids == {OLD.hex(), NEW.hex()})
    before = pool.weights().common
    assert before == frozenset()
    push(engines[2:], NEW)
    assert groups(pool.wait_weights(timeout_s=20, other_than=before)) == [(NEW.hex(), "", EVERYBODY)]


def test_what_a_push_that_has_returned_left_on_its_way_is_waited_for(world: HubWorld) -> None:
    engines, pool = holding(world), world.connect()

    def arrives(standing: WeightsStanding) -> None:
        if engines[0][1].holds == OLD:
            assert standing.waits_for == ()
            push(engines, NEW)
            eventually(lambda: {view.weights for view in world.snapshot().engines} == {NEW})

    report = pool.wait_weights(label="step-1", timeout_s=30, progress=arrives)
    assert groups(report) == [(NEW.hex(), "step-1", EVERYBODY)]


# ------------------------------------------------------------------------------------------------------------ it did not


def test_an_engine_that_missed_the_push_is_named(world: HubWorld) -> None:
    engines, pool = holding(world), world.connect()
    error = missed(pool, lambda: push(engines[:2], NEW))
    assert error.engines == ("engine-2",)
    assert groups(error.report) == [(NEW.hex(), "", EVERYBODY[:2]), (OLD.hex(), "", ("engine-2",))]
    assert str(error) == (
        "not all engines of pool policy hold the same, new weights after 1 s: engine-2 does not. "
        "Now 3f2a9c1e: engine-0, engine-1; 0a0a0a0a: engine-2"
    )
    assert pool.status().labels == {}, "nothing is called so that not everybody has"
    with pool.weight_update("step-1 again", timeout_s=20) as update:  # for those that have it already this push changes nothing
        push(engines, NEW)
    assert groups(update.report) == [(NEW.hex(), "step-1 again", EVERYBODY)]


def test_a_push_that_changes_nothing_is_told_so(world: HubWorld) -> None:
    engines, pool = holding(world), world.connect()
    with pool.weight_update("step-1", timeout_s=20):
        push(engines, NEW)
    error = missed(pool, lambda: None)
    assert error.engines == EVERYBODY
    assert str(error).endswith(" after 1 s: the weights did not change. Now 3f2a9c1e (step-1): engine-0, engine-1, engine-2")
    assert pool.status().labels == {NEW.hex(): "step-1"}


def test_an_engine_of_unknown_weights_is_named_with_its_note(world: HubWorld) -> None:
    engines, pool = holding(world), world.connect()
    push(engines[2:], "asleep")
    eventually(lambda: pool.weights().unknown == (UnknownWeights("engine-2", "asleep"),))
    assert not pool.weights().equal
    error = diverged(lambda: pool.wait_weights(timeout_s=0.5))
    assert error.engines == ("engine-2",)
    assert str(error).endswith("engine-2 does not. Now 0a0a0a0a: engine-0, engine-1; unknown: engine-2 (asleep)")
    (sleeper,) = [engine for engine in pool.engines() if not engine.weights]
    assert (sleeper.name, sleeper.state, sleeper.weights_note) == ("engine-2", "unknown", "asleep")
    push(engines, "asleep")
    eventually(lambda: len(pool.weights().unknown) == 3)
    assert diverged(lambda: pool.wait_weights(timeout_s=0.5)).engines == EVERYBODY


def test_a_pool_without_engines_proves_nothing(world: HubWorld) -> None:
    pool = world.connect()
    assert groups(pool.weights()) == []
    error = diverged(lambda: pool.wait_weights(timeout_s=0.5, label="step-1"))
    assert (error.engines, error.report) == ((), WeightsReport(()))
    assert str(error) == "not all engines of pool policy hold the same weights after 0.5 s: no engine is there"
    assert pool.status().labels == {}

    def join(standing: WeightsStanding) -> None:
        if not world.agents.all:
            world.agents.start("late", engine=engine_with(NEW))

    report = pool.wait_weights(timeout_s=30, progress=join)
    assert groups(report) == [(NEW.hex(), "", ("late",))]


def engine(name: str, weights: bytes, since_s: float) -> Engine:
    return Engine(name, name, name, "", 0, 0, "sharing", 0, 9.0, 0.0, "fp", weights.hex(), "", since_s)


def test_of_weights_that_are_held_as_often_those_count_that_came_last() -> None:
    engines = [engine("a", OLD, 60.0), engine("b", NEW, 3.0)]
    assert [late.name for late in outliers(engines, ())] == ["a"]
    assert [group.engines for group in report(engines, {}).groups] == [("b",), ("a",)]
    engines.append(engine("c", OLD, 60.0))
    assert [late.name for late in outliers(engines, ())] == ["b"], "most count, however old"
    assert [late.name for late in outliers(engines, {OLD.hex()})] == ["a", "c"], "unless they had to go"


# -------------------------------------------------------------------------------------------------- names, fingerprints


def test_engines_of_two_fingerprints_need_not_be_equal(world: HubWorld) -> None:
    """Such as two and four ranks: their digests differ for the same checkpoint."""
    engines, pool = holding(world, num_engines=2), world.connect()
    wide = [start_as(world, "wide", "fp-2", OTHER)]
    eventually(lambda: len(pool.engines()) == 3)
    report = pool.wait_weights(timeout_s=20)
    assert [(group.fingerprint, group.id, group.engines) for group in report.groups] == [
        ("fp", OLD.hex(), EVERYBODY[:2]),
        ("fp-2", OTHER.hex(), ("wide",)),
    ]
    assert report.equal
    error = missed(pool, lambda: push(engines, NEW))
    assert error.engines == ("wide",), "its weights are the same everywhere, and they are the old ones"
    with pool.weight_update("step-2", timeout_s=20) as update:
        push(engines, b"\x02" * 16)
        push(wide, b"\x03" * 16)
    assert groups(update.report) == [("02" * 16, "step-2", EVERYBODY[:2]), ("03" * 16, "step-2", ("wide",))]


def start_as(world: HubWorld, name: str, fingerprint: str, weights: bytes, pod: str = "", rank: int = 0) -> Running:
    """An engine of another kind."""
    return world.agents.start(engine=engine_with(weights), identity=EngineIdentity(name, pod, rank, fingerprint))


def test_engines_that_are_named_are_waited_for_alone(world: HubWorld) -> None:
    engines, pool = holding(world), world.connect()
    push(engines[:1], NEW)
    report = pool.wait_weights(["engine-0"], timeout_s=20, other_than=[OLD.hex()], label="canary")
    assert groups(report) == [(NEW.hex(), "canary", ("engine-0",))]
    error = diverged(lambda: pool.wait_weights(["engine-0", "engine-7"], timeout_s=0.5))
    assert error.engines == ("engine-7",)
    assert str(error).endswith(": no engine is called engine-7. Now 3f2a9c1e (canary): engine-0")
    nobody = diverged(lambda: pool.wait_weights(["engine-7"], timeout_s=0.5))
    assert str(nobody).endswith(": no engine is called engine-7. Now 0a0a0a0a: engine-1, engine-2; 3f2a9c1e (canary): engine-0")
    with pool.weight_update("step-1", engines=EVERYBODY[1:], timeout_s=20) as update:
        assert update.other_than == {OLD.hex()}
        push(engines[1:], OTHER)
    assert groups(update.report) == [(OTHER.hex(), "step-1", EVERYBODY[1:])]


def test_a_name_means_all_ranks_of_its_engine(world: HubWorld) -> None:
    ranks = [start_as(world, "rollout", "fp", OLD, "pod-a", rank) for rank in range(2)]
    pool = world.connect()
    eventually(lambda: len(pool.engines()) == 2)
    push(ranks[:1], NEW)
    assert diverged(lambda: pool.wait_weights(["pod-a"], timeout_s=0.5, other_than=[OLD.hex()])).engines == ("pod-a/1",)
    assert groups(pool.wait_weights(["pod-a/1"], timeout_s=20)) == [(OLD.hex(), "", ("pod-a/1",))]
