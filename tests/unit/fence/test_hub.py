"""The hub's rules, one by one, under a clock that the test moves. L = 30 s, margin 3 s."""

import pytest

from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.messages import Grant, Status
from epochkv_fence.protocol.pool import PoolConfig, PoolRecord, Term, margin_seconds
from tests.unit.fence.helpers import HOLD, LEASE, TERM, Driver, instance, led


@pytest.mark.parametrize(("lease", "margin"), [(4.0, 1.0), (10.0, 1.0), (30.0, 3.0), (300.0, 30.0)])
def test_margin_is_a_tenth_of_the_lease_and_at_least_a_second(lease: float, margin: float) -> None:
    assert margin_seconds(lease) == pytest.approx(margin)


# ---------------------------------------------------------------------------------------------------------------- rounds
def test_nothing_is_granted_before_the_record_is_read() -> None:
    hub = Driver()
    hub.beat(1)
    assert hub.hub.round_at(hub.now) == float("inf")
    assert hub.round() == []
    hub.lead(target=3, granting=True)
    (grant,) = hub.round()
    assert (grant.instance, grant.seq, grant.epoch, grant.lease_seconds) == (instance(1), 0, 3, LEASE)


def test_a_heartbeat_after_the_read_began_waits_for_the_next_round(hub: Driver) -> None:
    hub.beat(1)
    number = hub.begin()
    hub.beat(2)
    hub.step(ev.RoundVerified(number))
    assert [grant.instance for grant in hub.round()] == [instance(2)]


def test_a_round_for_a_question_alone_takes_no_heartbeat_that_comes_after_its_read(hub: Driver) -> None:
    hub.hear(Status(1))
    number = hub.begin()
    assert hub.hub.round_open
    hub.beat(1)
    hub.step(ev.RoundVerified(number))
    assert hub.of(Grant) == [], "another hub may have led, and published, between that read and the heartbeat"
    assert [grant.instance for grant in hub.round()] == [instance(1)]


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
    assert hub.hub.term == TERM
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
    hub.now += 1.0
    hub.step(ev.Tick())
    assert hub.writes == [ev.NoteGranting()] * 2
    hub.step(ev.Done(ev.NoteGranting(), ok=True))
    assert len(hub.round()) == 1


def test_rounds_come_once_a_second_and_at_once_while_a_reset_is_open(hub: Driver) -> None:
    hub.beat(1)
    assert hub.hub.round_at(hub.now) == hub.now
    hub.round()
    hub.now += 0.1
    hub.beat(1, epoch=0)
    assert hub.hub.round_at(hub.now) == pytest.approx(hub.now + 0.9)
    hub.ask(1)
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


def test_a_short_lease_has_quicker_rounds() -> None:
    hub = Driver(lease_seconds=1.0)
    hub.lead(granting=True)
    hub.beat(1)
    hub.round()
    hub.beat(1, epoch=0)
    assert hub.hub.round_at(hub.now) == pytest.approx(hub.now + 0.1, abs=1e-6)


def test_steady_state_asks_for_nothing(hub: Driver) -> None:
    hub.beat(1)
    hub.round()
    hub.beat(1, epoch=0)
    hub.round()
    sent = len(hub.sent)
    for _ in range(3):
        hub.now += 10.0
        hub.step(ev.Tick())
        assert hub.hub.round_at(hub.now) == float("inf")
        assert hub.hub.tick_at() > hub.now
    assert hub.writes == []
    assert len(hub.sent) == sent
    hub.now += 1000.0
    hub.step(ev.Tick())
    assert hub.hub.tick_at() == float("inf")  # nobody is left


# --------------------------------------------------------------------------------------------------------------- publish
def test_a_silent_engine_delays_by_lease_and_margin_after_its_last_older_grant() -> None:
    hub = led()
    granted = hub.now
    hub.ask(1)
    hub.beat(1, epoch=1)
    hub.now = granted + HOLD - 0.01
    hub.round()
    assert hub.published == []
    assert hub.hub.round_at(hub.now) == pytest.approx(granted + HOLD)
    hub.now = granted + HOLD
    hub.round()
    assert hub.published == [1]


def test_grants_of_the_target_never_delay() -> None:
    hub = led()
    granted = hub.now
    hub.ask(1)
    while hub.now < granted + HOLD:
        hub.now += 5.0
        hub.beat(1, epoch=0)
        hub.beat(2, epoch=0)
        hub.round()  # both get grants of 1 and never acknowledge
    assert hub.published == [1]


def test_a_new_leader_waits_for_the_grants_of_others() -> None:
    hub = Driver()
    hub.lead(target=1, published=0, granting=True)
    began = hub.now
    hub.beat(1, epoch=1)
    hub.now = began + HOLD - 0.01
    hub.round()
    assert hub.published == []
    hub.now = began + HOLD
    hub.round()
    assert hub.published == [1]


def test_a_late_heartbeat_never_lowers_what_was_heard() -> None:
    hub = led()
    hub.ask(1)
    hub.beat(1, epoch=1)
    hub.beat(2, epoch=1)
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
    hub.now = granted + 329.0
    hub.round()
    assert hub.published == []
    hub.now = granted + 330.0
    hub.round()
    assert hub.published == [1]


def test_a_publish_that_fails_is_tried_again_after_the_target_is_recorded_again() -> None:
    hub = led()
    hub.hold_writes = True
    hub.ask(1)
    hub.step(ev.Done(ev.RecordTarget(1), ok=True))
    hub.beat(1, epoch=1)
    hub.beat(2, epoch=1)
    hub.round()
    hub.step(ev.Done(ev.Publish(1), ok=False))
    hub.now += 1.0
    hub.step(ev.Tick())
    assert hub.kinds() == [("RecordTarget", 1), ("Publish", 1), ("RecordTarget", 1)]
    hub.step(ev.Done(ev.RecordTarget(1), ok=True))
    hub.round()
    assert hub.writes[-1] == ev.Publish(1)


# ---------------------------------------------------------------------------------------------------------------- record
def test_the_target_is_raised_only_once_it_is_durable_and_newer_asks_supersede() -> None:
    hub = Driver()
    hub.hold_writes = True
    hub.lead()
    hub.ask(1)
    hub.ask(2)
    hub.ask(3)
    assert hub.kinds() == [("RecordTarget", 1)]
    assert hub.hub.target == 0
    hub.step(ev.Done(ev.RecordTarget(1), ok=True))
    assert hub.hub.target == 1
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
    assert hub.hub.target == 7
    hub.now = granted + HOLD - 0.01
    hub.round()
    assert hub.published == []
    hub.step(ev.Observed(PoolRecord(target=3)))  # an old view changes nothing
    assert hub.hub.target == 7
