"""verl's rollouts and the manager of its weights under Ray, as its disaggregated trainers build them, who trains, and right answers.

Of verl: `vLLMReplica` with `vLLMHttpServer`, `CheckpointEngineWorker`, `ServerAdapter` and vLLM's worker extension for each
rollout; `CheckpointEngineManager` in a process of its own. The trainer is ours: a `Worker` of verl with `update_weights` and
`execute_checkpoint_engine`, as verl's workers have, which sends the tensors of a file.
"""

import asyncio
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

ROOT = Path(__file__).resolve().parents[3]
RAY_ENVIRONMENT = {
    "PYTHONPATH": str(ROOT),
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "tests.trainers.verl.cpu_platform",
    "RAY_AUTH_TOKEN": secrets.token_hex(32),  # else Ray keeps one in the home folder
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
}
os.environ.update(RAY_ENVIRONMENT)  # verl looks for its platform when it is imported

import ray  # noqa: E402
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup  # noqa: E402
from verl.utils.config import omega_conf_to_dataclass  # noqa: E402
from verl.workers.config import HFModelConfig, RolloutConfig  # noqa: E402
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica  # noqa: E402

from hack.engine_api import Answer  # noqa: E402
from hack.standalone.engine import CPU_ENVIRONMENT, GPU_BLOCKS  # noqa: E402
from hack.standalone.mooncake import CLIENT_ENVIRONMENT, Mooncake  # noqa: E402
from hack.standalone.pool import Pool  # noqa: E402
from hack.waiting import eventually  # noqa: E402
from tests.trainers.verl.actors import Driver, Trainer  # noqa: E402
from tests.trainers.verl.command_line import ROLLOUT, checked  # noqa: E402

NUM_ROLLOUTS = 2
WORKER = "tests.trainers.verl.cpu_worker.UnpackedWorker"
SETTINGS = (
    *("tensor_model_parallel_size=1", "n_gpus_per_node=1", "dtype=float32", "enforce_eager=true", "ignore_eos=true"),
    *("max_model_len=2048", "max_num_seqs=8", "max_num_batched_tokens=2048", "prompt_length=1024", "response_length=64"),
    *("enable_sleep_mode=false", "free_cache_engine=false"),  # vLLM cannot sleep on a CPU
    *("checkpoint_engine.backend=tcp_store", "checkpoint_engine.update_weights_bucket_megabytes=1"),
    "checkpoint_engine.custom_backend_module=tests.trainers.verl.cpu_transport",
    f"engine_kwargs.vllm.num_gpu_blocks_override={GPU_BLOCKS}",
    f"engine_kwargs.vllm.worker_cls={WORKER}",
)
"""Of a rollout on a CPU."""


class Verl:
    """Rollouts of verl, configured by its command line.

    Args:
        model: whose shape they have. By default they start with weights of vLLM's own making, as verl's trainers have them start.
        folder: gets what Ray writes. Its name is short.
        options: of the command line, as users give them.
        environ: of all processes.
    """

    def __init__(self, model: Path, folder: Path, options: Sequence[str], environ: Mapping[str, str]) -> None:
        self._folder = folder
        self._environ = {**CPU_ENVIRONMENT, **CLIENT_ENVIRONMENT, **RAY_ENVIRONMENT, **environ}
        self._rollout: RolloutConfig = omega_conf_to_dataclass(checked(*(f"++{ROLLOUT}.{one}" for one in SETTINGS), *options))
        self._model = HFModelConfig(path=str(model), override_config={"attn_implementation": "eager"})
        self.replicas: list[vLLMReplica] = []
        self._asked = 0

    def start(self) -> None:
        ray.init(
            num_cpus=16, num_gpus=NUM_ROLLOUTS, include_dashboard=False, log_to_driver=False, object_store_memory=128 << 20,
            _temp_dir=str(self._folder), runtime_env={"env_vars": self._environ},
        )  # fmt: skip
        self.trainer = RayWorkerGroup(
            RayResourcePool([1], use_gpu=False, max_colocate_count=1),
            RayClassWithInitArgs(ray.remote(Trainer), str(self._folder), self._rollout.checkpoint_engine),
            use_gpu=False,
            device_name="cpu",
        )
        self.replicas = [vLLMReplica(rank, self._rollout, self._model, gpus_per_node=1) for rank in range(NUM_ROLLOUTS)]

        async def launch() -> None:
            await asyncio.gather(*(replica.init_standalone() for replica in self.replicas))

        asyncio.run(launch())

    def driver(self) -> Any:
        return Driver.remote(self._rollout.checkpoint_engine, self.trainer, self.replicas)

    def generate(self, replica: int, prompt: Sequence[int]) -> Any:
        """Ask for one greedy answer, as verl's agents do."""
        self._asked += 1
        sampling = {"temperature": 0.0, "max_tokens": 8}
        return self.replicas[replica].server_handle.generate.remote(list(prompt), sampling, f"ask-{self._asked}")

    def answer(self, asked: Any) -> Answer:
        output = ray.get(asked, timeout=120)
        return Answer(tuple(output.token_ids), output.extra_fields["num_cached_tokens"] or 0)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:  # no `__exit__` follows
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Ray ends its processes with SIGKILL, and an engine that ends so leaves its shared memory behind."""
        with suppress(Exception):
            handles = [replica.server_handle for replica in self.replicas if replica.server_handle]
            ray.get([handle.__ray_call__.remote(end_engine) for handle in handles], timeout=60)
        ray.shutdown()


def end_engine(server: Any) -> None:
    """In verl's server: end its engine as vLLM's own server does."""
    server.engine.shutdown(timeout=20)


CACHED = 896
"""Of a prompt of 1,000 tokens: its whole blocks of 128."""


@dataclass(frozen=True)
class World:
    """`weights`: folders by name. `expected`: what plain vLLM without any cache answers with them, by name and prompt."""

    verl: Verl
    pool: Pool
    mooncake: Mooncake
    folder: Path
    weights: Mapping[str, Path]
    prompts: Sequence[Sequence[int]]
    expected: Mapping[str, Sequence[tuple[int, ...]]]

    def ask(self, replica: int, prompt: int, name: str) -> int:
        """The answer is right for these weights; returns how many tokens of the prompt came from a cache."""
        answer = self.verl.answer(self.verl.generate(replica, self.prompts[prompt]))
        assert answer.tokens == self.expected[name][prompt], "a wrong answer"
        return answer.cached

    def first_answers(self, name: str) -> None:
        """After a push: no rollout finds what the weights before have left in the GPU, in the host's memory and in the store."""
        assert self.ask(0, 0, name) == 0, "a wrong answer: from blocks that are not to be found"
        assert self.ask(1, 1, name) == 0, "a wrong answer: from blocks that are not to be found"

    def shares(self, name: str, prompt: int) -> None:
        """The second rollout takes a prompt from the store that only the first has computed with these weights."""
        self.pool.wait_engines(2)
        before = set(self.mooncake.keys())
        assert self.ask(0, prompt, name) == 0, "a wrong answer: from blocks that are not to be found"
        eventually(lambda: len(set(self.mooncake.keys()) - before) >= CACHED // 128, f"blocks of prompt {prompt} in the store", 60)
        assert self.ask(1, prompt, name) == CACHED
