"""The hub's rules, one by one, under a clock that the test moves. L = 30 s, margin 3 s."""

import pytest

from epochkv_fence.hub.record import MAX_INSTANCES, NUDGE_SECONDS, NUDGES_PER_SECOND
from epochkv_fence.protocol import messages
from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.messages import MAX_EPOCH, Bump, BumpStatus, Error, Grant, Heartbeat, Leave, Propose, Refusal, Source, Status
from epochkv_fence.protocol.pool import PoolConfig, PoolRecord, Term, margin_seconds
from tests.unit.fence.helpers import HOLD, LEASE, TERM, Driver, alive, instance, led, publishes_at


@pytest.mark.parametrize(("lease", "margin"), [(4.0, 1.0), (10.0, 1.0), (30.0, 3.0), (300.0, 30.0)])
def test_margin_is_a_tenth_of_the_lease_and_at_least_a_second(lease: float, margin: float) -> None:
    assert margin_seconds(lease) == pytest.approx(margin)


def test_nothing_is_granted_before_the_record_is_read() -> None:
    hub = Driver()
    hub.beat(1)
    assert hub.hub.round_at(hub.now) == float("inf")
    assert hub.round() == []
    hub.lead(target=3, granting=True)
    (grant,) = hub.round()
    assert (grant.instance, grant.seq, grant.epoch, grant.lease_seconds) == (instance(1), 0, 3, LEASE)


@pytest.mark.parametrize("heartbeats", [1, 0], ids=["for a heartbeat", "for a question alone"])
def test_a_heartbeat_after_the_read_began_waits_for_the_next_round(heartbeats: int, hub: Driver) -> None:
    hub.hear(Status(1))
    for _ in range(heartbeats):
        hub.beat(1)
    number = hub.begin()
    assert hub.hub.round_open
    hub.beat(2)
    hub.step(ev.RoundVerified(number))
    assert len(hub.of(Grant)) == heartbeats, "another hub may have led, and published, between that read and the heartbeat"
    assert [grant.instance for grant in hub.round()] == [instance(2)]


def test_the_epoch_is_taken_after_the_read(hub: Driver) -> None:
    hub.beat(1)
    number = hub.begin()
    hub.ask(4)
    hub.step(ev.RoundVerified(number))
    assert hub.sent[-1][1].epoch == 4  # type: ignore[union-attr]


def test_a_read_without_an_answer_grants_nothing_and_loses_no_heartbeat(hub: Driver) -> None:
    seq = hub.beat(1)
    hub.step(ev.RoundDropped(hub.begin()))
    assert hub.sent == []
    assert hub.hub.state.lead.term == TERM
    assert [(grant.instance, grant.seq) for grant in hub.round()] == [(instance(1), seq)]


def test_a_change_of_term_discards_what_was_evaluated() -> None:
    hub = Driver()
    hub.lead()
    hub.ask(1)  # nobody is there, nobody was granted: it may be published
    number = hub.begin()
    hub.step(ev.SteppedDown())
    hub.lead(target=1, granting=True, term=Term("hub-a", 2))
    hub.step(ev.RoundVerified(number))
    assert hub.published == []
    assert hub.sent == []


def test_the_note_is_durable_before_a_round_collects() -> None:
    hub = Driver()
    hub.hold_writes = True
    hub.lead()
    hub.beat(1)
    assert hub.writes == [ev.NoteGranting()]
    assert hub.round() == []
    hub.step(ev.Done(ev.NoteGranting(), ok=False))
    hub.beat(2)
    assert hub.writes == [ev.NoteGranting()], "an authority that fails is not asked again with each heartbeat"
    hub.wait(1.0)
    assert hub.writes == [ev.NoteGranting()] * 2
    hub.step(ev.Done(ev.NoteGranting(), ok=True))
    assert len(hub.round()) == 2


def test_rounds_come_once_a_second_and_at_once_for_who_is_behind_in_a_reset(hub: Driver) -> None:
    hub.beat(1)
    hub.beat(2)
    assert hub.hub.round_at(hub.now) == hub.now
    hub.round()
    hub.now += 0.1
    hub.beat(1, epoch=0)
    assert hub.hub.round_at(hub.now) == pytest.approx(hub.now + 0.9)
    hub.ask(1)
    assert hub.hub.round_at(hub.now) == hub.now
    hub.beat(1, epoch=1)
    assert hub.hub.round_at(hub.now) == pytest.approx(hub.now + 0.9), "the other one is silent"
    hub.beat(2, epoch=0)
    assert hub.hub.round_at(hub.now) == hub.now


