"""One trainer at a time pushes weights: who may open an update, how long a dead one keeps others out, and what ends one."""

from __future__ import annotations

from typing import Any

import msgspec

from epochkv_fence import hub_events as ev
from epochkv_fence.authority import UpdateNote
from epochkv_fence.messages import Bump, Mode, OpenUpdate, Source, Status
from epochkv_fence.updates import MAX_OVER, Updates
from tests.unit.fence.helpers import HOLD, TERM, Driver, boot

A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def led(granting: bool = True) -> Driver:
    hub = Driver()
    hub.lead(granting=granting)
    hub.now += HOLD
    return hub


def ask(hub: Driver, number: bytes, since: float = 0.0, **fields: Any) -> OpenUpdate | None:
    """What a trainer is told who wants to open an update, or to keep it open."""
    told = len(hub.of(Status))
    hub.hear(Status(1, update=OpenUpdate(number, "trainer-" + chr(number[0]), "v-" + chr(number[0]), since, **fields)), number[:1])
    hub.round()
    if len(hub.of(Status)) == told:
        hub.round()  # the record had to say so first
    return hub.of(Status)[-1].update


def test_the_second_trainer_is_told_who_has_it_open_since_when_and_for_how_long_at_most() -> None:
    hub = led()
    assert ask(hub, A) == OpenUpdate(A, "trainer-a", "v-a", 0.0, HOLD)
    hub.now += 5.0
    assert ask(hub, B) == OpenUpdate(A, "trainer-a", "v-a", 5.0, HOLD - 5.0)
    hub.now += 5.0
    assert ask(hub, A, 10.0) == OpenUpdate(A, "trainer-a", "v-a", 10.0, HOLD), "it goes on, from when it began"


def test_a_question_alone_opens_nothing_and_shows_what_is_open() -> None:
    hub = led()
    hub.hear(Status(1))
    hub.round()
    assert hub.of(Status)[-1].update is None
    ask(hub, A)
    hub.hear(Status(1))
    hub.round()
    assert hub.of(Status)[-1].update == OpenUpdate(A, "trainer-a", "v-a", 0.0, HOLD)


def test_a_dead_trainer_keeps_others_out_for_a_lease_and_its_margin_at_most() -> None:
    hub = led()
    ask(hub, A)
    hub.now += HOLD - 0.01
    found = ask(hub, B)
    assert found is not None
    assert found.number == A
    hub.now += 0.01
    assert ask(hub, B) == OpenUpdate(B, "trainer-b", "v-b", 0.0, HOLD)


def test_an_end_makes_room_at_once_and_a_late_question_does_not_open_it_again() -> None:
    for end in (
        Bump(1, 1, [boot(1)], "v-a", update=A),
        Bump(1, 1, [], "failed: v-a", update=A),
        Status(2, update=OpenUpdate(A, over=True)),
    ):
        hub = led()
        ask(hub, A)
        hub.hear(end)
        hub.round()
        assert ask(hub, A, 3.0) is None
        assert ask(hub, B) == OpenUpdate(B, "trainer-b", "v-b", 0.0, HOLD)
        assert ask(hub, A, 4.0) == OpenUpdate(B, "trainer-b", "v-b", 0.0, HOLD), "nor does it end another one"


def test_a_reset_of_somebody_else_ends_nothing() -> None:
    hub = led()
    ask(hub, A)
    hub.hear(Bump(1, 1))
    hub.hear(Bump(2, 2, [boot(1)], "other", update=C))
    found = ask(hub, B)
    assert found is not None
    assert found.number == A


def test_one_that_was_taken_for_dead_and_lives_ends_the_other_one_too() -> None:
    """Both have pushed: what engines hold is not what either of them says."""
    hub = led()
    ask(hub, A)
    hub.now += HOLD
    ask(hub, B)
    hub.now += 5.0
    assert ask(hub, A, HOLD + 5.0) is None
    assert ask(hub, B, 5.0) is None, "it is told at its end"
    assert ask(hub, C) == OpenUpdate(C, "trainer-c", "v-c", 0.0, HOLD)


def test_nobody_else_came_while_it_stood_still() -> None:
    hub = led()
    ask(hub, A)
    hub.now += 10 * HOLD
    assert ask(hub, A, 10 * HOLD) == OpenUpdate(A, "trainer-a", "v-a", 10 * HOLD, HOLD)


