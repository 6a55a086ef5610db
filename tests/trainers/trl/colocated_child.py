"""A GRPO run of real TRL with its vLLM in the trainer's process, as `vllm_mode="colocate"` has it. It knows nothing of EpochKV.

python -m tests.trainers.trl.colocated_child JOB        (JOB: what `test_colocated` wrote)
"""

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl import GRPOTrainer
from trl.generation import vllm_generation
from vllm import SamplingParams, _custom_ops
from vllm.model_executor.layers import utils

from tests.trainers.trl import grpo

BATCH = grpo.Batch(prompts=4, shared_tokens=128, own_tokens=200, generations=3)
"""It has 3,936 tokens. TRL lets vLLM compute 4,096 at a time, and vLLM 0.31 on CPU ends where a request with a seed is cut."""
MAX_MODEL_TOKENS = 384
COUNTED = (("vllm:prefix_cache_hits", ""), ("vllm:external_prefix_cache_hits", ""), ("vllm:epochkv_hit_tokens", "L1"))


def draw_apart(trainer: GRPOTrainer) -> None:
    """Give each request a seed of its own. TRL has one for all of them, and completions of a prompt would be equal."""
    llm = trainer.vllm_generation.llm
    generate = llm.generate

    def seeded(prompts: Sequence[Any], sampling_params: SamplingParams, **more: Any) -> Any:
        each = [sampling_params.clone() for _ in prompts]
        for seed, params in enumerate(each):
            params.seed = seed
        return generate(prompts, each, **more)

    llm.generate = seeded


def main() -> None:
    model, folder, arguments = json.loads(Path(sys.argv[1]).read_text())
    trainers: list[GRPOTrainer] = []

    def prepare(trainer: GRPOTrainer) -> None:
        trainers.append(trainer)
        draw_apart(trainer)

    def observe() -> list[int]:
        """Tokens that vLLM's own cache had, that its connector had, and that L1 had, as far as it is counted yet."""
        metrics = trainers[0].vllm_generation.llm.get_metrics()
        values = {(metric.name, metric.labels.get("tier", "")): int(getattr(metric, "value", 0)) for metric in metrics}
        return [values.get(key, 0) for key in COUNTED]

    # On some CPUs, vLLM packs weights and leaves nothing behind that TRL could write: the run without a cache fails, too.
    _custom_ops._supports_onednn = False
    utils.check_cpu_sgl_kernel = lambda *_: False
    # TRL passes a fixed list of arguments, and neither a size of the GPU's cache nor metrics are in it.
    vllm_generation.LLM = functools.partial(vllm_generation.LLM, disable_log_stats=False, **arguments)
    where = {"vllm_mode": "colocate", "vllm_max_model_length": MAX_MODEL_TOKENS}
    run = grpo.train(Path(model), BATCH, where, Path(folder), observe, prepare)
    print("RESULT " + json.dumps(dataclasses.asdict(run)), flush=True)


if __name__ == "__main__":
    main()
