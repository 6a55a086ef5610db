"""CPU kernels that pack linear weights away: a digest is taken of them while they are still there.

vLLM's CPU backend hands most weights to oneDNN, keeps an opaque handle and empties the parameter (69 % of a small model's
parameters). The functions that do so are wrapped in every process (`engine.patches.before_packing`).
"""

from __future__ import annotations

from typing import Any

from epochkv_connector.weights.held import PACKED


def mark(layer: Any) -> None:
    """Keep the digest of the layer's parameters at the layer. Weights on `meta` are yet to come."""
    from epochkv_connector.weights.digest import digest

    parameters = [(name, tensor) for name, tensor in layer._parameters.items() if tensor is not None]
    if any(tensor.is_meta for _, tensor in parameters):
        return
    layer.__dict__[PACKED] = digest(parameters).value.hex()
