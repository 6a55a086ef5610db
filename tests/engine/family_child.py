"""What `test_families` does inside its engines' processes: weights by name, two repairs for CPUs, and KV that is overwritten.

Tiny models of fifteen architectures have no checkpoints to load. vLLM's dummy loader makes the modules, and `draw` fills them: the same
numbers for the same name in every engine, sharp enough that attention and states decide the answer.
"""

import dataclasses
import zlib
from collections.abc import Mapping
from typing import Any

GAINS = {"embed_tokens": 1.0, "qkv_proj": 1.6, "o_proj": 2.0, "lm_head": 6.0}
"""Standard deviations of what a matrix makes of unit inputs, by a part of its name; the first that fits counts, else 1."""
FILLS = {"q_norm": 1.6, "k_norm": 1.6, "norm": 1.0}
"""Of vectors: constants by a part of the name."""


def prepare(gains: Mapping[str, float]) -> None:
    """Before the engine starts: what a family's engine needs in its process. `gains`: before those of `GAINS`."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    table = {**gains, **{part: gain for part, gain in GAINS.items() if part not in gains}}
    DummyModelLoader.load_weights = lambda self, model, config: draw(model, table)  # type: ignore[method-assign]
    inspect_here()
    leave_amx()
    keep_no_checkpoints()


def inspect_here() -> None:
    """vLLM looks at a class of model that it sees for the first time in a process of its own, which takes ten seconds: look here."""
    from vllm.model_executor.models import registry

    registry._LazyRegisteredModel.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(self.load_model_cls())  # type: ignore[method-assign]


def leave_amx() -> None:
    """Some machines announce AMX tiles and kill who uses them."""
    import torch

    torch.cpu._is_amx_tile_supported = lambda: False


def keep_no_checkpoints() -> None:
    """vLLM's scan for CPUs returns no states from inside a prefill, which Mamba-2 layers promise: let them promise none."""
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2
    from vllm.v1.kv_cache_interface import MambaSpec

    get = MambaMixer2.get_kv_cache_spec

    def get_without(self: Any, vllm_config: Any) -> Any:
        spec = get(self, vllm_config)
        if not isinstance(spec, MambaSpec):
            return spec
        return dataclasses.replace(spec, num_prefill_checkpoint_blocks=0, prefill_checkpoint_alignment=None)

    MambaMixer2.get_kv_cache_spec = get_without  # type: ignore[method-assign]


def draw(model: Any, gains: Mapping[str, float]) -> None:
    import torch

    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.is_floating_point() and tensor.device.type != "meta":
                fill(name, tensor, gains)


def fill(name: str, tensor: Any, gains: Mapping[str, float]) -> None:
    """The numbers of one weight, and of each tensor-parallel rank others."""
    import torch
    from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

    generator = torch.Generator().manual_seed(zlib.crc32(name.encode() + b"'" * get_tensor_model_parallel_rank()))
    noise = torch.randn(tensor.shape, generator=generator)
    last = name.rpartition(".")[2]
    gain = next((gain for part, gain in gains.items() if part in name), None)
    if last == "A":  # of Mamba-2: forgets over tens to hundreds of tokens
        values = -0.02 * torch.exp(noise)
    elif last == "A_log":
        values = noise - 4.0
    elif last == "D":
        values = torch.ones_like(noise)
    elif tensor.dim() >= 2:
        values = noise * ((1.0 if gain is None else gain) / tensor.shape[-1] ** 0.5)
        if "embed" in name:
            values = noise * (1.0 if gain is None else gain)
    else:
        fitting = next((value for part, value in FILLS.items() if part in name), None)
        values = 0.1 * noise if fitting is None else torch.full_like(noise, fitting if gain is None else gain)
    tensor.copy_(values.to(tensor.dtype))


def layout(served: Any) -> list[tuple[str, int]]:
    """(class of the spec, tokens of a block) of each KV cache group."""
    specs = [group.kv_cache_spec for group in served.core.scheduler.kv_cache_config.kv_cache_groups]
    return [(type(getattr(spec, "first_spec", spec)).__name__, int(spec.block_size)) for spec in specs]


def overwrite(served: Any, only: int | None) -> int:
    """Write one number over the blocks that vLLM's prefix cache names in group `only`, or over all KV; how many blocks it were."""
    from vllm.v1.core.kv_cache_utils import get_group_id

    config, pool = served.core.scheduler.kv_cache_config, served.core.scheduler.kv_cache_manager.block_pool
    layers = served.core.vllm_config.compilation_config.static_forward_context
    overwritten = set()
    for number, group in enumerate(config.kv_cache_groups):
        blocks = [block.block_id for block in pool.blocks if block.block_hash is not None and get_group_id(block.block_hash) == number]
        if only is None:
            blocks = list(range(config.num_blocks))
        elif only != number:
            continue
        overwritten |= set(blocks)
        for name in group.layer_names:
            cache = layers[name].kv_cache
            for tensor in cache if isinstance(cache, (list, tuple)) else [cache]:
                rows = tensor.shape[0] // config.num_blocks
                for block in blocks:
                    tensor[block * rows : (block + 1) * rows].fill_(0.7)
    return len(overwritten)
