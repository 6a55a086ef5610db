"""Pushes of weights against real hubs and agents: what counts as arrived, who is named when one did not, and every way to fail."""

import asyncio
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from epochkv_fence.client import AsyncPool, Engine, HubUnreachable, Pool, PoolClosed, WeightsDiverged, WeightsReport, WeightsStanding
from epochkv_fence.client.results import outliers, report
from epochkv_fence.net.agent import EngineIdentity
from epochkv_fence.protocol.messages import ASLEEP
from hack.waiting import eventually
from tests.support.fence import NEW, OLD, OTHER, Running, engine_with, push
from tests.support.hub import HubWorld, Switch, hub_world

HUB_OPTIONS = {"lease_seconds": 2.0}
EVERYBODY = ("engine-0", "engine-1", "engine-2")


def holding(world: HubWorld, weights: bytes = OLD, num_engines: int = 3) -> list[Running]:
    """Engines whose weights the hub has heard of."""
    engines = [world.agents.start(engine=engine_with(weights)) for _ in range(num_engines)]
    eventually(lambda: [view.weights for view in world.snapshot().engines] == [weights] * num_engines, "all are heard")
    return engines


def groups(report: WeightsReport | None) -> list[tuple[str, str, tuple[str, ...]]]:
    assert report is not None
    return [(group.id, group.label, group.engines) for group in report.groups]


def diverged(wait: Callable[[], object]) -> WeightsDiverged:
    with pytest.raises(WeightsDiverged) as caught:
        wait()
    return caught.value


def missed(pool: Pool, pushes: Callable[[], object], timeout_s: float = 1.0, **keys: Any) -> WeightsDiverged:
    """What an update raises whose push does this."""
    with pytest.raises(WeightsDiverged) as caught, pool.weight_update("step-1", timeout_s=timeout_s, **keys):
        pushes()
    return caught.value


def test_a_push_that_reaches_everybody_is_proved_and_called(world: HubWorld) -> None:
    engines, pool = holding(world), world.connect()
    assert groups(pool.weights()) == [(OLD.hex(), "", EVERYBODY)]
    with pool.weight_update("step-42", timeout_s=20) as update:
        assert groups(update.before) == [(OLD.hex(), "", EVERYBODY)]
        assert (update.other_than, update.report) == ({OLD.hex()}, None)
        push(engines, NEW)
    assert groups(update.report) == groups(pool.weights()) == [(NEW.hex(), "step-42", EVERYBODY)]
    assert pool.weights().equal
    assert pool.status().labels == {OLD.hex(): "before-step-42", NEW.hex(): "step-42"}
    assert {(engine.weights, engine.state) for engine in pool.engines()} == {(NEW.hex(), "sharing")}
    assert world.snapshot().target == 0, "a push asks for no epoch"
    push(engines, OLD)
    eventually(lambda: pool.weights().ids == {OLD.hex()})
    held = "0a0a0a0a (step-43): engines held these weights before, as before-step-42"
    assert pool.wait_weights(label="step-43", timeout_s=20).notes == (held,), "weights that nobody had called anything"


def test_what_a_push_that_has_returned_left_on_its_way_is_waited_for(world: HubWorld) -> None:
    engines, pool = holding(world), world.connect()

    def arrives(standing: WeightsStanding) -> None:
        if engines[0][1].holds == OLD:
            assert standing.waits_for == ()
            push(engines, NEW)
            eventually(lambda: {view.weights for view in world.snapshot().engines} == {NEW})

    report = pool.wait_weights(label="step-1", timeout_s=30, progress=arrives)
    assert groups(report) == [(NEW.hex(), "step-1", EVERYBODY)]


