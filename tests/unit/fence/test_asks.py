"""Who asked for an epoch, when, and for which weights: moments, repetitions, holds, proposals, a record that fell."""

from __future__ import annotations

import pytest

from epochkv_fence import hub_events as ev
from epochkv_fence.asks import asked_at
from epochkv_fence.authority import Origin, PoolRecord, Term
from epochkv_fence.messages import MAX_EPOCH, Bump, BumpStatus, Error, Mode, Moment, Propose, Refusal, Source, decode, encode
from tests.unit.fence.helpers import HOLD, INSTANCE, Driver, boot

OTHER = b"hub-in-b"


def pool(**keys: object) -> Driver:
    hub = Driver(**keys)
    hub.lead(granting=True)
    hub.now += HOLD
    return hub


def modes(hub: Driver) -> dict[int, Mode]:
    return {grant.boot[0]: grant.mode for grant in hub.round()}


# --------------------------------------------------------------------------------------------------------------- moments


@pytest.mark.parametrize(
    ("moment", "ago", "expected"),
    [
        (Moment(INSTANCE, 900.0), 0.0, 900.0),
        (Moment(INSTANCE, 900.0), 10.0, 885.0),  # the asker's clock may be slow by half
        (Moment(INSTANCE, 1000.0), 0.0, 1000.0),
        (Moment(INSTANCE, 1000.5), 0.0, None),  # has not been yet
        (Moment(OTHER, 900.0), 0.0, None),
        (None, 0.0, None),
    ],
)
def test_what_a_moment_proves(moment: Moment | None, ago: float, expected: float | None) -> None:
    assert asked_at(moment, INSTANCE, ago, 1.5, 1000.0) == expected


def test_a_hub_that_gives_no_moments_takes_none() -> None:
    assert asked_at(Moment(INSTANCE, 900.0), None, 0.0, 1.5, 1000.0) is None


def test_every_grant_and_answer_carries_the_moment_it_was_made() -> None:
    hub = pool()
    hub.beat(1)
    (grant,) = hub.round()
    assert grant.moment == Moment(INSTANCE, hub.now)
    hub.hear(Bump(1, 1))
    assert hub.of(BumpStatus)[-1].moment == Moment(INSTANCE, hub.now)


def test_an_ask_that_arrives_late_counts_as_made_at_its_moment() -> None:
    hub = pool()
    moment = hub.moment()
    hub.beat(1, age=100.0)
    hub.now += 500.0
    hub.beat(1, age=600.0)
    hub.beat(2, age=300.0)  # started after the ask was made, and old enough by now
    hub.hear(Bump(1, 1, moment=moment))
    assert modes(hub) == {1: Mode.USE, 2: Mode.BYPASS}


def test_what_lies_between_ask_and_moment_is_taken_off_by_the_slowest_clock() -> None:
    hub = pool()  # margin 3 s of 30 s: 1.1
    hub.beat(1, age=1.1 * 165.9)
    hub.beat(2, age=1.1 * 166.1)
    hub.hear(Bump(1, 1, moment=hub.moment(), ago_seconds=96.37))  # 106.0 s at most; 60 s older than that: 166.0
    assert modes(hub) == {1: Mode.BYPASS, 2: Mode.USE}


def test_without_a_moment_of_this_hub_no_age_proves_anything() -> None:
    for moment in (None, Moment(OTHER, 5.0), Moment(INSTANCE, 1e12)):
        hub = pool()
        hub.beat(1, age=10_000.0)
        hub.hear(Bump(1, 1, moment=moment))
        assert modes(hub) == {1: Mode.BYPASS}


@pytest.mark.parametrize("recorded", [False, True])
def test_the_repetition_with_a_moment_of_this_hub_proves_when_it_was(recorded: bool) -> None:
    """The first one carried the moment of a hub that is gone; it may be recorded before the repetition comes, or not."""
    hub = pool()
    hub.hold_writes = True
    hub.beat(1, age=100.0)
    hub.beat(2, age=55.0)
    hub.hear(Bump(77, 1, moment=Moment(OTHER, 5.0)))
    if recorded:
        hub.step(ev.Recorded(1))
    moment = hub.of(BumpStatus)[-1].moment
    hub.hear(Bump(77, 1, moment=moment, ago_seconds=0.5))
    if not recorded:
        hub.step(ev.Recorded(1))
    assert modes(hub) == {1: Mode.USE, 2: Mode.BYPASS}


