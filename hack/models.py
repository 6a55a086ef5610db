"""Make tiny random-weight models that vLLM loads like any other, so that tests and the demo need no download.

There are two shapes: Qwen3's, which is attention alone, and Granite 4's hybrid, where most layers keep a recurrent state (Mamba 2).

The weights are drawn so that attention decides the answer: sharp attention scores and large value projections make a
wrong block of KV change the tokens. Two seeds are two sets of weights for one architecture: "base" and "pushed".
No tokenizer is written (requests carry token ids). Standard library only: both environments can run it.

    python -m hack.models OUT --seed 1
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """Sizes of the model; the defaults give about 220 thousand parameters (0.9 MB) and 12 KiB of KV per 4 tokens."""

    vocab: int = 512
    hidden: int = 64
    intermediate: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    positions: int = 4096
    experts: int = 0

    def config(self) -> dict[str, object]:
        """The `config.json` of Hugging Face's Qwen3, with experts if there are any."""
        mixed = {"num_experts": self.experts, "num_experts_per_tok": 2, "moe_intermediate_size": self.intermediate, "norm_topk_prob": True}
        return {
            **(mixed if self.experts else {}),
            "architectures": ["Qwen3MoeForCausalLM" if self.experts else "Qwen3ForCausalLM"],
            "model_type": "qwen3_moe" if self.experts else "qwen3",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.positions,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "sliding_window": None,
            "initializer_range": 0.02,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "dtype": "float32",
            "torch_dtype": "float32",
            "use_cache": True,
        }


@dataclass(frozen=True)
class Tensor:
    """One weight: `gain` is the standard deviation of its outputs for unit inputs; 0 means a constant `fill`.

    `spread`: the standard deviation around `fill` then.
    """

    name: str
    shape: tuple[int, ...]
    gain: float = 0.0
    fill: float = 1.0
    spread: float = 0.0