def test_a_label_does_not_go_to_weights_of_another_label_without_a_word(world: HubWorld) -> None:
    """The framework has loaded the base weights again after the push."""
    engines, pool = holding(world), world.connect()
    error = diverged(lambda: pool.wait_weights(label="step-1", timeout_s=20, only_new=True))
    assert "nobody can tell whether engines started with these" in str(error)
    assert pool.status().labels == {}
    assert groups(pool.wait_weights(label="step-0", timeout_s=20, other_than=[NEW.hex()], only_new=True)) == [
        (OLD.hex(), "step-0", EVERYBODY)
    ]
    with pool.weight_update("step-1", timeout_s=20) as update:
        push(engines, NEW)
    assert update.report is not None
    assert update.report.notes == ()
    push(engines, OLD)
    eventually(lambda: pool.weights().ids == {OLD.hex()})
    held = "0a0a0a0a (step-2): engines held these weights before, as step-0"
    error = diverged(lambda: pool.wait_weights(label="step-2", timeout_s=20, only_new=True))
    assert str(error) == f"all engines of pool policy hold the same weights, and they are not new: {held}"
    assert error.report.notes == (held,)
    assert pool.status().labels == {OLD.hex(): "step-0", NEW.hex(): "step-1"}, "nothing is called anew"
    assert pool.wait_weights(label="step-0", timeout_s=20).notes == (), "a roll-back that says what it is"
    assert pool.wait_weights(label="step-2", timeout_s=20).notes == (held,)
    push(engines, OTHER)
    eventually(lambda: pool.weights().ids == {OTHER.hex()})
    moved = f"{OTHER.hex()[:8]} (step-1): until now step-1 was the label of weights 3f2a9c1e"
    assert pool.wait_weights(label="step-1", timeout_s=20).notes == (moved,)
    both = f"{OTHER.hex()[:8]} (step-1): step-1 is the label of weights 3f2a9c1e, too"
    assert pool.wait_weights(label="step-1", timeout_s=20).notes == (both,)
    push(engines[:1], b"\x04" * 16)
    eventually(lambda: len(pool.weights().ids) == 2)
    canary = f"04040404 (step-1): until now step-1 was the label of weights {OTHER.hex()[:8]}"
    assert pool.wait_weights(["engine-0"], label="step-1", timeout_s=20).notes == (canary,), "others still hold those"
    push(engines, NEW)
    eventually(lambda: pool.weights().ids == {NEW.hex()})
    error = diverged(lambda: pool.wait_weights(label="step-1", timeout_s=20, only_new=True))
    assert error.report.notes == ("3f2a9c1e (step-1): engines held these weights before, as step-1",)


def test_an_engine_that_missed_the_push_is_named(world: HubWorld) -> None:
    engines, pool = holding(world), world.connect()
    error = missed(pool, lambda: push(engines[:2], NEW))
    assert error.engines == ("engine-2",)
    assert groups(error.report) == [(NEW.hex(), "", EVERYBODY[:2]), (OLD.hex(), "before-step-1", ("engine-2",))]
    assert pool.weights().common == frozenset()
    assert str(error) == (
        "not all engines of pool policy hold the same, new weights after 1 s: engine-2 does not. "
        "Now 3f2a9c1e: engine-0, engine-1; 0a0a0a0a (before-step-1): engine-2"
    )
    assert pool.status().labels == {OLD.hex(): "before-step-1"}, "nothing is called so that not everybody has"
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
    assert pool.status().labels == {OLD.hex(): "before-step-1", NEW.hex(): "step-1"}


def test_an_engine_of_unknown_weights_is_named_with_its_note(world: HubWorld) -> None:
    engines, pool = holding(world), world.connect()
    push(engines[2:], "\nasleep")  # a heartbeat carries lines
    eventually(lambda: [(one.name, one.note) for one in pool.weights().unknown] == [("engine-2", " asleep")])
    assert not pool.weights().equal
    error = diverged(lambda: pool.wait_weights(timeout_s=0.5))
    assert error.engines == ("engine-2",)
    assert str(error).endswith("engine-2 does not. Now 0a0a0a0a: engine-0, engine-1; unknown: engine-2 ( asleep)")
    (sleeper,) = [engine for engine in pool.engines() if not engine.weights]
    assert (sleeper.name, sleeper.state, sleeper.weights_note) == ("engine-2", "unknown", " asleep")
    push(engines[2:], ASLEEP)
    eventually(lambda: [engine.state for engine in pool.engines()] == ["sharing", "sharing", "asleep"])
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


def engine(name: str, weights: bytes, since_s: float) -> Engine:
    return Engine(name, name, name, "", 0, 0, "sharing", 0, 9.0, 0.0, "fp", weights.hex(), "", since_s)


def test_of_weights_that_are_held_as_often_those_count_that_came_last() -> None:
    engines = [engine("a", OLD, 60.0), engine("b", NEW, 3.0)]
    assert [late.name for late in outliers(engines, ())] == ["a"]
    assert [group.engines for group in report(engines, {}).groups] == [("b",), ("a",)]
    engines.append(engine("c", OLD, 60.0))
    assert [late.name for late in outliers(engines, ())] == ["b"], "most count, however old"
    assert [late.name for late in outliers(engines, {OLD.hex()})] == ["a", "c"], "unless they had to go"


def test_a_pool_with_more_engines_than_fit_into_a_message(tmp_path: Path) -> None:
    with hub_world(tmp_path / "crowd") as world:
        engines, pool = holding(world, num_engines=70), world.connect()
        with pool.weight_update("step-1", timeout_s=60) as update:
            push(engines, NEW)
        assert update.report is not None
        assert [len(group.engines) for group in update.report.groups] == [70]
        error = missed(pool, lambda: push(engines[12:], OTHER), timeout_s=3.0)
        assert len(error.engines) == 12
        assert " and 2 more do not. Now 77777777: " in str(error)
        reset = pool.reset(timeout_s=60)
        assert (reset.published, reset.engines) == (True, 70)


