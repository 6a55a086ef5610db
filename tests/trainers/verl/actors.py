"""Who trains, and the process of verl's manager.

Apart from `lab`, which imports vLLM's server: these processes do not need it, and start seconds earlier.
"""

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from safetensors.torch import load_file
from verl.checkpoint_engine.base import CheckpointEngineManager, CheckpointEngineRegistry
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayWorkerGroup
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig
from verl.workers.rollout.replica import RolloutReplica

HELD, SENT = "held", "sent"


class Trainer(Worker):
    """Who has the weights. `folder` gets a file of the name HELD while it waits in the middle of a push, and SENT after each push."""

    def __init__(self, folder: str, config: CheckpointEngineConfig) -> None:
        super().__init__()
        self._folder, self._weights, self._hold_at = Path(folder), "", 0
        import_external_libs(config.custom_backend_module)
        self.checkpoint_engine = CheckpointEngineRegistry.new(config.backend, bucket_size=1 << 20, is_master=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def train(self, weights: str, hold_at: int = 0) -> None:
        """Take these for the result of a step. `hold_at`: of the next push, wait before so many tensors until HELD is gone."""
        self._weights, self._hold_at = weights, hold_at

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    async def update_weights(self, global_steps: int | None = None, mode: str = "auto") -> None:
        await self.checkpoint_engine.send_weights(self._tensors(), global_steps)
        (self._folder / SENT).write_text(self._weights)

    @register(dispatch_mode=Dispatch.DP_COMPUTE, blocking=False)
    def execute_checkpoint_engine(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.checkpoint_engine, method)(*args, **kwargs)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        held = self._folder / HELD
        for index, named in enumerate(load_file(f"{self._weights}/model.safetensors").items()):
            if index and index == self._hold_at:
                held.touch()
                while held.exists():
                    time.sleep(0.02)
            yield named


@ray.remote(num_cpus=0)
class Driver:
    """The process of verl's manager."""

    def __init__(self, config: CheckpointEngineConfig, trainer: RayWorkerGroup, replicas: Sequence[RolloutReplica]) -> None:
        self._manager = CheckpointEngineManager(config, trainer, list(replicas))

    def pid(self) -> int:
        return os.getpid()

    def update_weights(self, step: int) -> None:
        self._manager.update_weights(global_steps=step)
