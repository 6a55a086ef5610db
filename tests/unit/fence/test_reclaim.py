"""Keys of older epochs are removed after publication: by an engine, or by the store when there is none. L = 30 s."""

import pytest

from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.messages import Reclaim, Reclaimed
from tests.unit.fence.helpers import HOLD, Driver, alive, config, instance, waited


def published(**keys: object) -> Driver:
    """Epoch 1 is published and instances 1 and 2 are at it."""
    hub = waited(**keys)
    hub.ask(1)
    alive(hub)
    hub.round()
    assert hub.published == [1]
    return hub


def asked(hub: Driver) -> Reclaim:
    """The next request to an engine, when it is due."""
    before = len(hub.of(Reclaim))
    alive(hub)
    hub.step(ev.Tick())
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
    hub.now += 10.0
    alive(hub)
    hub.step(ev.Tick())
    assert len(hub.of(Reclaim)) == 4


def test_a_pause_lies_between_two_requests() -> None:
    hub = published(reclaim_seconds=7.0)
    answer(hub, asked(hub), 3)
    hub.now += 6.9
    alive(hub)
    hub.step(ev.Tick())
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


def test_an_engine_behind_the_published_epoch_is_not_asked(hub: Driver) -> None:
    hub.now += HOLD
    hub.ask(1)
    hub.beat(1, epoch=0)
    hub.round()
    assert hub.published == [1]
    hub.step(ev.Tick())
    assert hub.of(Reclaim) == []


def left(hub: Driver) -> None:
    """All engines fall silent, for longer than a lease."""
    hub.now += 60.0
    hub.step(ev.Tick())


def test_without_engines_the_store_is_swept_until_it_is_empty_and_once_more() -> None:
    hub = published(store_admin=True)
    left(hub)
    assert hub.stores == []
    hub.now += HOLD
    hub.step(ev.Tick())
    assert hub.stores == [ev.RemoveAll(1, sweep=True)]
    hub.now += 60.0
    hub.step(ev.Tick())
    assert hub.stores == [ev.RemoveAll(1, sweep=True)]  # until it answers
    hub.step(ev.Done(ev.RemoveAll(1, sweep=True), ok=True, removed=(40, 4000)))
    assert hub.hub.snapshot(hub.now).reclaimed == 0
    for keys in (0, 0):
        hub.now += 10.0
        hub.step(ev.Tick())
        hub.step(ev.Done(ev.RemoveAll(1, sweep=True), ok=True, removed=(keys, None)))
    snapshot = hub.hub.snapshot(hub.now)
    assert (snapshot.reclaimed, snapshot.reclaimed_keys, snapshot.reclaimed_bytes) == (1, 40, 4000)
    hub.now += 60.0
    hub.step(ev.Tick())
    assert hub.stores == [ev.RemoveAll(1, sweep=True)] * 3


def test_a_sweep_that_fails_is_asked_for_again() -> None:
    hub = published(store_admin=True)
    left(hub)
    hub.now += HOLD
    hub.step(ev.Tick())
    hub.step(ev.Done(ev.RemoveAll(1, sweep=True), ok=False))
    hub.now += 10.0
    hub.step(ev.Tick())
    assert hub.stores == [ev.RemoveAll(1, sweep=True)] * 2


@pytest.mark.parametrize("keys", [{"store_admin": False}, {"store_admin": True, "reclaim": "Retain"}])
def test_a_store_that_is_not_the_pools_alone_or_is_to_keep_its_keys_is_not_swept(keys: dict[str, object]) -> None:
    hub = published(**keys)
    left(hub)
    hub.now += 10 * HOLD
    hub.step(ev.Tick())
    assert hub.stores == []


def test_while_an_engine_is_there_the_store_is_not_swept() -> None:
    hub = published(store_admin=True)
    for _ in range(10):
        request = asked(hub)
        answer(hub, request, 1)
        hub.now += 10.0
    assert hub.stores == []


def test_retain_asks_nobody_until_the_policy_is_changed() -> None:
    hub = published(reclaim="Retain")
    hub.now += 10.0
    alive(hub)
    hub.step(ev.Tick())
    assert hub.of(Reclaim) == []
    hub.step(ev.Configured(config(reclaim="Delete")))
    request = asked(hub)
    hub.step(ev.Configured(config(reclaim="Retain")))
    answer(hub, request, 4)
    hub.now += 60.0
    alive(hub)
    hub.step(ev.Tick())
    assert len(hub.of(Reclaim)) == 1


# ---------------------------------------------------------------------- engines without a client of the store
def mixed(hub: Driver) -> None:
    """Instance 1 has no client of the store, instance 2 has one."""
    hub.beat(1, epoch=1, removes=False)
    hub.beat(2, epoch=1)


def test_an_engine_without_a_client_of_the_store_is_not_asked_beside_one_that_has_one() -> None:
    hub = published()
    for _ in range(3):
        mixed(hub)
        hub.step(ev.Tick())
        hub.now += 10.0
    assert {request.instance for request in hub.of(Reclaim)} == {instance(2)}


@pytest.mark.parametrize("admin", [False, True])
def test_where_no_engine_has_a_client_of_the_store_the_hub_sweeps_it_or_takes_their_word(admin: bool) -> None:
    hub = published(store_admin=admin)
    for _ in range(8):
        for number in (1, 2):
            hub.beat(number, epoch=1, removes=False)
        hub.step(ev.Tick())
        hub.now += 10.0
    assert hub.stores[:1] == ([ev.RemoveAll(1, sweep=True)] if admin else [])
    assert bool(hub.of(Reclaim)) == (not admin)
