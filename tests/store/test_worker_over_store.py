"""Two ranks that share KV through a real store, with its owner freezing under them."""

from __future__ import annotations

import secrets
from collections import Counter

import pytest
import torch

from epochkv_connector.store.client import StoreClient
from epochkv_connector.wire import BlockMove, JobAck, LoadJob, Phase, SaveJob, StepMetadata, Tier
from epochkv_connector.worker.layout import GroupSpec, layout_digest
from epochkv_connector.worker.runner import JobRunner
from epochkv_connector.worker.staging import HostRegion, Staging
from hack.standalone.mooncake import Mooncake
from hack.waiting import eventually
from tests.support.store import settings

LAYERS, BLOCKS, SLOTS = 4, 32, 16
NAMESPACE = "0a1b2c3d/00112233445566ff/e7/w8899aabbccddeeff"


class Engine:
    """KV tensors, a worker role, and everything it reported."""

    def __init__(self, address: str, seed: int, *, heads_first: bool = True, num_blocks: int = BLOCKS) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.kv = torch.randn(LAYERS, num_blocks, *((2, 16) if heads_first else (16, 2)), 64, generator=generator)
        if not heads_first:
            self.kv = self.kv.transpose(2, 3)  # an equal shape
        self.clients: list[StoreClient] = []
        names = [f"l{i}" for i in range(LAYERS)]
        caches, groups = dict(zip(names, self.kv, strict=True)), [GroupSpec(names, 16)]
        layout = layout_digest(caches, groups, num_blocks)

        def open_store(region: HostRegion) -> StoreClient:
            client = StoreClient(settings(address), [(region.address, region.num_bytes)], layout=layout)
            self.clients.append(client)
            client.start()
            return client

        self.worker = JobRunner(Staging(caches, dict(enumerate(groups)), SLOTS, num_blocks), open_store=open_store)
        self.finished: list[str] = []
        self.failed: list[str] = []
        self.acks: list[JobAck] = []
        assert self.clients[0].wait_ready(15)

    def step(self, **parts: object) -> None:
        self.worker.start_step(StepMetadata(**parts))  # type: ignore[arg-type]
        self.worker.finish_step()

    def collect(self) -> None:
        finished, failed, acks = self.worker.results(0.001)
        self.finished += finished
        self.failed += failed
        self.acks += acks

    def settled(self) -> bool:
        self.collect()
        return self.worker.stats()["held_slots"] == 0 and not self.worker.open_jobs()

    def wait(self, job_id: int, phase: Phase) -> JobAck:
        def found() -> JobAck | None:
            self.collect()
            return next((ack for ack in self.acks if (ack.job_id, ack.phase) == (job_id, phase)), None)

        eventually(found, f"job {job_id} {phase.name}", 20)
        ack = found()
        assert ack is not None
        return ack


@pytest.fixture
def engines(stores: Mooncake):  # type: ignore[no-untyped-def]
    stores.client_ttl_seconds = 60
    stores.start_master()
    stores.start_store()
    made = [Engine(stores.address, seed) for seed in (1, 2)]
    yield made
    for engine in made:
        assert engine.worker.shutdown(10)


def moves(count: int, first_block: int, names: list[bytes], source: Tier) -> tuple[BlockMove, ...]:
    return tuple(BlockMove(0, i, first_block + i, i, names[i], source) for i in range(count))


def test_kv_saved_by_one_worker_is_loaded_by_another(engines: list[Engine]) -> None:
    one, two = engines
    names = [secrets.token_bytes(32) for _ in range(10)]
    one.step(saves=(SaveJob(1, "a", NAMESPACE, 0, 10, moves(10, 3, names, Tier.HOST), 20.0),))
    assert not one.wait(1, Phase.STORED).failed
    before = two.kv.clone()

    two.step(loads=(LoadJob(1, "b", NAMESPACE, moves(10, 20, names, Tier.STORE), 20.0),))
    ack = two.wait(1, Phase.LOADED)
    assert (ack.failed, ack.num_blocks, ack.filled_slots) == (False, 10, tuple(range(10)))
    assert (two.finished, two.failed) == (["b"], [])
    assert torch.equal(two.kv[:, 20:30], one.kv[:, 3:13])
    assert torch.equal(two.kv[:, :20], before[:, :20])
    assert torch.equal(two.kv[:, 30:], before[:, 30:])

    # Another epoch is another name: nothing is found, nothing is written.
    other = NAMESPACE.replace("/e7", "/e8")
    two.step(loads=(LoadJob(2, "c", other, moves(10, 5, names, Tier.STORE), 20.0),))
    assert two.wait(2, Phase.LOADED).failed
    assert two.failed == ["c"]
    assert torch.equal(two.kv[:, :20], before[:, :20])


def test_kv_of_tensors_that_are_laid_out_otherwise_is_a_miss(stores: Mooncake) -> None:
    """Equal names, equal sizes, sound checksums; only the number of blocks may differ."""
    stores.client_ttl_seconds = 60
    stores.start_master()
    stores.start_store()
    one, smaller, other = (
        Engine(stores.address, 1),
        Engine(stores.address, 2, num_blocks=24),
        Engine(stores.address, 3, heads_first=False),
    )
    names = [secrets.token_bytes(32) for _ in range(4)]
    one.step(saves=(SaveJob(1, "a", NAMESPACE, 0, 4, moves(4, 3, names, Tier.HOST), 20.0),))
    assert not one.wait(1, Phase.STORED).failed
    before = other.kv.clone()
    for engine in (smaller, other):
        engine.step(loads=(LoadJob(1, "b", NAMESPACE, moves(4, 20, names, Tier.STORE), 20.0),))
    assert not smaller.wait(1, Phase.LOADED).failed
    assert torch.equal(smaller.kv[:, 20:24], one.kv[:, 3:7])
    assert other.wait(1, Phase.LOADED).failed
    assert torch.equal(other.kv, before)
    stats = other.worker.stats()
    assert (stats["load_failed_store_foreign"], stats["store_defect_layout"] > 0) == (1, True)
    for engine in (one, smaller, other):
        assert engine.worker.shutdown(10)


