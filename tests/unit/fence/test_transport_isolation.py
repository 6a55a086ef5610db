"""What goes wrong with one pool, or with one message, harms nothing else, and is over when its cause is."""

import threading
from typing import Any

import pytest

from epochkv_fence.hub import machine
from epochkv_fence.hub.machine import Hub, HubState
from hack.waiting import eventually
from tests.support.fence import POOL, SECOND_POOL, FakeEngine, FenceWorld

LEASE = 3.0
FENCE_OPTIONS = {"lease_seconds": LEASE}


STEPS = [(Hub, "_finish_round"), (Hub, "_tick"), (Hub, "round_at"), (machine, "_heartbeat"), (machine, "acquire")]


@pytest.mark.parametrize(("owner", "step"), STEPS, ids=[step for _, step in STEPS])
def test_a_pool_whose_steps_fail_harms_no_other_and_goes_on_afterwards(
    fence: FenceWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, owner: Any, step: str
) -> None:
    real = getattr(owner, step)
    broken = threading.Event()
    broken.set()

    def fails(hub: Hub | HubState, *args: Any, **kwargs: Any) -> Any:
        state = hub.state if isinstance(hub, Hub) else hub
        if state.config.uid == SECOND_POOL and broken.is_set():
            raise ArithmeticError("the test breaks this pool")
        return real(hub, *args, **kwargs)

    monkeypatch.setattr(owner, step, fails)
    hub = fence.hub()
    keys = fence.second_pool(hub)
    fence.lead(hub)
    good, _ = fence.agent(hub.endpoint)
    bad, _ = fence.agent(hub.endpoint, keys)
    eventually(lambda: good.view.epoch == 0, "the other pool's engine is granted")
    fence.thread.call(lambda: hub.request(SECOND_POOL, 1))
    bad.poke()
    eventually(lambda: hub.counters["steps_failed"] >= 1, "the fault is there")
    fence.request(hub, 1)
    eventually(lambda: fence.published() == 1, "the other pool's reset")
    lease = good.view.lease_until
    eventually(lambda: good.view.lease_until > lease + LEASE / 2, "its leases are renewed, again and again")
    broken.clear()
    bad.poke()
    eventually(lambda: bad.view.epoch == 1, "the pool is served again")
    eventually(lambda: fence.thread.call(lambda: hub.snapshot(SECOND_POOL)).published == 1)
    assert hub.counters["tasks_failed"] == hub.counters["turns_failed"] == hub.counters["take_failed"] == 0
    said = caplog.text.count("the hub failed to take a step")
    assert 1 <= said <= 4  # not once per failure: at most one each 10 s
    assert said < hub.counters["steps_failed"] or hub.counters["steps_failed"] == 1


def test_an_engine_whose_numbers_cannot_be_encoded_is_silent_until_they_can(fence: FenceWorld, caplog: pytest.LogCaptureFixture) -> None:
    hub = fence.hub()
    fence.lead(hub)
    engine = FakeEngine()
    engine.num_old_epoch = 2**64
    agent, _ = fence.agent(hub.endpoint, engine=engine)
    eventually(lambda: agent.counters["unencodable"] >= 2)
    assert agent.view.epoch is None
    engine.num_old_epoch = 5
    eventually(lambda: agent.view.epoch == 0)
    eventually(lambda: fence.thread.call(lambda: hub.snapshot(POOL)).old_epoch_requests == 5)
    assert agent.counters["sessions_failed"] == 0
    assert caplog.text.count("cannot be encoded") == 1
