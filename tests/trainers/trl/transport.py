"""The one part of TRL's server mode that needs a GPU, replaced: how the bytes of a weight travel.

TRL pushes through vLLM's NCCL engine, which no CPU has. Here a tensor goes through vLLM's own `StatelessProcessGroup` (TCP) instead.
Everything around it is TRL's and vLLM's: the rendezvous with its address and ranks, the HTTP calls, which tensors go and under
what names, vLLM's layerwise reload, `load_weights`, the reset of the prefix cache.

The server loads this module with `--worker-extension-cls tests.trainers.trl.transport.Extension`, and takes the engine with
`--weight-transfer-config '{"backend": "tcp"}'`. The trainer calls `patch_trainer`.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from vllm.distributed.utils import StatelessProcessGroup
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine, NCCLWeightTransferInitInfo, NCCLWeightTransferUpdateInfo

Named = tuple[str, torch.Tensor]


class TcpWeightTransferEngine(NCCLWeightTransferEngine):
    """vLLM's NCCL engine with another wire."""

    def init_transfer_engine(self, init_info: NCCLWeightTransferInitInfo) -> None:
        rank = init_info.rank_offset + self.parallel_config.rank
        self.model_update_group = StatelessProcessGroup.create(
            host=init_info.master_address, port=init_info.master_port, rank=rank, world_size=init_info.world_size
        )

    def receive_weights(self, update_info: NCCLWeightTransferUpdateInfo) -> None:
        for name, dtype, shape in zip(update_info.names, update_info.dtype_names, update_info.shapes, strict=True):
            tensor = self.model_update_group.broadcast(None, src=0)
            assert (tensor.dtype, list(tensor.shape)) == (getattr(torch, dtype), list(shape)), f"{name} is not what was announced"
            self.model.load_weights([(name, tensor)])


class Extension:
    """Adds nothing to the worker: naming it makes the worker import this module."""


WeightTransferEngineFactory.register_engine("tcp", TcpWeightTransferEngine)


@dataclass
class Endpoint:
    """What TRL keeps as its communicator, and takes apart at the end (`close_communicator`)."""

    group: Any


def _open_endpoint(init_info: dict[str, Any]) -> Endpoint:
    host, port, size = (init_info[key] for key in ("master_address", "master_port", "world_size"))
    return Endpoint(StatelessProcessGroup.create(host=host, port=port, rank=0, world_size=size))


def _send(iterator: Iterator[Named], group: Endpoint, src: int, post_iter_func: Callable[[Named], torch.Tensor]) -> None:
    for item in iterator:
        group.group.broadcast(post_iter_func(item).clone(), src=src)


def patch_trainer(patch: pytest.MonkeyPatch) -> None:
    """Have TRL's client use this wire: two functions that it imports from vLLM, and its refusal of devices other than CUDA."""
    from trl.generation import vllm_client  # not for the server, which imports this module, too

    stock = vllm_client.VLLMClient.init_communicator

    def init_communicator(self: vllm_client.VLLMClient, device: object) -> None:
        stock(self, "cuda")  # without an index TRL never touches the device

    patch.setattr(vllm_client, "open_trainer_endpoint", _open_endpoint)
    patch.setattr(vllm_client, "packed_nccl_broadcast_producer", _send)
    patch.setattr(vllm_client.VLLMClient, "init_communicator", init_communicator)
    patch.setenv("VLLM_HOST_IP", "127.0.0.1")  # where the trainer waits for the workers