@dataclass(frozen=True)
class HybridShape:
    """Sizes of a hybrid; by default 18 KiB of state in each layer that has one, and 32 KiB of KV per 128 tokens in the other."""

    vocab: int = 512
    hidden: int = 64
    intermediate: int = 128
    layers: tuple[str, ...] = ("mamba", "attention", "mamba")
    heads: int = 2
    kv_heads: int = 1
    positions: int = 4096
    state_heads: int = 4
    state_head_dim: int = 32
    state_size: int = 32

    @property
    def inner(self) -> int:
        """Width inside of a layer with a state."""
        return self.state_heads * self.state_head_dim

    def config(self) -> dict[str, object]:
        """The `config.json` of Hugging Face's Granite 4 hybrids without experts."""
        return {
            "architectures": ["GraniteMoeHybridForCausalLM"],
            "model_type": "granitemoehybrid",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "shared_intermediate_size": self.intermediate,
            "num_hidden_layers": len(self.layers),
            "layer_types": list(self.layers),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "mamba_n_heads": self.state_heads,
            "mamba_d_head": self.state_head_dim,
            "mamba_d_state": self.state_size,
            "mamba_n_groups": 1,
            "mamba_d_conv": 4,
            "mamba_expand": self.inner // self.hidden,
            "mamba_chunk_size": 64,
            "mamba_conv_bias": True,
            "mamba_proj_bias": False,
            "position_embedding_type": "rope",
            "max_position_embeddings": self.positions,
            "attention_multiplier": 2.5 / (self.hidden // self.heads) ** 0.5,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "initializer_range": 0.02,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "dtype": "float32",
            "torch_dtype": "float32",
            "use_cache": True,
        }


def tensors(shape: Shape | HybridShape) -> Iterator[Tensor]:
    """Every weight of the model, in file order."""
    return _hybrid_tensors(shape) if isinstance(shape, HybridShape) else _attention_tensors(shape)


def _hybrid_tensors(shape: HybridShape) -> Iterator[Tensor]:
    hidden, kv, inner = shape.hidden, shape.kv_heads * shape.hidden // shape.heads, shape.inner
    convolved = inner + 2 * shape.state_size
    yield Tensor("model.embed_tokens.weight", (shape.vocab, hidden), gain=float(hidden) ** 0.5)
    for index, kind in enumerate(shape.layers):
        layer = f"model.layers.{index}"
        yield Tensor(f"{layer}.input_layernorm.weight", (hidden,))
        if kind == "attention":
            yield Tensor(f"{layer}.self_attn.q_proj.weight", (hidden, hidden), gain=1.0)
            yield Tensor(f"{layer}.self_attn.k_proj.weight", (kv, hidden), gain=1.0)
            yield Tensor(f"{layer}.self_attn.v_proj.weight", (kv, hidden), gain=4.0)
            yield Tensor(f"{layer}.self_attn.o_proj.weight", (hidden, hidden), gain=2.0)
        else:
            # A state forgets over tens to hundreds of tokens, so it decides the answer and does not blow up.
            yield Tensor(f"{layer}.mamba.A_log", (shape.state_heads,), fill=-3.0, spread=1.0)
            yield Tensor(f"{layer}.mamba.D", (shape.state_heads,))
            yield Tensor(f"{layer}.mamba.dt_bias", (shape.state_heads,), fill=-1.0, spread=0.5)
            yield Tensor(f"{layer}.mamba.conv1d.weight", (convolved, 1, 4), gain=1.0)
            yield Tensor(f"{layer}.mamba.conv1d.bias", (convolved,), fill=0.0, spread=0.1)
            yield Tensor(f"{layer}.mamba.in_proj.weight", (inner + convolved + shape.state_heads, hidden), gain=1.0)
            yield Tensor(f"{layer}.mamba.norm.weight", (inner,))
            yield Tensor(f"{layer}.mamba.out_proj.weight", (hidden, inner), gain=4.0)
        yield Tensor(f"{layer}.post_attention_layernorm.weight", (hidden,))
        yield Tensor(f"{layer}.shared_mlp.input_linear.weight", (2 * shape.intermediate, hidden), gain=1.0)
        yield Tensor(f"{layer}.shared_mlp.output_linear.weight", (hidden, shape.intermediate), gain=1.0)
    yield Tensor("model.norm.weight", (hidden,))
    yield Tensor("lm_head.weight", (shape.vocab, hidden), gain=4.0)


def _attention_tensors(shape: Shape) -> Iterator[Tensor]:
    hidden, wide, kv = shape.hidden, shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    yield Tensor("model.embed_tokens.weight", (shape.vocab, hidden), gain=float(hidden) ** 0.5)
    for index in range(shape.layers):
        layer = f"model.layers.{index}"
        yield Tensor(f"{layer}.input_layernorm.weight", (hidden,))
        yield Tensor(f"{layer}.self_attn.q_proj.weight", (wide, hidden), gain=1.0)
        yield Tensor(f"{layer}.self_attn.k_proj.weight", (kv, hidden), gain=1.0)
        yield Tensor(f"{layer}.self_attn.v_proj.weight", (kv, hidden), gain=4.0)
        yield Tensor(f"{layer}.self_attn.o_proj.weight", (hidden, wide), gain=2.0)
        # Norms of 1.6 make attention scores spread by about 2.5: a few positions dominate, none is lost.
        yield Tensor(f"{layer}.self_attn.q_norm.weight", (shape.head_dim,), fill=1.6)
        yield Tensor(f"{layer}.self_attn.k_norm.weight", (shape.head_dim,), fill=1.6)
        yield Tensor(f"{layer}.post_attention_layernorm.weight", (hidden,))
        if shape.experts:
            yield Tensor(f"{layer}.mlp.gate.weight", (shape.experts, hidden), gain=1.0)
        for mlp in [f"{layer}.mlp.experts.{expert}" for expert in range(shape.experts)] or [f"{layer}.mlp"]:
            yield Tensor(f"{mlp}.gate_proj.weight", (shape.intermediate, hidden), gain=1.0)
            yield Tensor(f"{mlp}.up_proj.weight", (shape.intermediate, hidden), gain=1.0)
            yield Tensor(f"{mlp}.down_proj.weight", (hidden, shape.intermediate), gain=1.0)
    yield Tensor("model.norm.weight", (hidden,))
    yield Tensor("lm_head.weight", (shape.vocab, hidden), gain=4.0)


def values(tensor: Tensor, rng: random.Random) -> array[float]:
    """The weight as little-endian float32, row by row."""
    count = 1
    for size in tensor.shape:
        count *= size
    if not tensor.gain:
        return array("f", (rng.gauss(tensor.fill, tensor.spread) if tensor.spread else tensor.fill for _ in range(count)))
    std = tensor.gain / tensor.shape[-1] ** 0.5
    return array("f", (rng.gauss(0.0, std) for _ in range(count)))


def write_safetensors(path: Path, weights: dict[str, tuple[tuple[int, ...], array[float]]]) -> None:
    """Write the safetensors format: length of the header (u64), the header as JSON, the data in one piece."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (shape, data) in weights.items():
        size = len(data) * data.itemsize
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for _, data in weights.values():
            if sys.byteorder == "big":
                data.byteswap()
            data.tofile(file)


def make(out: Path, seed: int, shape: Shape | HybridShape | None = None) -> Path:
    """Write the model of this seed into the folder `out` (made if absent) and return it; the same seed gives the same bytes."""
    shape = shape or Shape()
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    weights = {tensor.name: (tensor.shape, values(tensor, rng)) for tensor in tensors(shape)}
    write_safetensors(out / "model.safetensors", weights)
    (out / "config.json").write_text(json.dumps(shape.config(), indent=1) + "\n")
    return out


def make_adapter(out: Path, seed: int, shape: Shape | None = None, rank: int = 4) -> Path:
    """Write a LoRA adapter for models of this shape into the folder `out`, strong enough to change answers; returns `out`."""
    shape = shape or Shape()
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    sizes = {"q_proj": shape.heads * shape.head_dim, "v_proj": shape.kv_heads * shape.head_dim}
    weights = {}
    for layer in range(shape.layers):
        for module, rows in sizes.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            for part, (num_rows, num_columns) in (("lora_A", (rank, shape.hidden)), ("lora_B", (rows, rank))):
                tensor = Tensor(f"{name}.{part}.weight", (num_rows, num_columns), gain=1.5)
                weights[tensor.name] = (tensor.shape, values(tensor, rng))
    write_safetensors(out / "adapter_model.safetensors", weights)
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": sorted(sizes), "bias": "none", "lora_dropout": 0.0}
    (out / "adapter_config.json").write_text(json.dumps(config, indent=1) + "\n")
    return out


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m hack.models", description="Make a tiny random-weight model.")
    parser.add_argument("out", type=Path, help="folder to write config.json and model.safetensors into")
    about = "layers with a recurrent state (Mamba 2) around one of attention; on CPUs, vLLM 0.32 serves it without prefix caching only"
    parser.add_argument("--hybrid", action="store_true", help=about)
    parser.add_argument("--seed", type=int, default=1, help="another seed is another set of weights (default 1)")
    arguments = parser.parse_args()
    out = make(arguments.out, arguments.seed, HybridShape() if arguments.hybrid else None)
    print(f"{out}: {sum(file.stat().st_size for file in out.iterdir())} bytes, seed {arguments.seed}")


if __name__ == "__main__":
    main()
