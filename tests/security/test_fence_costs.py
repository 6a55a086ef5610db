"""Messages that cost the hub more than others: what one pool asks for is paid for by that pool alone.

Hub, engines and flooder are processes of their own. The flooding pool has 10,000 instances, so that a `Bump` of it takes some
milliseconds of the hub's only thread, and a few hundred a second would take all of it.
"""

from __future__ import annotations

import time

import pytest

from epochkv_fence.net.keys import ClientKeys
from epochkv_fence.net.server import HubServer
from epochkv_fence.protocol.messages import Bump, BumpStatus, Error, Heartbeat, Refusal, Status, encode
from hack.waiting import eventually
from tests.security.engines import engines
from tests.security.flooder import flooding
from tests.security.wire import failures, heartbeat, pool_instances, raw
from tests.support.fence import POOL, SECOND_POOL, FenceWorld

LEASE = 6.0
NUM_INSTANCES = 10_000


def second_pool(world: FenceWorld, hub: HubServer, num_instances: int = 0) -> ClientKeys:
    """Keys of another pool of the same hub, and instances of it that nobody has."""
    keys = world.second_pool(hub, lease_seconds=60.0)

    def join() -> None:
        holder = hub.receiver.client(keys.public)
        assert holder is not None
        for number in range(num_instances):
            hub.receiver.take(
                holder, b"nobody", Heartbeat(number.to_bytes(16, "big"), 0, 0, weights=(number % 500 + 1).to_bytes(16, "big"))
            )

    world.thread.call(join)
    return keys


def test_a_flood_of_costly_messages_over_many_connections_takes_no_lease_of_another_pool(world: FenceWorld, hub: HubServer) -> None:
    keys = second_pool(world, hub, NUM_INSTANCES)
    with engines(hub.endpoint, world.client_keys, 3) as served, flooding("bumps", hub.endpoint, 400, keys) as flood:
        eventually(lambda: hub.counters["dropped_cost"] >= 1_000, lambda: f"the flood is there: {hub.counters}")
        eventually(lambda: hub.counters["connections_accepted"] >= 600, "all of it is")
        world.request(hub, 1)
        eventually(lambda: world.published() == 1, "a reset goes on")
        until = time.monotonic() + 1.5 * LEASE
        eventually(lambda: time.monotonic() >= until)
        dropped = hub.counters["dropped_cost"]
        eventually(lambda: hub.counters["dropped_cost"] > dropped, "it was going on all the time")
    assert flood["sent"] >= 1_000
    assert served["looks"] >= 100
    assert served["gaps"] == 0
    assert served["renewed"] >= 2  # in one and a half leases
    assert failures(hub) == {}


def test_who_asks_for_too_much_is_told_and_its_pools_heartbeats_are_taken(world: FenceWorld, hub: HubServer) -> None:
    def spend() -> None:
        holder = hub.receiver.client(world.pool_pair.public)
        assert holder is not None
        holder.pool.costs.penalise(10**6)

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


@pytest.mark.parametrize("old_epoch_requests", [2**31 - 1, 2**63 - 1])
def test_numbers_that_add_up_to_what_no_message_can_hold_harm_nobody(world: FenceWorld, hub: HubServer, old_epoch_requests: int) -> None:
    keys = second_pool(world, hub)
    agent, _ = world.agent(hub.endpoint)
    eventually(lambda: agent.view.epoch == 0)
    with raw(hub.endpoint, keys) as client:
        for number in range(3):
            client.socket.send_multipart(encode(Heartbeat(bytes([number]) * 16, 0, old_epoch_requests=old_epoch_requests)))
        eventually(lambda: len(pool_instances(world, hub, SECOND_POOL)) + hub.counters["refused_malformed"] == 3, "taken or refused")
        client.socket.send_multipart(encode(Bump(1, 1)))
        client.socket.send_multipart(encode(Status(2)))
        eventually(lambda: isinstance(client.hear(0.1), Status), "answered")
        assert world.thread.call(lambda: hub.snapshot(SECOND_POOL)).asked == 1
        world.request(hub, 1)
        eventually(lambda: world.published() == 1 and agent.view.epoch == 1)
        lease = agent.view.lease_until
        eventually(lambda: agent.view.lease_until > lease)
    assert failures(hub) == {}
