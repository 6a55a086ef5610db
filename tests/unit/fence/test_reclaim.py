"""Keys of older epochs are removed after publication: by an engine, or by the store when there is none. L = 30 s."""

import asyncio

import pytest

from epochkv_fence.common import lease_clock
from epochkv_fence.hub.reclaim import WIPE_RETRY_SECONDS, WIPE_SECONDS
from epochkv_fence.mooncake_admin import StoreAdminError
from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.messages import Reclaim, Reclaimed
from epochkv_fence.protocol.pool import PoolRecord, Term
from hack.waiting import eventually
from tests.support.fence import POOL, FenceWorld
from tests.unit.fence.helpers import HOLD, LEASE, Driver, alive, config, instance, led, waited


def published(**keys: object) -> Driver:
    """Epoch 1 is published and instances 1 and 2 are at it."""
    hub = waited(**keys)
    hub.ask(1)
    alive(hub)
    hub.round()
    assert hub.published == [1]
    return hub


def live_on(hub: Driver, seconds: float) -> None:
    """So much later, both engines are there."""
    hub.now += seconds
    alive(hub)
    hub.step(ev.Tick())


def asked(hub: Driver) -> Reclaim:
    """The next request to an engine, when it is due."""
    before = len(hub.of(Reclaim))
    live_on(hub, 0.0)
    (request,) = hub.of(Reclaim)[before:]
    return request


def answer(hub: Driver, request: Reclaim, keys: int, num_bytes: int = 0) -> None:
    hub.hear(Reclaimed(request.instance, request.below, keys, num_bytes, request.number))


def test_repeated_until_nothing_is_left_and_once_more_for_what_lands_later() -> None:
    hub = published()
    first = asked(hub)
    answer(hub, first, 12, 1200)
    assert hub.hub.snapshot(hub.now).reclaimed == 0
    hub.now += 10.0
    second = asked(hub)
    assert {first.instance, second.instance} == {instance(1), instance(2)}  # what one cannot remove, the next one may
    answer(hub, second, 0)
    assert hub.hub.snapshot(hub.now).reclaimed == 1
    hub.now += 10.0
    answer(hub, asked(hub), 2, 200)  # a save that was in flight has landed
    hub.now += 10.0
    answer(hub, asked(hub), 0)
    snapshot = hub.hub.snapshot(hub.now)
    assert (snapshot.reclaimed, snapshot.reclaimed_keys, snapshot.reclaimed_bytes) == (1, 14, 1400)
    live_on(hub, 10.0)
    assert len(hub.of(Reclaim)) == 4


def test_a_pause_lies_between_two_requests() -> None:
    hub = published(reclaim_seconds=7.0)
    answer(hub, asked(hub), 3)
    live_on(hub, 6.9)
    assert len(hub.of(Reclaim)) == 1
    hub.now += 0.2
    asked(hub)


@pytest.mark.parametrize("what", ["nobody was asked", "another instance", "another epoch", "twice"])
def test_answers_to_what_was_not_asked_are_not_counted(what: str) -> None:
    hub = published()
    if what == "nobody was asked":
        hub.hear(Reclaimed(instance(1), 1, 5, 500, 1))
        assert hub.hub.snapshot(hub.now).reclaimed_keys == 0
        return
    request = asked(hub)
    if what == "twice":
        answer(hub, request, 5)
    other = instance(1) if request.instance == instance(2) else instance(2)
    below = 0 if what == "another epoch" else 1
    hub.hear(Reclaimed(other if what == "another instance" else request.instance, below, 5, number=request.number))
    assert hub.hub.snapshot(hub.now).reclaimed_keys == (5 if what == "twice" else 0)


def test_an_answer_that_comes_after_the_next_publication_counts() -> None:
    hub = published()
    request = asked(hub)
    hub.ask(2)
    alive(hub, 2)
    hub.round()
    assert hub.published == [1, 2]
    asked(hub)
    answer(hub, request, 5)
    assert hub.hub.snapshot(hub.now).reclaimed_keys == 5


def test_an_engine_behind_the_published_epoch_is_not_asked() -> None:
    hub = waited()
    hub.ask(1)
    hub.beat(1, epoch=0)
    hub.round()
    assert hub.published == [1]
    hub.step(ev.Tick())
    assert hub.of(Reclaim) == []


def left(hub: Driver) -> None:
    """All engines fall silent, for longer than a lease."""
    hub.wait(60.0)


def test_without_engines_the_store_is_swept_until_it_is_empty_and_once_more() -> None:
    hub = published(store_admin=True)
    left(hub)
    assert hub.stores == []
    hub.wait(HOLD)
    assert hub.stores == [ev.RemoveAll(1, sweep=True)]
    hub.wait(60.0)
    assert hub.stores == [ev.RemoveAll(1, sweep=True)]  # until it answers
    hub.step(ev.Done(ev.RemoveAll(1, sweep=True), ok=False))
    hub.wait(10.0)
    hub.step(ev.Done(ev.RemoveAll(1, sweep=True), ok=True, removed=(40, 4000)))
    assert hub.hub.snapshot(hub.now).reclaimed == 0
    for keys in (0, 0):
        hub.wait(10.0)
        hub.step(ev.Done(ev.RemoveAll(1, sweep=True), ok=True, removed=(keys, None)))
    snapshot = hub.hub.snapshot(hub.now)
    assert (snapshot.reclaimed, snapshot.reclaimed_keys, snapshot.reclaimed_bytes) == (1, 40, 4000)
    hub.wait(60.0)
    assert hub.stores == [ev.RemoveAll(1, sweep=True)] * 4, "one had failed"


