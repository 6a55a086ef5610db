"""Who asked for an epoch, what trainers are told of it, and a record that fell."""

import pytest

from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.messages import MAX_EPOCH, Bump, BumpStatus, Error, Grant, Propose, Refusal, Source, decode, encode
from epochkv_fence.protocol.pool import PoolRecord, Term
from tests.unit.fence.helpers import HOLD, Driver, instance, waited


@pytest.fixture
def hub() -> Driver:
    return waited()


def epochs(hub: Driver) -> dict[int, int]:
    return {grant.instance[0]: grant.epoch for grant in hub.round()}


def test_of_many_proposals_the_first_one_counts(hub: Driver) -> None:
    hub.hold_writes = True
    hub.hear(Propose(instance(1), 1))
    hub.hear(Bump(1, 1))
    hub.hear(Propose(instance(2), 1))
    hub.step(ev.Done(ev.RecordTarget(1), ok=True))
    hub.hear(Propose(instance(2), 1))
    assert hub.kinds() == [("RecordTarget", 1)]
    assert hub.hub.snapshot(hub.now).origin == Source.ENGINE


def test_no_epoch_is_left_after_the_last(hub: Driver) -> None:
    hub.ask(MAX_EPOCH)
    assert hub.hub.target == MAX_EPOCH
    hub.ask(MAX_EPOCH + 1)
    hub.ask(-1)
    assert hub.kinds() == [("RecordTarget", MAX_EPOCH)]
    assert hub.hub.snapshot(hub.now).asked == MAX_EPOCH


# --------------------------------------------------------------------------------------------------------------- origins
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


# -------------------------------------------------------------------------------------------------------- a record that fell
def test_an_epoch_above_the_record_is_recorded_again(hub: Driver) -> None:
    hub.beat(1, epoch=9)
    assert hub.writes == [ev.RecordTarget(9, Source.ENGINE)]
    hub.beat(2, epoch=0)
    assert epochs(hub) == {1: 9, 2: 9}


def test_after_a_record_that_fell_older_grants_are_waited_for() -> None:
    hub = Driver()
    hub.lead(granting=False)  # rolled back to before its first grant
    found = hub.now
    hub.beat(1, epoch=9)
    hub.round()
    assert hub.published == []
    hub.now = found + HOLD - 0.1
    hub.beat(1, epoch=9)
    hub.round()
    assert hub.published == []
    hub.now = found + HOLD
    hub.round()
    assert hub.published == [9]


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


# ------------------------------------------------------------------------------------------------------------- what is told
def test_a_sum_that_no_message_can_carry_is_cut(hub: Driver) -> None:
    for number in (1, 2, 3):
        hub.beat(number, old_epoch_requests=2**63 - 1)
    hub.hear(Bump(1, 1))
    answer = hub.of(BumpStatus)[-1]
    assert decode(encode(answer)) == answer
    assert answer.old_epoch_requests == hub.hub.snapshot(hub.now).old_epoch_requests == 2**63 - 1


def test_a_bump_is_remembered_by_a_hub_that_does_not_lead_and_answered_when_it_does() -> None:
    hub = Driver()
    hub.beat(1)
    hub.hear(Bump(7, 3))
    ((_, answer),) = hub.sent
    assert isinstance(answer, Error)
    assert answer.code is Refusal.NOT_LEADING
    hub.lead(target=2, published=2, granting=True)
    assert hub.hub.target == 3
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
    hub.ask(1)
    hub.round()
    assert hub.hub.published == 1
    hub.ask(2)
    hub.step(ev.Done(ev.Publish(2), ok=True))
    assert hub.hub.round_at(hub.now) == float("inf")
