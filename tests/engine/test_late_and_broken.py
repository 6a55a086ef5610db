"""L2 alone, whose master comes later, and a hub that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.loopback import free_port
from hack.standalone.engine import Engine
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool
from hack.waiting import eventually
from tests.engine.conftest import BLOCKS, CACHED, PATIENT, PATIENT_ENVIRON, Prompts, Reference, Weights, check, settled_keys
from tests.engine.server_nursery import ServerNursery


@pytest.fixture(scope="module")
def pool(folder: Path) -> Iterator[Pool]:
    with Pool(folder) as pool:  # no test here loses a lease: a short one is lost whenever the machine stands still
        yield pool


def test_l2_only_and_a_master_that_comes_later(
    weights: Weights, folder: Path, pool: Pool, servers: ServerNursery, prompts: Prompts, reference: Reference
) -> None:
    prompt = prompts()
    mooncake = Mooncake(folder / "late")
    connector = pool.connector(master_address=mooncake.address, staging_slots=8, **PATIENT)  # a load gets one: 7 pieces
    with Engine("l2", weights.base, folder, connector, environ=PATIENT_ENVIRON, popen=servers.popen) as engine:
        pool.wait_engines(1)
        answer = engine.complete(prompt)
        check(answer, 0, reference(prompt, weights.base))
        with mooncake:
            eventually(lambda: _stored(engine, mooncake, prompts()), "the engine joins the store", 60.0)
            before = settled_keys(mooncake)
            prompt = prompts()
            assert engine.complete(prompt).tokens == reference(prompt, weights.base)
            eventually(lambda: len(set(mooncake.keys()) - before) == BLOCKS, "blocks in the store")
            assert engine.reset_prefix_cache(external=False)
            answer = engine.complete(prompt)
            check(answer, CACHED, reference(prompt, weights.base))
            assert mooncake.master
            mooncake.master.end(1.0)
            assert not mooncake.master.alive()
            assert engine.reset_prefix_cache(external=False)
            assert engine.complete(prompt).tokens == reference(prompt, weights.base), "a dead master changed an answer"
        assert [view.alive for view in pool.snapshot().engines] == [True]
    assert pool.snapshot().engines == [], "an engine that ends says so: nobody waits for its lease"


def _stored(engine: Engine, mooncake: Mooncake, prompt: list[int]) -> bool:
    engine.complete(prompt, 1)
    return bool(mooncake.keys())


def test_broken_hub_address_and_key(
    weights: Weights, folder: Path, pool: Pool, servers: ServerNursery, prompts: Prompts, reference: Reference
) -> None:
    connector = pool.connector(local_bytes=64 << 20)
    wrong = folder / "wrong-fence"
    wrong.mkdir()
    for file in pool.credentials.iterdir():
        (wrong / file.name).write_text(file.read_text())
    (wrong / "client.key").write_text("this is not a CURVE key")
    connector["kv_connector_extra_config"]["hub"] = {"endpoint": f"tcp://127.0.0.1:{free_port()}", "credentials_dir": str(wrong)}
    prompt = prompts()
    with Engine("no-hub", weights.base, folder, connector, popen=servers.popen) as engine:
        for _ in range(3):
            answer = engine.complete(prompt)
            check(answer, 0, reference(prompt, weights.base))
        assert engine.metric("vllm:external_prefix_cache_hits_total") == 0
        log = engine.process.log.read_text()
        complaints = [line for line in log.splitlines() if "client.key" in line]
        assert complaints, log[-3000:]
        assert len([line for line in complaints if "EngineCore" in line or "Worker" not in line]) == 1, complaints
