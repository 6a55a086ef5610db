"""The agent's rules, one by one, under a clock that the test moves."""

import time

import pytest

from epochkv_fence.common import LeaseClock
from epochkv_fence.protocol import agent as ag
from epochkv_fence.protocol.messages import MAX_EPOCH, Grant, Leave, Nudge, Propose, Reclaim

INSTANCE, OTHER = b"B" * 16, b"O" * 16
LEASE = 30.0


def grant(seq: int, epoch: int, instance: bytes = INSTANCE) -> ag.Received:
    return ag.Received(Grant(instance, seq, epoch, LEASE))


def started(at: float = 100.0) -> ag.Agent:
    agent = ag.Agent(INSTANCE)
    assert agent.step(ag.Started(), at) == [ag.Beat(0, None)]
    return agent


def at_epoch(epoch: int, at: float = 100.0) -> ag.Agent:
    """An agent whose heartbeat 0 was sent at `at`, granted, adopted and acknowledged (heartbeat 1) at once."""
    agent = started(at)
    assert agent.step(grant(0, epoch), at) == [ag.Adopt(epoch)]
    assert agent.step(ag.Adopted(epoch), at) == [ag.Settle()]
    assert agent.step(ag.Settled(), at) == [ag.Beat(1, epoch)]
    return agent


def test_nothing_is_sent_or_taken_before_the_engine_can_adopt() -> None:
    agent = ag.Agent(INSTANCE)
    assert agent.deadline() == float("inf")
    assert agent.step(ag.Tick(), 5.0) == []
    assert agent.step(ag.Poked(), 5.0) == []
    assert agent.step(grant(0, 1), 5.0) == []
    assert agent.refused == {"not_started": 1}
    assert agent.step(ag.Left(), 5.0) == [], "nobody has to be told"


def test_a_lease_counts_from_sending() -> None:
    agent = started(100.0)
    agent.step(grant(0, 1), 110.0)
    agent.step(ag.Adopted(1), 111.0)
    assert agent.view == (1, 130.0)


def test_the_lease_moves_only_once_the_epoch_is_adopted() -> None:
    agent = at_epoch(1)  # lease until 130
    agent.step(ag.Poked(), 120.0)
    assert agent.step(grant(2, 2), 121.0) == [ag.Adopt(2)]
    assert agent.view == (1, 130.0)
    agent.step(ag.Adopted(2), 122.0)
    assert agent.view == (2, 150.0)


def test_an_instance_that_has_left_has_no_lease_and_takes_nothing() -> None:
    agent = at_epoch(1)
    agent.step(ag.Poked(), 101.0)
    assert agent.step(grant(2, 2), 102.0) == [ag.Adopt(2)]
    assert agent.step(ag.Left(), 103.0) == [ag.Send(Leave(INSTANCE))]
    assert agent.view.lease_until == ag.NO_LEASE
    for late in (ag.Adopted(2), grant(1, 1), ag.Settled(), ag.Poked(), ag.Tick(), ag.Proposed(9), ag.Left()):
        assert agent.step(late, 104.0) == []
    assert agent.view.lease_until == ag.NO_LEASE
    assert agent.deadline() == float("inf")


def test_an_adoption_that_fails_changes_nothing_and_is_tried_again() -> None:
    agent = at_epoch(1)
    agent.step(ag.Poked(), 101.0)
    agent.step(grant(2, 2), 101.0)
    agent.step(ag.AdoptFailed(), 101.0)
    assert agent.view == (1, 130.0)
    assert agent.step(grant(2, 2), 102.0) == [ag.Adopt(2)]


@pytest.mark.parametrize(
    ("message", "now", "reason"),
    [
        (grant(0, 5, instance=OTHER), 101.0, "other_instance"),
        (grant(7, 5), 101.0, "unknown_seq"),
        (grant(0, 5), 130.0, "expired"),
        (grant(1, 2), 101.0, "lower_epoch"),
    ],
)
def test_grants_that_are_dropped(message: ag.Received, now: float, reason: str) -> None:
    agent = at_epoch(3)
    before = agent.view
    assert agent.step(message, now) == []
    assert agent.refused == {reason: 1}
    assert agent.view == before


