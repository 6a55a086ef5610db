"""A pool's client key is replaced while engines serve: nobody's lease ends, whichever side learns of the new key first."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from epochkv_fence.net.agent import AgentThread
from epochkv_fence.net.keys import ClientKeys, CredentialsError, KeyPair, generate_keypair
from epochkv_fence.net.server import HubServer
from hack.waiting import eventually
from tests.security.wire import heartbeat, raw
from tests.support.fence import POOL, SECOND_POOL, FakeEngine, FenceWorld

LEASE = 3.0


@pytest.fixture
def world() -> Iterator[FenceWorld]:
    made = FenceWorld(lease_seconds=LEASE)
    yield made
    made.close()


class Vault:
    """Where credentials are read from; `failing` while its files are being written."""

    def __init__(self, keys: ClientKeys) -> None:
        self.keys = keys
        self.failing = False
        self.num_reads = 0

    def __call__(self) -> ClientKeys:
        self.num_reads += 1
        if self.failing:
            raise CredentialsError("client.key: cannot read the key")
        return self.keys


class Watch:
    """Looks at agents all the time; `gaps` counts how often one was seen without a live lease and `Use`."""

    def __init__(self, agents: list[AgentThread]) -> None:
        self.gaps = 0
        self.looks = 0
        self._agents = agents
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.005):
            for agent in self._agents:
                view = agent.view
                self.looks += 1
                self.gaps += view.epoch is None or time.monotonic() >= view.lease_until

    def close(self) -> None:
        self._stop.set()
        self._thread.join(5)


def accept(world: FenceWorld, hub: HubServer, *pairs: KeyPair) -> None:
    """Have the hub accept these keys for the pool, the newest first."""
    config = world.reconfigure(client_public_keys=tuple(pair.public for pair in pairs))
    world.thread.call(lambda: hub.set_pool(config))


def key_indexes(world: FenceWorld, hub: HubServer) -> list[int]:
    return [view.key_index for view in world.thread.call(lambda: hub.snapshot(POOL)).engines if view.alive]


def serving(world: FenceWorld, num_agents: int = 4) -> tuple[HubServer, Vault, list[AgentThread], list[FakeEngine]]:
    hub = world.hub()
    world.lead(hub)
    vault = Vault(world.client_keys)
    made = [world.agent(hub.endpoint, credentials=vault) for _ in range(num_agents)]
    eventually(lambda: all(time.monotonic() < agent.view.lease_until for agent, _ in made), "everyone may use the pool")
    return hub, vault, [agent for agent, _ in made], [engine for _, engine in made]


@pytest.mark.parametrize("first", ["hub", "engines"])
def test_a_key_is_replaced_under_load_and_no_lease_ends(world: FenceWorld, first: str) -> None:
    hub, vault, agents, engines = serving(world)
    old, new = world.pool_pair, generate_keypair()
    watch = Watch(agents)
    try:
        if first == "hub":
            accept(world, hub, new, old)
            eventually(lambda: key_indexes(world, hub) == [1] * 4, "everyone still uses the old key")
            vault.keys = ClientKeys(world.hub_pair.public, *new)
        else:
            vault.keys = ClientKeys(world.hub_pair.public, *new)
            eventually(lambda: hub.counters["connections_refused"] >= 4, "the new key was tried too early")
            assert all(agent.counters["key_changes"] == 0 for agent in agents)
            accept(world, hub, new, old)
        world.request(hub, 1)  # there is no rest for it
        eventually(lambda: all(agent.counters["key_changes"] == 1 for agent in agents), "everyone has changed over")
        eventually(lambda: key_indexes(world, hub) == [0] * 4, "the hub knows that the old key can go")
        accept(world, hub, new)
        with raw(hub.endpoint, world.client_keys) as client:
            assert client.ask(heartbeat(b"o" * 16), timeout=1.0) is None  # the old key is refused
        refused = hub.counters["connections_refused"]
        assert refused >= 1
        world.request(hub, 2)
        eventually(lambda: world.published() == 2, "life goes on")
        lease = agents[0].view.lease_until
        eventually(lambda: agents[0].view.lease_until >= lease + LEASE)
    finally:
        watch.close()
    assert watch.looks > 100
    assert watch.gaps == 0
    assert all(len(engine.adopted) == 3 for engine in engines)


def test_a_key_that_was_dropped_too_early_costs_a_rejoin_and_nothing_else(world: FenceWorld) -> None:
    hub, vault, agents, engines = serving(world, 1)
    new = generate_keypair()
    accept(world, hub, new)
    agents[0].poke()
    eventually(lambda: hub.counters["refused_pool"] >= 1, "its open connection speaks for no pool any more")
    reads = vault.num_reads
    eventually(lambda: vault.num_reads > reads, "it looks for new keys at once")
    eventually(lambda: time.monotonic() >= agents[0].view.lease_until, "it shares nothing")
    vault.keys = ClientKeys(world.hub_pair.public, *new)
    eventually(lambda: time.monotonic() < agents[0].view.lease_until, "it is back")
    assert agents[0].view.epoch == 0
    assert engines[0].adopted == [0]


def test_credentials_that_cannot_be_read_change_nothing(world: FenceWorld, caplog: pytest.LogCaptureFixture) -> None:
    hub, vault, agents, _ = serving(world, 1)
    watch = Watch(agents)
    vault.failing = True
    eventually(lambda: agents[0].counters["credentials_errors"] >= 2)
    vault.failing = False
    vault.keys = ClientKeys(world.hub_pair.public, *generate_keypair())  # a key of nobody
    eventually(lambda: hub.counters["connections_refused"] >= 2)
    vault.keys = world.client_keys  # and back again
    refused = hub.counters["connections_refused"]
    lease = agents[0].view.lease_until
    eventually(lambda: agents[0].view.lease_until >= lease + LEASE)
    watch.close()
    assert watch.gaps == 0
    assert hub.counters["connections_refused"] <= refused + 2
    assert caplog.text.count("cannot read the credentials") == 1
    assert agents[0].counters["key_changes"] == 0


def test_the_hubs_own_key_is_replaced(world: FenceWorld) -> None:
    """Another hub process with another key pair takes the address over: engines follow their files."""
    hub, vault, agents, _ = serving(world, 2)
    endpoint = hub.endpoint
    world.thread.run(hub.stop())
    world.hub_pair = type(world.hub_pair)(*generate_keypair())
    successor = world.hub(endpoint)
    world.lead(successor)
    eventually(lambda: successor.counters["protocol_errors"] + successor.counters["handshakes_failed"] >= 1)
    assert successor.counters["received"] == 0
    vault.keys = world.client_keys
    eventually(lambda: all(agent.counters["key_changes"] == 1 for agent in agents))
    eventually(lambda: all(time.monotonic() < agent.view.lease_until for agent in agents))


def test_an_engine_that_is_given_the_keys_of_another_pool_shares_nothing_there(world: FenceWorld, caplog: pytest.LogCaptureFixture) -> None:
    """Its pool was deleted and made again, and the folder with its keys was refreshed. Its epoch must not become the new pool's."""
    hub, vault, agents, _ = serving(world, 1)
    world.request(hub, 5)
    eventually(lambda: agents[0].view.epoch == 5, "epoch 5")
    vault.keys = world.second_pool(hub)
    world.thread.call(lambda: hub.remove_pool(POOL))
    eventually(lambda: agents[0].counters["key_changes"] == 1, "it has the other pool's keys")
    eventually(lambda: time.monotonic() >= agents[0].view.lease_until, "it shares nothing")
    eventually(lambda: SECOND_POOL in caplog.text, "it says which pool the keys are of")
    assert not world.thread.call(lambda: hub.snapshot(SECOND_POOL).engines)
    world.thread.call(lambda: hub.request(SECOND_POOL, 1))
    eventually(lambda: world.authority.records[SECOND_POOL].published == 1, "a reset of the other pool needs no more than its number")
    assert world.authority.records[SECOND_POOL].target == 1
