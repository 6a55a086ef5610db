"""A hub that is flooded goes on granting and publishing, for every pool but at most the flooder's own.

The floods come from processes of their own; each test shows by counters of the hub, or by what the hub answered on the
flooder's connections, that the flood was there before and after what it must not disturb.
"""

from __future__ import annotations

import errno
import os
import resource
import time

import pytest

from epochkv_fence.net.gate import MAX_PEERS, Bucket, Peers
from epochkv_fence.net.server import HubServer
from hack.waiting import eventually
from tests.security.flooder import flooding
from tests.security.wire import failures
from tests.support.fence import POOL, SECOND_POOL, FenceWorld

LEASE = 6.0


def stands(world: FenceWorld, hub: HubServer, proof: str, at_least: int) -> None:
    """Leases are renewed and an epoch is published by agreement while `proof` counts on."""
    agents = [world.agent(hub.endpoint) for _ in range(3)]
    eventually(lambda: all(agent.view.epoch == 0 for agent, _ in agents), "everyone is granted")
    eventually(lambda: hub.counters[proof] >= at_least, lambda: f"the flood is there: {hub.counters}")
    leases = [agent.view.lease_until for agent, _ in agents]
    eventually(lambda: all(agent.view.lease_until > old for (agent, _), old in zip(agents, leases, strict=True)), "leases renewed")
    began = time.monotonic()
    world.request(hub, 1)
    eventually(lambda: world.published() == 1, "published")
    assert world.authority.published[0][0] < began + LEASE  # by agreement, not by waiting for leases
    assert all(agent.view.epoch == 1 and time.monotonic() < agent.view.lease_until for agent, _ in agents)
    flooded = hub.counters[proof]
    eventually(lambda: hub.counters[proof] > flooded, "it was going on all the time")
    assert failures(hub) == {}


@pytest.mark.parametrize("whose", ["same pool", "another pool"])
def test_garbage_of_an_authenticated_client(world: FenceWorld, hub: HubServer, whose: str) -> None:
    keys = world.client_keys if whose == "same pool" else world.second_pool(hub)
    with flooding("garbage", hub.endpoint, 10_000, keys) as counts:
        stands(world, hub, "dropped_peer", 20_000)
        errors = hub.counters["refused_malformed"] + hub.counters["dropped_peer"] - hub.counters["errors_unsaid"]
    assert counts["sent"] >= 20_000
    assert counts.get("answers", 0) <= errors + 2  # about one a second, not one per frame
    assert counts["sent"] > 100 * counts.get("answers", 0)


def test_messages_of_thousands_of_frames(world: FenceWorld, hub: HubServer) -> None:
    with flooding("frames", hub.endpoint, 5, world.second_pool(hub)) as counts:
        stands(world, hub, "discarded_frames", 100_000)
    assert counts["sent"] >= 5


def test_strangers_who_try_keys(world: FenceWorld, hub: HubServer) -> None:
    with flooding("strangers", hub.endpoint, 300, world.client_keys) as counts:
        stands(world, hub, "connections_refused", 300)
    assert counts["sent"] >= 300


def test_plain_connections_that_are_left_open(world: FenceWorld, hub: HubServer) -> None:
    with flooding("connections", hub.endpoint, 1_000) as counts:
        stands(world, hub, "connections", 1_000)
    assert counts["sent"] >= 1_000


def out_of_files() -> bool:
    """Whether this process, which is the hub's, can open nothing more."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY))
    except OSError as error:
        return error.errno == errno.EMFILE
    return False


def test_connections_that_use_up_the_file_descriptors(world: FenceWorld, hub: HubServer) -> None:
    """Who is connected is served; who comes later is let in when the flood is over."""
    agent, _ = world.agent(hub.endpoint)
    eventually(lambda: agent.view.epoch == 0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        with flooding("connections", hub.endpoint, 1_000) as counts:
            resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 50, hard))
            eventually(out_of_files, "out of file descriptors")
            lease = agent.view.lease_until
            eventually(lambda: agent.view.lease_until > lease, "leases are renewed")
            world.request(hub, 1)
            eventually(lambda: world.published() == 1)
            assert agent.view.epoch == 1
            eventually(out_of_files, "it was so all the time")
        assert counts["sent"] >= 50
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    late, _ = world.agent(hub.endpoint)
    eventually(lambda: late.view.epoch == 1)
    assert failures(hub) == {}


def test_many_connections_of_one_pool_share_its_limit(world: FenceWorld, hub: HubServer) -> None:
    """What one connection may send, ten may not ten times, once the pool's own limit is used up."""
    keys = world.second_pool(hub)

    def empty() -> None:
        holder = hub.receiver.client(keys.public)
        assert holder is not None
        holder.pool.bucket.penalise(holder.pool.bucket.tokens + 10**6)

    world.thread.call(empty)
    with flooding("messages", hub.endpoint, 500, keys):
        stands(world, hub, "dropped_pool", 500)
        assert world.thread.call(lambda: hub.snapshot(SECOND_POOL)).engines == []


def test_a_pool_of_many_instances_is_limited(world: FenceWorld, hub: HubServer) -> None:
    """A client of the pool itself may make instances up; each counts as an engine, and costs no more than lease and margin."""
    with flooding("messages", hub.endpoint, 150, world.client_keys) as counts:
        eventually(lambda: len(world.thread.call(lambda: hub.snapshot(POOL)).engines) >= 300)
        world.request(hub, 1)
        asked = time.monotonic()
        eventually(lambda: world.published() == 1, seconds=60)
    assert counts["sent"] >= 300
    assert world.authority.published[0][0] >= asked


def test_a_bucket_gives_its_rate_and_no_more() -> None:
    bucket = Bucket.full(10.0, 20.0, at := 100.0)
    assert sum(bucket.take(1, at) for _ in range(50)) == 20
    assert not bucket.take(1, at + 0.09)
    assert bucket.take(1, at + 0.11)
    assert sum(bucket.take(1, at + 1.1) for _ in range(50)) == 9
    bucket.penalise(15)
    assert not bucket.take(1, at + 2.0)
    assert bucket.take(4.5, at + 3.0)
    assert not bucket.take(1, at)  # a clock that goes back gives nothing


def test_connections_beyond_the_limit_forget_the_oldest() -> None:
    peers = Peers()
    first = peers.get(b"0", 0.0)
    assert peers.get(b"0", 0.0) is first
    for number in range(1, MAX_PEERS + 1):
        peers.get(str(number).encode(), 0.0)
    assert peers.get(b"0", 0.0) is not first
