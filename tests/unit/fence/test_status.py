"""What trainers and owners are told about a pool: `Status`, `BumpStatus`, the snapshot."""

import dataclasses
from typing import Any

import pytest

from epochkv_fence.client import Engine
from epochkv_fence.hub.record import MAX_QUESTIONS
from epochkv_fence.protocol import messages
from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.messages import MAX_LABELS, Bump, BumpStatus, EngineStatus, Error, Heartbeat, Label, Refusal, Source, Status
from epochkv_fence.protocol.pool import PoolRecord, Term
from tests.unit.fence.helpers import LEASE, Driver, instance, waited

W = b"w" * 16


@pytest.fixture
def hub() -> Driver:
    return waited()


def pages(hub: Driver) -> list[Status]:
    hub.hear(Status(1))
    hub.round()
    found = [hub.of(Status)[-1]]
    while found[-1].engines:
        hub.hear(Status(1, after=found[-1].engines[-1].instance))
        found.append(hub.of(Status)[-1])
    return found[:-1]


def test_a_status_tells_all_about_the_pool(hub: Driver) -> None:
    hub.beat(1, epoch=0, age=100.0, engine="e", pod="p", rank=2, fingerprint="f", old_epoch_requests=3, weights=b"w" * 16)
    hub.now += 2.0
    hub.beat(2, epoch=0, weights_note="asleep")
    hub.hear(Label(7, b"w" * 16, "step-5"))
    hub.hear(Bump(1, 5))
    (page,) = pages(hub)
    assert (page.request, page.target, page.published, page.total) == (1, 5, 0, 2)
    assert (page.origin, page.lease_seconds, page.pool) == (Source.TRAINER, LEASE, "uid")
    assert page.labels == {(b"w" * 16).hex(): "step-5"}
    engine, other = page.engines
    assert (engine.instance, engine.engine, engine.pod, engine.rank, engine.fingerprint) == (instance(1), "e", "p", 2, "f")
    assert (engine.epoch, engine.old_epoch_requests) == (0, 3)
    assert (engine.age_seconds, engine.silent_seconds) == (100.0, 2.0)
    assert (engine.weights, engine.weights_note, engine.since_seconds) == (b"w" * 16, "", 2.0)
    assert (other.weights, other.weights_note, other.since_seconds) == (None, "asleep", 0.0)


def test_a_hub_that_does_not_lead_tells_nothing_about_epochs_and_labels_nothing() -> None:
    """A trainer that took its target for the newest would ask for one that is long published: a reset that is none."""
    hub = Driver()
    for question in (Status(1), Bump(2, 1), Label(3, W, "step-1")):
        hub.hear(question)
    assert [message.code for message in hub.of(Error)] == [Refusal.NOT_LEADING] * len(hub.sent) == [Refusal.NOT_LEADING] * 3


def test_a_status_waits_for_a_leadership_read(hub: Driver) -> None:
    hub.hear(Status(1))
    assert hub.hub.round_at(hub.now) == hub.now
    number = hub.begin()
    assert hub.hub.round_open
    hub.step(ev.Observed(PoolRecord(target=7)))
    assert hub.of(Status) == []
    hub.step(ev.RoundVerified(number))
    assert [page.target for page in hub.of(Status)] == [7]


def test_a_status_survives_a_read_that_fails_and_is_refused_when_the_hub_was_deposed(hub: Driver) -> None:
    hub.hear(Status(1))
    hub.step(ev.RoundDropped(hub.begin()))
    assert hub.of(Status) == []
    hub.hear(Status(2))
    number = hub.begin()
    hub.hear(Status(3))
    hub.step(ev.SteppedDown())
    hub.step(ev.RoundVerified(number))
    assert hub.of(Status) == []
    assert [message.code for message in hub.of(Error)] == [Refusal.NOT_LEADING] * 3


def test_a_flood_of_questions_costs_few_reads_and_little_memory(hub: Driver) -> None:
    hub.hear(Status(1))
    hub.round()
    for request in range(1000):
        hub.hear(Status(request))
    assert hub.hub.round_at(hub.now) > hub.now
    hub.now += 1.0
    hub.round()
    assert len(hub.of(Status)) == 1 + MAX_QUESTIONS
    assert hub.of(Status)[-1].request == 999


@pytest.mark.parametrize(("width", "note"), [(60, ""), (253, "weights_note"), (253, "tiers_note"), (63, "namespace")])
def test_pages_fit_into_messages_whatever_names_engines_have(width: int, note: str, hub: Driver) -> None:
    wide = "\U0001f600" * width  # four bytes each
    for number in range(100):
        texts: dict[str, Any] = dict.fromkeys(("engine", "pod", "fingerprint", "tiers_off"), wide)
        texts |= {note: wide * 4} if note else {}
        hub.beat(number, **texts, weights=instance(number))
        hub.hear(Label(number, instance(number), "\U0001f600" * 253))
    found = pages(hub)
    assert len(found) >= 2
    assert [len(page.labels) for page in found[:2]] == [MAX_LABELS, 0]
    for page in found:
        messages.encode(page)
    assert [engine.instance for page in found for engine in page.engines] == [instance(number) for number in range(100)]


