"""Which weights engines hold: what people are shown, and which keys are removed. L = 30 s, margin 3 s."""

import pytest

from epochkv_fence.hub.record import MAX_LABELLING
from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.messages import ASLEEP, MAX_KEPT, MAX_LABELS, Error, Label, Labelled, Leave, Reclaim, Reclaimed, Refusal
from epochkv_fence.protocol.pool import EngineView, PoolRecord, Term, merged_labels
from tests.unit.fence.helpers import HOLD, LEASE, Driver, config, instance, leading

GRACE = 600.0
A, B, C = b"a" * 16, b"b" * 16, b"c" * 16


def groups(hub: Driver) -> list[tuple[bytes, int, float]]:
    return [(group.weights, group.engines, group.since_seconds) for group in hub.hub.snapshot(hub.now).weights]


def diverged(hub: Driver) -> dict[int, bytes | None]:
    """Instance number to what most hold."""
    return {view.instance[0]: view.majority for view in hub.hub.snapshot(hub.now).diverged}


def views(hub: Driver) -> dict[int, EngineView]:
    return {view.instance[0]: view for view in hub.hub.snapshot(hub.now).engines}


# ------------------------------------------------------------------------------------------------------------ what is shown
def test_how_long_an_engine_has_held_its_weights(hub: Driver) -> None:
    hub.beat(1, weights=A)
    hub.now += 5.0
    hub.beat(1, weights=A)
    assert views(hub)[1].weights_since == 5.0
    hub.now += 5.0
    hub.beat(1, weights=B)
    hub.beat(1, weights=A, seq=0)  # an older one, late
    hub.now += 1.0
    assert (views(hub)[1].weights, views(hub)[1].weights_since) == (B, 1.0)
    assert views(hub)[1].pushed is False, "that it was pushed to, it says itself"
    hub.beat(1, weights=B, pushed=True)
    assert views(hub)[1].pushed is True
    for note, seconds in ((ASLEEP, 600.0), ("a call writes them", 0.0)):
        hub.beat(1, weights=None, weights_note=note)
        hub.now += seconds
    assert views(hub)[1].weights_since == 0.0, "sleep is over"


def test_live_engines_are_grouped_most_first_and_of_as_many_the_newest(hub: Driver) -> None:
    for number, weights, fingerprint in ((1, A, "f"), (2, B, "f"), (3, B, "g"), (4, C, "f"), (5, None, "f")):
        hub.beat(number, weights=weights, fingerprint=fingerprint)
        hub.now += 1.0
    assert groups(hub) == [(B, 2, 4.0), (C, 1, 2.0), (A, 1, 5.0)]
    hub.now += LEASE - 3.5  # 1 and 2 have fallen silent
    assert [(group[0], group[1]) for group in groups(hub)] == [(C, 1), (B, 1)]


def test_who_differs_from_most_of_its_fingerprint(hub: Driver) -> None:
    for number in (1, 2, 3, 4):
        hub.beat(number, weights=A, fingerprint="f")
    hub.beat(5, weights=C, fingerprint="g")  # another model
    hub.beat(6, weights=None, fingerprint="f")
    hub.now += 10.0
    assert diverged(hub) == {}
    for number in (1, 2):
        hub.beat(number, weights=B, fingerprint="f")
        hub.now += 1.0
    assert diverged(hub) == {3: B, 4: B}  # of as many the newest are taken for most
    hub.beat(3, weights=B, fingerprint="f")
    hub.now += 2.0
    assert diverged(hub) == {4: B}
    assert views(hub)[6].majority is None
    hub.beat(4, weights=B, fingerprint="f")
    assert diverged(hub) == {}
    hub.beat(4, weights=A, fingerprint="f")
    assert diverged(hub) == {4: B}


