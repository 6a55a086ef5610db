"""The hub's rules about those it talks to: instances that fall behind, leave or die, proposals, trainers. L = 30 s, margin 3 s."""

import pytest

from epochkv_fence.hub.record import MAX_INSTANCES, NUDGE_SECONDS, NUDGES_PER_SECOND
from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.messages import Bump, BumpStatus, Error, Heartbeat, Leave, Propose, Refusal
from tests.unit.fence.helpers import HOLD, Driver, instance, led


# ----------------------------------------------------------------------------------------------------- nudges, dead instances
def test_nudges_go_to_those_behind_at_record_and_every_quarter_second() -> None:
    hub = led()
    hub.step(ev.Tick())
    hub.ask(1)
    assert hub.nudged() == [instance(1), instance(2)]
    hub.beat(1, epoch=1)
    hub.now += 0.24
    assert hub.hub.tick_at() == pytest.approx(hub.now + 0.01, abs=1e-6)
    hub.now += 0.01
    hub.step(ev.Tick())
    assert hub.nudged() == [instance(1), instance(2), instance(2)]
    hub.beat(2, epoch=1)
    hub.round()
    hub.now += 1.0
    hub.step(ev.Tick())
    assert len(hub.nudged()) == 3


def test_thousands_that_are_behind_are_nudged_no_faster_than_they_can_answer(hub: Driver) -> None:
    for number in range(5000):
        hub.hear(Heartbeat(number.to_bytes(16, "big"), 0))
    assert len(hub.round()) == 5000
    hub.ask(1)
    assert len(hub.nudged()) == 5000
    asked = hub.now
    while hub.hub.tick_at() > hub.now or not hub.step(ev.Tick()):
        hub.now += 0.01
        assert hub.now < asked + 10.0
    assert hub.now - asked >= 5000 / NUDGES_PER_SECOND - 0.01 > NUDGE_SECONDS


def test_nobody_waits_for_an_instance_that_has_left(hub: Driver) -> None:
    hub.now += HOLD
    for number in (1, 2):
        hub.beat(number)
    hub.round()
    hub.ask(1)
    hub.beat(2, epoch=1)
    hub.round()
    assert hub.published == [], "instance 1 has a lease below"
    hub.hear(Leave(instance(1)), b"peer1")
    hub.round()
    assert hub.published == [1]
    assert [view.instance for view in hub.hub.snapshot(hub.now).engines] == [instance(2)]


def test_a_heartbeat_that_comes_after_its_instance_has_left_brings_nobody_back(hub: Driver) -> None:
    hub.beat(1)
    hub.hear(Leave(instance(1)), b"peer1")
    hub.beat(1)
    assert hub.round() == []
    assert hub.hub.state.instances.known == {}


def test_an_engine_of_another_pool_does_not_count() -> None:
    """It was given the keys of the pool that took its pool's name, and stands at an epoch of its own."""
    hub = led()
    hub.beat(3, epoch=7, pool="uid-of-a-deleted-namesake")
    assert hub.round() == []
    assert instance(3) not in hub.hub.state.instances.known
    (refused,) = hub.of(Error)
    assert refused.code is Refusal.POOL
    assert "uid-of-a-deleted-namesake" in refused.text
    assert hub.published == []
    hub.ask(1)
    for number in (1, 2):
        hub.beat(number, epoch=1, pool="uid")
    hub.round()
    assert hub.published == [1], "its epoch raised no target, and nobody waits for it"


def test_what_is_remembered_of_those_who_left_is_bounded(hub: Driver) -> None:
    for number in range(MAX_INSTANCES + 5):
        hub.hear(Leave(number.to_bytes(16, "big")))
    assert len(hub.hub.state.instances.departed) == MAX_INSTANCES


def test_dead_instances_are_forgotten_after_lease_and_margin_of_silence() -> None:
    hub = led()
    hub.now += HOLD - 1
    hub.beat(2, epoch=0)
    hub.now += 2
    hub.step(ev.Tick())
    assert [view.instance for view in hub.hub.snapshot(hub.now).engines] == [instance(2)]
    assert instance(1) not in {grant.instance for grant in hub.round()}


def test_the_number_of_instances_is_limited() -> None:
    hub = Driver()
    for number in range(MAX_INSTANCES):
        hub.hub.step(ev.Heard(b"p", Heartbeat(number.to_bytes(16, "big"), 0)), hub.now)
    hub.step(ev.Heard(b"p", Heartbeat(b"\xff" * 16, 0)))
    ((_, error),) = hub.sent
    assert isinstance(error, Error)
    assert error.code is Refusal.LIMIT


# ------------------------------------------------------------------------------------------- proposals, trainers, status
def test_many_proposals_for_one_epoch_cause_one_bump() -> None:
    hub = led(epoch=4)
    for number in (1, 2, 1):
        hub.step(ev.Heard(b"p", Propose(instance(number), 5)))
    assert hub.kinds() == [("RecordTarget", 5)]
    hub.step(ev.Heard(b"p", Propose(instance(2), 5)))  # made at 4, arrives at 5
    hub.step(ev.Heard(b"p", Propose(instance(2), 9)))  # not the next one
    assert hub.kinds() == [("RecordTarget", 5)]


def test_a_trainer_bumps_repeats_itself_and_hears_of_the_publication() -> None:
    hub = led()
    for _ in range(2):
        hub.step(ev.Heard(b"trainer", Bump(request=9, epoch=1)))
    assert hub.kinds() == [("RecordTarget", 1)]
    hub.beat(1, epoch=1, old_epoch_requests=2)
    hub.beat(2, epoch=1)
    hub.round()
    answers = hub.of(BumpStatus)
    assert [(a.request, a.epoch, a.target, a.published) for a in answers] == [(9, 1, 0, 0), (9, 1, 1, 0), (9, 1, 1, 1)]
    assert (answers[-1].engines, answers[-1].laggards, answers[-1].old_epoch_requests) == (2, 0, 2)


def test_the_snapshot_names_laggards_and_carried_requests() -> None:
    hub = led()
    hub.ask(1)
    hub.now += 2.0
    hub.beat(1, epoch=1, old_epoch_requests=3, pod="a", engine="rollout", rank=1, fingerprint="f", stats={"x": 1.0})
    snapshot = hub.hub.snapshot(hub.now)
    assert (snapshot.target, snapshot.published, snapshot.asked, snapshot.old_epoch_requests) == (1, 0, 1, 3)
    assert [view.instance for view in snapshot.laggards] == [instance(2)]
    assert not snapshot.converged
    view = next(view for view in snapshot.engines if view.instance == instance(1))
    assert (view.pod, view.engine, view.rank, view.epoch, view.converged) == ("a", "rollout", 1, 1, True)
    assert view.stats == {"x": 1.0}
    hub.beat(2, epoch=1)
    hub.round()
    snapshot = hub.hub.snapshot(hub.now)
    assert snapshot.converged
    assert snapshot.reset_seconds == pytest.approx(2.0)
