"""Who may use an epoch: the table of the design page "fence", section 5, line by line."""

from __future__ import annotations

import pytest

from epochkv_fence import hub_events as ev
from epochkv_fence.authority import Origin, PoolRecord
from epochkv_fence.messages import Bump, BumpStatus, Mode, Source
from tests.unit.fence.helpers import HOLD, TERM, Driver, boot


def pool(**config: object) -> Driver:
    hub = Driver(**config)
    hub.lead(granting=True)
    return hub


def modes(hub: Driver) -> dict[int, Mode]:
    return {grant.boot[0]: grant.mode for grant in hub.round()}


def test_weights_that_are_never_pushed_are_always_there() -> None:
    hub = pool(weights_source="Model")
    hub.ask(3)
    hub.beat(1, age=0.1)
    assert modes(hub) == {1: Mode.USE}


def test_everyone_has_the_base_weights() -> None:
    hub = pool()
    hub.beat(1, age=0.1)
    assert modes(hub) == {1: Mode.USE}


def test_only_boots_old_enough_when_it_was_asked_for_join() -> None:
    hub = pool()
    hub.beat(1, age=70.0)
    hub.beat(2, age=50.0)
    hub.ask(1)
    hub.now += 1000.0  # getting older later does not help
    hub.beat(1, age=1070.0)
    hub.beat(2, age=1050.0)
    hub.beat(3, age=900.0)  # first heard of later; started after the ask
    hub.beat(4, age=1200.0)  # first heard of later; 200 s old at the ask, by a clock that may be 10 % fast: 90 s
    assert modes(hub) == {1: Mode.USE, 2: Mode.BYPASS, 3: Mode.BYPASS, 4: Mode.USE}


def test_a_fast_clock_does_not_let_a_young_boot_join() -> None:
    hub = pool()
    hub.ask(1)
    asked = hub.now
    hub.now = asked + 990.0
    hub.beat(1, age=1.09 * (990.0 - 5.0))  # started 5 s after the ask, its clock runs 9 % fast
    assert modes(hub) == {1: Mode.BYPASS}


def test_a_late_heartbeat_makes_a_boot_younger_never_older() -> None:
    hub = pool()
    hub.beat(1, age=200.0)
    hub.beat(1, age=1.0, seq=0)  # its first heartbeat, hours late
    hub.ask(1)
    hub.beat(1, age=201.0)
    assert modes(hub) == {1: Mode.USE}


def test_an_ask_of_unknown_age_lets_nobody_join() -> None:
    hub = pool()
    hub.beat(1, age=10_000.0)
    hub.ask(1, fresh=False)
    assert modes(hub) == {1: Mode.BYPASS}


def test_a_target_found_recorded_lets_nobody_join_but_those_who_have_it() -> None:
    hub = Driver()
    hub.lead(target=4, published=4, granting=True)
    hub.ask(4)
    hub.beat(1, age=10_000.0)
    hub.beat(2, age=10.0, epoch=4, mode=Mode.USE)
    hub.beat(3, age=10_000.0, epoch=3, mode=Mode.USE)
    hub.beat(4, age=10_000.0, epoch=4, mode=Mode.BYPASS)
    assert modes(hub) == {1: Mode.BYPASS, 2: Mode.USE, 3: Mode.BYPASS, 4: Mode.BYPASS}


@pytest.mark.parametrize("late", [False, True])
def test_the_own_record_seen_before_its_answer_or_after_its_failure_counts_as_own(late: bool) -> None:
    hub = pool()
    hub.beat(1, age=100.0)
    hub.hold_writes = True
    hub.ask(1)
    if late:
        hub.step(ev.RecordFailed(1))
    hub.step(ev.Observed(PoolRecord(target=1)))
    assert modes(hub) == {1: Mode.USE}


def test_use_is_kept_within_its_epoch_only() -> None:
    hub = pool()
    hub.beat(1, age=5.0, epoch=0, mode=Mode.USE)
    hub.ask(1)
    hub.beat(1, age=6.0, epoch=0, mode=Mode.USE)
    assert modes(hub) == {1: Mode.BYPASS}


def test_with_a_list_exactly_those_boots_join() -> None:
    hub = pool()
    hub.beat(1, age=1.0)
    hub.beat(2, age=10_000.0)
    hub.step(ev.Heard(b"t", Bump(1, 1, [boot(1)])))
    assert modes(hub) == {1: Mode.USE, 2: Mode.BYPASS}


def test_a_list_that_was_lost_with_a_hub_is_taken_from_the_repetition() -> None:
    hub = Driver()
    hub.lead(target=1, published=1, granting=True)
    hub.beat(1, age=10_000.0)
    assert modes(hub) == {1: Mode.BYPASS}
    hub.step(ev.Heard(b"t", Bump(1, 1, [boot(1)])))
    hub.beat(1, age=10_000.0)
    assert modes(hub) == {1: Mode.USE}


