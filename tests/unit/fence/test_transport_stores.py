"""Wipes, sweeps, reclaims and weights between real agents, a real hub and a store: who is asked for what, and when."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from epochkv_fence.authority import Origin
from epochkv_fence.messages import Mode, Source
from epochkv_fence.store_admin import Removed, StoreAdminError
from epochkv_fence.transport import HubServer, PoolSnapshot
from tests.helpers_fence import POOL, FakeEngine, FenceWorld, eventually


@dataclass
class Store:
    """A store with keys; notes every call with its time."""

    keys: int = 5
    failing: bool = False
    hanging: bool = False
    calls: list[tuple[float, str, bool]] = field(default_factory=list)

    async def remove_all(self, pool_uid: str, *, force: bool, before: float = float("inf")) -> Removed:
        self.calls.append((time.monotonic(), pool_uid, force))
        if self.hanging:
            await asyncio.sleep(3600)
        if self.failing:
            raise StoreAdminError("the store is told to fail")
        if time.monotonic() >= before:
            raise StoreAdminError("too late")
        removed, self.keys = self.keys, 0
        return Removed(removed, 100 * removed)


class LoadingEngine(FakeEngine):
    """An engine whose loads end when the test says so. `reclaim` gives bytes back, too."""

    def __init__(self) -> None:
        super().__init__()
        self.num_loading: int | None = 0

    def loading(self) -> int | None:
        return self.num_loading

    def reclaim(self, below: int) -> tuple[int, int]:  # type: ignore[override]
        self.reclaims.append(below)
        left, self.left_to_reclaim = self.left_to_reclaim, 0
        return left, 10 * left


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def world() -> Iterator[FenceWorld]:
    made = FenceWorld(lease_seconds=3.0, join_after_seconds=0.0, weights_source="Model", reclaim="RemoveAll", store_admin=True)
    yield made
    made.close()


def snapshot(world: FenceWorld, hub: HubServer) -> PoolSnapshot:
    return world.thread.call(lambda: hub.snapshot(POOL))


def test_the_store_is_wiped_once_the_last_load_has_ended_and_before_the_epoch_is_published(world: FenceWorld, store: Store) -> None:
    hub = world.hub(stores=store)
    world.lead(hub)
    engines = [LoadingEngine(), LoadingEngine()]
    agents = [world.agent(hub.endpoint, engine=engine)[0] for engine in engines]
    eventually(lambda: all(agent.view.mode is Mode.USE for agent in agents))
    engines[1].num_loading = 2
    agents[1].poke()
    world.request(hub, 1)
    eventually(lambda: all(agent.view == (1, Mode.BYPASS, agent.view.lease_until) for agent in agents), what="loads are held everywhere")
    assert store.calls == []
    assert world.published() == 0
    sent = agents[1].counters["sent"]
    engines[1].num_loading = 0
    ended = time.monotonic()
    eventually(lambda: world.published() == 1)
    assert agents[1].counters["sent"] > sent  # it said so by itself
    assert [(uid, force) for _, uid, force in store.calls] == [(POOL, True), (POOL, True)]  # until nothing is left
    assert ended < store.calls[0][0] < store.calls[1][0] < world.authority.published[0][0]
    eventually(lambda: all(agent.view.mode is Mode.USE for agent in agents), what="loads are released")
    seen = snapshot(world, hub)
    assert (seen.reclaimed_keys, seen.reclaimed_bytes, seen.wipe_failed) == (5, 500, False)


@pytest.mark.parametrize("how", ["fails", "hangs", "is out of reach"])
def test_a_store_that_cannot_be_wiped_holds_an_epoch_up_for_a_while_and_no_longer(world: FenceWorld, store: Store, how: str) -> None:
    store.failing, store.hanging = how == "fails", how == "hangs"
    hub = world.hub(stores=None if how == "is out of reach" else store, store_deadline_seconds=0.5)
    world.lead(hub)
    agent, _ = world.agent(hub.endpoint, engine=LoadingEngine())
    eventually(lambda: agent.view.mode is Mode.USE)
    world.request(hub, 1)
    eventually(lambda: hub.counters["wipe_failed"] >= 2, what="it is tried again")
    assert world.published() == 0
    eventually(lambda: world.published() == 1, timeout=60)
    assert snapshot(world, hub).wipe_failed
    eventually(lambda: agent.view.mode is Mode.USE)


def test_a_killed_engine_is_not_waited_for_longer_than_its_lease(world: FenceWorld, store: Store) -> None:
    hub = world.hub(stores=store)
    world.lead(hub)
    engines = [LoadingEngine(), LoadingEngine()]
    agents = [world.agent(hub.endpoint, engine=engine)[0] for engine in engines]
    eventually(lambda: all(agent.view.mode is Mode.USE for agent in agents))
    engines[1].num_loading = 2
    agents[1].poke()
    eventually(lambda: [view.loading for view in snapshot(world, hub).engines].count(2) == 1)
    lease = agents[1].view.lease_until
    engines[1].is_busy = True  # killed in the middle of a step: it cannot say that it leaves
    agents[1].stop()
    world.request(hub, 1)
    eventually(lambda: world.published() == 1, timeout=60)
    assert store.calls[0][0] >= lease


def test_without_engines_a_store_of_one_pool_is_swept(store: Store) -> None:
    world = FenceWorld(lease_seconds=1.0, join_after_seconds=0.0, store_admin=True, reclaim="Delete", reclaim_seconds=0.5)
    try:
        hub = world.hub(stores=store)
        world.lead(hub)
        world.request(hub, 1)
        eventually(lambda: world.published() == 1)
        eventually(lambda: snapshot(world, hub).reclaimed == 1)
        assert {force for _, _, force in store.calls} == {False}
        assert snapshot(world, hub).reclaimed_bytes == 500
    finally:
        world.close()


def test_an_engine_reports_the_bytes_it_gave_back() -> None:
    world = FenceWorld(join_after_seconds=0.0, reclaim_seconds=0.2)
    try:
        hub = world.hub()
        world.lead(hub)
        engine = LoadingEngine()
        agent, _ = world.agent(hub.endpoint, engine=engine)
        eventually(lambda: agent.view.epoch == 0)
        engine.left_to_reclaim = 7
        world.request(hub, 1)
        eventually(lambda: snapshot(world, hub).reclaimed == 1)
        assert (snapshot(world, hub).reclaimed_keys, snapshot(world, hub).reclaimed_bytes) == (7, 70)
    finally:
        world.close()


def test_an_engine_that_cannot_tell_its_loads_does_not_count_as_drained(world: FenceWorld, store: Store) -> None:
    hub = world.hub(stores=store)
    world.lead(hub)
    agent, _ = world.agent(hub.endpoint)  # no `loading` hook
    eventually(lambda: agent.view.mode is Mode.USE)
    world.request(hub, 1)
    eventually(lambda: agent.view == (1, Mode.BYPASS, agent.view.lease_until))
    assert [view.loading for view in snapshot(world, hub).engines] == [None]
    eventually(lambda: world.published() == 1, timeout=60)
    assert snapshot(world, hub).wipe_failed
    assert store.calls == []


def test_weights_that_are_not_ready_hold_the_mode_and_not_the_epoch() -> None:
    world = FenceWorld(join_after_seconds=0.0)
    try:
        hub = world.hub()
        world.lead(hub)
        agent, _ = world.agent(hub.endpoint)
        eventually(lambda: agent.view.mode is Mode.USE)
        world.request(hub, 1, weights_version="v2", weights_ready=False)
        eventually(lambda: world.published() == 1)
        assert world.authority.records[POOL].origin == Origin(Source.SPEC, "v2")
        assert (agent.view.epoch, agent.view.mode) == (1, Mode.BYPASS)
        assert snapshot(world, hub).held
        world.request(hub, 1, weights_version="v2", weights_ready=True)
        eventually(lambda: agent.view.mode is Mode.USE)
        assert not snapshot(world, hub).held
    finally:
        world.close()