@pytest.mark.parametrize("recorded", [False, True])
def test_another_request_for_the_same_epoch_proves_nothing_about_the_first(recorded: bool) -> None:
    hub = pool()
    hub.hold_writes = True
    hub.hear(Bump(77, 1))
    if recorded:
        hub.step(ev.Recorded(1))
    hub.now += 1000.0
    hub.beat(1, age=900.0)  # started after the first one
    hub.hear(Bump(78, 1, moment=hub.moment()))
    hub.ask(1)
    if not recorded:
        hub.step(ev.Recorded(1))
    assert modes(hub) == {1: Mode.BYPASS}


def test_a_repetition_opens_no_gate_that_a_list_has_closed() -> None:
    hub = pool()
    hub.beat(1, age=10_000.0)
    hub.hear(Bump(77, 1))
    hub.hear(Bump(78, 1, []))
    hub.hear(Bump(77, 1, moment=hub.moment()))
    assert modes(hub) == {1: Mode.BYPASS}


def test_an_epoch_found_recorded_is_not_dated_by_a_repetition() -> None:
    hub = Driver()
    hub.lead(target=1, granting=True)
    hub.beat(1, age=10_000.0)
    hub.hear(Bump(77, 1, moment=hub.moment()))
    assert modes(hub) == {1: Mode.BYPASS}


# ------------------------------------------------------------------------------------------------------------- proposals


def test_a_proposal_counts_as_made_when_the_caches_were_reset() -> None:
    hub = pool()
    moment = hub.moment()
    hub.beat(1, age=100.0)
    hub.now += 500.0
    hub.beat(1, age=600.0)
    hub.beat(2, age=300.0)
    hub.hear(Propose(boot(1), 1, moment))
    assert modes(hub) == {1: Mode.USE, 2: Mode.BYPASS}


@pytest.mark.parametrize("moment", [None, Moment(OTHER, 5.0)])
def test_a_proposal_without_a_moment_of_this_hub_lets_nobody_join(moment: Moment | None) -> None:
    hub = pool()
    hub.beat(1, age=10_000.0)
    hub.hear(Propose(boot(1), 1, moment))
    assert hub.hub.target == 1
    assert modes(hub) == {1: Mode.BYPASS}


def test_of_many_proposals_the_first_one_dates_the_epoch() -> None:
    hub = pool()
    hub.beat(1, age=100.0)
    hub.beat(2, age=61.0)
    hub.hold_writes = True
    hub.hear(Propose(boot(1), 1, hub.moment()))
    hub.now += 1.0
    hub.hear(Propose(boot(2), 1))
    hub.step(ev.Recorded(1))
    hub.hear(Propose(boot(2), 1))
    assert hub.kinds() == [("Record", 1)]
    assert hub.hub.snapshot(hub.now).origin == Origin(Source.ENGINE)
    assert modes(hub) == {1: Mode.USE, 2: Mode.BYPASS}  # 61 s by a clock that may be 10 % fast: 55


def test_no_epoch_is_left_after_the_last() -> None:
    hub = pool()
    hub.ask(MAX_EPOCH)
    assert hub.hub.target == MAX_EPOCH
    hub.ask(MAX_EPOCH + 1)
    hub.step(ev.Asked(-1, None))
    assert hub.kinds() == [("Record", MAX_EPOCH)]
    assert hub.hub.snapshot(hub.now).asked == MAX_EPOCH


# ----------------------------------------------------------------------------------------------------------------- holds


def test_weights_that_are_not_ready_are_held_until_their_owner_says_so() -> None:
    hub = pool()
    hub.beat(1, age=100.0)
    hub.beat(2, age=10.0)
    hub.ask(1, version="v2", ready=False)
    assert modes(hub) == {1: Mode.BYPASS, 2: Mode.BYPASS}
    snapshot = hub.hub.snapshot(hub.now)
    assert (snapshot.held, snapshot.weights_version, snapshot.origin) == (True, "v2", Origin(Source.SPEC, "v2"))
    hub.now += 1000.0
    hub.ask(1, version="v2", ready=False)  # nothing new
    hub.beat(1, age=1100.0, epoch=1, mode=Mode.BYPASS)
    hub.beat(2, age=1010.0, epoch=1, mode=Mode.BYPASS)
    assert modes(hub) == {1: Mode.BYPASS, 2: Mode.BYPASS}
    assert hub.published == [1]
    assert [view.boot for view in hub.hub.snapshot(hub.now).weights_pending] == [boot(1), boot(2)]
    hub.ask(1, version="v2", ready=True)
    assert not hub.hub.snapshot(hub.now).held
    assert hub.nudged()[-1:] == [boot(1)]  # the one that may use it, and does not know it
    hub.beat(1, age=1100.0, epoch=1, mode=Mode.BYPASS)
    hub.beat(2, age=1010.0, epoch=1, mode=Mode.BYPASS)
    assert modes(hub) == {1: Mode.USE, 2: Mode.BYPASS}  # by their age when it was first asked for


