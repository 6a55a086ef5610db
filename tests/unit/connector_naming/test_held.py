"""Which tensors of a worker are weights: everything a model holds in any way, less what a reason leaves out; what is hidden is said."""

from typing import Any

import pytest
import torch
from torch import nn

from epochkv_connector.weights.digest import LEFT_OUT, PACKED, Unreadable, digest, mark, models, packed, weights
from tests.unit.connector_naming.workers import Worker


class QuantMethod:
    """As vLLM's: an object beside the layer."""

    scale_of_nothing = 3.0


class Linear(nn.Module):
    """As vLLM's linear layers."""

    def __init__(self, inputs: int = 8, outputs: int = 4) -> None:
        super().__init__()
        self.quant_method = QuantMethod()
        self.input_size_per_partition, self.output_size_per_partition = inputs, outputs
        self.weight = nn.Parameter(torch.randn(outputs, inputs), requires_grad=False)
        self.bias = None


class Block(nn.Module):
    """A layer with each kind of tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = Linear()
        self.norm = nn.LayerNorm(8)
        self.register_buffer("k_scale", torch.tensor(1.0))
        self.register_buffer("gate_bias", torch.zeros(3), persistent=False)
        self.w13 = torch.ones(4, 4)
        self.tables = [torch.ones(2), "text", (torch.ones(2),)]


class Model(nn.Module):
    """Two layers and tied embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(8, 16, bias=False)
        self.lm_head.weight = self.embed.weight


def names(worker: Any) -> list[str]:
    return [name for name, _ in weights(worker)]


def value(worker: Any) -> bytes:
    return digest(weights(worker), packed(worker))


def test_parameters_buffers_and_plain_tensors_are_weights() -> None:
    block = {"proj.weight", "norm.weight", "norm.bias", "k_scale", "gate_bias", "w13", "tables.0"}
    expected = {"embed.weight", "lm_head.weight"} | {f"layers.{index}.{name}" for index in (0, 1) for name in block}
    assert set(names(Worker(Model()))) == expected


@pytest.mark.parametrize("ending", sorted(LEFT_OUT))
@pytest.mark.parametrize("prefix", ["", "some_"])
def test_what_is_left_out_changes_nothing(ending: str, prefix: str) -> None:
    model = Model()
    worker = Worker(model)
    before = value(worker)
    model.layers[0].register_buffer(prefix + ending, torch.zeros(5))
    setattr(model.layers[1], f"{prefix}{ending}", [torch.zeros(5)])
    assert value(worker) == before


@pytest.mark.parametrize("name", ["cos_sin_cache_scale", "xkv_cache", "kv_cache_scale", "workspaces", "my_expert_maps"])
def test_a_name_that_only_looks_like_it_is_a_weight(name: str) -> None:
    model = Model()
    worker = Worker(model)
    before = value(worker)
    model.layers[0].register_buffer(name, torch.zeros(5))
    assert value(worker) != before


def test_adapters_do_not_count_and_what_is_below_them_keeps_its_name() -> None:
    plain, wrapped = Model(), Model()
    wrapped.load_state_dict(plain.state_dict())

    class WithLoRA(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_layer = base
            self.lora_a_stacked = (torch.randn(3, 3),)

    WithLoRA.__module__ = "vllm.lora.layers.column_parallel_linear"
    for block in wrapped.layers:
        block.proj = WithLoRA(block.proj)
    assert set(names(Worker(wrapped))) == set(names(Worker(plain)))
    assert value(Worker(wrapped)) == value(Worker(plain))
    before = value(Worker(wrapped))
    wrapped.layers[0].proj.lora_a_stacked[0].add_(1)
    assert value(Worker(wrapped)) == before
    with torch.no_grad():
        wrapped.layers[0].proj.base_layer.weight[0, 0] += 1
    assert value(Worker(wrapped)) != before


def test_vllms_own_adapter_layers_are_known_by_their_module() -> None:
    from vllm.lora.layers import ColumnParallelLinearWithLoRA, LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA

    for kind in (ColumnParallelLinearWithLoRA, LogitsProcessorWithLoRA, VocabParallelEmbeddingWithLoRA):
        assert kind.__module__.startswith("vllm.lora.")


def test_tensors_that_a_quant_method_keeps_are_weights() -> None:
    model = Model()
    worker = Worker(model)
    before = value(worker)
    method: Any = model.layers[0].proj.quant_method
    method.scales = torch.ones(3)
    method.parts = [torch.ones(2), torch.ones(2)]
    with_them = value(worker)
    assert with_them != before
    assert {"layers.0.proj.quant_method.scales", "layers.0.proj.quant_method.parts.1"} <= set(names(worker))
    method.parts[1][0] = 5
    assert value(worker) not in (before, with_them)


def test_a_quant_method_that_is_a_module_is_walked_once() -> None:
    class Method(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))
            self.plain = torch.ones(2)

    model = Model()
    model.layers[0].proj.quant_method = Method()
    found = names(Worker(model))
    assert "layers.0.proj.quant_method.scale" in found
    assert "layers.0.proj.quant_method.plain" in found


# ---------------------------------------------------------------------------------------------- drafters
def test_a_drafter_counts_under_names_of_its_own() -> None:
    model, draft = Model(), Model()
    alone, both = value(Worker(model)), value(Worker(model, draft))
    assert alone != both
    with torch.no_grad():
        draft.embed.weight[0, 0] += 1
    assert value(Worker(model, draft)) != both
    assert [prefix for prefix, _ in models(Worker(model, draft))] == ["", "draft."]


# ---------------------------------------------------------------------------------------------- weights that kernels hide
def test_a_layer_without_sizes_whose_parameter_was_emptied_has_no_digest_either() -> None:
    class Fused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quant_method = QuantMethod()
            self.w13_weight = nn.Parameter(torch.empty(0))

    model = Model()
    model.layers[0].experts = Fused()
    with pytest.raises(Unreadable, match=r"layers\.0\.experts"):
        names(Worker(model))


def test_a_bias_alone_does_not_pass_for_the_weights() -> None:
    model = Model()
    layer = model.layers[0].proj
    layer.input_size_per_partition = layer.output_size_per_partition = 4096
    layer.weight = nn.Parameter(torch.empty(0))
    layer.bias = nn.Parameter(torch.zeros(4096))
    with pytest.raises(Unreadable, match=r"layers\.0\.proj were packed away.*VLLM_PLUGINS"):
        names(Worker(model))


def test_what_was_packed_under_our_eyes_is_known_by_its_digest() -> None:
    def pack(change: float = 0.0) -> Worker:
        torch.manual_seed(1)
        model = Model()
        layer = model.layers[0].proj
        with torch.no_grad():
            layer.weight[3, 7] += change
        mark(layer)
        layer.weight = nn.Parameter(torch.empty(0))
        return Worker(model)

    first, second, other = pack(), pack(), pack(1.0)
    assert value(first) == value(second) != value(other)
    assert packed(Worker(Model(), other.get_model()))[0][0] == "draft.layers.0.proj."
    ((name, hexed),) = packed(first)
    assert name == "layers.0.proj."
    assert len(bytes.fromhex(hexed)) == 32


def test_weights_that_are_yet_to_come_are_not_taken_for_the_packed_ones() -> None:
    layer = Linear()
    mark(layer)
    before = layer.__dict__[PACKED]
    layer.weight = nn.Parameter(torch.empty(4, 8, device="meta"))
    mark(layer)
    assert layer.__dict__[PACKED] == before