def test_who_has_no_live_lease_is_answered_within_50_ms(hub: Driver) -> None:
    hub.beat(1)
    hub.round()
    hub.now += 0.02
    hub.beat(2)
    assert hub.hub.round_at(hub.now) == pytest.approx(hub.now + 0.03)
    hub.now += HOLD - 0.03
    hub.beat(2)
    hub.round()
    hub.now += 0.02
    hub.beat(1, epoch=0)
    assert hub.hub.round_at(hub.now) == pytest.approx(hub.now + 0.03)


def test_steady_state_asks_for_nothing(hub: Driver) -> None:
    hub.beat(1)
    hub.round()
    hub.beat(1, epoch=0)
    hub.round()
    sent = len(hub.sent)
    for _ in range(3):
        hub.wait(10.0)
        assert hub.hub.round_at(hub.now) == float("inf")
        assert hub.hub.tick_at() > hub.now
    assert hub.writes == []
    assert len(hub.sent) == sent
    hub.wait(1000.0)
    assert hub.hub.tick_at() == float("inf")  # nobody is left


def test_a_silent_engine_delays_by_lease_and_margin_after_its_last_older_grant() -> None:
    hub = led()
    granted = hub.now
    hub.ask(1)
    hub.beat(1, epoch=1)
    hub.round()
    assert hub.hub.round_at(hub.now) == pytest.approx(granted + HOLD)
    publishes_at(hub, granted + HOLD)


def test_grants_of_the_target_never_delay() -> None:
    hub = led()
    granted = hub.now
    hub.ask(1)
    while hub.now < granted + HOLD:
        hub.now += 5.0
        alive(hub, 0)
        hub.round()  # both get grants of 1 and never acknowledge
    assert hub.published == [1]


def test_a_new_leader_waits_for_the_grants_of_others() -> None:
    hub = Driver()
    hub.lead(target=1, published=0, granting=True)
    began = hub.now
    hub.beat(1, epoch=1)
    publishes_at(hub, began + HOLD)


def test_a_late_heartbeat_never_lowers_what_was_heard() -> None:
    hub = led()
    hub.ask(1)
    alive(hub)
    hub.beat(1, epoch=0, seq=0)
    hub.round()
    assert hub.published == [1]
    assert {view.epoch for view in hub.hub.snapshot(hub.now).engines} == {1}


def test_a_longer_lease_holds_for_the_grants_made_under_it() -> None:
    hub = led()
    hub.step(ev.Configured(PoolConfig("uid", "ns/pool", (), lease_seconds=300.0)))
    hub.beat(1, epoch=0)
    hub.round()
    granted = hub.now
    hub.step(ev.Configured(PoolConfig("uid", "ns/pool", (), lease_seconds=30.0)))
    hub.ask(1)
    publishes_at(hub, granted + 330.0)


def test_a_publish_that_fails_is_tried_again_after_the_target_is_recorded_again() -> None:
    hub = led()
    hub.hold_writes = True
    hub.ask(1)
    hub.step(ev.Done(ev.RecordTarget(1), ok=True))
    alive(hub)
    hub.round()
    hub.step(ev.Done(ev.Publish(1), ok=False))
    hub.wait(1.0)
    assert hub.kinds() == [("RecordTarget", 1), ("Publish", 1), ("RecordTarget", 1)]
    hub.step(ev.Done(ev.RecordTarget(1), ok=True))
    hub.round()
    assert hub.writes[-1] == ev.Publish(1)


def test_the_target_is_raised_only_once_it_is_durable_and_newer_asks_supersede() -> None:
    hub = Driver()
    hub.hold_writes = True
    hub.lead()
    hub.ask(1)
    hub.ask(2)
    hub.ask(3)
    assert hub.kinds() == [("RecordTarget", 1)]
    assert hub.hub.state.record.target == 0
    hub.step(ev.Done(ev.RecordTarget(1), ok=True))
    assert hub.hub.state.record.target == 1
    assert hub.kinds() == [("RecordTarget", 1), ("RecordTarget", 3)]


def test_a_record_that_fails_is_tried_again() -> None:
    hub = Driver()
    hub.hold_writes = True
    hub.lead()
    hub.ask(1)
    hub.step(ev.Done(ev.RecordTarget(1), ok=False))
    due = hub.hub.tick_at()
    assert hub.now < due <= hub.now + 1.0
    hub.now = due
    hub.step(ev.Tick())
    assert hub.kinds() == [("RecordTarget", 1), ("RecordTarget", 1)]