def test_a_new_hub_believes_who_is_in_the_middle_and_admits_no_new_one_before_all_holds_are_over() -> None:
    hub = Driver()
    hub.lead(granting=True, update=UpdateNote(1, A, "trainer-a", "v-a", open=False))  # it was taken for dead
    assert ask(hub, B) is None
    assert ask(hub, A, 20.0) == OpenUpdate(A, "trainer-a", "v-a", 20.0, HOLD)
    found = ask(hub, B)
    assert found is not None
    assert found.number == A
    hub = Driver()
    hub.lead(granting=True)
    hub.now += HOLD - 0.01
    assert ask(hub, B) is None
    hub.now += 0.01
    assert ask(hub, B) is not None


def test_a_new_pool_admits_one_at_once() -> None:
    hub = Driver()
    hub.lead(granting=False)
    assert ask(hub, A) is not None


def test_a_change_of_leader_forgets_what_is_open() -> None:
    hub = led()
    ask(hub, A)
    hub.step(ev.SteppedDown())
    hub.lead(granting=True, term=type(TERM)("hub-a", 3))
    assert ask(hub, B) is None, "another hub may have admitted somebody"


def test_a_hold_needs_a_leadership_read_and_counts_from_before_it() -> None:
    hub = led()
    hub.hear(Status(1, update=OpenUpdate(A)))
    hub.round()
    assert hub.of(Status) == []
    number = hub.begin()
    hub.now += 2.0
    hub.step(ev.RoundVerified(number))
    assert hub.of(Status)[-1].update == OpenUpdate(A, since_seconds=2.0, left_seconds=HOLD - 2.0)


# ------------------------------------------------------------------ the record, and trainers that die


def notes(hub: Driver) -> list[UpdateNote]:
    return [action.note for action in hub.writes if isinstance(action, ev.NoteUpdate)]


def test_a_trainer_is_let_in_by_a_round_that_began_when_the_record_said_so() -> None:
    """An older read may have been before another hub took over, which then read the record before the note was in it."""
    hub = led()
    hub.hold_writes = True
    hub.hear(Status(1, update=OpenUpdate(A, "trainer-a", "v-a")))
    hub.round()
    assert notes(hub) == [UpdateNote(1, A, "trainer-a", "v-a")]
    number = hub.begin()
    hub.step(ev.UpdateNoted(notes(hub)[0]))
    hub.step(ev.RoundVerified(number))
    assert hub.of(Status) == []
    hub.round()
    assert hub.of(Status)[-1].update == OpenUpdate(A, "trainer-a", "v-a", 0.0, HOLD)


def test_a_note_that_failed_is_written_again() -> None:
    hub = led()
    hub.hold_writes = True
    hub.hear(Status(1, update=OpenUpdate(A)))
    hub.round()
    hub.step(ev.UpdateNoteFailed())
    assert len(notes(hub)) == 1
    hub.now += ev.RETRY_SECONDS
    assert hub.hub.tick_at() <= hub.now
    hub.step(ev.Tick())
    assert [note.number for note in notes(hub)] == [A, A]


def test_a_trainer_that_is_not_heard_from_again_has_failed() -> None:
    hub = led()
    hub.beat(1, 0)
    ask(hub, A)
    hub.now += HOLD
    assert hub.hub.tick_at() <= hub.now
    hub.step(ev.Tick())
    assert hub.hub.target == 1
    snapshot = hub.hub.snapshot(hub.now)
    assert (snapshot.weights_version, snapshot.origin and snapshot.origin.source) == ("failed: v-a #1", Source.TRAINER)
    hub.beat(1, 0)
    assert [(grant.epoch, grant.mode) for grant in hub.round()] == [(1, Mode.BYPASS)]
    assert [note.open for note in notes(hub)] == [True, False]
    hub.now += 5 * HOLD
    hub.step(ev.Tick())
    assert hub.hub.target == 1, "once"


def test_one_that_was_taken_for_dead_may_go_on_and_end_well() -> None:
    hub = led()
    hub.beat(1, 0)
    ask(hub, A)
    hub.now += HOLD
    hub.step(ev.Tick())
    assert ask(hub, A, HOLD) is not None
    assert [(note.serial, note.open) for note in notes(hub)] == [(1, True), (1, False), (2, True)]
    hub.hear(Bump(1, 2, [boot(1)], "v-a", update=A))
    hub.beat(1, 1, Mode.BYPASS)
    assert [(grant.epoch, grant.mode) for grant in hub.round()] == [(2, Mode.USE)]
    assert (notes(hub)[-1].serial, notes(hub)[-1].open) == (2, False)


