"""A random-weight model of about 100 million parameters, so that a prefill costs what it does in life.

The architecture and the spread of the weights are those of `hack.models`; only the sizes differ, and torch draws the
numbers (pure Python would take minutes). 24 KiB of KV for each token in float32: 384 KiB for a block of 16.
"""

from __future__ import annotations

import json
from array import array
from pathlib import Path

from hack.models import Shape, tensors, write_safetensors

SHAPE = Shape(vocab=12288, hidden=768, intermediate=2304, layers=12, heads=12, kv_heads=4, head_dim=64, positions=8192)


def make_large(out: Path, seed: int, shape: Shape = SHAPE) -> Path:
    """Write the model into the folder `out` and return it; the same seed gives the same weights."""
    import torch

    out.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, tuple[tuple[int, ...], array[float]]] = {}
    for tensor in tensors(shape):
        values = torch.full(tensor.shape, tensor.fill)
        if tensor.gain:
            values = torch.randn(tensor.shape, generator=generator) * (tensor.gain / tensor.shape[-1] ** 0.5)
        data = array("f")
        data.frombytes(values.numpy().tobytes())
        weights[tensor.name] = (tensor.shape, data)
    write_safetensors(out / "model.safetensors", weights)
    (out / "config.json").write_text(json.dumps(shape.config(), indent=1) + "\n")
    return out