def test_a_durable_target_above_the_own_raises_it_and_counts_older_grants() -> None:
    hub = led()
    granted = hub.now
    hub.step(ev.Observed(PoolRecord(target=7)))
    assert hub.hub.state.record.target == 7
    hub.now = granted + HOLD - 0.01
    hub.round()
    assert hub.published == []
    hub.step(ev.Observed(PoolRecord(target=3)))  # an old view changes nothing
    assert hub.hub.state.record.target == 7


def test_nudges_go_to_those_behind_at_record_and_every_quarter_second() -> None:
    hub = led()
    hub.step(ev.Tick())
    hub.ask(1)
    assert hub.nudged() == [instance(1), instance(2)]
    hub.beat(1, epoch=1)
    hub.now += 0.24
    assert hub.hub.tick_at() == pytest.approx(hub.now + 0.01, abs=1e-6)
    hub.wait(0.01)
    assert hub.nudged() == [instance(1), instance(2), instance(2)]
    hub.beat(2, epoch=1)
    hub.round()
    hub.wait(1.0)
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


def test_nobody_waits_for_an_instance_that_has_left() -> None:
    hub = led()
    hub.ask(1)
    hub.beat(2, epoch=1)
    hub.round()
    assert hub.published == [], "instance 1 has a lease below"
    hub.hear(Leave(instance(1)), b"peer1")
    hub.round()
    assert hub.published == [1]
    assert [view.instance for view in hub.hub.snapshot(hub.now).engines] == [instance(2)]
    hub.beat(1)
    assert hub.round() == [], "a late heartbeat brings nobody back"
    assert set(hub.hub.state.instances.known) == {instance(2)}


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
    hub.wait(2)
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


def test_many_proposals_for_one_epoch_cause_one_bump() -> None:
    hub = led(epoch=4)
    for number in (1, 2, 1):
        hub.step(ev.Heard(b"p", Propose(instance(number), 5)))
    assert hub.kinds() == [("RecordTarget", 5)]
    hub.step(ev.Heard(b"p", Propose(instance(2), 5)))  # made at 4, arrives at 5
    hub.step(ev.Heard(b"p", Propose(instance(2), 9)))  # not the next one
    assert hub.kinds() == [("RecordTarget", 5)]


def test_the_snapshot_names_laggards_and_carried_requests() -> None:
    hub = led()
    hub.ask(1)
    hub.now += 2.0
    hub.beat(1, epoch=1, old_epoch_requests=3, pod="a", engine="rollout", rank=1, fingerprint="f", stats={"x": 1.0})
    snapshot = hub.hub.snapshot(hub.now)
    assert (snapshot.target, snapshot.published, snapshot.asked, snapshot.old_epoch_requests) == (1, 0, 1, 3)
    assert [view.instance for view in snapshot.engines if not view.converged] == [instance(2)]
    assert not snapshot.converged
    view = next(view for view in snapshot.engines if view.instance == instance(1))
    assert (view.pod, view.engine, view.rank, view.epoch, view.converged) == ("a", "rollout", 1, 1, True)
    assert view.stats == {"x": 1.0}
    hub.beat(2, epoch=1)
    hub.round()
    snapshot = hub.hub.snapshot(hub.now)
    assert snapshot.converged
    assert snapshot.reset_seconds == pytest.approx(2.0)
    hub.ask(2)
    hub.hold_writes = True
    alive(hub, 2)
    hub.round()
    hub.ask(3)
    for write in (ev.RecordTarget(3), ev.Publish(2)):
        hub.step(ev.Done(write, ok=True))
    snapshot = hub.hub.snapshot(hub.now)
    assert (snapshot.target, snapshot.published, snapshot.reset_seconds) == (3, 2, None)  # that of 1 is no duration of 2


def test_no_epoch_is_left_after_the_last(hub: Driver) -> None:
    hub.ask(MAX_EPOCH)
    assert hub.hub.state.record.target == MAX_EPOCH
    hub.ask(MAX_EPOCH + 1)
    hub.ask(-1)
    assert hub.kinds() == [("RecordTarget", MAX_EPOCH)]
    assert hub.hub.snapshot(hub.now).asked == MAX_EPOCH


def test_one_message_cannot_use_up_all_epochs(hub: Driver) -> None:
    hub.now += HOLD
    hub.beat(1, epoch=MAX_EPOCH)
    for epoch in (MAX_EPOCH, 10**13, 2 * 10**13 + 1):
        hub.hear(Bump(1, epoch))
    hub.round()
    assert [error.code for error in hub.of(Error)] == [Refusal.LIMIT] * 2
    assert hub.kinds()[-2:] == [("RecordTarget", 10**13), ("Publish", 10**13)], "and nothing waits for such an engine"


