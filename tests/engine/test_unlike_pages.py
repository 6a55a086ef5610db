"""L1 of an engine whose layers have KV pages of unlike size: a target, and an EAGLE drafter with more heads, in one group.

vLLM shows the scheduler role the first layer of such a group as if all were like it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack import models
from hack.standalone.pool import transfer_config
from tests.engine.conftest import PATIENT
from tests.engine.matrix_engine import BLOCK, MatrixEngine, Nursery, Request

TARGET = models.Shape()
DRAFTER = models.Shape(layers=1, heads=8, kv_heads=8)
SLOTS = 24
BLOCKS = 4
"""Of a prompt. vLLM gives up the last one of a hit: the drafter's last position in it depends on the next token."""
PROMPTS = 20
FOUND = (BLOCKS - 1) * BLOCK


def page_bytes(shape: models.Shape) -> int:
    """Keys and values of one block in one layer, as float32."""
    return 2 * shape.kv_heads * shape.head_dim * BLOCK * 4


SLOT_BYTES = TARGET.layers * page_bytes(TARGET) + page_bytes(DRAFTER) + 256
SEEN_BYTES = (TARGET.layers + 1) * page_bytes(TARGET) + 256


def make_drafter(out: Path, seed: int) -> Path:
    """Random weights of an EAGLE head of Llama's kind; it uses its target's embeddings and `lm_head`."""
    hidden, wide, kv = DRAFTER.hidden, DRAFTER.heads * DRAFTER.head_dim, DRAFTER.kv_heads * DRAFTER.head_dim
    shapes = {
        "fc": (hidden, 2 * hidden),
        "layers.0.self_attn.q_proj": (wide, hidden),
        "layers.0.self_attn.k_proj": (kv, hidden),
        "layers.0.self_attn.v_proj": (kv, hidden),
        "layers.0.self_attn.o_proj": (hidden, wide),
        "layers.0.mlp.gate_proj": (DRAFTER.intermediate, hidden),
        "layers.0.mlp.up_proj": (DRAFTER.intermediate, hidden),
        "layers.0.mlp.down_proj": (hidden, DRAFTER.intermediate),
    }
    tensors = [models.Tensor(f"{name}.weight", shape, gain=1.0) for name, shape in shapes.items()]
    tensors.append(models.Tensor("layers.0.post_attention_layernorm.weight", (hidden,)))
    rng = random.Random(seed)
    out.mkdir()
    models.write_safetensors(out / "model.safetensors", {tensor.name: (tensor.shape, models.values(tensor, rng)) for tensor in tensors})
    (out / "config.json").write_text(json.dumps({**DRAFTER.config(), "architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    return out


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    with Nursery(tmp_path_factory.mktemp("unlike")) as nursery:
        yield nursery


@pytest.mark.slow
def test_an_l1_of_unlike_pages_evicts_and_finds_the_newest(nursery: Nursery) -> None:
    """L1 has room for 6 of 20 prompts. Counted with the first layer's pages, it would have room for 10."""
    assert SLOTS * SLOT_BYTES // SEEN_BYTES == 41
    target, drafter = models.make(nursery.directory / "target", 1, TARGET), make_drafter(nursery.directory / "drafter", 2)
    source = random.Random(7)
    requests = [Request(tuple(source.randrange(2, 512) for _ in range(BLOCKS * BLOCK + 3))) for _ in range(PROMPTS)]
    with MatrixEngine(nursery, "reference", target, prefix_caching=False) as reference:
        expected = [output.tokens for output in reference.run(requests)]
    connector = transfer_config({"pool": {"name": "p", "uid": "u"}}, SLOTS * SLOT_BYTES, **PATIENT)
    speculative = {"method": "eagle", "model": str(drafter), "num_speculative_tokens": 2}
    with MatrixEngine(nursery, "eagle", target, connector, speculative_config=speculative, num_gpu_blocks_override=64) as engine:
        for request, answer in zip(requests, expected, strict=True):
            engine.ask([request], [answer], [0])
        engine.run([Request((2, 3, 4), 1)])  # acknowledgements travel with steps
        engine.forget()
        for index in range(PROMPTS - 1, PROMPTS - 5, -1):
            engine.ask(requests[index : index + 1], expected[index : index + 1], [FOUND], host=FOUND)
        engine.ask(requests[:1], expected[:1], [0])
        facts = engine.facts()
        assert facts["draft_tokens"] > 0
        assert facts["half"]["slots"] == facts["half"]["slots_indexed"] == SLOTS
        assert facts["half"]["evictions"] >= BLOCKS * PROMPTS - SLOTS
        assert facts["half"]["blocks_saved"] >= BLOCKS * PROMPTS
        assert (facts["half"]["loads_failed"], facts["errors"]) == (0, {})
    log = (nursery.directory / "eagle.log").read_text()
    assert "KV save failed" not in log
    assert "KV load failed" not in log
