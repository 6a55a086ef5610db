"""A hub that is flooded goes on granting and publishing, for every pool but at most the flooder's own.

The floods come from processes of their own; each test shows by counters of the hub, or by what the hub answered on the
flooder's connections, that the flood was there before and after what it must not disturb.
"""

import errno
import os
import resource
import time
from collections.abc import Callable

import pytest

from epochkv_fence.common import lease_clock
from epochkv_fence.net.agent import AgentThread
from epochkv_fence.net.gate import MAX_PEERS, Bucket, Peers
from epochkv_fence.net.server import HubServer
from epochkv_fence.protocol.messages import Bump, BumpStatus, Error, Heartbeat, Refusal, encode
from hack.waiting import eventually
from tests.security.flooder import flooding
from tests.security.wire import failures, heartbeat, pool_instances, raw
from tests.support.fence import POOL, SECOND_POOL, FenceWorld

LEASE = 6.0


def joined(world: FenceWorld, hub: HubServer) -> list[AgentThread]:
    agents = [world.agent(hub.endpoint)[0] for _ in range(3)]
    eventually(lambda: all(agent.view.epoch == 0 for agent in agents), "everyone is granted")
    return agents


def leases_held_for(seconds: float, agents: list[AgentThread]) -> Callable[[], bool]:
    """Whether so much time is over; asserts that nobody is without a lease meanwhile."""
    until = time.monotonic() + seconds

    def looked() -> bool:
        assert all(lease_clock() < agent.view.lease_until for agent in agents), "a lease was lost"
        return time.monotonic() >= until

    return looked


def stands(world: FenceWorld, hub: HubServer, proof: str, at_least: int) -> None:
    """Engines join, their leases are renewed, and an epoch is published by agreement while `proof` counts on."""
    agents = joined(world, hub)
    eventually(lambda: hub.counters[proof] >= at_least, lambda: f"the flood is there: {hub.counters}")
    leases = [agent.view.lease_until for agent in agents]
    eventually(lambda: all(agent.view.lease_until > old for agent, old in zip(agents, leases, strict=True)), "leases renewed")
    began = time.monotonic()
    world.request(hub, 1)
    eventually(lambda: world.published() == 1, "published")
    assert world.authority.published[0][0] < began + LEASE  # by agreement, not by waiting for leases
    assert all(agent.view.epoch == 1 and lease_clock() < agent.view.lease_until for agent in agents)
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
        holder = hub._pools._clients[keys.public]
        holder.pool.bucket.tokens = -(10.0**6)

    world.thread.call(empty)
    with flooding("messages", hub.endpoint, 500, keys):
        stands(world, hub, "dropped_pool", 500)
        assert world.thread.call(lambda: hub.snapshot(SECOND_POOL)).engines == []


def test_costly_messages_over_many_connections(world: FenceWorld, hub: HubServer) -> None:
    """A `Bump` of a pool with so many instances takes milliseconds of the hub's only thread: a few hundred a second would take all."""
    keys = world.second_pool(hub, lease_seconds=60.0)

    def join() -> None:
        holder = hub._pools._clients[keys.public]
        for number in range(10_000):
            weights = (number % 500 + 1).to_bytes(16, "big")
            hub._hear(holder, b"nobody", Heartbeat(number.to_bytes(16, "big"), 0, 0, weights=weights))

    world.thread.call(join)
    agents = joined(world, hub)
    with flooding("bumps", hub.endpoint, 400, keys) as counts:
        eventually(lambda: hub.counters["dropped_cost"] >= 1_000, lambda: f"the flood is there: {hub.counters}")
        eventually(lambda: hub.counters["connections_accepted"] >= 600, "all of it is")
        world.request(hub, 1)
        eventually(lambda: world.published() == 1, "a reset goes on")
        eventually(leases_held_for(1.5 * LEASE, agents), "a lease and a half")
        dropped = hub.counters["dropped_cost"]
        eventually(lambda: hub.counters["dropped_cost"] > dropped, "it was going on all the time")
    assert counts["sent"] >= 1_000
    assert failures(hub) == {}


def test_who_asks_for_too_much_is_told_and_its_pools_heartbeats_are_taken(world: FenceWorld, hub: HubServer) -> None:
    def spend() -> None:
        holder = hub._pools._clients[world.pool_pair.public]
        holder.pool.costs.tokens -= 10**6

    with raw(hub.endpoint, world.client_keys) as client:
        assert isinstance(client.ask(encode(Bump(1, 1))), BumpStatus)
        world.thread.call(spend)
        client.socket.send_multipart(encode(Bump(2, 2)))
        answer = eventually(lambda: told if isinstance(told := client.hear(0.1), Error) else None)
        assert answer.code is Refusal.LIMIT
        assert world.thread.call(lambda: hub.snapshot(POOL)).asked == 1
        client.socket.send_multipart(heartbeat(b"h" * 16))
        eventually(lambda: pool_instances(world, hub) == {b"h" * 16})
    assert hub.counters["dropped_cost"] == 1


def test_a_bucket_gives_its_rate_and_no_more() -> None:
    bucket = Bucket(10.0, 20.0, 20.0, at := 100.0)
    assert sum(bucket.take(1, at) for _ in range(50)) == 20
    assert not bucket.take(1, at + 0.09)
    assert bucket.take(1, at + 0.11)
    assert sum(bucket.take(1, at + 1.1) for _ in range(50)) == 9
    bucket.tokens -= 15
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