@pytest.mark.parametrize("why", ["it is shared", "it keeps its keys", "another hub published", "another policy"])
def test_a_store_is_swept_only_for_an_epoch_that_was_published_just_now(why: str) -> None:
    """Later it may be full of keys of the published epoch, which engines use when they come back."""
    hub = published(store_admin=why != "it is shared", reclaim="Delete" if why == "it is shared" else "Retain")
    if why == "another policy":
        hub.step(ev.Configured(config(store_admin=True)))
    elif why == "another hub published":
        hub = Driver(store_admin=True)
        hub.lead(target=1, published=1, granting=True)
    left(hub)
    hub.wait(5 * HOLD)
    assert hub.stores == []
    if "another" in why:
        hub.now += 10.0
        assert asked(hub).below == 1, "engines remove the older ones"
        hub.ask(2)
        hub.wait(HOLD)
        hub.round()
        left(hub)
        hub.wait(HOLD)
        assert (hub.published[-1], hub.stores) == (2, [ev.RemoveAll(2, sweep=True)])


# ---------------------------------------------------------------------- engines without a client of the store
@pytest.mark.parametrize(("beside", "admin", "who", "swept"), [(True, True, {2}, 0), (False, True, set(), 1), (False, False, {1, 2}, 0)])
def test_an_engine_without_a_client_of_the_store_is_asked_only_if_nobody_has_one(
    beside: bool, admin: bool, who: set[int], swept: int
) -> None:
    hub = published(store_admin=admin)
    for _ in range(8):
        hub.beat(1, epoch=1, removes=False)
        hub.beat(2, epoch=1, removes=beside)
        hub.step(ev.Tick())
        hub.now += 10.0
    assert {request.instance for request in hub.of(Reclaim)} == {instance(number) for number in who}
    assert hub.stores[:1] == [ev.RemoveAll(1, sweep=True)] * swept


# ----------------------------- RemoveAll: the store is wiped once after each publication, and nothing waits for that
@pytest.fixture
def hub() -> Driver:
    """A hub long past its own leadership wait, with instances 1 and 2, that has its store wiped."""
    return led(reclaim="RemoveAll")


def publish(hub: Driver, epoch: int) -> None:
    """Ask, agree, publish, and let what is due happen."""
    hub.ask(epoch)
    alive(hub, epoch)
    hub.round()
    assert hub.published[-1] == epoch
    hub.step(ev.Tick())


def later(hub: Driver, seconds: float) -> None:
    """Time passes, and engines live on."""
    end = hub.now + seconds
    while hub.now < end:
        hub.now = min(end, hub.now + 1.0)
        alive(hub, hub.hub.state.record.target)
        hub.step(ev.Tick())


def test_published_first_then_wiped_once_then_engines_remove_what_was_being_read(hub: Driver) -> None:
    publish(hub, 1)
    assert hub.stores == [ev.RemoveAll(1)]
    assert hub.of(Reclaim) == []
    hub.step(ev.Done(ev.RemoveAll(1), ok=True, removed=(7, 700)))
    later(hub, 20.0)
    assert hub.stores == [ev.RemoveAll(1)], "what was made since the publication is there by now"
    assert hub.of(Reclaim)[0].below == 1
    snapshot = hub.hub.snapshot(hub.now)
    assert (snapshot.reclaimed_keys, snapshot.reclaimed_bytes, snapshot.wipe_failed) == (7, 700, False)


def test_an_epoch_is_published_and_granted_whatever_becomes_of_the_wipe_before(hub: Driver) -> None:
    publish(hub, 1)
    publish(hub, 2)
    alive(hub, 2)
    assert [grant.epoch for grant in hub.round()] == [2, 2]
    assert hub.stores == [ev.RemoveAll(1)]  # one at a time
    hub.step(ev.Done(ev.RemoveAll(1), ok=True, removed=(3, 300)))
    hub.step(ev.Tick())
    assert hub.stores == [ev.RemoveAll(1), ev.RemoveAll(2)]
    hub.step(ev.Done(ev.RemoveAll(2), ok=True, removed=(0, 0)))
    later(hub, 100.0)
    assert len(hub.stores) == 2


