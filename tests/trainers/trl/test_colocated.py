"""With vLLM in the trainer's process, `EPOCHKV_ATTACH` alone gives TRL's GRPO hits, and the run is the one without it.

TRL writes weights by `load_weights` of vLLM's model there: no call of the engine says so.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hack.loopback import free_port
from hack.standalone.engine import CPU_ENVIRONMENT
from hack.standalone.mooncake import CLIENT_ENVIRONMENT, Mooncake
from hack.standalone.pool import Pool
from hack.standalone.process import Process
from tests.engine.conftest import PATIENT, PATIENT_ENVIRON
from tests.trainers.trl import grpo
from tests.trainers.trl.colocated_child import BATCH
from tests.trainers.trl.server import ROOT

pytestmark = pytest.mark.timeout(1200)  # two trainers with their engines

GPU_BLOCKS = 8
"""Room for two prompts with their completions: what a step asks for again, the GPU has lost."""
L1_BYTES = 8 << 20
"""Room for all blocks of a step: whether a put to L2 is over when it is asked again depends on the machine."""


@dataclass(frozen=True)
class Trained:
    """A trainer's run, and its log."""

    run: grpo.Run
    log: str

    @property
    def hits(self) -> list[grpo.Hits]:
        return [grpo.Hits(*batch.observed[:2]) for batch in self.run.batches]


def start(model: Path, folder: Path, arguments: Mapping[str, Any], environ: Mapping[str, str]) -> Process:
    """A trainer whose vLLM gets these arguments, beside those of TRL."""
    job = folder / "job.json"
    job.write_text(json.dumps([str(model), str(folder / "trained"), arguments]))
    loopback = {"VLLM_HOST_IP": "127.0.0.1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environ = {**CPU_ENVIRONMENT, **CLIENT_ENVIRONMENT, **loopback, **environ}
    return Process("trainer", [sys.executable, "-m", "tests.trainers.trl.colocated_child", str(job)], folder / "trainer.log", environ, ROOT)


def finish(trainer: Process) -> Trained:
    try:
        trainer.popen.wait(500)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the trainer hangs:\n{trainer.tail(60)}")
    log = trainer.log.read_text()
    results = [line for line in log.splitlines() if line.startswith("RESULT ")]
    assert results, trainer.tail(60)
    return Trained(grpo.Run.load(json.loads(results[0].removeprefix("RESULT "))), log)


@pytest.fixture(scope="module")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    """A trainer whose vLLM caches nothing; it starts while the other one does."""
    with start(model, tmp_path_factory.mktemp("plain"), {"enable_prefix_caching": False}, {}) as trainer:
        yield trainer


@pytest.fixture(scope="module")
def expected(plain: Process) -> Trained:
    return finish(plain)


@pytest.fixture(scope="module")
def attached(plain: Process, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("attached")
    with Mooncake(folder) as mooncake, Pool(folder) as pool:
        connection = folder / "connection.json"
        tiers = {"local": {"capacity_bytes": L1_BYTES}, "distributed": {"master_address": mooncake.address}}
        connection.write_text(json.dumps({**pool.connection(), **tiers, **PATIENT}))
        environ = {**PATIENT_ENVIRON, "EPOCHKV_ATTACH": "1", "EPOCHKV_CONFIG": str(connection)}
        with start(model, folder, {"num_gpu_blocks_override": GPU_BLOCKS}, environ) as trainer:
            return finish(trainer)


def test_it_is_the_run_without_a_cache(attached: Trained, expected: Trained) -> None:
    attached.run.check(expected.run)


def test_the_run_without_a_cache_learns_so_that_old_kv_would_show(expected: Trained) -> None:
    assert expected.hits == [grpo.Hits(0, 0)] * 2 * grpo.STEPS
    assert expected.run.learns


def test_every_step_shares_within_itself_and_nothing_across(attached: Trained) -> None:
    BATCH.check_hits(attached.hits)


def test_l1_took_part(attached: Trained) -> None:
    assert attached.run.batches[-1].observed[2] > 0


def test_every_push_is_seen_though_nothing_announces_it(attached: Trained) -> None:
    names = re.findall(r"EpochKV: weights (\w+), seen in", attached.log)
    assert len(names) == len(set(names)) == grpo.STEPS, "the first push brings what the engine has read from its file"
    assert attached.log.count("EPOCHKV_ATTACH joins this engine to pool policy") == 1
