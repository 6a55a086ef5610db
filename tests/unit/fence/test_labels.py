"""What weights are called: answered when it is durable, kept over a change of hub, bounded."""

import pytest

from epochkv_fence.hub.record import MAX_LABELLING
from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.messages import MAX_LABELS, Error, Label, Labelled, Refusal
from epochkv_fence.protocol.pool import PoolRecord, Term, merged_labels
from tests.unit.fence.helpers import Driver

A, B = b"a" * 16, b"b" * 16


def labels(hub: Driver) -> dict[bytes, str]:
    return hub.hub.snapshot(hub.now).labels


def notes(hub: Driver) -> list[dict[bytes, str]]:
    return [dict(action.labels) for action in hub.writes if isinstance(action, ev.NoteLabels)]


def test_of_the_same_weights_the_newer_label_counts_and_the_oldest_go() -> None:
    assert list(merged_labels({A: "a", B: "b"}, {A: "c"}).items()) == [(B, "b"), (A, "c")]
    many = {bytes([number]) * 16: f"{number}" for number in range(MAX_LABELS + 3)}
    assert list(merged_labels(many, {})) == list(many)[3:]


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


@pytest.mark.parametrize("when", ["never led", "steps down"])
def test_a_hub_that_does_not_lead_labels_nothing(when: str) -> None:
    hub = Driver()
    hub.hold_writes = True
    if when == "steps down":
        hub.lead(granting=True)
        hub.hear(Label(1, A, "one"))
        hub.step(ev.SteppedDown())
        hub.step(ev.Done(ev.NoteLabels({A: "one"}), ok=True))
    else:
        hub.hear(Label(1, A, "one"))
    assert [error.code for error in hub.of(Error)] == [Refusal.NOT_LEADING]
    assert hub.of(Labelled) == []


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
    assert len(hub.of(Labelled)) == 1 + MAX_LABELLING
    assert len(labels(hub)) == MAX_LABELS
