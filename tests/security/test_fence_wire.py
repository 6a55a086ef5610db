"""Who may speak to the hub, and what garbage, tampering and replay can do: nothing but cost their sender an answer."""

import logging
import os
import secrets
import time
from contextlib import closing

import msgspec
import pytest

from epochkv_fence.net.keys import ClientKeys, generate_keypair
from epochkv_fence.net.server import HubServer
from epochkv_fence.protocol.messages import VERSION_FRAME, Bump, BumpStatus, Error, Grant, Refusal, encode
from hack.standalone.relay import Relay
from hack.waiting import eventually
from tests.security import fuzz
from tests.security.wire import heartbeat, pool_instances, raw
from tests.support.fence import POOL, SECOND_POOL, FenceWorld


# ------------------------------------------------------------------------------------------------------------------ keys
def test_without_curve_nothing_is_heard(world: FenceWorld, hub: HubServer) -> None:
    with raw(hub.endpoint, None) as client:
        assert client.ask(heartbeat(b"x" * 16), timeout=1.0) is None
    assert hub.counters["received"] == 0
    assert pool_instances(world, hub) == set()


def test_an_unknown_key_is_refused_and_the_agent_says_so_once(world: FenceWorld, hub: HubServer, caplog: pytest.LogCaptureFixture) -> None:
    agent, engine = world.agent(hub.endpoint, ClientKeys(world.hub_pair.public, *generate_keypair()))
    eventually(lambda: hub.counters["connections_refused"] >= 3, "it keeps trying")
    assert agent.view.epoch is None
    assert engine.adopted == []
    assert hub.counters["received"] == 0
    assert caplog.text.count("rejects our key") == 1


def test_another_hubs_key_is_not_spoken_to(world: FenceWorld, hub: HubServer, caplog: pytest.LogCaptureFixture) -> None:
    agent, engine = world.agent(hub.endpoint, ClientKeys(generate_keypair().public, *world.pool_pair))
    eventually(lambda: "no CURVE handshake" in caplog.text or "no connection to the hub" in caplog.text)
    time.sleep(0.5)
    assert engine.adopted == []
    assert agent.view.epoch is None
    warnings = [record.name for record in caplog.records if record.levelno >= logging.WARNING]
    assert warnings.count("epochkv_fence.net.agent") == 1
    assert warnings.count("epochkv_fence.net.gate") == len(warnings) - 1 <= 1  # the hub says so, too, once


def test_a_client_speaks_for_its_own_pool_only(world: FenceWorld, hub: HubServer) -> None:
    agent, _ = world.agent(hub.endpoint)
    eventually(lambda: agent.view.epoch == 0)
    keys, victims = world.second_pool(hub), pool_instances(world, hub)
    with raw(hub.endpoint, keys) as client:
        (victim,) = victims
        assert isinstance(client.ask(heartbeat(victim, 10**6)), Grant)  # as an engine instance of its own pool
        status = client.ask(encode(Bump(1, 7)))
        assert isinstance(status, BumpStatus)
        eventually(lambda: world.authority.records[SECOND_POOL].target == 7)
    assert world.authority.records[POOL].target == 0
    assert pool_instances(world, hub) == victims
    before = agent.view.lease_until
    agent.poke()
    eventually(lambda: agent.view.lease_until > before)


# --------------------------------------------------------------------------------------------------------------- garbage
def test_garbage_costs_its_sender_an_answer_and_nothing_else(world: FenceWorld, hub: HubServer) -> None:
    instance = secrets.token_bytes(16)
    for frames, code in (
        ([b""], Refusal.FRAMES),
        ([VERSION_FRAME, b"\xff" * 100], Refusal.MALFORMED),
        ([b"\x09", b"x"], Refusal.VERSION),
        ([VERSION_FRAME, msgspec.msgpack.encode({"type": "Wipe"})], Refusal.TAG),
        ([VERSION_FRAME] * 50, Refusal.FRAMES),
        ([VERSION_FRAME, b"x" * 70_000], Refusal.SIZE),
        (encode(Grant(instance, 0, 9, 30.0)), Refusal.UNEXPECTED),
    ):
        with raw(hub.endpoint, world.client_keys) as client:
            answer = client.ask(frames)
            assert isinstance(answer, Error)
            assert answer.code is code
            assert isinstance(client.ask(heartbeat(instance)), Grant)  # on the same connection
    with raw(hub.endpoint, world.client_keys) as client:
        assert client.ask(encode(Error(Refusal.TAG, "hm")), timeout=0.3) is None  # errors are not answered


def test_a_giant_message_is_cut_off_and_hurts_nobody(world: FenceWorld, hub: HubServer) -> None:
    agent, _ = world.agent(hub.endpoint)
    eventually(lambda: agent.view.epoch == 0)
    with raw(hub.endpoint, world.client_keys) as client:
        assert client.ask([VERSION_FRAME, b"x" * 5_000_000], timeout=0.5) is None
        before = agent.view.lease_until
        agent.poke()
        eventually(lambda: agent.view.lease_until > before)


# ------------------------------------------------------------------------------------------------- tampering and replay
def test_tampered_frames_are_never_taken(world: FenceWorld, hub: HubServer) -> None:
    with closing(Relay(hub.endpoint)) as relay:
        agent, engine = world.agent(relay.endpoint)
        eventually(lambda: agent.view.epoch == 0 and hub.counters["received"] == agent.counters["sent"] >= 2)
        relay.tampering = True
        received, before = hub.counters["received"], agent.view
        agent.poke()
        eventually(lambda: hub.counters["protocol_errors"] >= 1, "refused and counted")
        world.request(hub, 1)
        eventually(lambda: relay.num_changed >= 5)
        assert hub.counters["received"] == received
        assert agent.view == before
        assert engine.adopted == [0]
        relay.tampering = False
        eventually(lambda: agent.view.epoch == 1, "it recovers by itself")


def test_frames_sent_twice_are_taken_once(world: FenceWorld, hub: HubServer) -> None:
    with closing(Relay(hub.endpoint)) as relay:
        agent, engine = world.agent(relay.endpoint)
        eventually(lambda: agent.view.epoch == 0 and hub.counters["received"] == agent.counters["sent"] >= 2)
        relay.replaying = True
        agent.poke()
        eventually(lambda: relay.num_changed >= 1)
        eventually(lambda: hub.counters["protocol_errors"] >= 1, "counted")
        assert hub.counters["received"] <= agent.counters["sent"]
        relay.replaying = False
        world.request(hub, 1)
        eventually(lambda: agent.view.epoch == 1, "it recovers by itself")
        assert engine.adopted == [0, 1]


def test_some_seconds_of_the_fuzzer() -> None:
    """A slice of `make fuzz`, over real sockets too; another seed each time, which its output names."""
    said: list[str] = []
    inputs, crashes = fuzz.run(15.0, int.from_bytes(os.urandom(4), "big"), said.append)
    assert crashes == 0, "\n".join(said)
    assert inputs > 1_000