def test_no_instance_that_stays_is_missed_while_others_come_and_go(hub: Driver) -> None:
    """The next page begins behind the last instance of the one before, also when that one has left."""
    for number in range(0, 256, 2):
        hub.beat(number)
    (first, *_) = pages(hub)
    last = first.engines[-1].instance
    hub.now += LEASE
    there = [number for number in range(1, 256) if instance(number) != last]
    for number in there:
        hub.beat(number)
    hub.hear(Status(1, after=last))
    hub.round()
    page = hub.of(Status)[-1]
    assert page.total == len(there)
    behind = [instance(number) for number in there if instance(number) > last]
    assert [engine.instance for engine in page.engines] == behind[: len(first.engines)]


def test_everyone_who_waits_is_told_of_the_publication_once(hub: Driver) -> None:
    hub.hold_writes = True
    for request, epoch in ((1, 1), (2, 2), (3, 2), (4, 9)):
        hub.hear(Bump(request, epoch), b"t%d" % request)
    hub.step(ev.Done(ev.RecordTarget(1), ok=True))
    hub.step(ev.Observed(PoolRecord(target=2)))
    hub.beat(1, epoch=2)
    before = len(hub.sent)
    hub.step(ev.Done(ev.Publish(2), ok=True))
    told = [(peer, m.request, m.epoch, m.published) for peer, m in hub.sent[before:] if isinstance(m, BumpStatus)]
    assert told == [(b"t1", 1, 1, 2), (b"t2", 2, 2, 2), (b"t3", 3, 2, 2)]
    before = len(hub.sent)
    hub.step(ev.Done(ev.Publish(2), ok=True))
    assert hub.sent[before:] == []


def test_the_snapshot_shows_what_engines_said(hub: Driver) -> None:
    beat = Heartbeat(instance(1), 0, 0, old_epoch_requests=5)
    hub.step(ev.Heard(b"p", beat, key_index=1))
    (view,) = hub.hub.snapshot(hub.now).engines
    assert (view.old_epoch_requests, view.key_index, view.state) == (5, 1, "unknown")
    actions = hub.step(ev.Heard(b"p", Heartbeat(instance(1), 1, 0, old_epoch_requests=5), key_index=0))
    assert ev.Changed() in actions  # its owner waits for this to drop the old key
    (view,) = hub.hub.snapshot(hub.now).engines
    assert view.key_index == 0
    tiers = {"tiers_off": "SavesOnly", "tiers_note": "loads are off"}
    changes: list[Any] = [{"weights_note": "asleep"}, {"weights": W}, {"isolated": True}, tiers, {**tiers, "tiers_note": "an error"}]
    for seq, change in enumerate(changes, start=2):
        assert ev.Changed() in hub.step(ev.Heard(b"p", Heartbeat(instance(1), seq, 0, **change)))
    assert [view.tiers_note for view in hub.hub.snapshot(hub.now).limited] == ["an error"]
    hub.now += LEASE
    assert hub.hub.snapshot(hub.now).limited == [], "only of live engines"


def test_other_keys_move_what_engines_use_among_them(hub: Driver) -> None:
    """Until an engine's next heartbeat, too: its owner must not believe that the newest key is in use because it was."""

    def accept(*keys: str) -> int:
        hub.step(ev.Configured(dataclasses.replace(hub.hub.state.config, client_public_keys=keys)))
        (view,) = hub.hub.snapshot(hub.now).engines
        return view.key_index

    hub.step(ev.Configured(dataclasses.replace(hub.hub.state.config, client_public_keys=("old",))))
    hub.step(ev.Heard(b"p", Heartbeat(instance(1), 0, 0), key_index=0))
    assert accept("new", "old") == 1
    assert accept("newer", "new", "old") == 2
    assert accept("new", "old") == 1
    assert accept("new") == 1  # it has none of them
    assert accept("newest", "new") == 2
    hub.step(ev.Heard(b"p", Heartbeat(instance(1), 1, 0), key_index=0))
    assert accept("newest") == 0


@pytest.mark.parametrize(
    ("epoch", "weights", "isolated", "state"),
    [(2, W, False, "sharing"), (2, W, True, "isolated"), (2, None, True, "unknown"), (2, None, False, "unknown"), (1, W, True, "behind")],
)
def test_the_state_of_an_engine(epoch: int, weights: bytes | None, isolated: bool, state: str) -> None:
    """What keeps it from sharing first is what is told: an epoch, then weights, then its own reset."""
    status = EngineStatus(instance(1), epoch, engine="e", pod="p", isolated=isolated, weights=weights)
    assert Engine.of(status, 2).state == state
    hub = Driver()
    hub.step(ev.Acquired(Term("h", 1), PoolRecord(2, 2, True)))
    hub.beat(1, epoch=epoch, weights=weights, isolated=isolated)
    assert [view.state for view in hub.hub.snapshot(hub.now).engines] == [state]
    hub.now += LEASE
    assert [view.state for view in hub.hub.snapshot(hub.now).engines] == ["silent"]