def test_engines_of_two_fingerprints_need_not_be_equal(world: HubWorld) -> None:
    """Such as two and four ranks: their digests differ for the same checkpoint."""
    engines, pool = holding(world, num_engines=2), world.connect()
    wide = [start_as(world, "wide", "fp-2", OTHER)]
    eventually(lambda: len(pool.engines()) == 3)
    report = pool.wait_weights(timeout_s=20)
    assert [group.fingerprint for group in report.groups] == ["fp", "fp-2"]
    assert groups(report) == [(OLD.hex(), "", EVERYBODY[:2]), (OTHER.hex(), "", ("wide",))]
    assert report.equal
    error = missed(pool, lambda: push(engines, NEW))
    assert error.engines == ("wide",), "its weights are the same everywhere, and they are the old ones"
    assert set(pool.status().labels.values()) == {f"before-step-1-{weights.hex()[:8]}" for weights in (OLD, OTHER)}
    with pool.weight_update("step-2", timeout_s=20) as update:
        push(engines, b"\x02" * 16)
        push(wide, b"\x03" * 16)
    assert groups(update.report) == [("02" * 16, "step-2", EVERYBODY[:2]), ("03" * 16, "step-2", ("wide",))]


def start_as(world: HubWorld, name: str, fingerprint: str, weights: bytes, pod: str = "", rank: int = 0) -> Running:
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


def test_an_engine_that_joins_while_it_is_waited_for_counts(world: HubWorld) -> None:
    engines, pool = holding(world), world.connect()
    late: list[Running] = []

    def join(standing: WeightsStanding) -> None:
        if not late:
            late.append(world.agents.start("late", engine=engine_with(OTHER)))
            eventually(lambda: any(view.weights == OTHER for view in world.snapshot().engines))
            push(engines, NEW)
        elif standing.waits_for == ("late",):
            push(late, NEW)

    report = pool.wait_weights(timeout_s=30, other_than=[OLD.hex()], progress=join)
    assert groups(report) == [(NEW.hex(), "", (*EVERYBODY, "late"))]


def test_one_that_dies_is_waited_for_until_its_lease_is_over(world: HubWorld) -> None:
    engines = holding(world, num_engines=2)
    with Switch(world.port) as switch:
        world.agents.start("dying", endpoint=switch.endpoint, engine=engine_with(OLD))
        eventually(lambda: len(world.snapshot().engines) == 3)
        told: list[tuple[str, ...]] = []
        pool = world.connect()
        with pool.weight_update("step-1", timeout_s=30, progress=lambda standing: told.append(standing.waits_for)) as update:
            switch.turn(None)
            push(engines, NEW)
        assert groups(update.report) == [(NEW.hex(), "step-1", EVERYBODY[:2])]
        assert ("dying",) in told


def test_a_hub_that_begins_to_lead_says_that_it_may_not_know_everybody(tmp_path: Path) -> None:
    with hub_world(tmp_path / "state", lease_seconds=30.0) as world:
        holding(world)
        world.stop_hub()
        world.start_hub()
        pool = world.connect()
        eventually(lambda: pool.weights().ids == {OLD.hex()} and len(pool.engines()) == 3, "all are back")
        error = diverged(lambda: pool.wait_weights(timeout_s=0.5))
        assert re.search(r"the hub became leader just now; the list of engines is complete in 3\d s$", str(error))
        assert error.engines == ()
        with pytest.raises(HubUnreachable, match="nobody knows what the push replaces"), pool.weight_update("step-1", timeout_s=0.5):
            pytest.fail("the push has begun")


def test_one_that_a_new_hub_has_not_heard_is_no_proof(world: HubWorld) -> None:
    """It missed the push, and lives; the hub that leads now hears of it when its line is mended, and nobody shares with it."""
    engines = holding(world, num_engines=2)
    with Switch(world.port) as switch:
        world.agents.start("cut off", endpoint=switch.endpoint, engine=engine_with(OLD))
        eventually(lambda: len(world.snapshot().engines) == 3)
        pool = world.connect()

        def misses() -> None:
            world.stop_hub()
            switch.turn(None)
            push(engines, NEW)
            world.start_hub()
            eventually(lambda: pool.weights().ids == {NEW.hex()}, "those that it hears hold the same, new weights")

        error = missed(pool, misses, timeout_s=3.0, progress=lambda _: switch.turn(world.port))
        assert error.engines == ("cut off",)


