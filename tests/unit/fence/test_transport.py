"""Agents and hubs over real sockets on loopback, with an authority in memory."""

import asyncio
import gc
import logging
import os
import threading
import time
from collections import Counter
from unittest.mock import Mock

import pytest

from epochkv_fence.common import SayOnce, lease_clock
from epochkv_fence.net.agent import AgentThread, EngineIdentity, GuardedEngine, Mailbox
from epochkv_fence.net.server import HubServer
from epochkv_fence.protocol.agent import RemoveOld
from epochkv_fence.protocol.messages import ASLEEP
from epochkv_fence.protocol.pool import EngineView
from hack.waiting import eventually
from tests.support.fence import POOL, SECOND_POOL, WEIGHTS, FakeEngine, FenceWorld
from tests.support.hub import using

Agents = list[tuple[AgentThread, FakeEngine]]


def serving(fence: FenceWorld, num_agents: int = 2) -> tuple[HubServer, Agents]:
    hub = fence.hub()
    agents = [fence.agent(hub.endpoint) for _ in range(num_agents)]
    eventually(lambda: all(agent.view.epoch is not None for agent, _ in agents), "everyone is granted")
    return hub, agents


def test_an_engine_inside_schedule_does_not_say_that_it_leaves(fence: FenceWorld) -> None:
    hub, agents = serving(fence)
    agent, engine = agents[0]
    engine.is_busy = True
    assert agent.stop()
    assert not using(agent, 0)
    received = hub.counters["received"]
    agents[1][0].poke()
    eventually(lambda: hub.counters["received"] > received, "what others say later is heard")
    assert len(fence.thread.call(lambda: hub.snapshot(POOL)).engines) == 2, "a request may still be admitted with what it found"


