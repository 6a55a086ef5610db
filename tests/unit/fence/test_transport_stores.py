"""Wipes, sweeps, reclaims and labels between real agents, a real hub and a store: who is asked for what, and when."""

import asyncio
import time
from dataclasses import dataclass, field

import pytest

from epochkv_fence.mooncake_admin import Removed, StoreAdminError
from epochkv_fence.net.server import HubServer
from epochkv_fence.protocol.pool import PoolSnapshot
from hack.waiting import eventually
from tests.support.fence import POOL, FenceWorld

FENCE_OPTIONS = {"lease_seconds": 3.0, "reclaim": "RemoveAll", "store_admin": True, "reclaim_seconds": 0.2}


@dataclass
class Store:
    """A store with keys; notes every call with its time."""

    keys: int = 5
    failing: bool = False
    hanging: bool = False
    calls: list[tuple[float, str]] = field(default_factory=list)

    async def remove_all(self, pool_uid: str) -> Removed:
        self.calls.append((time.monotonic(), pool_uid))
        if self.hanging:
            await asyncio.sleep(3600)
        if self.failing:
            raise StoreAdminError("the store is told to fail")
        removed, self.keys = self.keys, 0
        return Removed(removed, 100 * removed)


@pytest.fixture
def store() -> Store:
    return Store()


def snapshot(fence: FenceWorld, hub: HubServer) -> PoolSnapshot:
    return fence.thread.call(lambda: hub.snapshot(POOL))


def test_the_store_is_wiped_once_after_publication_and_engines_remove_the_rest(fence: FenceWorld, store: Store) -> None:
    hub = fence.hub(stores=store)
    fence.lead(hub)
    agent, engine = fence.agent(hub.endpoint)
    eventually(lambda: agent.view.epoch == 0)
    engine.left_to_reclaim = 2
    fence.request(hub, 1)
    eventually(lambda: snapshot(fence, hub).reclaimed == 1)
    assert [uid for _, uid in store.calls] == [POOL]
    assert fence.authority.published[0][0] < store.calls[0][0]
    seen = snapshot(fence, hub)
    assert (seen.reclaimed_keys, seen.reclaimed_bytes, seen.wipe_failed) == (7, 520, False)


@pytest.mark.parametrize("how", ["fails", "hangs", "is out of reach"])
def test_a_store_that_cannot_be_wiped_holds_nothing_up_and_engines_remove_the_keys(
    fence: FenceWorld, store: Store, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epochkv_fence.hub.reclaim.WIPE_SECONDS", 2.0)
    store.failing, store.hanging = how == "fails", how == "hangs"
    hub = fence.hub(stores=None if how == "is out of reach" else store, store_deadline_seconds=0.2)
    fence.lead(hub)
    agent, engine = fence.agent(hub.endpoint)
    eventually(lambda: agent.view.epoch == 0)
    fence.request(hub, 1)
    eventually(lambda: fence.published() == 1)
    eventually(lambda: agent.view.epoch == 1 and time.monotonic() < agent.view.lease_until)
    eventually(lambda: hub.counters["wipe_failed"] >= 2, "it is tried again")
    eventually(lambda: snapshot(fence, hub).wipe_failed)
    eventually(lambda: snapshot(fence, hub).reclaimed == 1)
    assert (1, ()) in engine.reclaims
