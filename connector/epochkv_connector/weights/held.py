"""Which tensors of a worker are weights: everything its models hold, less a short list with reasons.

Parameters and buffers by name, and plain tensors that modules keep as attributes, since some kernels put repacked weights there.
If a layer hides its weights, the engine has no digest. One kind may: vLLM's CPU backend hands most linear weights to oneDNN, keeps an
opaque handle and empties the parameter (69 % of a small model's parameters). The functions that do so are wrapped in every process
(`engine.patches.before_packing`), and `mark` takes a digest while the weights are still there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from epochkv_connector.weights.digest import Unreadable, digest

PACKED = "_epochkv_packed"
"""Attribute of a layer: hex digest of the weights that a kernel has packed away."""

LEFT_OUT = {
    "cos_sin_cache": "rotary tables are made of the configuration, which the fingerprint has, and may be cast or grown later",
    "kv_cache": "what is named, not what names",
    "workspace": "scratch memory of kernels",
    "expert_map": "which rank has which expert: the layout, not the weights",
    "expert_load_view": "a statistic",
    "logical_to_physical_map": "as expert_map",
    "logical_replica_count": "as expert_map",
}
"""Names, or ends of names behind an underscore, of tensors that are not weights, and why."""

MIN_BITS_PER_WEIGHT = 1
"""Of any quantisation: a linear layer with less than this to be seen hides its weights."""


def models(worker: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """The model, and the drafter's where there is one, with a prefix for names."""
    yield "", worker.get_model()
    draft = getattr(worker, "get_draft_model", lambda: None)()
    if draft is not None:
        yield "draft.", draft


@dataclass(frozen=True, slots=True)
class Home:
    """A weight, and where it is kept.

    Attributes:
        steps: (container, key, what is there), from the module's own table to the tensor.
    """

    name: str
    tensor: torch.Tensor
    steps: tuple[tuple[Any, Any, Any], ...]


def homes(worker: Any) -> Iterator[Home]:
    """All weights of this rank, with the places that they were found in.

    Raises:
        Unreadable: a layer hides its weights.
    """
    for prefix, model in models(worker):
        for path, module in model.named_modules(remove_duplicate=True):
            name = f"{prefix}{path}.".replace(".base_layer.", ".")
            if type(module).__module__.startswith("vllm.lora."):
                continue  # the adapters' own; what is below such a wrapper is a module of its own
            num_bytes = 0
            for home in _own(module):
                num_bytes += home.tensor.numel() * home.tensor.element_size()
                if not _is_left_out(home.name):
                    yield Home(name + home.name, home.tensor, home.steps)
            _check_visible(name, module, num_bytes)


def weights(worker: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all weights of this rank.

    Raises:
        Unreadable: a layer hides its weights.
    """
    return ((home.name, home.tensor) for home in homes(worker))


def mark(layer: Any) -> None:
    """Keep the digest of the layer's parameters at the layer, before they are packed away. Weights on `meta` are yet to come."""
    parameters = [(name, tensor) for name, tensor in layer._parameters.items() if tensor is not None]
    if not any(tensor.is_meta for _, tensor in parameters):
        layer.__dict__[PACKED] = digest(parameters).value.hex()


def packed(worker: Any) -> list[list[str]]:
    """[name, digest] of layers whose weights were packed away."""
    found = []
    for prefix, model in models(worker):
        for path, module in model.named_modules():
            marked = module.__dict__.get(PACKED)
            if marked is not None:
                found.append([f"{prefix}{path}.".replace(".base_layer.", "."), str(marked)])
    return found


def _own(module: torch.nn.Module) -> Iterator[Home]:
    for table in (module._parameters, module._buffers):
        for attribute, tensor in table.items():
            if tensor is not None:
                yield Home(attribute, tensor, ((table, attribute, tensor),))
    holders = [("", module), ("quant_method.", module.__dict__.get("quant_method") or module._modules.get("quant_method"))]
    for prefix, holder in holders:
        kept = getattr(holder, "__dict__", {})
        for attribute, value in kept.items():
            step = (kept, attribute, value)
            if isinstance(value, torch.Tensor):
                yield Home(prefix + attribute, value, (step,))
            elif isinstance(value, (list, tuple)):
                for index, one in enumerate(value):
                    if isinstance(one, torch.Tensor):
                        yield Home(f"{prefix}{attribute}.{index}", one, (step, (value, index, one)))


def _is_left_out(attribute: str) -> bool:
    name = attribute.partition(".")[0]
    return any(name == ending or name.endswith(f"_{ending}") for ending in LEFT_OUT)


def _check_visible(name: str, module: torch.nn.Module, num_bytes: int) -> None:
    if getattr(module, "quant_method", None) is None or PACKED in module.__dict__:
        return
    sizes = [getattr(module, f"{side}_size_per_partition", getattr(module, f"{side}_size", 0)) for side in ("input", "output")]
    num_weights = math.prod(size if isinstance(size, int) else 0 for size in sizes)  # of a linear layer; 0: this is none
    emptied = any(parameter is not None and not parameter.numel() for parameter in module._parameters.values())
    if num_bytes * 8 < num_weights * MIN_BITS_PER_WEIGHT or (emptied and not num_bytes):
        raise Unreadable(
            f"the weights of {name[:-1]} were packed away by a kernel before anybody looked at them; "
            "let vLLM load the plugin 'epochkv' in every process (VLLM_PLUGINS)"
        )
