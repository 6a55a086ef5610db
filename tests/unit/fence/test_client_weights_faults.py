"""Pushes of weights while engines come and go, hubs restart or are killed, and callers break off; and all of it with asyncio."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from pathlib import Path

import pytest

from epochkv_fence.client import AsyncPool, HubUnreachable, Pool, PoolClosed, WeightsDiverged, WeightsStanding
from hack.waiting import eventually
from tests.support.fence import NEW, OLD, OTHER, Running, engine_with, push
from tests.support.hub import Agents, HubProcess, HubWorld, Switch, hub_world
from tests.unit.fence.weights_world import EVERYBODY, diverged, groups, holding, missed

HUB_OPTIONS = {"lease_seconds": 2.0}

# --------------------------------------------------------------------------------------------------- engines come and go


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


def test_one_that_leaves_is_not_waited_for(world: HubWorld) -> None:
    engines, pool = holding(world), world.connect()
    with pool.weight_update("step-1", timeout_s=20) as update:
        push(engines[:2], NEW)
        engines[2][0].stop()
    assert groups(update.report) == [(NEW.hex(), "step-1", EVERYBODY[:2])]


def test_one_that_dies_is_waited_for_until_its_lease_is_over(world: HubWorld) -> None:
    assert world.hub is not None
    engines, switch = holding(world, num_engines=2), Switch(int(world.hub.server.endpoint.rpartition(":")[2]))
    try:
        world.agents.start("dying", endpoint=switch.endpoint, engine=engine_with(OLD))
        eventually(lambda: len(world.snapshot().engines) == 3)
        told: list[tuple[str, ...]] = []
        pool = world.connect()
        with pool.weight_update("step-1", timeout_s=30, progress=lambda standing: told.append(standing.waits_for)) as update:
            switch.turn(None)
            push(engines, NEW)
        assert groups(update.report) == [(NEW.hex(), "step-1", EVERYBODY[:2])]
        assert ("dying",) in told
    finally:
        switch.close()


# --------------------------------------------------------------------------------------------------------------- the hub


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


def test_one_that_a_new_hub_has_not_heard_is_no_proof(world: HubWorld) -> None:
    """It missed the push, and lives; the hub that leads now hears of it when its line is mended, and nobody shares with it."""
    assert world.hub is not None
    port = int(world.hub.server.endpoint.rpartition(":")[2])
    engines, switch = holding(world, num_engines=2), Switch(port)
    try:
        world.agents.start("cut off", endpoint=switch.endpoint, engine=engine_with(OLD))
        eventually(lambda: len(world.snapshot().engines) == 3)
        pool = world.connect()

        def misses() -> None:
            world.stop_hub()
            switch.turn(None)
            push(engines, NEW)
            world.start_hub()
            eventually(lambda: pool.weights().ids == {NEW.hex()}, "those that it hears hold the same, new weights")

        error = missed(pool, misses, timeout_s=3.0, progress=lambda _: switch.turn(port))
        assert error.engines == ("cut off",)
    finally:
        switch.close()


def test_a_hub_that_is_killed_in_the_middle_costs_time_alone(tmp_path: Path) -> None:
    process = HubProcess(tmp_path / "state", "--lease-seconds", "1").start()
    with Agents(process.folder) as agents:
        engines = [agents.start(engine=engine_with(OLD)) for _ in range(2)]
        with Pool.connect(process.folder) as pool:
            eventually(lambda: pool.weights().ids == {OLD.hex()} and len(pool.engines()) == 2)
            again = threading.Thread(target=lambda: (process.kill(), process.start()))

            def kill(standing: WeightsStanding) -> None:
                if not again.ident:
                    again.start()
                    push(engines, NEW)

            with pool.weight_update("step-1", timeout_s=60, progress=kill) as update:
                pass
            again.join(60)
            assert groups(update.report) == [(NEW.hex(), "step-1", EVERYBODY[:2])]
        process.end()


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


# ------------------------------------------------------------------------------------------------------------- exceptions


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
    assert (world.snapshot().target, pool.status().labels) == (0, {})


def test_an_interrupted_wait_ends_at_once(world: HubWorld) -> None:
    _, pool = holding(world), world.connect()
    threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            pool.wait_weights(timeout_s=600, other_than=[OLD.hex()])
    finally:
        signal.signal(signal.SIGINT, before)
    assert groups(pool.weights()) == [(OLD.hex(), "", EVERYBODY)]


@pytest.mark.parametrize("kind", [BrokenPipeError, SystemExit])
def test_a_progress_callback_that_raises_changes_nothing(
    world: HubWorld, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    engines, pool = holding(world), world.connect()
    told: list[WeightsStanding] = []

    def broken(standing: WeightsStanding) -> None:
        told.append(standing)
        push(engines[: len(told)], NEW)
        raise kind("the terminal is gone")

    assert pool.wait_weights(timeout_s=30, other_than=[OLD.hex()], progress=broken).ids == {NEW.hex()}
    assert len(told) >= 3
    assert sum("the progress callback failed" in record.message for record in caplog.records) == 1


# -------------------------------------------------------------------------------------------------------------- asyncio


def test_asyncio_does_all_of_it(world: HubWorld) -> None:
    engines = holding(world)

    async def body() -> None:
        async with await AsyncPool.connect(world.folder) as pool:
            assert (pool.name, pool.uid) == ("policy", world.snapshot().uid)
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

    asyncio.run(body())


def test_asyncio_a_wait_that_is_cancelled_ends(world: HubWorld) -> None:
    engines = holding(world)

    async def body() -> None:
        async with await AsyncPool.connect(world.folder) as pool:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pool.wait_weights(timeout_s=600, other_than=[OLD.hex()]), 0.5)
            engines[0][1].is_busy = True
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pool.reset(), 0.3)
            engines[0][1].is_busy = False
            assert (await pool.wait_weights(timeout_s=20)).ids == {OLD.hex()}

    asyncio.run(body())


def test_asyncio_a_pool_that_is_closed_ends_what_waits(world: HubWorld) -> None:
    holding(world)

    async def body() -> None:
        pool = await AsyncPool.connect(world.folder)
        looked = asyncio.Event()
        loop = asyncio.get_running_loop()

        def note(standing: WeightsStanding) -> None:
            loop.call_soon_threadsafe(looked.set)

        wait = pool.wait_weights(timeout_s=600, other_than=[OLD.hex()], progress=note)
        task = asyncio.create_task(wait)
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

    asyncio.run(body())
