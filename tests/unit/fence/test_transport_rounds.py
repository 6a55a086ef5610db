"""When the hub's driver is to begin a round: at once for whom a second matters, once a second for everybody else."""

from __future__ import annotations

from epochkv_fence.hub.machine import Hub
from epochkv_fence.hub.record import NUDGE_SECONDS, NUDGES_PER_SECOND
from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.messages import Grant, Heartbeat, Nudge
from epochkv_fence.protocol.pool import PoolConfig, PoolRecord, Term


def instance(number: int) -> bytes:
    return number.to_bytes(16, "big")


def leading() -> Hub:
    hub = Hub(PoolConfig("u", "p", (), lease_seconds=30.0, reclaim="Retain"))
    hub.step(ev.Acquired(Term("h", 1), PoolRecord(0, 0, True)), 100.0)
    return hub


def grant(hub: Hub, number: int, now: float) -> list[bytes]:
    """One round; the instances that were granted."""
    hub.step(ev.RoundBegan(number), now)
    actions = hub.step(ev.RoundVerified(number), now)
    return [action.message.instance for action in actions if isinstance(action, ev.Send) and isinstance(action.message, Grant)]


def test_an_instance_without_a_lease_is_answered_within_50_ms_and_one_with_a_lease_within_a_second() -> None:
    hub = leading()
    hub.step(ev.Heard(b"1", Heartbeat(instance(1), 0)), 101.0)
    assert hub.round_at(101.0) == 101.0
    assert grant(hub, 1, 101.0) == [instance(1)]
    hub.step(ev.Heard(b"1", Heartbeat(instance(1), 1, 0)), 101.01)
    assert hub.round_at(101.01) == 102.0
    hub.step(ev.Heard(b"2", Heartbeat(instance(2), 0)), 101.02)
    assert hub.round_at(101.02) == 101.05
    assert sorted(grant(hub, 2, 101.05)) == [instance(1), instance(2)]
    hub.step(ev.Heard(b"2", Heartbeat(instance(2), 1, 0)), 101.06)
    assert hub.round_at(101.06) == 102.05


def test_an_instance_whose_lease_has_run_out_is_answered_as_one_that_never_had_one() -> None:
    hub = leading()
    hub.step(ev.Heard(b"1", Heartbeat(instance(1), 0)), 101.0)
    grant(hub, 1, 101.0)
    hub.step(ev.Heard(b"2", Heartbeat(instance(2), 0)), 133.99)
    grant(hub, 2, 133.99)
    hub.step(ev.Heard(b"1", Heartbeat(instance(1), 1, 0)), 134.0)  # 33 s are lease and margin
    assert hub.round_at(134.0) == 133.99 + 0.05


def test_thousands_of_instances_that_are_behind_are_nudged_no_faster_than_they_can_answer() -> None:
    hub = leading()
    for number in range(5000):
        hub.step(ev.Heard(b"%d" % number, Heartbeat(instance(number), 0)), 101.0)
    assert len(grant(hub, 1, 101.0)) == 5000
    hub.step(ev.Asked(1), 101.0)
    nudges = [
        action
        for action in hub.step(ev.Done(ev.RecordTarget(1), ok=True), 101.0)
        if isinstance(action, ev.Send) and isinstance(action.message, Nudge)
    ]
    assert len(nudges) == 5000
    again = next(now for now in (101.0 + step * 0.01 for step in range(1000)) if hub.tick_at() <= now and hub.step(ev.Tick(), now))
    assert again - 101.0 >= 5000 / NUDGES_PER_SECOND - 0.01 > NUDGE_SECONDS