def test_a_read_that_does_not_answer_grants_nothing_but_is_no_stepping_down(fence: FenceWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = fence.hub(deadline=0.25)
    agent, _ = fence.agent(hub.endpoint)
    eventually(lambda: agent.view.epoch == 0)
    fence.thread.call(fence.authority.gate.clear)
    before = agent.view.lease_until
    agent.poke()
    eventually(lambda: hub.counters["verify_failed"] >= 2)
    assert (hub.leading, agent.view.lease_until) == (True, before)
    fence.thread.call(fence.authority.gate.set)
    eventually(lambda: agent.view.lease_until > before)
    monkeypatch.setattr(fence.authority, "verify", lambda term: asyncio.sleep(60))
    failed, began = hub.counters["verify_failed"], time.monotonic()
    fence.request(hub, 1)
    eventually(lambda: hub.counters["verify_failed"] >= failed + 4, "a reset is open")
    assert time.monotonic() - began > 1.4, "who is overloaded has a pause between two reads"


def test_a_process_that_missed_time_has_no_lease_and_is_another_instance(fence: FenceWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after suspension, or in a pod that is restored from an image: the monotonic clock stood still."""

    def instances() -> set[str]:
        return {engine.instance for engine in fence.thread.call(lambda: hub.snapshot(POOL)).engines}

    hub, ((agent, _),) = serving(fence, 1)
    (before,), lease, wall = instances(), agent.view.lease_until, time.time
    monkeypatch.setattr(lease_clock, "_set_back", 0.0)
    monkeypatch.setattr(lease_clock, "ahead", lease_clock.ahead)
    monkeypatch.setattr(time, "time", lambda: wall() + 3600)
    assert lease_clock() > lease
    assert not using(agent, 0), "at once, on whichever thread asks"
    eventually(lambda: instances() > {before}, "nobody is heard for it")
    eventually(lambda: agent.view.lease_until > lease + 3600 and using(agent, 0), "it is granted anew")
    fence.request(hub, 1)
    eventually(lambda: using(agent, 1), "it follows resets")


def test_an_agent_that_has_ended_leaves_no_file_open(fence: FenceWorld) -> None:
    def num_files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    def join_and_leave() -> None:
        agent, _ = fence.agent(hub.endpoint)
        eventually(lambda: agent.view.epoch == 0)
        assert fence.agents.pop().stop()

    hub = fence.hub()
    join_and_leave()
    before = num_files()
    join_and_leave()
    eventually(lambda: num_files() <= before, "the hub closes its end, too")


def test_an_engine_that_is_not_ready_is_not_heard_of(fence: FenceWorld) -> None:
    hub = fence.hub()
    engine = FakeEngine()
    engine.is_ready = False
    agent, _ = fence.agent(hub.endpoint, engine=engine)
    eventually(lambda: hub.counters["connections_accepted"] == 1)
    assert hub.counters["received"] == 0
    engine.is_ready = True
    eventually(lambda: using(agent, 0))


def test_an_engine_that_cannot_adopt_shares_nothing_and_says_so_once(fence: FenceWorld, caplog: pytest.LogCaptureFixture) -> None:
    hub = fence.hub()

    class Broken(FakeEngine):
        def adopt(self, epoch: int) -> None:
            raise RuntimeError("no root here")

    agent, _ = fence.agent(hub.endpoint, engine=Broken())
    eventually(lambda: agent.counters["adopt_errors"] >= 1)
    agent.poke()
    eventually(lambda: agent.counts()["adopt_errors"] >= 2, seconds=30)
    assert agent.view.epoch is None
    assert caplog.text.count("cannot adopt epoch 0") == 1


@pytest.mark.parametrize(
    ("endpoint", "said"), [("tcp://127.0.0.1:1", "no connection to the hub"), ("nonsense://x", "the agent's session failed")]
)
def test_nobody_listens(endpoint: str, said: str, fence: FenceWorld, caplog: pytest.LogCaptureFixture) -> None:
    agent, engine = fence.agent(endpoint)
    eventually(lambda: said in caplog.text, seconds=15)
    assert (engine.adopted, agent.view) == ([], (None, 0.0))
    assert agent.stop()


def test_a_removed_pool_is_gone_and_may_come_back(fence: FenceWorld) -> None:
    hub, agents = serving(fence, 1)
    fence.thread.call(lambda: hub.remove_pool(POOL))
    agents[0][0].poke()
    eventually(lambda: agents[0][0].counters["refused_by_hub"] >= 1)
    with pytest.raises(KeyError):
        fence.thread.call(lambda: hub.snapshot(POOL))
    before = agents[0][0].view.lease_until
    fence.thread.call(lambda: hub.set_pool(fence.config))
    agents[0][0].poke()
    eventually(lambda: agents[0][0].view.lease_until > before)


def test_two_pools_share_no_key(fence: FenceWorld) -> None:
    hub = fence.hub()
    second = fence.reconfigure(uid=SECOND_POOL, name="default/second", client_public_keys=(fence.pool_pair.public,))
    with pytest.raises(ValueError, match="has the client key of pool 'default/policy'"):
        fence.thread.call(lambda: hub.set_pool(second))


def test_stopping_is_quick_even_when_the_authority_hangs(fence: FenceWorld) -> None:
    hub, agents = serving(fence, 1)
    fence.thread.call(fence.authority.gate.clear)
    fence.request(hub, 1)
    eventually(lambda: fence.authority.calls.count("record") == 1)
    fence.thread.run(hub.stop(), timeout=5)
    fence.thread.call(fence.authority.gate.set)
    assert agents[0][0].stop()
    assert agents[0][0].view.lease_until == 0.0


def test_an_engine_says_at_once_that_its_weights_have_changed(fence: FenceWorld) -> None:
    hub, agents = serving(fence)
    (agent, engine), _ = agents

    def groups() -> list[tuple[bytes, int]]:
        return [(group.weights, group.engines) for group in fence.thread.call(lambda: hub.snapshot(POOL)).weights]

    assert groups() == [(WEIGHTS, 2)]
    engine.holds = b"w" * 16
    agent.poke()
    eventually(lambda: groups() == [(b"w" * 16, 1), (WEIGHTS, 1)], "the newest first, of as many")
    assert [view.pod for view in fence.thread.call(lambda: hub.snapshot(POOL)).diverged] == ["rollout-1"]
    engine.holds = "rank 1: no digest"
    agent.poke()
    eventually(lambda: groups() == [(WEIGHTS, 1)])
    (view,) = [view for view in fence.thread.call(lambda: hub.snapshot(POOL)).engines if view.state == "unknown"]
    assert (view.pod, view.weights_note) == ("rollout-0", "rank 1: no digest")


def test_what_an_engine_lacks_is_one_line_at_the_hub_and_hooks_that_fail_cost_no_lease(fence: FenceWorld) -> None:
    class Broken(FakeEngine):
        def tiers(self) -> tuple[str, str]:
            raise RuntimeError("nothing to say")

        def weights(self) -> tuple[bytes | None, str]:
            raise RuntimeError("no digest here")

    limited, short = FakeEngine(), FakeEngine()
    limited.lacks = ("LayoutUnsupported\n" + "x" * 300, "no tier\x1b[31m is used:\n" + "y" * 2000)
    short.holds = b"short"
    hub = fence.hub()
    agents = [fence.agent(hub.endpoint, engine=engine)[0] for engine in (limited, Broken(), short)]
    eventually(lambda: all(using(agent, 0) for agent in agents))

    def told() -> list[EngineView] | None:
        """Once the hub has heard of their adoptions, by the next heartbeats."""
        views = fence.thread.call(lambda: hub.snapshot(POOL)).engines
        return sorted(views, key=lambda view: view.pod) if all(view.state != "behind" for view in views) else None

    lacks, broken, digest = eventually(told)
    assert lacks.tiers_off == "LayoutUnsupported " + "x" * 235
    assert lacks.tiers_note == ("no tier [31m is used: " + "y" * 2000)[:1024]
    assert (broken.tiers_off, broken.tiers_note) == ("", "")
    assert [(view.weights, view.state) for view in (broken, digest)] == [(None, "unknown")] * 2
    assert (broken.weights_note, digest.weights_note) == ("the engine cannot say what it holds", "a digest of 5 bytes, not 16")


def test_keys_are_removed_again_once_there_are_threads_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, counters = FakeEngine(), Counter[str]()
    guarded = GuardedEngine(b"i" * 16, EngineIdentity("e"), engine, Mailbox(), counters, SayOnce(logging.getLogger(__name__)))
    with monkeypatch.context() as limit:
        limit.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
        guarded.remove_old(RemoveOld(1))
    assert counters["reclaim_errors"] == 1
    guarded.remove_old(RemoveOld(2))
    eventually(lambda: engine.reclaims == [(2, ())])


def test_an_engine_that_has_known_other_weights_was_pushed_to() -> None:
    engine, identity = FakeEngine(), EngineIdentity("e")
    guarded = GuardedEngine(b"i" * 16, identity, engine, Mailbox(), Counter(), SayOnce(logging.getLogger(__name__)))
    held: list[tuple[bytes | str, bool]] = [
        ("asleep", False), (WEIGHTS, False), ("asleep", False), (WEIGHTS, False), (b"w" * 16, True), ("asleep", True), (WEIGHTS, True),
    ]  # fmt: skip
    for seq, (engine.holds, pushed) in enumerate(held):
        assert guarded.heartbeat(seq, 0).pushed is pushed
    again = GuardedEngine(b"j" * 16, identity, engine, Mailbox(), Counter(), SayOnce(logging.getLogger(__name__)))
    assert not again.heartbeat(0, 0).pushed, "another instance has started with them"
    since = set()
    for seq, engine.holds in enumerate((ASLEEP, ASLEEP, "a call writes them", "it is digested")):
        again.heartbeat(seq, 0)
        since.add(again._reported_since)
    assert len(since) == 2, "sleep counts for itself"