def test_an_empty_list_says_that_nobody_has_the_weights_yet() -> None:
    hub = pool()
    for number in (1, 2):
        hub.beat(number, age=10_000.0)
    hub.hear(Bump(1, 1, [], weights_version="v1"))
    assert modes(hub) == {1: Mode.BYPASS, 2: Mode.BYPASS}
    hub.hear(Bump(1, 1, [boot(1)], weights_version="v1"))
    for number in (1, 2):
        hub.beat(number, age=10_000.0, epoch=1, mode=Mode.BYPASS)
    assert modes(hub) == {1: Mode.USE, 2: Mode.BYPASS}


@pytest.mark.parametrize("first", ["spec", "list"])
def test_an_empty_list_closes_an_epoch_that_somebody_else_asked_for(first: str) -> None:
    hub = pool()
    hub.hold_writes = True
    hub.beat(1, age=10_000.0)
    if first == "spec":
        hub.ask(1)
        hub.hear(Bump(1, 1, []))
    else:
        hub.hear(Bump(1, 1, []))
        hub.ask(1)
    hub.step(ev.Recorded(1))
    assert modes(hub) == {1: Mode.BYPASS}


@pytest.mark.parametrize("recorded", [False, True])
def test_of_two_trainers_that_push_different_weights_for_one_epoch_only_one_is_believed(recorded: bool) -> None:
    hub = pool()
    hub.hold_writes = True
    for number in (1, 2):
        hub.beat(number, age=10_000.0)
    hub.hear(Bump(1, 1, [boot(1)], weights_version="a"), b"ta")
    if recorded:
        hub.step(ev.Recorded(1))
    hub.hear(Bump(2, 1, [boot(2)], weights_version="b"), b"tb")
    if not recorded:
        hub.step(ev.Recorded(1))
    assert modes(hub) == {1: Mode.USE, 2: Mode.BYPASS}
    hub.hear(Bump(2, 1, [boot(2)], weights_version="b"), b"tb")
    assert hub.of(BumpStatus)[-1].weights_version == "a"  # so the other one knows


def test_a_list_for_weights_that_the_recorded_target_did_not_come_with_marks_nobody() -> None:
    hub = Driver()
    hub.hear(Bump(1, 1, [boot(1)], weights_version="mine"))
    hub.step(ev.Acquired(TERM, PoolRecord(1, 1, True, Origin(Source.TRAINER, "theirs"))))
    hub.beat(1, age=10_000.0)
    assert modes(hub) == {1: Mode.BYPASS}
    hub.hear(Bump(1, 1, [boot(1)], weights_version="theirs"))
    hub.beat(1, age=10_000.0)
    assert modes(hub) == {1: Mode.USE}


def test_marked_boots_are_told_at_once_and_answered_without_a_pause() -> None:
    hub = pool()
    for number in (1, 2):
        hub.beat(number, age=1.0)
    hub.hear(Bump(1, 1, []))
    hub.round()
    for number in (1, 2):
        hub.beat(number, age=1.0, epoch=1, mode=Mode.BYPASS)
    hub.now += HOLD
    for number in (1, 2):
        hub.beat(number, age=1.0, epoch=1, mode=Mode.BYPASS)
    hub.round()
    assert hub.published == [1]
    before = len(hub.nudged())
    hub.hear(Bump(1, 1, [boot(2)]))
    assert hub.nudged()[before:] == [boot(2)]
    hub.beat(2, age=1.0, epoch=1, mode=Mode.BYPASS)
    assert hub.hub.round_at(hub.now) == hub.now
    assert modes(hub)[2] is Mode.USE


def test_lists_for_more_epochs_than_are_kept_leave_their_epochs_closed() -> None:
    hub = pool()
    hub.hold_writes = True
    hub.ask(100)
    for epoch in range(101, 121):
        hub.hear(Bump(1, epoch, [boot(1)]))
    hub.step(ev.Observed(PoolRecord(target=119)))
    hub.beat(1, age=10_000.0)
    assert modes(hub) == {1: Mode.BYPASS}


def test_a_list_for_an_older_epoch_marks_nobody() -> None:
    hub = Driver()
    hub.lead(target=2, granting=True)
    hub.step(ev.Heard(b"t", Bump(1, 1, [boot(1)])))
    hub.beat(1, age=10_000.0)
    assert modes(hub) == {1: Mode.BYPASS}


def test_a_bump_without_a_list_goes_by_age() -> None:
    hub = pool()
    hub.beat(1, age=100.0)
    hub.beat(2, age=10.0)
    hub.hear(Bump(1, 1, moment=hub.moment()))
    assert modes(hub) == {1: Mode.USE, 2: Mode.BYPASS}


@pytest.mark.parametrize("epoch", [1, 5])
def test_a_client_that_makes_boots_up_fills_no_memory(epoch: int) -> None:
    """At the target, and for an epoch to come; the hub serves other pools, too."""
    hub = Driver()
    hub.lead(target=1)
    hub.hold_writes = True  # the epoch to come stays to come
    for start in range(0, 60_000, 3000):
        hub.step(ev.Heard(b"t", Bump(1, epoch, [number.to_bytes(16, "big") for number in range(start, start + 3000)])))
    if epoch == hub.hub.target:
        marked = hub.hub._gate.marked
    else:
        marks = hub.hub._trainers.marked(epoch)
        assert marks is not None
        marked = marks.boots
    assert len(marked) == 20_000