def test_the_record_names_who_asked(hub: Driver) -> None:
    hub.hear(Propose(instance(1), 1))
    hub.ask(2)
    hub.hear(Bump(1, 3))
    origins = [action.origin for action in hub.writes if isinstance(action, ev.RecordTarget)]
    assert origins == [Source.ENGINE, Source.SPEC, Source.TRAINER]


@pytest.mark.parametrize("how", ["acquired", "observed", "observed after our own record"])
def test_the_origin_on_record_counts(how: str) -> None:
    found = PoolRecord(4, 0, True, Source.TRAINER)
    hub = Driver()
    if how == "acquired":
        hub.step(ev.Acquired(Term("h", 1), found))
    else:
        hub.lead(granting=True)
        if how != "observed":
            hub.ask(4)  # another hub's Record of the same epoch landed first
        hub.step(ev.Observed(found))
    assert hub.hub.snapshot(hub.now).origin == Source.TRAINER


def test_an_epoch_above_the_record_is_recorded_again(hub: Driver) -> None:
    hub.beat(1, epoch=9)
    assert hub.writes == [ev.RecordTarget(9, Source.ENGINE)]
    hub.beat(2, epoch=0)
    assert {grant.instance[0]: grant.epoch for grant in hub.round()} == {1: 9, 2: 9}


def test_after_a_record_that_fell_older_grants_are_waited_for() -> None:
    hub = Driver()
    hub.lead(granting=False)  # rolled back to before its first grant
    found = hub.now
    hub.beat(1, epoch=9)
    hub.round()
    assert hub.published == []
    hub.now = found + HOLD - 0.1
    hub.beat(1, epoch=9)
    publishes_at(hub, found + HOLD, 9)


def test_an_epoch_heard_before_leadership_is_compared_when_it_leads() -> None:
    hub = Driver()
    hub.beat(1, epoch=9)
    assert hub.writes == []
    hub.lead(target=5, published=5, granting=True)
    assert hub.kinds() == [("RecordTarget", 9)]
    hub = Driver()
    hub.beat(1, epoch=9)
    hub.lead(target=9, published=9, granting=True)
    assert hub.kinds() == []


def test_a_sum_that_no_message_can_carry_is_cut(hub: Driver) -> None:
    for number in (1, 2, 3):
        hub.beat(number, old_epoch_requests=2**63 - 1)
    hub.hear(Bump(1, 1))
    answer = hub.of(BumpStatus)[-1]
    assert messages.decode(messages.encode(answer)) == answer
    assert answer.old_epoch_requests == hub.hub.snapshot(hub.now).old_epoch_requests == 2**63 - 1


def test_a_bump_is_remembered_by_a_hub_that_does_not_lead_and_answered_when_it_does() -> None:
    hub = Driver()
    hub.beat(1)
    hub.hear(Bump(7, 3))
    ((_, answer),) = hub.sent
    assert isinstance(answer, Error)
    assert answer.code is Refusal.NOT_LEADING
    hub.lead(target=2, published=2, granting=True)
    assert hub.hub.state.record.target == 3
    hub.round()
    assert [(grant.instance, grant.epoch) for grant in hub.of(Grant)] == [(instance(1), 3)]
    assert [answer.target for answer in hub.of(BumpStatus)] == [3]


def test_a_target_is_told_only_when_a_later_read_shows_that_we_lead(hub: Driver) -> None:
    hub.hold_writes = True
    hub.beat(1)
    before_the_record = hub.begin()
    hub.hear(Bump(7, 1))
    assert [answer.target for answer in hub.of(BumpStatus)] == [0]
    hub.step(ev.Done(ev.RecordTarget(1), ok=True))
    hub.hear(Bump(7, 1))
    assert len(hub.of(BumpStatus)) == 1, "whether another hub leads meanwhile, and never heard of it, nobody knows"
    hub.step(ev.RoundVerified(before_the_record))
    assert len(hub.of(BumpStatus)) == 1, "that read may have been answered before the record was written"
    assert hub.hub.round_at(hub.now) <= hub.now + 0.05
    hub.step(ev.RoundVerified(hub.begin()))
    assert [answer.target for answer in hub.of(BumpStatus)] == [0, 1]
    hub.hear(Bump(8, 2))
    assert [answer.target for answer in hub.of(BumpStatus)] == [0, 1, 1], "known from now on"


def test_nobody_who_waits_and_no_read_for_a_target(hub: Driver) -> None:
    hub.now += HOLD
    hub.ask(1)
    hub.round()
    assert hub.hub.state.record.published == 1
    hub.ask(2)
    hub.step(ev.Done(ev.Publish(2), ok=True))
    assert hub.hub.round_at(hub.now) == float("inf")