@pytest.mark.parametrize("order", [(1, 2, 3), (3, 2, 1)])
def test_a_new_hub_learns_from_heartbeats_which_weights_are_the_newest(order: tuple[int, ...], hub: Driver) -> None:
    ages = {1: 20.0, 2: 25.0, 3: 900.0}
    for number in order:
        hub.beat(number, weights=A if number == 3 else B, weights_age_seconds=ages[number])
    hub.now += 5.0
    hub.beat(1, weights=B, weights_age_seconds=25.5)
    assert [(group[0], group[2]) for group in groups(hub)] == [(B, 30.0), (A, 905.0)]
    hub.hear(Leave(instance(1)))
    assert diverged(hub) == {3: B}, "of as many, the newest count"


@pytest.mark.parametrize("how", ["leaves", "dies", "forgets"])
def test_an_engine_that_is_gone_or_does_not_know_differs_from_nobody(how: str, hub: Driver) -> None:
    for number, weights in ((1, A), (2, A), (3, B)):
        hub.beat(number, weights=weights)
    assert set(diverged(hub)) == {3}
    if how == "leaves":
        hub.hear(Leave(instance(3)))
    elif how == "dies":
        hub.wait(2 * HOLD)
        for number in (1, 2):
            hub.beat(number, weights=A)
    else:
        hub.beat(3, weights=None, weights_note="rank 1: no digest")
    assert diverged(hub) == {}
    hub.now += 10.0
    hub.beat(4, weights=B)
    assert diverged(hub) == {4: A}


# --------------------------------------------------------------------------------------------------- keys of old weights
def serving(**keys: object) -> Driver:
    """A hub that leads for longer than the grace period, with instances 1 and 2 that hold A and nothing left to remove."""
    hub = leading(**keys)
    pass_time(hub, GRACE, {1: A, 2: A})
    settle(hub)
    return hub


def pass_time(hub: Driver, seconds: float, held: dict[int, bytes | None], epoch: int = 0) -> None:
    end = hub.now + seconds
    while hub.now < end:
        hub.now = min(end, hub.now + 10.0)
        for number, weights in held.items():
            hub.beat(number, epoch=epoch, weights=weights)
        hub.step(ev.Tick())


def requests(hub: Driver) -> list[tuple[int, list[bytes]]]:
    return [(request.below, request.keep) for request in hub.of(Reclaim)]


def settle(hub: Driver) -> None:
    """Whoever is asked finds nothing, and the list of requests is emptied."""
    for request in hub.of(Reclaim):
        hub.hear(Reclaimed(request.instance, request.below, 0, number=request.number))
    hub.sent.clear()


def test_what_an_older_hub_has_left_is_removed_a_grace_period_after_it(hub: Driver) -> None:
    pass_time(hub, GRACE - 10.0, {1: A, 2: B})
    assert requests(hub) == []
    pass_time(hub, 10.0, {1: A, 2: B})
    assert requests(hub) == [(0, [A, B])]


def test_an_epoch_that_is_published_meanwhile_is_no_reason_to_remove_them_sooner(hub: Driver) -> None:
    pass_time(hub, HOLD + 1.0, {1: A, 2: B})
    hub.ask(1)
    pass_time(hub, 1.0, {1: A, 2: B}, epoch=1)
    hub.round()
    for _ in range(4):
        pass_time(hub, 10.0, {1: A, 2: B}, epoch=1)
        for request in hub.of(Reclaim):
            hub.hear(Reclaimed(request.instance, request.below, 0, number=request.number))
    assert requests(hub) == [(1, [])] * 2
    pass_time(hub, GRACE, {1: A, 2: B}, epoch=1)
    assert requests(hub)[2] == (1, [A, B])


