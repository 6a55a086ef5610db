"""OpenRLHF's own engines, which have no field for a connector, join by EPOCHKV_ATTACH and share; its push cannot run without CUDA."""

import asyncio
import json
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from vllm import SamplingParams

from hack.standalone.engine import CPU_ENVIRONMENT
from hack.standalone.mooncake import CLIENT_ENVIRONMENT, Mooncake
from hack.standalone.pool import Pool
from hack.waiting import eventually
from tests.engine.conftest import PATIENT
from tests.trainers.frameworks.conftest import CACHED, L1_BYTES, START_SECONDS, new_prompt

pytestmark = pytest.mark.timeout(900)


@dataclass(frozen=True)
class Rollout:
    """One `RolloutRayActor`."""

    actor: Any

    def complete(self, prompt: list[int]) -> tuple[tuple[int, ...], int]:
        """Tokens of the answer, and how many of the prompt's were found in a cache."""
        sampling = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        output = ray.get(self.actor.generate.remote(prompt, sampling), timeout=120.0)
        return tuple(output.outputs[0].token_ids), output.num_cached_tokens

    def call(self, method: str, **arguments: Any) -> None:
        """A call on the workers by the engine that the actor holds. Ray runs the function beside the engine's loop."""

        def on_engine(actor: Any) -> None:
            loop = actor.llm.output_handler.get_loop()
            asyncio.run_coroutine_threadsafe(actor.llm.collective_rpc(method, kwargs=arguments), loop).result(120.0)

        ray.get(self.actor.__ray_call__.remote(on_engine), timeout=150.0)


@pytest.fixture(scope="module")
def rollouts(
    weights: tuple[Path, Path], pool: Pool, mooncake: Mooncake, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[Rollout]]:
    """Two of them, made by OpenRLHF. Ray is told of GPUs that nobody has: OpenRLHF asks it for one for each engine."""
    from openrlhf.trainer.ray.vllm_engine import create_vllm_engines

    document = tmp_path_factory.mktemp("openrlhf") / "connection.json"
    extra = pool.connector(L1_BYTES, mooncake.address, **PATIENT)["kv_connector_extra_config"]
    document.write_text(json.dumps(extra))
    attach = {"EPOCHKV_ATTACH": "1", "EPOCHKV_CONFIG": str(document), "HF_HUB_OFFLINE": "1"}
    temporary = tempfile.mkdtemp(prefix="ray-")  # Ray's sockets are below it, and their paths may have 107 characters
    environ = {**CPU_ENVIRONMENT, **CLIENT_ENVIRONMENT, **attach}
    ray.init(num_cpus=4, num_gpus=2, include_dashboard=False, _temp_dir=temporary, runtime_env={"env_vars": environ})
    try:
        actors = create_vllm_engines(
            num_engines=2,
            tensor_parallel_size=1,
            pretrain=str(weights[0]),
            seed=1,
            full_determinism=False,
            enable_prefix_caching=True,
            enforce_eager=True,
            max_model_len=2048,
            gpu_memory_utilization=0.2,
        )
        pool.wait_engines(2, START_SECONDS)
        yield [Rollout(actor) for actor in actors]
    finally:
        ray.shutdown()
        shutil.rmtree(temporary, ignore_errors=True)


def test_engines_share_without_a_patch_and_new_weights_keep_nothing_old(
    rollouts: list[Rollout], pool: Pool, mooncake: Mooncake, weights: tuple[Path, Path]
) -> None:
    one, two = rollouts
    prompt = new_prompt(11)
    computed, cached = one.complete(prompt)
    assert cached == 0
    eventually(lambda: len(mooncake.keys()) >= CACHED // 128, "the first engine has stored its blocks")
    assert two.complete(prompt) == (computed, CACHED)

    one.call("reload_weights", weights_path=str(weights[1]))
    new, cached = one.complete(prompt)
    assert (cached, new != computed) == (0, True)
    assert two.complete(prompt) == (computed, CACHED)  # it has the old weights still

    two.call("reload_weights", weights_path=str(weights[1]))
    assert two.complete(prompt) == (new, CACHED)
