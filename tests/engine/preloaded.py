"""What every engine of the tests imports, for `tests.support.nursery`."""

import gc
import os
from typing import Any

import vllm.entrypoints.launchers.api_server.entry
import vllm.entrypoints.openai.api_server
import vllm.model_executor.models.qwen3
import vllm.v1.engine.core
import vllm.v1.executor.uniproc_executor
import vllm.v1.worker.cpu_model_runner
import vllm.v1.worker.cpu_worker  # noqa: F401
from vllm.platforms.cpu import CpuPlatform

settle = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]


def settle_and_fork(cls: type[CpuPlatform], vllm_config: Any) -> None:
    """vLLM spawns cores and workers on CPUs, whatever the environment says: fork them, as it does elsewhere."""
    settle(cls, vllm_config)
    os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"


CpuPlatform.check_and_update_config = classmethod(settle_and_fork)  # type: ignore[assignment]
gc.collect()
gc.freeze()  # otherwise every child copies what its collector touches
