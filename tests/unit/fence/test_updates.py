"""One trainer at a time pushes weights: who may open an update, how long a dead one keeps others out, and what ends one."""

from __future__ import annotations

from typing import Any

from epochkv_fence import hub_events as ev
from epochkv_fence.messages import Bump, OpenUpdate, Status
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
    hub.hear(Status(1, update=OpenUpdate(number, "trainer-" + chr(number[0]), "v-" + chr(number[0]), since, **fields)), number[:1])
    hub.round()
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
    hub.lead(granting=True)
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
    assert ask(hub, A, 1.0) is not None


def test_a_hold_needs_a_leadership_read_and_counts_from_before_it() -> None:
    hub = led()
    hub.hear(Status(1, update=OpenUpdate(A)))
    assert hub.of(Status) == []
    number = hub.begin()
    hub.now += 2.0
    hub.step(ev.RoundVerified(number))
    assert hub.of(Status)[-1].update == OpenUpdate(A, left_seconds=HOLD - 2.0)


def test_what_is_remembered_is_bounded() -> None:
    updates = Updates()
    for number in range(3 * MAX_OVER):
        updates.end(number.to_bytes(16, "big"))
    assert len(updates._over) == MAX_OVER
