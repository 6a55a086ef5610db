"""The demo's own pieces: models that can be loaded, claims that can fail, durations that survive, metrics that are summed right."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from rich.console import Console

from hack.demo.claims import Claims
from hack.demo.journey import BLOCKS, CACHED, make_prompts
from hack.demo.kube import DemoError, condition
from hack.demo.progress import Progress
from hack.durations import Durations
from hack.engine_api import metric_total
from hack.models import Shape, make
from hack.sync_chart import BadCrd, template

METRICS = """\
# HELP vllm:prompt_tokens_by_source_total Prompt tokens
# TYPE vllm:prompt_tokens_by_source_total counter
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="local_compute"} 104.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="tiny",source="external_kv_transfer"} 896.0
vllm:prompt_tokens_by_source_total{engine="1",model_name="tiny",source="external_kv_transfer"} 128.0
vllm:prompt_tokens_by_source_created{engine="0",source="external_kv_transfer"} 1.7e+09
process_cpu_seconds_total 12.5
"""


def read_safetensors(path: Path) -> dict[str, tuple[list[int], bytes]]:
    """By the format's description: u64 length, JSON header, data."""
    raw = path.read_bytes()
    (size,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + size])
    data = raw[8 + size :]
    return {name: (entry["shape"], data[slice(*entry["data_offsets"])]) for name, entry in header.items() if name != "__metadata__"}


def test_a_model_has_every_tensor_of_its_architecture(tmp_path: Path) -> None:
    found = read_safetensors(make(tmp_path / "a", 1) / "model.safetensors")
    config = json.loads((tmp_path / "a/config.json").read_text())
    # 11 weights in a layer, and embedding, last norm, head.
    assert len(found) == 11 * config["num_hidden_layers"] + 3
    for name, (shape, data) in found.items():
        count = 1
        for size in shape:
            count *= size
        assert len(data) == 4 * count, name
    assert found["model.layers.0.self_attn.k_proj.weight"][0] == [
        config["num_key_value_heads"] * config["head_dim"],
        config["hidden_size"],
    ]


def test_a_seed_decides_the_weights(tmp_path: Path) -> None:
    first, again, other = (make(tmp_path / str(index), seed) for index, seed in enumerate((1, 1, 2)))
    assert (first / "model.safetensors").read_bytes() == (again / "model.safetensors").read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()
    assert (first / "config.json").read_text() == (other / "config.json").read_text()


def test_norms_are_constant_and_projections_are_spread(tmp_path: Path) -> None:
    found = read_safetensors(make(tmp_path, 3, Shape(layers=1)) / "model.safetensors")
    norm = struct.unpack("<32f", found["model.layers.0.self_attn.q_norm.weight"][1])
    assert set(norm) == {norm[0]}
    values = struct.unpack(f"<{64 * 64}f", found["model.layers.0.self_attn.v_proj.weight"][1])
    std = (sum(value * value for value in values) / len(values)) ** 0.5
    assert std == pytest.approx(4.0 / 64**0.5, rel=0.1)


def test_prompts_are_drawn_from_the_seed_and_avoid_special_ids() -> None:
    assert make_prompts(5, 2) == make_prompts(5, 2)
    assert make_prompts(5, 2) != make_prompts(6, 2)
    assert {len(prompt) for prompt in make_prompts(5, 3)} == {1000}
    assert min(min(prompt) for prompt in make_prompts(5, 3)) >= 2
    assert (BLOCKS, CACHED) == (7, 896)


def test_claims_tell_what_broke() -> None:
    claims = Claims()
    claims.equal("kept", 1, 1)
    claims.equal("broken", 896, 0)
    claims.check("said", False, "yes", "no")
    assert [(claim.what, claim.expected, claim.seen) for claim in claims.broken] == [("broken", "0", "896"), ("said", "yes", "no")]
    console = Console(width=100, record=True)
    claims.show(console, "title")
    text = console.export_text()
    assert text.count("✗") == 2
    assert text.count("✓") == 1


def test_metrics_are_summed_over_the_series_with_these_labels() -> None:
    name = "vllm:prompt_tokens_by_source_total"
    assert metric_total(METRICS, name, {"source": "external_kv_transfer"}) == 1024
    assert metric_total(METRICS, name, {}) == 1128
    assert metric_total(METRICS, "process_cpu_seconds_total", {}) == 12.5
    assert metric_total(METRICS, "absent_total", {}) == 0


def test_progress_counts_steps_and_does_not_swallow_errors(tmp_path: Path) -> None:
    console = Console(width=100, record=True, force_terminal=False)
    progress = Progress(console, Durations(tmp_path / "d.json"), 2)
    with progress.step("first", 60):
        progress.note("halfway")
    with pytest.raises(DemoError, match="broke"), progress.step("second", 5):
        raise DemoError("it broke")
    text = console.export_text()
    assert "[1/2] first, about 1:00" in text
    assert "halfway" in text
    assert "[1/2] first: done in" in text
    assert "[2/2] second: done" not in text


def test_a_missing_condition_is_empty() -> None:
    pool = {"status": {"conditions": [{"type": "Ready", "status": "False"}]}}
    assert condition(pool, "Ready")["status"] == "False"
    assert condition(pool, "StoreAvailable") == {}
    assert condition({}, "Ready") == {}


def test_crd_templates_keep_the_text_and_escape_braces() -> None:
    text = "apiVersion: v1\nkind: CustomResourceDefinition\nmetadata:\n  name: x\nspec:\n  note: a {{ b }}\n"
    made = template("x.yaml", text)
    assert "helm.sh/resource-policy: keep" in made
    assert 'note: a {{ "{{" }} b }}' in made
    assert made.endswith("{{- end }}\n")
    with pytest.raises(BadCrd, match=r"x\.yaml"):
        template("x.yaml", "kind: CustomResourceDefinition\n")
