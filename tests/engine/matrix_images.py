"""Make a tiny random PaliGemma that vLLM loads like any other: Gemma behind a SigLIP tower that sees four patches.

Tower and projector are drawn so that another picture changes the answer. (LLaVA and Qwen-VL would need torchvision, which the
test environment does without.) Standard library only.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

from hack import models
from hack.models import Tensor

VOCAB, IMAGE_TOKEN, NEWLINE, BOS = 512, 511, 510, 2
IMAGE_PIXELS, PATCH_PIXELS = 28, 14
PREFIX_TOKENS = (IMAGE_PIXELS // PATCH_PIXELS) ** 2 + 1
"""vLLM puts so many tokens before a prompt that comes with a picture: one per patch, and the beginning of the sentence."""
SUFFIX_TOKENS = 1
"""And a new line behind it."""
TEXT = {"hidden": 64, "wide": 128, "layers": 3, "heads": 4, "kv_heads": 2, "head_dim": 32}
VISION = {"hidden": 32, "wide": 64, "layers": 2, "heads": 2}


def tensors() -> Iterator[Tensor]:
    """Every weight, by the names of Hugging Face's PaliGemma."""
    yield from _vision()
    yield from _linear("multi_modal_projector.linear", VISION["hidden"], TEXT["hidden"], gain=3.0)
    yield Tensor("language_model.model.embed_tokens.weight", (VOCAB, TEXT["hidden"]), gain=1.0)
    hidden, wide = TEXT["hidden"], TEXT["wide"]
    queries, keys = TEXT["heads"] * TEXT["head_dim"], TEXT["kv_heads"] * TEXT["head_dim"]
    for index in range(TEXT["layers"]):
        layer = f"language_model.model.layers.{index}"
        yield Tensor(f"{layer}.input_layernorm.weight", (hidden,), fill=0.0)  # Gemma adds one
        yield Tensor(f"{layer}.self_attn.q_proj.weight", (queries, hidden), gain=1.6)
        yield Tensor(f"{layer}.self_attn.k_proj.weight", (keys, hidden), gain=1.6)
        yield Tensor(f"{layer}.self_attn.v_proj.weight", (keys, hidden), gain=4.0)
        yield Tensor(f"{layer}.self_attn.o_proj.weight", (hidden, queries), gain=2.0)
        yield Tensor(f"{layer}.post_attention_layernorm.weight", (hidden,), fill=0.0)
        yield Tensor(f"{layer}.mlp.gate_proj.weight", (wide, hidden), gain=1.0)
        yield Tensor(f"{layer}.mlp.up_proj.weight", (wide, hidden), gain=1.0)
        yield Tensor(f"{layer}.mlp.down_proj.weight", (hidden, wide), gain=1.0)
    yield Tensor("language_model.model.norm.weight", (hidden,), fill=0.0)


def _vision() -> Iterator[Tensor]:
    tower, hidden, wide = "vision_tower.vision_model", VISION["hidden"], VISION["wide"]
    yield Tensor(f"{tower}.embeddings.patch_embedding.weight", (hidden, 3, PATCH_PIXELS, PATCH_PIXELS), gain=0.3)
    yield Tensor(f"{tower}.embeddings.patch_embedding.bias", (hidden,), fill=0.0)
    yield Tensor(f"{tower}.embeddings.position_embedding.weight", (PREFIX_TOKENS - 1, hidden), gain=1.0)
    for index in range(VISION["layers"]):
        layer = f"{tower}.encoder.layers.{index}"
        yield from _norm(f"{layer}.layer_norm1")
        for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
            yield from _linear(f"{layer}.self_attn.{name}", hidden, hidden)
        yield from _norm(f"{layer}.layer_norm2")
        yield from _linear(f"{layer}.mlp.fc1", hidden, wide)
        yield from _linear(f"{layer}.mlp.fc2", wide, hidden)
    yield from _norm(f"{tower}.post_layernorm")


def _linear(name: str, inputs: int, outputs: int, gain: float = 1.0) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (outputs, inputs), gain=gain)
    yield Tensor(f"{name}.bias", (outputs,), fill=0.0)


def _norm(name: str) -> Iterator[Tensor]:
    yield Tensor(f"{name}.weight", (VISION["hidden"],), fill=1.0)
    yield Tensor(f"{name}.bias", (VISION["hidden"],), fill=0.0)


def _config() -> dict[str, object]:
    text = {
        "model_type": "gemma",
        "vocab_size": VOCAB,
        "hidden_size": TEXT["hidden"],
        "intermediate_size": TEXT["wide"],
        "num_hidden_layers": TEXT["layers"],
        "num_attention_heads": TEXT["heads"],
        "num_key_value_heads": TEXT["kv_heads"],
        "head_dim": TEXT["head_dim"],
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "dtype": "float32",
    }
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": VISION["hidden"],
        "intermediate_size": VISION["wide"],
        "num_hidden_layers": VISION["layers"],
        "num_attention_heads": VISION["heads"],
        "image_size": IMAGE_PIXELS,
        "patch_size": PATCH_PIXELS,
        "projection_dim": TEXT["hidden"],
        "vision_use_head": False,
    }
    return {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "model_type": "paligemma",
        "image_token_index": IMAGE_TOKEN,
        "hidden_size": TEXT["hidden"],
        "projection_dim": TEXT["hidden"],
        "bos_token_id": BOS,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "dtype": "float32",
        "is_mm_prefix_lm": False,  # the CPU's attention kernels have no mask for pictures that see each other both ways
        "text_config": text,
        "vision_config": vision,
    }


def _tokenizer() -> dict[str, object]:
    """Words are the token ids."""
    words = {f"t{index}": index for index in range(VOCAB - 2)} | {"\n": NEWLINE, "<image>": IMAGE_TOKEN}
    image = {"id": IMAGE_TOKEN, "content": "<image>", "single_word": False, "lstrip": False, "rstrip": False}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{**image, "normalized": False, "special": True}],
        "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }


def make(out: Path, seed: int) -> Path:
    """Write the model of this seed, with its processor and a tokenizer, into the folder `out` and return it."""
    out.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    weights = {tensor.name: (tensor.shape, models.values(tensor, rng)) for tensor in tensors()}
    models.write_safetensors(out / "model.safetensors", weights)
    size = {"height": IMAGE_PIXELS, "width": IMAGE_PIXELS}
    files = {
        "config.json": _config(),
        "preprocessor_config.json": {
            "image_processor_type": "SiglipImageProcessor",
            "image_seq_length": PREFIX_TOKENS - 1,
            "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.25, 0.25, 0.25],
            "size": size,
        },
        "processor_config.json": {"processor_class": "PaliGemmaProcessor"},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": f"t{BOS}",
            "eos_token": "t1",
            "pad_token": "t0",
        },
        "tokenizer.json": _tokenizer(),
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=1) + "\n")
    return out
