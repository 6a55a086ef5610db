"""A pool's client key is replaced while engines serve: nobody's lease ends, whichever side learns of the new key first."""

import threading
from typing import Any

import pytest

from epochkv_fence.common import lease_clock
from epochkv_fence.hub import machine
from epochkv_fence.hub.machine import Hub, HubState
from epochkv_fence.net.agent import AgentThread
from epochkv_fence.net.keys import ClientKeys, CredentialsError, KeyPair, generate_keypair
from epochkv_fence.net.server import HubServer
from hack.waiting import eventually
from tests.security.wire import heartbeat, raw
from tests.support.fence import POOL, SECOND_POOL, FakeEngine, FenceWorld, LeaseWatch

LEASE = 3.0
FENCE_OPTIONS = {"lease_seconds": LEASE}


class Vault:
    """Where credentials are read from; `failing` while its files are being written, hanging until `back` is set."""

    def __init__(self, keys: ClientKeys) -> None:
        self.keys = keys
        self.failing = False
        self.num_reads = self.num_hanging = 0
        self.back = threading.Event()
        self.back.set()

    def __call__(self) -> ClientKeys:
        self.num_reads += 1
        if self.failing:
            raise CredentialsError("client.key: cannot read the key")
        if not self.back.is_set():
            self.num_hanging += 1
            assert self.back.wait(120)
        return self.keys


def accept(fence: FenceWorld, hub: HubServer, *pairs: KeyPair) -> None:
    """Have the hub accept these keys for the pool, the newest first."""
    config = fence.reconfigure(client_public_keys=tuple(pair.public for pair in pairs))
    fence.thread.call(lambda: hub.set_pool(config))


def key_indexes(fence: FenceWorld, hub: HubServer) -> list[int]:
    return [view.key_index for view in fence.thread.call(lambda: hub.snapshot(POOL)).engines if view.alive]


def serving(fence: FenceWorld, num_agents: int = 4) -> tuple[HubServer, Vault, list[AgentThread], list[FakeEngine]]:
    hub = fence.hub()
    vault = Vault(fence.client_keys)
    made = [fence.agent(hub.endpoint, credentials=vault) for _ in range(num_agents)]
    eventually(lambda: all(lease_clock() < agent.view.lease_until for agent, _ in made), "everyone may use the pool")
    return hub, vault, [agent for agent, _ in made], [engine for _, engine in made]


@pytest.mark.parametrize("first", ["hub", "engines"])
def test_a_key_is_replaced_under_load_and_no_lease_ends(fence: FenceWorld, first: str) -> None:
    hub, vault, agents, engines = serving(fence)
    old, new = fence.pool_pair, generate_keypair()
    with LeaseWatch(agents) as watch:
        if first == "hub":
            accept(fence, hub, new, old)
            eventually(lambda: key_indexes(fence, hub) == [1] * 4, "everyone still uses the old key")
            vault.keys = ClientKeys(fence.hub_pair.public, *new)
        else:
            vault.keys = ClientKeys(fence.hub_pair.public, *new)
            eventually(lambda: hub.counters["connections_refused"] >= 4, "the new key was tried too early")
            assert all(agent.counters["key_changes"] == 0 for agent in agents)
            accept(fence, hub, new, old)
        fence.request(hub, 1)  # there is no rest for it
        eventually(lambda: all(agent.counters["key_changes"] == 1 for agent in agents), "everyone has changed over")
        eventually(lambda: key_indexes(fence, hub) == [0] * 4, "the hub knows that the old key can go")
        accept(fence, hub, new)
        with raw(hub.endpoint, fence.client_keys) as client:
            assert client.ask(heartbeat(b"o" * 16), timeout=1.0) is None  # the old key is refused
        refused = hub.counters["connections_refused"]
        assert refused >= 1
        fence.request(hub, 2)
        eventually(lambda: fence.published() == 2, "life goes on")
        lease = agents[0].view.lease_until
        eventually(lambda: agents[0].view.lease_until >= lease + LEASE)
    assert watch.looks > 100
    assert watch.gaps == 0
    assert all(len(engine.adopted) == 3 for engine in engines)


def test_a_key_that_was_dropped_too_early_costs_a_rejoin_and_nothing_else(fence: FenceWorld) -> None:
    hub, vault, agents, engines = serving(fence, 1)
    new = generate_keypair()
    accept(fence, hub, new)
    agents[0].poke()
    eventually(lambda: hub.counters["refused_pool"] >= 1, "its open connection speaks for no pool any more")
    reads = vault.num_reads
    eventually(lambda: vault.num_reads > reads, "it looks for new keys at once")
    eventually(lambda: lease_clock() >= agents[0].view.lease_until, "it shares nothing")
    vault.keys = ClientKeys(fence.hub_pair.public, *new)
    eventually(lambda: lease_clock() < agents[0].view.lease_until, "it is back")
    assert agents[0].view.epoch == 0
    assert engines[0].adopted == [0]