def test_the_epoch_survives_lease_loss() -> None:
    agent = at_epoch(3)
    agent.step(ag.Tick(), 500.0)  # heartbeat 2, long after the lease
    assert agent.view == (3, 130.0)
    assert agent.step(grant(2, 2), 500.0) == []
    assert agent.step(grant(2, 3), 500.0) == []  # same epoch: nothing to adopt
    assert agent.view == (3, 530.0)


def test_while_adopting_no_other_grant_is_taken() -> None:
    agent = started()
    agent.step(grant(0, 1), 100.0)
    assert agent.step(grant(0, 2), 100.0) == []
    assert agent.refused == {"adopting": 1}


def test_a_grant_of_the_same_epoch_extends_the_lease_and_never_shortens_it() -> None:
    agent = at_epoch(1)  # heartbeats 0 and 1
    agent.step(ag.Poked(), 105.0)  # heartbeat 2
    assert agent.step(grant(2, 1), 106.0) == []
    assert agent.step(grant(1, 1), 107.0) == []
    assert agent.view == (1, 135.0)


def test_the_acknowledgement_waits_until_the_scheduler_is_outside() -> None:
    agent = at_epoch(1)
    agent.step(ag.Poked(), 101.0)
    agent.step(grant(2, 2), 101.0)
    assert agent.step(ag.Adopted(2), 101.0) == [ag.Settle()]
    assert agent.step(ag.Poked(), 102.0) == [ag.Beat(3, 1)]  # still speaks of the old epoch
    assert agent.step(ag.Settled(), 103.0) == [ag.Beat(4, 2)]
    assert agent.step(ag.Settled(), 104.0) == []


def test_heartbeats_come_every_third_of_a_lease_and_faster_without_one() -> None:
    agent = at_epoch(1)
    assert agent.deadline() == pytest.approx(110.0)
    assert agent.step(ag.Tick(), 109.0) == []
    sent = 0
    now = 100.0
    while now < 190.0:
        now = agent.deadline()
        actions = agent.step(ag.Tick(), now)
        sent += sum(isinstance(action, ag.Beat) for action in actions)
        for action in actions:
            if isinstance(action, ag.Beat):
                agent.step(grant(action.seq, 1), now)
    assert sent == 9  # 90 s, one per 10 s: nothing else is sent in steady state
    lost = agent.deadline()
    agent.step(ag.Tick(), lost)
    agent.step(ag.Tick(), lost + 10)
    agent.step(ag.Tick(), lost + 20)
    agent.step(ag.Tick(), lost + 30)  # the lease is over now
    assert agent.deadline() == pytest.approx(lost + 31)


def test_a_nudge_asks_for_a_heartbeat_and_a_flood_of_them_for_few() -> None:
    agent = at_epoch(1)
    assert agent.step(ag.Received(Nudge(INSTANCE)), 101.0) == [ag.Beat(2, 1)]
    assert agent.step(ag.Received(Nudge(OTHER)), 102.0) == []
    flood = [agent.step(ag.Received(Nudge(INSTANCE)), 102.0 + i * 1e-5) for i in range(1000)]  # 10 ms
    assert sum(map(len, flood)) <= 3
    agent = at_epoch(1)
    assert agent.step(ag.Received(Nudge(INSTANCE)), 100.001) == [], "just after a heartbeat it is answered a moment later"
    assert agent.deadline() == pytest.approx(100.005)
    assert agent.step(ag.Tick(), 100.006) == [ag.Beat(2, 1)]


def test_old_seqs_are_forgotten_and_then_refused() -> None:
    agent = started()
    for i in range(300):
        agent.step(ag.Poked(), 101.0 + i * 0.01)
    agent.step(grant(0, 1), 105.0)
    assert agent.refused == {"unknown_seq": 1}
    assert agent.step(grant(300, 1), 105.0) == [ag.Adopt(1)]