def test_weights_that_nobody_reports_any_more_are_removed_after_a_grace_period_until_nothing_is_left() -> None:
    hub = serving()
    pass_time(hub, 5 * GRACE, {1: A, 2: A})
    assert requests(hub) == []  # steady: nobody is asked anything
    pass_time(hub, GRACE - 10.0, {1: B, 2: B})
    assert requests(hub) == []
    pass_time(hub, 20.0, {1: B, 2: B})
    assert requests(hub)[0] == (0, [B])
    first = hub.of(Reclaim)[0]
    hub.hear(Reclaimed(first.instance, 0, 7, 700, first.number))
    asked = len(requests(hub))
    pass_time(hub, 20.0, {1: B, 2: B})
    assert len(requests(hub)) > asked  # again: something was there
    settle(hub)
    pass_time(hub, 5 * GRACE, {1: B, 2: B})
    assert requests(hub) == []
    assert hub.hub.snapshot(hub.now).reclaimed_keys == 7


def test_weights_that_come_back_within_the_grace_period_keep_their_keys() -> None:
    hub = serving()
    for _ in range(6):
        pass_time(hub, GRACE / 2, {1: B, 2: B})
        pass_time(hub, GRACE / 2, {1: A, 2: A})
    assert requests(hub) == []


def test_nothing_is_removed_while_a_live_engine_does_not_know_what_it_holds() -> None:
    hub = serving()
    pass_time(hub, 3 * GRACE, {1: B, 2: None})
    assert requests(hub) == []
    pass_time(hub, 20.0, {1: B, 2: B})
    assert requests(hub)[0] == (0, [B])


@pytest.mark.parametrize("how", ["leaves", "falls silent"])
def test_an_engine_that_does_not_know_and_is_gone_holds_nothing_up(how: str) -> None:
    hub = serving()
    pass_time(hub, 3 * GRACE, {1: B, 2: None})
    if how == "leaves":
        hub.hear(Leave(instance(2)))
    pass_time(hub, 2 * HOLD, {1: B})
    assert requests(hub)[-1] == (0, [B])


def test_a_new_leader_waits_a_grace_period_of_its_own() -> None:
    hub = serving()
    hub.step(ev.SteppedDown())
    hub.now += 1.0
    hub.lead(granting=True, term=Term("hub-a", 2))
    pass_time(hub, GRACE - 10.0, {1: B, 2: B})
    assert requests(hub) == []
    pass_time(hub, 20.0, {1: B, 2: B})
    assert requests(hub)[-1] == (0, [B])


def test_a_pool_whose_engines_are_all_gone_keeps_its_keys() -> None:
    hub = serving(store_admin=True)
    pass_time(hub, 5 * GRACE, {})
    assert requests(hub) == []
    assert hub.stores == []
    assert hub.hub.tick_at() == float("inf")
    pass_time(hub, 20.0, {1: B})
    assert requests(hub)[0] == (0, [B])


def test_an_answer_to_an_older_request_says_nothing_about_the_weights_since() -> None:
    hub = serving()
    hub.hear(Leave(instance(2)))  # so that one engine is asked again and again
    pass_time(hub, GRACE / 2, {1: B})
    pass_time(hub, GRACE / 2 + 10.0, {1: C})
    first = hub.of(Reclaim)[0]
    assert requests(hub)[0] == (0, [B, C])
    pass_time(hub, GRACE / 2, {1: C})
    assert requests(hub)[-1] == (0, [C])
    hub.hear(Reclaimed(first.instance, 0, 0, number=first.number))
    asked = len(requests(hub))
    pass_time(hub, 30.0, {1: C})
    assert len(requests(hub)) > asked


def test_retain_removes_no_weights_either() -> None:
    hub = leading(reclaim="Retain")
    pass_time(hub, 2 * GRACE, {1: A})
    pass_time(hub, 2 * GRACE, {1: B})
    assert requests(hub) == []
    hub.step(ev.Configured(config(reclaim="Delete")))
    pass_time(hub, 10.0, {1: B})
    assert requests(hub) == [(0, [B])]


def test_more_weights_than_can_be_remembered_are_all_kept() -> None:
    hub = serving()
    for number in range(MAX_KEPT + 10):
        hub.beat(1, epoch=0, weights=number.to_bytes(16, "big"))
    pass_time(hub, GRACE - 10.0, {1: A, 2: A})
    assert requests(hub) == []
    pass_time(hub, 20.0, {1: A, 2: A})
    assert requests(hub)[-1] == (0, [A])