def test_credentials_that_cannot_be_read_change_nothing(fence: FenceWorld, caplog: pytest.LogCaptureFixture) -> None:
    hub, vault, agents, _ = serving(fence, 1)
    with LeaseWatch(agents) as watch:
        vault.failing = True
        eventually(lambda: agents[0].counters["credentials_errors"] >= 2)
        vault.failing = False
        vault.keys = ClientKeys(fence.hub_pair.public, *generate_keypair())  # a key of nobody
        eventually(lambda: hub.counters["connections_refused"] >= 2)
        vault.keys = fence.client_keys  # and back again
        refused = hub.counters["connections_refused"]
        lease = agents[0].view.lease_until
        eventually(lambda: agents[0].view.lease_until >= lease + LEASE)
    assert watch.gaps == 0
    assert hub.counters["connections_refused"] <= refused + 2
    assert caplog.text.count("cannot read the credentials") == 1
    assert agents[0].counters["key_changes"] == 0


def test_a_file_system_that_hangs_costs_no_lease_and_stopping_does_not_wait_for_it(
    fence: FenceWorld, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("epochkv_fence.net.keys.READ_SECONDS", 0.5)
    hub, vault, agents, _ = serving(fence, 2)
    with LeaseWatch(agents) as watch:
        vault.back.clear()
        eventually(lambda: vault.num_hanging == 2, "reads hang")
        leases = [agent.view.lease_until for agent in agents]
        eventually(lambda: all(agent.view.lease_until >= lease + LEASE for agent, lease in zip(agents, leases, strict=True)))
        eventually(lambda: all(agent.counters["credentials_errors"] >= 1 for agent in agents))
        assert caplog.text.count("the file system hangs") == 2
        fence.request(hub, 1)
        eventually(lambda: all(agent.view.epoch == 1 for agent in agents), "resets go on, too")
    assert watch.gaps == 0
    assert agents[0].stop()
    assert vault.num_hanging == 2, "they hang still, and nobody has tried again"
    reads = vault.num_reads
    vault.back.set()
    eventually(lambda: vault.num_reads > reads, "the other engine reads again")


def test_the_hubs_own_key_is_replaced(fence: FenceWorld) -> None:
    """Another hub process with another key pair takes the address over: engines follow their files."""
    hub, vault, agents, _ = serving(fence, 2)
    endpoint = hub.endpoint
    fence.thread.run(hub.stop())
    fence.hub_pair = type(fence.hub_pair)(*generate_keypair())
    successor = fence.hub(endpoint)
    eventually(lambda: successor.counters["protocol_errors"] + successor.counters["handshakes_failed"] >= 1)
    assert successor.counters["received"] == 0
    vault.keys = fence.client_keys
    eventually(lambda: all(agent.counters["key_changes"] == 1 for agent in agents))
    eventually(lambda: all(lease_clock() < agent.view.lease_until for agent in agents))


# -------------------------------------------- what goes wrong with one pool, or with one message, harms nothing else
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
    hub = fence.hub(leads=False)
    keys = fence.second_pool(hub)
    fence.lead(hub)
    good, _ = fence.agent(hub.endpoint)
    bad, _ = fence.agent(hub.endpoint, keys)
    eventually(lambda: good.view.epoch == 0, "the other pool's engine is granted")
    fence.thread.call(lambda: hub.request(SECOND_POOL, 1))
    bad.poke()
    eventually(lambda: hub.counters["pool_step_failed"] >= 1, "the fault is there")
    fence.request(hub, 1)
    eventually(lambda: fence.published() == 1, "the other pool's reset")
    lease = good.view.lease_until
    eventually(lambda: good.view.lease_until > lease + LEASE / 2, "its leases are renewed, again and again")
    broken.clear()
    bad.poke()
    eventually(lambda: bad.view.epoch == 1, "the pool is served again")
    eventually(lambda: fence.thread.call(lambda: hub.snapshot(SECOND_POOL)).published == 1)
    assert hub.counters["tasks_failed"] == hub.counters["loop_failed"] == hub.counters["receive_failed"] == 0
    said = caplog.text.count("the hub failed to take a step")
    assert 1 <= said <= 4  # not once per failure: at most one each 10 s
    assert said < hub.counters["pool_step_failed"] or hub.counters["pool_step_failed"] == 1


def test_an_engine_whose_numbers_cannot_be_encoded_is_silent_until_they_can(fence: FenceWorld, caplog: pytest.LogCaptureFixture) -> None:
    hub = fence.hub()
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
