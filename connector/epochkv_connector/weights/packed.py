"""CPU kernels that pack linear weights away: a digest is taken of them while they are still there. A plugin of every process.

vLLM's CPU backend hands most weights to oneDNN, keeps an opaque handle and empties the parameter (69 % of a small model's
parameters). The functions that do so are wrapped, at load and at every reload.
"""

from __future__ import annotations

import functools
from typing import Any

from epochkv_connector.weights.held import PACKED


def listen() -> None:
    """Wrap what packs weights away; once in a process, and only where the CPU backend runs."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.layers import utils

    _wrap(utils, "dispatch_cpu_unquantized_gemm", lambda args, kwargs: args[0] if args else kwargs["layer"])
    try:
        from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
    except ImportError:  # elsewhere in another version: such a layer then hides its weights, and the engine says so
        return
    _wrap(CPUInt8ScaledMMLinearKernel, "process_weights_after_loading", lambda args, kwargs: args[1] if len(args) > 1 else kwargs["layer"])


def _wrap(owner: Any, name: str, layer_of: Any) -> None:
    packs = getattr(owner, name, None)
    if packs is None or hasattr(packs, "__wrapped__"):
        return

    @functools.wraps(packs)
    def packing(*args: Any, **kwargs: Any) -> Any:
        mark(layer_of(args, kwargs))
        return packs(*args, **kwargs)

    setattr(owner, name, packing)


def mark(layer: Any) -> None:
    """Keep the digest of the layer's parameters at the layer. Weights on `meta` are yet to come."""
    from epochkv_connector.weights.digest import digest

    parameters = [(name, tensor) for name, tensor in layer._parameters.items() if tensor is not None]
    if any(tensor.is_meta for _, tensor in parameters):
        return
    layer.__dict__[PACKED] = digest(parameters).value.hex()