def test_a_hub_that_does_not_lead_asks_nobody() -> None:
    hub = Driver()
    pass_time(hub, 2 * GRACE, {1: A})
    pass_time(hub, 2 * GRACE, {1: B})
    assert hub.sent == []
    hub.step(ev.Acquired(Term("h", 1), PoolRecord(0, 0, True)))
    hub.step(ev.SteppedDown())
    pass_time(hub, 2 * GRACE, {1: B})
    assert requests(hub) == []


# -------------------------- what weights are called: answered when it is durable, kept over a change of hub, bounded


def labels(hub: Driver) -> dict[bytes, str]:
    return hub.hub.snapshot(hub.now).labels


def notes(hub: Driver) -> list[dict[bytes, str]]:
    return [dict(action.labels) for action in hub.writes if isinstance(action, ev.NoteLabels)]


def test_of_the_same_weights_the_newer_label_counts_and_the_oldest_go_but_for_the_first() -> None:
    assert list(merged_labels({A: "a", B: "b", C: "c"}, {B: "d"}).items()) == [(A, "a"), (C, "c"), (B, "d")]
    assert list(merged_labels({A: "a", B: "b"}, {B: "b", A: "e"}).items()) == [(A, "e"), (B, "b")]
    many = {bytes([number]) * 16: f"{number}" for number in range(MAX_LABELS + 3)}
    assert list(merged_labels(many, {})) == [bytes(16), *list(many)[4:]]


def test_labels_of_weights_that_are_held_are_not_old(hub: Driver) -> None:
    hub.beat(1, weights=B)
    for number, weights in enumerate([A, B, *(bytes([number]) * 16 for number in range(100, 100 + MAX_LABELS))]):
        hub.hear(Label(number, weights, f"step-{number}"))
    assert list(labels(hub).items())[:2] == [(A, "step-0"), (B, "step-1")]
    assert len(labels(hub)) == MAX_LABELS
    known = labels(hub)
    assert merged_labels(known, {}, known) == known
    assert list(merged_labels(known, {C: "new"}, known)) == [A, *list(known)[2:], C], "who labels is answered that it is kept"


def test_a_label_is_answered_when_it_is_durable(hub: Driver) -> None:
    hub.hold_writes = True
    hub.beat(1, weights=A)
    hub.hear(Label(7, A, "step-1"))
    assert notes(hub) == [{A: "step-1"}]
    assert hub.of(Labelled) == []
    assert labels(hub) == {}
    hub.step(ev.Done(ev.NoteLabels({A: "step-1"}), ok=True))
    assert hub.sent[-1] == (b"trainer", Labelled(7, A, "step-1"))
    assert labels(hub) == {A: "step-1"}
    assert [group.label for group in hub.hub.snapshot(hub.now).weights] == ["step-1"]
    hub.hear(Label(8, A, "step-1"))
    assert hub.of(Labelled)[-1].request == 8
    assert len(notes(hub)) == 1, "it is durable already"


def test_labels_that_come_during_a_write_are_written_together_after_it(hub: Driver) -> None:
    hub.hold_writes = True
    hub.hear(Label(1, A, "one"))
    hub.hear(Label(2, A, "two"), peer=b"other")
    hub.hear(Label(3, B, "b"))
    hub.hear(Label(4, A, "one"))
    assert notes(hub) == [{A: "one"}]
    hub.step(ev.Done(ev.NoteLabels({A: "one"}), ok=True))
    assert [answer.request for answer in hub.of(Labelled)] == [1]
    assert notes(hub)[1:] == [{B: "b", A: "one"}]
    hub.step(ev.Done(ev.NoteLabels({B: "b", A: "one"}), ok=True))
    assert [answer.request for answer in hub.of(Labelled)] == [1, 2, 3, 4]
    assert labels(hub) == {B: "b", A: "one"}