def test_a_proposal_is_repeated_until_its_epoch_is_reached() -> None:
    agent = at_epoch(4)
    proposal = ag.Send(Propose(INSTANCE, 5))
    assert agent.step(ag.Proposed(5), 101.0) == [proposal]
    assert agent.step(ag.Tick(), 110.0) == [ag.Beat(2, 4), proposal]
    agent.step(grant(2, 5), 110.0)
    agent.step(ag.Adopted(5), 110.0)
    assert agent.step(ag.Settled(), 110.0) == [ag.Beat(3, 5)]


def test_who_missed_time_goes_on_as_another_instance_without_a_lease() -> None:
    agent, other = at_epoch(1), bytes(16)
    agent.step(ag.Proposed(5), 101.0)
    agent.step(ag.Poked(), 101.0)
    assert agent.step(ag.Woke(other), 105.0) == [ag.Beat(3, 1), ag.Send(Propose(other, 5))]
    assert (agent.view.epoch, agent.view.lease_until) == (1, ag.NO_LEASE)
    assert agent.step(grant(2, 1), 105.0) == [], "it was for the instance before"
    assert agent.view.lease_until == ag.NO_LEASE


def test_an_adoption_under_way_while_time_was_missed_brings_no_lease() -> None:
    agent = at_epoch(1)
    agent.step(ag.Poked(), 101.0)
    agent.step(grant(2, 2), 101.0)
    agent.step(ag.Woke(bytes(16)), 103.0)
    agent.step(ag.Adopted(2), 103.0)
    assert agent.view == (2, ag.NO_LEASE)


def test_the_clock_of_leases_goes_on_whatever_stands_still(monkeypatch: pytest.MonkeyPatch) -> None:
    def read_boot(which: int) -> float:
        nonlocal wall, boot, waits
        wall, boot, waits = wall + waits, boot + waits, 0.0
        return boot

    wall, boot, waits = 1e9, 0.0, 0.0
    monkeypatch.setattr(time, "time", lambda: wall)
    monkeypatch.setattr(time, "clock_gettime", read_boot)
    clock, begin = LeaseClock(), wall
    to_and_fro = [(-0.4, 0, 0, 0), (0.4, 0, 0, 0)] * 99  # it costs nothing; nor does a thread that waits between two readings
    for wall_step, boot_step, wait, passed in (
        *((-600, 0, 0, 0), (500, 500, 0, 500), (60, 0, 0, 60)),  # set back, suspended, restored from an image
        *((3600, 0, 0, 3600), (-3600, 0, 0, 0), (60, 0, 0, 60), *to_and_fro, (0, 0, 60, 60), (1, 1, 0, 1)),
        *((-0.4, 0, 0, 0), (-0.4, 0, 0, 0), (60, 0, 0, 60)),  # in small steps
    ):
        wall, boot, waits, begin = wall + wall_step, boot + boot_step, wait, begin + passed
        assert clock() == pytest.approx(begin, abs=0.01)


def test_of_two_resets_the_higher_epoch_is_proposed_and_none_that_was_left_meanwhile() -> None:
    agent = at_epoch(4)
    assert agent.step(ag.Proposed(4), 101.0) == []
    assert agent.step(ag.Tick(), 110.0) == [ag.Beat(2, 4)]
    agent.step(ag.Proposed(6), 111.0)
    assert agent.step(ag.Proposed(5), 112.0) == [ag.Send(Propose(INSTANCE, 6))]


def test_beyond_the_last_epoch_nothing_is_proposed() -> None:
    agent = at_epoch(MAX_EPOCH)
    assert agent.step(ag.Proposed(MAX_EPOCH + 1), 101.0) == []
    assert agent.refused == {"no_epoch_left": 1}


def test_reclaim_is_for_the_instance_it_names() -> None:
    agent = at_epoch(4)
    assert agent.step(ag.Received(Reclaim(INSTANCE, 4)), 101.0) == [ag.RemoveOld(4)]
    assert agent.step(ag.Received(Reclaim(INSTANCE, 4, [b"w" * 16])), 101.0) == [ag.RemoveOld(4, (b"w" * 16,))]
    assert agent.step(ag.Received(Reclaim(INSTANCE, 4, number=7)), 101.0) == [ag.RemoveOld(4, number=7)]
    assert agent.step(ag.Received(Reclaim(OTHER, 4)), 101.0) == []