def test_a_wipe_that_fails_is_tried_again_until_it_works(hub: Driver) -> None:
    publish(hub, 1)
    for number in (1, 2, 3):
        hub.step(ev.Done(ev.RemoveAll(1), ok=False))
        hub.step(ev.Tick())
        assert len(hub.stores) == number, "after a pause"
        assert hub.hub.tick_at() <= hub.now + WIPE_RETRY_SECONDS
        later(hub, WIPE_RETRY_SECONDS)
    assert hub.stores == [ev.RemoveAll(1)] * 4
    hub.step(ev.Done(ev.RemoveAll(1), ok=True, removed=(5, None)))
    later(hub, 2 * WIPE_SECONDS)
    assert hub.stores == [ev.RemoveAll(1)] * 4
    assert not hub.hub.snapshot(hub.now).wipe_failed


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_wipe_is_given_up_and_engines_remove_the_keys(how: str, hub: Driver) -> None:
    publish(hub, 1)
    began = hub.now
    while hub.now < began + WIPE_SECONDS:
        if how == "fails":
            hub.step(ev.Done(ev.RemoveAll(1), ok=False))
        assert not hub.hub.snapshot(hub.now).wipe_failed
        assert hub.of(Reclaim) == []
        later(hub, 1.0)
    assert hub.hub.snapshot(hub.now).wipe_failed
    assert hub.of(Reclaim)[-1].below == 1
    asked = len(hub.stores)
    hub.step(ev.Done(ev.RemoveAll(1), ok=False))
    later(hub, 2 * WIPE_SECONDS)
    assert len(hub.stores) == asked
    publish(hub, 2)
    assert not hub.hub.snapshot(hub.now).wipe_failed, "the next one is tried anew"
    assert hub.stores[-1] == ev.RemoveAll(2)
    later(hub, 2 * WIPE_SECONDS)
    hub.step(ev.Configured(config(reclaim="Delete")))
    assert not hub.hub.snapshot(hub.now).wipe_failed, "nobody wants it any more"


def test_a_pool_that_was_never_granted_for_has_nothing_to_wipe() -> None:
    hub = Driver(reclaim="RemoveAll")
    hub.lead()
    hub.ask(1)
    hub.round()
    hub.step(ev.Tick())
    assert hub.published == [1]
    assert hub.stores == []


def test_a_new_leader_wipes_only_what_it_sees_published(hub: Driver) -> None:
    """What the hub before has wiped or not it cannot know; engines remove those keys one by one."""
    publish(hub, 1)
    hub.step(ev.SteppedDown())
    hub.step(ev.Done(ev.RemoveAll(1), ok=False))
    later(hub, 5.0)
    hub.lead(target=1, published=1, granting=True, term=Term("hub-a", 2))
    later(hub, 20.0)
    assert hub.stores == [ev.RemoveAll(1)]
    assert hub.of(Reclaim)[-1].below == 1
    hub.step(ev.Observed(PoolRecord(2, 2, True)))
    hub.step(ev.Tick())
    assert hub.stores == [ev.RemoveAll(1), ev.RemoveAll(2)]


def test_another_policy_ends_it(hub: Driver) -> None:
    publish(hub, 1)
    hub.step(ev.Done(ev.RemoveAll(1), ok=False))
    hub.step(ev.Configured(config(reclaim="Delete")))
    later(hub, 10.0)
    assert hub.stores == [ev.RemoveAll(1)]
    assert hub.of(Reclaim)[-1].below == 1
    hub.step(ev.Configured(config(reclaim="Retain")))
    answer(hub, hub.of(Reclaim)[-1], 4)
    hub.sent.clear()
    publish(hub, 2)
    later(hub, 2 * LEASE)
    assert hub.stores == [ev.RemoveAll(1)]
    assert hub.of(Reclaim) == []


# ------------------------------------------------------------------------------------------------------ real sockets
FENCE_OPTIONS = {"lease_seconds": 3.0, "reclaim": "RemoveAll", "store_admin": True, "reclaim_seconds": 0.2}


class Store:
    def __init__(self, how: str) -> None:
        self.how = how

    async def remove_all(self, pool_uid: str) -> tuple[int, int | None]:
        if self.how == "hangs":
            await asyncio.sleep(3600)
        raise StoreAdminError("the store is told to fail")


@pytest.mark.parametrize("how", ["fails", "hangs", "is out of reach"])
def test_a_store_that_cannot_be_wiped_holds_nothing_up(fence: FenceWorld, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epochkv_fence.hub.reclaim.WIPE_SECONDS", 2.0)
    hub = fence.hub(stores=None if how == "is out of reach" else Store(how), store_deadline_seconds=0.2)
    agent, engine = fence.agent(hub.endpoint)
    eventually(lambda: agent.view.epoch == 0)
    fence.request(hub, 1)
    eventually(lambda: fence.published() == 1)
    eventually(lambda: agent.view.epoch == 1 and lease_clock() < agent.view.lease_until)
    eventually(lambda: hub.counters["wipe_failed"] >= 2, "it is tried again")
    eventually(lambda: fence.thread.call(lambda: hub.snapshot(POOL)).wipe_failed)
    eventually(lambda: fence.thread.call(lambda: hub.snapshot(POOL)).reclaimed == 1)
    assert (1, ()) in engine.reclaims