def test_a_label_that_is_about_to_be_replaced_is_no_answer(hub: Driver) -> None:
    hub.hear(Label(1, A, "one"))
    hub.hold_writes = True
    hub.hear(Label(2, A, "two"), peer=b"other")
    hub.hear(Label(3, A, "one"))
    assert [answer.request for answer in hub.of(Labelled)] == [1]
    hub.step(ev.Done(ev.NoteLabels({A: "two"}), ok=True))
    hub.step(ev.Done(ev.NoteLabels({A: "one"}), ok=True))
    assert [answer.request for answer in hub.of(Labelled)] == [1, 2, 3]
    assert labels(hub) == {A: "one"}


def test_a_write_of_an_earlier_term_answers_nothing(hub: Driver) -> None:
    hub.hold_writes = True
    hub.hear(Label(1, A, "one"))
    hub.step(ev.SteppedDown())
    assert [error.code for error in hub.of(Error)] == [Refusal.NOT_LEADING]
    hub.step(ev.Done(ev.NoteLabels({A: "one"}), ok=True))
    hub.lead(granting=True, term=Term("hub-a", 2))
    hub.hear(Label(2, B, "b"))
    hub.step(ev.Done(ev.NoteLabels({A: "one"}), ok=True))
    assert hub.of(Labelled) == []
    hub.step(ev.Done(ev.NoteLabels({B: "b"}), ok=True))
    assert [answer.request for answer in hub.of(Labelled)] == [2]


def test_a_write_that_fails_is_made_again_when_its_trainer_asks_again(hub: Driver) -> None:
    hub.hold_writes = True
    hub.hear(Label(1, A, "one"))
    hub.step(ev.Done(ev.NoteLabels({A: "one"}), ok=False))
    hub.step(ev.Tick())
    assert len(notes(hub)) == 1
    assert hub.hub.tick_at() > hub.now
    hub.hear(Label(1, A, "one"))
    assert notes(hub) == [{A: "one"}] * 2
    hub.step(ev.Done(ev.NoteLabels({A: "one"}), ok=True))
    assert [answer.request for answer in hub.of(Labelled)] == [1]


def test_labels_on_record_are_known_to_the_next_hub_and_to_one_that_sees_them_later() -> None:
    hub = Driver()
    hub.step(ev.Acquired(Term("h", 1), PoolRecord(labels={A: "one"})))
    assert labels(hub) == {A: "one"}
    hub.hear(Label(1, A, "two"))
    actions = hub.step(ev.Observed(PoolRecord(labels={B: "b", A: "one"})))
    assert ev.Changed() in actions
    assert labels(hub) == {B: "b", A: "two"}, "a record that was seen late takes nothing back"
    assert hub.step(ev.Observed(PoolRecord(labels={B: "b", A: "one"}))) == []


def test_a_hub_that_leads_again_believes_the_record_and_not_what_it_remembers() -> None:
    hub = Driver()
    hub.step(ev.Acquired(Term("h", 1), PoolRecord(labels={A: "old", B: "gone"})))
    hub.step(ev.SteppedDown())
    hub.step(ev.Acquired(Term("h", 3), PoolRecord(labels={A: "new"})))
    assert labels(hub) == {A: "new"}


def test_what_waits_is_bounded(hub: Driver) -> None:
    hub.hold_writes = True
    for number in range(MAX_LABELLING + 50):
        hub.hear(Label(number, number.to_bytes(16, "big"), "x"))
    hub.step(ev.Done(ev.NoteLabels(notes(hub)[0]), ok=True))
    assert len(notes(hub)[1]) == MAX_LABELS
    hub.step(ev.Done(ev.NoteLabels(notes(hub)[1]), ok=True))
    assert len(hub.of(Labelled)) == 1 + MAX_LABELS, "the others ask again"
    assert len(labels(hub)) == MAX_LABELS