def test_ready_before_it_is_recorded_opens_it_too() -> None:
    hub = pool()
    hub.hold_writes = True
    hub.beat(1, age=100.0)
    hub.ask(1, version="v2", ready=False)
    hub.ask(1, version="v2", ready=True)
    hub.step(ev.Recorded(1))
    assert modes(hub) == {1: Mode.USE}


def test_a_hold_of_an_epoch_that_was_superseded_holds_nothing() -> None:
    hub = pool()
    hub.beat(1, age=100.0)
    hub.ask(1, version="v2", ready=False)
    hub.ask(2, version="v3")
    assert modes(hub) == {1: Mode.USE}
    hub.ask(1, version="v2", ready=True)  # late
    assert hub.hub.target == 2
    assert hub.hub.snapshot(hub.now).weights_version == "v3"


def test_an_ask_that_is_superseded_while_it_is_held_and_unrecorded_is_forgotten() -> None:
    hub = pool()
    hub.hold_writes = True
    hub.beat(1, age=100.0)
    hub.ask(1, version="v2", ready=False)
    hub.ask(2, version="v3", ready=False)
    hub.step(ev.Recorded(1))
    assert modes(hub) == {1: Mode.BYPASS}
    hub.step(ev.Recorded(2))
    hub.ask(1, version="v2", ready=True)
    hub.beat(1, age=100.0)
    assert modes(hub) == {1: Mode.BYPASS}


def test_nobody_else_releases_a_hold() -> None:
    hub = pool()
    hub.beat(1, age=100.0)
    hub.ask(1, version="v2", ready=False)
    hub.hear(Bump(5, 1, moment=hub.moment()))
    hub.hear(Propose(boot(1), 1, hub.moment()))
    assert modes(hub) == {1: Mode.BYPASS}


def test_ready_opens_no_gate_that_a_list_has_closed() -> None:
    hub = pool()
    hub.beat(1, age=100.0)
    hub.beat(2, age=100.0)
    hub.ask(1, version="v2", ready=False)
    hub.hear(Bump(5, 1, [boot(2)], weights_version="v2"))
    assert not hub.hub.snapshot(hub.now).held
    hub.ask(1, version="v2", ready=True)
    assert modes(hub) == {1: Mode.BYPASS, 2: Mode.USE}


def test_a_hold_heard_before_leadership_is_remembered() -> None:
    hub = Driver()
    hub.beat(1, age=100.0)
    hub.ask(1, version="v2", ready=False)
    hub.lead(granting=True)
    assert modes(hub) == {1: Mode.BYPASS}
    hub.ask(1, version="v2")
    hub.beat(1, age=100.0)
    assert modes(hub) == {1: Mode.USE}


@pytest.mark.parametrize("asked", ["before leadership", "since"])
def test_a_hold_of_an_epoch_that_is_found_recorded_holds(asked: str) -> None:
    hub = Driver()
    if asked == "before leadership":
        hub.ask(1, fresh=False, version="v2", ready=False)
    hub.step(ev.Acquired(Term("h", 1), PoolRecord(1, 1, True, Origin(Source.SPEC, "v2"))))
    if asked == "since":
        hub.ask(1, fresh=False, version="v2", ready=False)
    hub.beat(1, 1, Mode.BYPASS)
    hub.hear(Bump(5, 2, moment=hub.moment()))  # a plain reset does not end it
    assert hub.hub.target == 2
    assert modes(hub) == {1: Mode.BYPASS}


# --------------------------------------------------------------------------------------------------------------- origins


def test_the_record_names_who_asked_and_for_which_weights() -> None:
    hub = pool()
    hub.hear(Propose(boot(1), 1))
    hub.ask(2, version="v1")
    hub.hear(Bump(1, 3, [boot(1)], weights_version="v2"))
    hub.beat(1)
    hub.hear(Propose(boot(1), 4))
    origins = [action.origin for action in hub.writes if isinstance(action, ev.Record)]
    assert origins == [
        Origin(Source.ENGINE, listed=None),  # as of the epoch before
        Origin(Source.SPEC, "v1", listed=False),
        Origin(Source.TRAINER, "v2", listed=True),
        Origin(Source.ENGINE, "v2", listed=None),
    ]


