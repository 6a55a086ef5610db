"""A group of two pods with two data-parallel ranks each, of a dense model: two processes with the arguments that the operator renders."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from epochkv_operator.planning.engine import desired_engine
from hack.standalone.engine import CPU_ENVIRONMENT, Engine
from hack.standalone.mooncake import CLIENT_ENVIRONMENT
from hack.standalone.pool import Pool
from hack.standalone.process import Process
from hack.waiting import eventually
from tests.engine.conftest import L1_BYTES, Prompts, Weights
from tests.support.nursery import Nursery
from tests.support.planning import CONTEXT, engine, one

pytestmark = pytest.mark.slow
ARGUMENTS = ("--skip-tokenizer-init", "--enforce-eager", "--dtype=float32", "--max-model-len=2048", "--num-gpu-blocks-override=20")
VARIABLES = {"$(LWS_LEADER_ADDRESS)": "localhost", "$(LWS_WORKER_INDEX)": "1", "$(POD_IP)": "127.0.0.1"}
SLOT_BYTES = 3 * 2 * 128 * 2 * 32 * 4 + 256  # layers, keys and values, tokens, heads, numbers of 4 bytes; header and trailer


def rendered(role: str, model: Path) -> list[str]:
    """Command and arguments of these pods, with the variables as Kubernetes and LeaderWorkerSet set them."""
    spec: dict[str, Any] = {"model": {"name": "model", "source": str(model)}, "parallelism": {"data": 4, "nodes": 2}, "args": ARGUMENTS}
    made = desired_engine(engine(spec), None, replace(CONTEXT, served=frozenset({"LeaderWorkerSet"})))
    template = one(made, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"][f"{role}Template"]
    [runs] = template["spec"]["containers"]
    return [VARIABLES.get(argument, argument) for argument in (*runs["command"], *runs["args"])]


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pool]:
    with Pool(tmp_path_factory.mktemp("pool")) as pool:
        yield pool


@pytest.fixture(scope="module")
def group(pool: Pool, weights: Weights, servers: Nursery, folder: Path) -> Iterator[Engine]:
    """The first pod, which answers for both."""
    connector = pool.connector(L1_BYTES)
    follower = [*rendered("worker", weights.base), "--kv-transfer-config", json.dumps(connector)]
    environ = {**CPU_ENVIRONMENT, **CLIENT_ENVIRONMENT, "POD_NAME": "group-0-1"}
    with Process("group-0-1", follower, folder / "group-0-1.log", environ, popen=servers.popen):
        leader = rendered("leader", weights.base)[4:]
        port = leader.index("--port")
        del leader[port : port + 2]  # the engine's own of this test
        with Engine("group-0", weights.base, folder, connector, args=leader, environ={"POD_NAME": "group-0"}, popen=servers.popen) as first:
            yield first


def test_each_rank_reports_for_itself_and_has_its_share_of_its_pods_l1(group: Engine, pool: Pool, prompts: Prompts) -> None:
    names = ["group-0", "group-0-1/2", "group-0-1/3", "group-0/1"]
    eventually(lambda: sorted(view.display_name for view in pool.snapshot().engines) == names, lambda: f"{names} in {pool.snapshot()}")
    pool.wait_engines(4)

    def slots() -> list[float]:
        """Of L1, by rank, once each has taken a step."""
        group.complete(prompts(), 2)
        return [group.metric("vllm:epochkv_slots", state="total", engine=str(rank)) for rank in range(4)]

    eventually(lambda: slots() == [L1_BYTES // 2 // SLOT_BYTES] * 4, lambda: f"halves: {slots()}")
