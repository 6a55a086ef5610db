"""`RemoveAll`: the store is wiped once after each publication, and nothing waits for that. L = 30 s, margin 3 s."""

import pytest

from epochkv_fence.hub.reclaim import WIPE_RETRY_SECONDS, WIPE_SECONDS
from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.messages import Reclaim
from epochkv_fence.protocol.pool import PoolRecord, Term
from tests.unit.fence.helpers import HOLD, LEASE, Driver, alive, config


def led(epoch: int = 0, **keys: object) -> Driver:
    """A hub long past its own leadership wait, with instances 1 and 2 at `epoch`."""
    hub = Driver(**{"reclaim": "RemoveAll", **keys})
    hub.lead(target=epoch, published=epoch, granting=True)
    hub.now += HOLD
    alive(hub, epoch)
    hub.round()
    return hub


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
        alive(hub, hub.hub.target)
        hub.step(ev.Tick())


def test_published_first_then_wiped_once_then_engines_remove_what_was_being_read() -> None:
    hub = led()
    publish(hub, 1)
    assert hub.stores == [ev.RemoveAll(1)]
    assert hub.of(Reclaim) == []
    hub.step(ev.Done(ev.RemoveAll(1), ok=True, removed=(7, 700)))
    later(hub, 20.0)
    assert hub.stores == [ev.RemoveAll(1)], "what was made since the publication is there by now"
    assert hub.of(Reclaim)[0].below == 1
    snapshot = hub.hub.snapshot(hub.now)
    assert (snapshot.reclaimed_keys, snapshot.reclaimed_bytes, snapshot.wipe_failed) == (7, 700, False)


def test_an_epoch_is_published_and_granted_whatever_becomes_of_the_wipe_before() -> None:
    hub = led()
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


def test_a_wipe_that_fails_is_tried_again_until_it_works() -> None:
    hub = led()
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
def test_a_wipe_is_given_up_and_engines_remove_the_keys(how: str) -> None:
    hub = led()
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


def test_a_pool_that_was_never_granted_for_has_nothing_to_wipe() -> None:
    hub = Driver(reclaim="RemoveAll")
    hub.lead()
    hub.ask(1)
    hub.round()
    hub.step(ev.Tick())
    assert hub.published == [1]
    assert hub.stores == []


def test_a_new_leader_wipes_only_what_it_sees_published() -> None:
    """What the hub before has wiped or not it cannot know; engines remove those keys one by one."""
    hub = led()
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


def test_another_policy_ends_it() -> None:
    hub = led()
    publish(hub, 1)
    hub.step(ev.Done(ev.RemoveAll(1), ok=False))
    hub.step(ev.Configured(config(reclaim="Delete")))
    later(hub, 10.0)
    assert hub.stores == [ev.RemoveAll(1)]
    assert hub.of(Reclaim)[-1].below == 1
    hub.step(ev.Configured(config(reclaim="Retain")))
    hub.sent.clear()
    publish(hub, 2)
    later(hub, 2 * LEASE)
    assert hub.stores == [ev.RemoveAll(1)]
    assert hub.of(Reclaim) == []