def test_a_record_written_again_keeps_its_origin() -> None:
    hub = pool()
    hub.hold_writes = True
    hub.hear(Bump(1, 1, weights_version="v1"))
    hub.step(ev.Recorded(1))
    hub.step(ev.PublishFailed(1))
    hub.now += 1.0
    hub.step(ev.Tick())
    assert hub.writes[-1] == ev.Record(1, Origin(Source.TRAINER, "v1"))


@pytest.mark.parametrize("how", ["acquired", "observed", "observed after our own record"])
def test_the_origin_on_record_counts(how: str) -> None:
    found = PoolRecord(4, 0, True, Origin(Source.TRAINER, "v4"))
    hub = Driver()
    if how == "acquired":
        hub.step(ev.Acquired(Term("h", 1), found))
    else:
        hub.lead(granting=True)
        if how != "observed":
            hub.ask(4, version="mine")  # another hub's Record of the same epoch landed first
        hub.step(ev.Observed(found))
    snapshot = hub.hub.snapshot(hub.now)
    assert (snapshot.origin, snapshot.weights_version) == (Origin(Source.TRAINER, "v4"), "v4")


# -------------------------------------------------------------------------------------------------------- a record that fell


def test_an_epoch_above_the_record_is_recorded_again() -> None:
    hub = pool()
    hub.beat(1, epoch=9, age=10_000.0)
    assert hub.writes == [ev.Record(9, Origin(Source.ENGINE, listed=None))]
    hub.beat(2, epoch=0, age=10_000.0)
    assert modes(hub) == {1: Mode.USE, 2: Mode.BYPASS}  # who has it keeps it, and no age proves anything


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
    assert hub.kinds() == [("Record", 9)]
    hub = Driver()
    hub.beat(1, epoch=9)
    hub.lead(target=9, published=9, granting=True)
    assert hub.kinds() == []


# ------------------------------------------------------------------------------------------------------------- what is told


def test_a_sum_that_no_message_can_carry_is_cut() -> None:
    hub = pool()
    for number in (1, 2, 3):
        hub.beat(number, carried=2**63 - 1)
    hub.hear(Bump(1, 1))
    answer = hub.of(BumpStatus)[-1]
    assert decode(encode(answer)) == answer
    assert answer.carried == hub.hub.snapshot(hub.now).carried == 2**63 - 1


# ------------------------------------------------------------------------------------------------------- not yet leading


def test_a_bump_is_remembered_by_a_hub_that_does_not_lead_and_answered_when_it_does() -> None:
    hub = Driver()
    hub.beat(1, age=100.0)
    hub.hear(Bump(7, 3, moment=hub.moment()))
    ((_, answer),) = hub.sent
    assert isinstance(answer, Error)
    assert answer.code is Refusal.NOT_LEADING
    hub.lead(target=2, published=2, granting=True)
    assert hub.hub.target == 3
    assert modes(hub) == {1: Mode.USE}


# ------------------------------------------------------------------------------------------------------------ what is told


def test_a_target_is_told_only_when_a_later_read_shows_that_we_lead() -> None:
    hub = pool()
    hub.hold_writes = True
    hub.beat(1, age=100.0)
    before_the_record = hub.begin()
    hub.hear(Bump(7, 1, []))
    assert [answer.target for answer in hub.of(BumpStatus)] == [0]
    hub.step(ev.Recorded(1))
    hub.hear(Bump(7, 1, []))
    assert len(hub.of(BumpStatus)) == 1, "whether another hub leads meanwhile, and never heard of it, nobody knows"
    hub.step(ev.RoundVerified(before_the_record))
    assert len(hub.of(BumpStatus)) == 1, "that read may have been answered before the record was written"
    assert hub.hub.round_at(hub.now) <= hub.now + 0.05
    hub.step(ev.RoundVerified(hub.begin()))
    assert [answer.target for answer in hub.of(BumpStatus)] == [0, 1]
    hub.hear(Bump(8, 2, []))
    assert [answer.target for answer in hub.of(BumpStatus)] == [0, 1, 1], "known from now on"


def test_a_target_that_was_read_with_leadership_is_told_at_once() -> None:
    hub = Driver()
    hub.lead(target=4, published=3, granting=True)
    hub.hear(Bump(7, 4, []))
    assert [answer.target for answer in hub.of(BumpStatus)] == [4]


def test_nobody_who_waits_and_no_read_for_a_target() -> None:
    hub = pool()
    hub.ask(1)
    hub.round()
    assert hub.hub.published == 1
    hub.ask(2)
    hub.step(ev.Published(2))
    assert hub.hub.round_at(hub.now) == float("inf")