def test_the_note_is_closed_when_the_epoch_that_says_how_it_ended_is_durable() -> None:
    hub = led()
    ask(hub, A)
    hub.hold_writes = True
    hub.hear(Bump(1, 1, [boot(1)], "v-a", update=A))
    assert len(notes(hub)) == 1
    hub.step(ev.Recorded(1))
    assert [note.open for note in notes(hub)] == [True, False]


def test_a_new_hub_reads_whose_push_may_still_be_under_way() -> None:
    for returns in (True, False):
        hub = Driver()
        hub.lead(granting=True, update=UpdateNote(4, A, "trainer-a", "v-a"))
        hub.beat(1, 0)
        found = ask(hub, B)
        assert found == OpenUpdate(A, "trainer-a", "v-a", 0.0, HOLD)
        if returns:
            assert ask(hub, A, 20.0) is not None
            hub.hear(Bump(1, 1, [boot(1)], "v-a", update=A))
            assert notes(hub) == [UpdateNote(4, A, "trainer-a", "v-a", open=False)]
        else:
            hub.now += HOLD
            hub.step(ev.Tick())
            assert hub.hub.snapshot(hub.now).weights_version == "failed: v-a #1"


def test_a_new_hub_fails_nothing_that_was_over() -> None:
    hub = Driver()
    hub.lead(target=3, published=3, granting=True, update=UpdateNote(4, A, "trainer-a", "v-a", open=False))
    hub.now += 3 * HOLD
    hub.step(ev.Tick())
    assert hub.hub.target == 3
    assert notes(hub) == []


def test_one_that_goes_on_after_another_one_has_finished_fails_the_pool_once() -> None:
    hub = led()
    ask(hub, A)
    hub.now += HOLD
    ask(hub, B)
    hub.hear(Bump(1, 2, [boot(1)], "v-b", update=B))
    hub.round()
    assert hub.hub.snapshot(hub.now).weights_version == "v-b"
    for _ in range(3):
        assert ask(hub, A, HOLD + 5.0) is None
        hub.step(ev.Tick())
        hub.now += 1.0
    assert (hub.hub.target, hub.hub.snapshot(hub.now).weights_version) == (3, "failed: v-a #3")
    assert ask(hub, C) is not None


def test_one_that_goes_on_after_another_one_and_a_change_of_hub_is_known_by_the_note() -> None:
    for is_open in (True, False):
        hub = Driver()
        hub.lead(target=2, published=2, granting=True, update=UpdateNote(2, B, "trainer-b", "v-b", is_open))
        assert ask(hub, A, HOLD + 5.0) is None
        hub.step(ev.Tick())
        assert hub.hub.target == 3
        assert hub.hub.snapshot(hub.now).weights_version == ("failed: v-b #3" if is_open else "failed: v-a #3")


def test_age_proves_nothing_while_somebody_pushes() -> None:
    for plain in (Bump(1, 1), Bump(1, 1, weights_version="label"), None):
        hub = led()
        hub.beat(1, 0)
        ask(hub, A)
        if plain is None:
            hub.ask(1)
        else:
            hub.hear(msgspec.structs.replace(plain, moment=hub.moment()))
        hub.beat(1, 0)
        assert [(grant.epoch, grant.mode) for grant in hub.round()] == [(1, Mode.BYPASS)]


def test_what_is_remembered_is_bounded() -> None:
    updates = Updates()
    for number in range(3 * MAX_OVER):
        updates.end(number.to_bytes(16, "big"))
    assert len(updates._over) == MAX_OVER


def test_a_mark_that_comes_too_late_to_count_does_not_end_the_update() -> None:
    """A plain reset was taken first. The trainer sees that, and names the engines in an epoch of its own."""
    hub = led()
    ask(hub, A)
    hub.hear(Bump(1, 1, [], "v-a"))
    hub.hear(Bump(2, 2, moment=hub.moment()))
    hub.hear(Bump(3, 1, [boot(1)], "v-a", update=A))
    found = ask(hub, A, 1.0)
    assert found is not None
    assert found.number == A
    hub.hear(Bump(4, 3, [boot(1)], "v-a", update=A))
    assert ask(hub, B) is not None
