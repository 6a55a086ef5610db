"""vLLM's worker on a CPU, with weights that stay where they were loaded, as on a GPU.

There, vLLM packs linear weights for its kernels and leaves an empty parameter. verl writes into the parameters of the live model,
without the steps that vLLM's own `reload_weights` takes. `worker_cls` of vLLM names this class.
"""

from typing import Any

import torch
from vllm.model_executor.layers import utils
from vllm.v1.worker.cpu_worker import CPUWorker


def keep_weight(layer: torch.nn.Module, remove_weight: bool) -> None:
    """The kernel for layers whose weights cannot be packed."""
    layer.cpu_linear = torch.nn.functional.linear


class UnpackedWorker(CPUWorker):
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        utils.dispatch_cpu_unquantized_gemm = keep_weight
        super().load_model(*args, **kwargs)