def test_a_frozen_store_fails_the_load_at_its_deadline_and_frees_the_slots_later(stores: Mooncake, engines: list[Engine]) -> None:
    one, two = engines
    names = [secrets.token_bytes(32) for _ in range(4)]
    one.step(saves=(SaveJob(1, "a", NAMESPACE, 0, 4, moves(4, 3, names, Tier.HOST), 20.0),))
    assert not one.wait(1, Phase.STORED).failed
    before = two.kv.clone()

    stores.stores[0].freeze()
    two.step(loads=(LoadJob(1, "b", NAMESPACE, moves(4, 20, names, Tier.STORE), 0.2),))
    ack = two.wait(1, Phase.LOADED)
    assert (ack.failed, ack.busy_slots) == (True, (0, 1, 2, 3))
    assert two.finished == two.failed == ["b"]
    assert not any(ack.phase is Phase.RELEASED for ack in two.acks)
    stores.stores[0].thaw()
    two.wait(1, Phase.RELEASED)
    assert torch.equal(two.kv, before)
    assert two.finished == ["b"]

    def loaded() -> bool:
        job_id = len(two.acks) + 10
        two.step(loads=(LoadJob(job_id, f"r{job_id}", NAMESPACE, moves(4, 20, names, Tier.STORE), 5.0),))
        return not two.wait(job_id, Phase.LOADED).failed

    eventually(loaded, "loads work again", 30)
    assert torch.equal(two.kv[:, 20:24], one.kv[:, 3:7])


def test_a_load_longer_than_its_slots_arrives_whole(engines: list[Engine]) -> None:
    one, two = engines
    names = [secrets.token_bytes(32) for _ in range(10)]
    one.step(saves=(SaveJob(1, "a", NAMESPACE, 0, 10, moves(10, 3, names, Tier.HOST), 20.0),))
    assert not one.wait(1, Phase.STORED).failed
    before = two.kv.clone()
    two.step(loads=(LoadJob(1, "b", NAMESPACE, in_turns(10, 20, names, 3), 20.0),))
    ack = two.wait(1, Phase.LOADED)
    assert (ack.failed, ack.num_blocks, ack.filled_slots) == (False, 10, (0, 1, 2))
    assert (two.finished, two.failed) == (["b"], [])
    assert torch.equal(two.kv[:, 20:30], one.kv[:, 3:13])
    assert torch.equal(two.kv[:, :20], before[:, :20])
    assert torch.equal(two.kv[:, 30:], before[:, 30:])
    # A block in the middle is gone: the load fails once, and what follows it is not fetched.
    missing = [*names[:5], secrets.token_bytes(32), *names[6:]]
    two.step(loads=(LoadJob(2, "c", NAMESPACE, in_turns(10, 5, missing, 3), 20.0),))
    assert two.wait(2, Phase.LOADED).failed
    assert (two.finished, two.failed) == (["b", "c"], ["c"])
    assert torch.equal(two.kv[:, 11:15], before[:, 11:15]), "blocks 6 to 9 were never fetched"


@pytest.mark.parametrize("victim", ["store", "master"])
def test_a_store_killed_under_loads_and_saves_leaves_every_job_answered_once(stores: Mooncake, engines: list[Engine], victim: str) -> None:
    one, two = engines
    names = [secrets.token_bytes(32) for _ in range(8)]
    one.step(saves=(SaveJob(1, "a", NAMESPACE, 0, 8, moves(8, 3, names, Tier.HOST), 20.0),))
    assert not one.wait(1, Phase.STORED).failed
    process = stores.stores[0] if victim == "store" else stores.master
    assert process is not None
    process.freeze()  # what begins now is under way when the process dies
    two.step(loads=(LoadJob(1, "b", NAMESPACE, in_turns(8, 20, names, 3), 8.0),))
    two.step(
        saves=(SaveJob(2, "s", NAMESPACE, 0, 2, tuple(BlockMove(0, i, 1 + i, 8 + i, secrets.token_bytes(32)) for i in range(2)), 8.0),)
    )
    two.wait(2, Phase.COPIED)
    eventually(lambda: two.worker.stats()["store_in_flight"] >= 2, "calls are under way", 5)
    process.kill()
    assert process.popen.returncode == -9
    assert two.wait(1, Phase.LOADED).failed
    two.wait(2, Phase.STORED)
    eventually(two.settled, "no slot is held any more", 30)
    assert (two.finished, two.failed) == (["b"], ["b"])
    told = Counter((ack.job_id, ack.phase) for ack in two.acks)
    assert {key for key in told if key[1] is not Phase.RELEASED} == {(1, Phase.LOADED), (2, Phase.COPIED), (2, Phase.STORED)}
    assert set(told.values()) == {1}


def in_turns(count: int, first_block: int, names: list[bytes], num_slots: int) -> tuple[BlockMove, ...]:
    return tuple(BlockMove(0, i, first_block + i, i % num_slots, names[i], Tier.STORE) for i in range(count))