def test_without_a_hub_nothing_is_proved(world: HubWorld) -> None:
    engines, pool = holding(world), world.connect()

    def ends() -> None:
        push(engines, NEW)
        world.stop_hub()

    with pytest.raises(HubUnreachable, match="no answer from the hub"), pool.weight_update("step-1", timeout_s=0.5):
        ends()
    with pytest.raises(HubUnreachable), pool.weight_update("step-2", timeout_s=0.5):
        raise AssertionError("nobody knows what engines hold, so nothing could be proved afterwards")
    with pytest.raises(HubUnreachable):
        pool.weights(timeout_s=0.3)


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_inside_goes_on_as_it_is(world: HubWorld, kind: type[BaseException]) -> None:
    engines, pool = holding(world), world.connect()
    began = kind("the push failed")

    def breaks_off() -> None:
        push(engines[:1], NEW)
        raise began

    with pytest.raises(kind) as caught, pool.weight_update("step-1"):
        breaks_off()
    assert caught.value is began
    assert not hasattr(began, "__notes__")
    assert (world.snapshot().target, pool.status().labels) == (0, {OLD.hex(): "before-step-1"})


@pytest.mark.parametrize("kind", [BrokenPipeError, SystemExit])
def test_a_progress_callback_may_raise(world: HubWorld, kind: type[BaseException], caplog: pytest.LogCaptureFixture) -> None:
    engines, pool = holding(world), world.connect()
    told: list[WeightsStanding] = []

    def broken(standing: WeightsStanding) -> None:
        told.append(standing)
        push(engines[: len(told)], NEW)
        raise kind("the terminal is gone")

    assert pool.wait_weights(timeout_s=30, other_than=[OLD.hex()], progress=broken).ids == {NEW.hex()}
    assert len(told) >= 3
    assert sum("the progress callback failed" in record.message for record in caplog.records) == 1


def test_a_progress_callback_that_asks_the_pool_is_told_so_and_holds_nothing_up(world: HubWorld) -> None:
    engines, pool = holding(world), world.connect()
    told: list[str] = []

    def asks(standing: WeightsStanding) -> None:
        push(engines, NEW)
        with pytest.raises(RuntimeError, match="cannot ask the pool") as caught:
            pool.status()
        told.append(str(caught.value))

    assert pool.wait_weights(timeout_s=5, other_than=[OLD.hex()], progress=asks).ids == {NEW.hex()}
    assert told


async def test_asyncio_does_all_of_it(world: HubWorld) -> None:
    engines = holding(world)

    async with await AsyncPool.connect(world.folder) as pool:
        assert world.hub is not None
        assert (pool.name, pool.uid) == ("policy", world.hub.uid)
        before = await pool.weights()
        async with pool.weight_update("step-1", timeout_s=20) as update:
            push(engines, NEW)
        assert groups(update.report) == [(NEW.hex(), "step-1", EVERYBODY)]
        assert (await pool.wait_weights(other_than=before.common)).ids == {NEW.hex()}
        with pytest.raises(WeightsDiverged) as caught:
            async with pool.weight_update("step-2", engines=["engine-0"], timeout_s=0.5):
                pass
        assert caught.value.engines == ("engine-0",)
        with pytest.raises(RuntimeError):
            async with pool.weight_update("step-3"):
                raise RuntimeError("the push failed")
        resets = await asyncio.gather(*(pool.reset() for _ in range(4)))
        top = max(reset.epoch for reset in resets)
        assert (await pool.wait(top, timeout_s=20)).published
        assert [engine.state for engine in await pool.engines()] == ["sharing"] * 3
        assert (await pool.status()).target == top


async def test_asyncio_a_wait_that_is_cancelled_ends(world: HubWorld) -> None:
    engines = holding(world)

    async with await AsyncPool.connect(world.folder) as pool:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.wait_weights(timeout_s=600, other_than=[OLD.hex()]), 0.5)
        engines[0][1].is_busy = True
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.reset(), 0.3)
        engines[0][1].is_busy = False
        assert (await pool.wait_weights(timeout_s=20)).ids == {OLD.hex()}


async def test_asyncio_tasks_that_close_a_pool_together_all_return(world: HubWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    pool, pauses = await AsyncPool.connect(world.folder), [0.0, 30.0]
    monkeypatch.setattr(pool._session, "close", lambda: asyncio.sleep(pauses.pop(0)))
    await asyncio.wait_for(asyncio.gather(pool.close(), pool.close()), 20)


async def test_asyncio_a_pool_that_is_closed_ends_what_waits(world: HubWorld) -> None:
    holding(world)

    pool = await AsyncPool.connect(world.folder)
    looked = asyncio.Event()
    loop = asyncio.get_running_loop()
    note = Mock(side_effect=lambda _: loop.call_soon_threadsafe(looked.set))
    task = asyncio.create_task(pool.wait_weights(timeout_s=600, other_than=[OLD.hex()], progress=note))
    await looked.wait()
    await pool.close()
    with pytest.raises(PoolClosed):
        await task
    with pytest.raises(PoolClosed):
        await pool.weights()
    pool = await AsyncPool.connect(world.folder)
    with pytest.raises(PoolClosed):
        async with pool.weight_update("step-1"):
            await pool.close()
