"""The way of weights from verl's trainer to its rollouts on a machine without NCCL, NIXL and RDMA: a store over TCP.

verl's own backends need one of those. `checkpoint_engine.custom_backend_module` names this module, which is verl's way to add
another. It ends in verl's worker beside the rollout; from there on everything is verl's own.
"""

from collections.abc import AsyncGenerator, Generator
from typing import Any

import ray
import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry
from verl.utils.net_utils import get_free_port
from vllm.distributed.utils import StatelessProcessGroup

BACKEND = "tcp_store"


@CheckpointEngineRegistry.register(BACKEND)
class StoreCheckpointEngine(CheckpointEngine):
    """Rank 0 is the trainer, and the others are workers beside rollouts."""

    def __init__(self, bucket_size: int, is_master: bool = False) -> None:
        self._group: StatelessProcessGroup | None = None

    def prepare(self) -> dict[str, Any]:
        address = ray.util.get_node_ip_address().strip("[]")
        return {"host": address, "port": get_free_port(address)[0]}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        assert actor_wg_world_size == 1
        size = 1 + rollout_world_size

        def arguments(ranks: range) -> dict[str, list[Any]]:
            return {"rank": list(ranks), "world_size": [size] * len(ranks), "master": [metadata[0]] * len(ranks)}

        return arguments(range(1)), arguments(range(1, size))

    def init_process_group(self, rank: int, world_size: int, master: dict[str, Any]) -> None:
        self._group = StatelessProcessGroup.create(**master, rank=rank, world_size=world_size)

    def finalize(self) -> None:
        self._group = None

    async def send_weights(self, weights: Generator[tuple[str, torch.Tensor], None, None], global_steps: int | None = None) -> None:
        assert self._group
        for weight in weights:
            self._group.broadcast_obj(weight, 0)
        self._group.broadcast_obj(None, 0)

    async def receive_weights(self, global_steps: int | None = None) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        assert self._group
        while weight := self._group.broadcast_obj(None, 0):
            yield weight
