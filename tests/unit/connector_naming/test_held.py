"""Which tensors of a worker are weights: everything a model holds in any way, less what a reason leaves out; what is hidden is said.

Layouts that hide weights are made by vLLM's own kernels: packed away by oneDNN, packed anew, quantised. One changed weight changes the
digest, although no tensor of the model may show it any more.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm
from torch import nn

from epochkv_connector.engine import patches
from epochkv_connector.weights import digest as packing
from epochkv_connector.weights.digest import LEFT_OUT, PACKED, Hidden, digest, mark, models, packed, weights
from epochkv_connector.weights.rank import Held, Places


class Worker:
    """A rank with a model and perhaps a drafter."""

    def __init__(self, model: nn.Module, draft: nn.Module | None = None) -> None:
        self._model, self._draft = model, draft

    def get_model(self) -> Any:
        return self._model

    def get_draft_model(self) -> nn.Module | None:
        return self._draft


class QuantMethod:
    """As vLLM's: an object beside the layer."""

    scale_of_nothing = 3.0


class Linear(nn.Module):
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


def test_what_vllms_models_make_for_the_tokens_of_a_step_is_left_out() -> None:
    """DeepSeek's top-k indices, Qwen3-VL's and Gemma's embeddings, ...: passes write there, and the weights are the same."""
    rows = r"torch\.(?:empty|zeros)\([\s(]*(?:vllm_config\.scheduler_config\.max_num_batched_tokens|max_(?:num_|total_)?tokens)\b"
    text = "\n".join(source.read_text() for source in Path(vllm.__file__).parent.glob("model*/**/*.py"))
    scratch, buffers = (set(re.findall(kept + rows, text)) for kept in (r"self\.(\w+) = \[?\s*", r'register_buffer\(\s*"(\w+)",\s*'))
    assert {"deepstack_input_embeds", "per_layer_embeddings", "topk_indices_buffer"} <= scratch
    model = Model()
    before = value(Worker(model))
    for name in sorted({*scratch, "_replayssm_ring_start", "_replayssm_prev_query_len"}):
        setattr(model.layers[0], name, torch.zeros(5))
        setattr(model.layers[1], name, [torch.zeros(5)])
    for name in sorted({*buffers, "topk_indices_buffer"}):
        model.layers[0].proj.register_buffer(name, torch.zeros(5), persistent=False)
    model.layers[0].staging = type("EngramBatch", (Linear,), {})()
    assert value(Worker(model)) == before
    model.layers[0].register_buffer("some_buffer", torch.zeros(5))
    assert value(Worker(model)) != before


@pytest.mark.parametrize("name", ["cos_sin_cache_scale", "xkv_cache", "kv_cache_scale", "workspaces", "my_expert_maps"])
def test_a_name_that_only_looks_like_it_is_a_weight(name: str) -> None:
    model = Model()
    worker = Worker(model)
    before = value(worker)
    model.layers[0].register_buffer(name, torch.zeros(5))
    assert value(worker) != before


def test_scales_that_kernels_took_at_first_stay_in_the_name() -> None:
    """FlashInfer multiplies numbers of the layer once, at its first forward pass."""
    model = Model()

    def named(held: Held, scale: float) -> bytes:
        model.layers[0]._k_scale_float = scale
        return digest(weights(Worker(model)), held.scales_of(Worker(model)))

    one, other = Held(), Held()
    plain, changed, fresh = named(one, 1.0), named(one, 2.0), named(other, 2.0)
    assert len({plain, changed, fresh}) == 3
    assert named(one, 1.0) == plain
    model.layers[1]._o_scale_float = 3.0
    assert named(one, 1.0) == named(Held(), 1.0) != plain, "that of outputs is always what it was at first"


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


@pytest.mark.parametrize("library", ["triton_kernels", "vllm.third_party.triton_kernels", "b12x"])
def test_tensors_that_objects_beside_a_layer_keep_are_weights(library: str) -> None:
    """Its quantisation, the one whose place adapters took, a scheme, sinks that attention has copied; and objects in which libraries of
    kernels keep packed weights, as those of gpt-oss and their scales."""
    held: Any = type("Held", (SimpleNamespace,), {"__module__": f"{library}.tensor"})
    model, one = Model(), [torch.ones(2) for _ in range(6)]
    layer, worker = model.layers[0].proj, Worker(model)
    layer.quant_method.parts, layer.quant_method.scale = [None, one[0]], held(weight_scale=held(data=one[1]))
    layer.quant_method.old_quant_method = SimpleNamespace(old=one[2])
    layer.scheme, layer.impl = SimpleNamespace(_input_scale=one[3]), SimpleNamespace(sinks=one[4], scratch=torch.zeros(3))
    layer.w13_weight = held(storage=held(data=one[5]), shape=[2])
    kept = ("quant_method.parts.1", "quant_method.scale.weight_scale.data", "quant_method.old", "scheme._input_scale", "impl.sinks")
    added = set(names(worker)) - set(names(Worker(Model())))
    assert added == {f"layers.0.proj.{name}" for name in (*kept, "w13_weight.storage.data")}
    seen, places = {value(worker)}, Places(worker)
    for tensor in one:
        sample = packing.Sample(weights(worker))
        tensor[0] = 5
        assert not sample.holds()
        seen.add(value(worker))
    assert len(seen) == 7
    layer.w13_weight.storage.data = one[5].clone()
    assert not places.stay()


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
class Fused(nn.Module):
    def __init__(self, size: int, **tensors: torch.Tensor) -> None:
        super().__init__()
        self.quant_method: Any = QuantMethod()
        self.local_num_experts, self.hidden_size, self.intermediate_size_per_partition = 2, size, size
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor, requires_grad=False))


def with_bias_alone() -> nn.Module:
    layer = Linear(4096, 4096)
    layer.weight, layer.bias = nn.Parameter(torch.empty(0)), nn.Parameter(torch.zeros(4096))
    return layer


HIDING = {"emptied": Fused(0, w13_weight=torch.empty(0)), "deleted": Fused(64, w2_bias=torch.zeros(2, 64)), "linear": with_bias_alone()}


@pytest.mark.parametrize("layer", HIDING.values(), ids=HIDING.keys())
def test_a_layer_whose_weights_are_nowhere_to_be_seen_has_no_digest(layer: nn.Module) -> None:
    """Whatever it shows beside them."""
    model = Model()
    model.layers[0].proj = layer
    with pytest.raises(Hidden, match=r"layers\.0\.proj were packed away.*VLLM_PLUGINS"):
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


# ---------------------------------------------------------------------------------------------- vLLM's own kernels
SIZE = 64


class Unpacked(nn.Module):
    """As vLLM's linear layers before a kernel has seen them."""

    def __init__(self, weight: torch.Tensor, **others: torch.Tensor) -> None:
        super().__init__()
        self.quant_method = object()
        self.output_size_per_partition, self.input_size_per_partition = weight.shape
        self.logical_widths = [weight.shape[0]]
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None
        for name, tensor in others.items():
            setattr(self, name, nn.Parameter(tensor, requires_grad=False))


def drawn(dtype: torch.dtype = torch.float32, *shape: int, seed: int = 1) -> torch.Tensor:
    made = torch.randn(shape or (SIZE, SIZE), generator=torch.Generator().manual_seed(seed))
    return (made * 20).round().clamp(-127, 127).to(dtype) if dtype is torch.int8 else made.to(dtype)


def has_cpu_kernels() -> bool:
    """Wheels of vLLM that are made for CUDA have none."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    return hasattr(torch.ops._C, "convert_weight_packed")


needs_cpu_kernels = pytest.mark.skipif(not has_cpu_kernels(), reason="this wheel of vLLM has no kernels for CPUs")


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As the plugin does in every process; undone afterwards."""
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    kernel: Any = CPUInt8ScaledMMLinearKernel
    pack, process = utils.dispatch_cpu_unquantized_gemm, kernel.process_weights_after_loading
    patches.before_packing(packing.mark)
    yield
    monkeypatch.undo()
    utils.dispatch_cpu_unquantized_gemm, kernel.process_weights_after_loading = pack, process


def one_more(weight: torch.Tensor) -> torch.Tensor:
    changed = weight.clone()
    changed[SIZE // 2, 3] += 1
    return changed


def pack_plain(weight: torch.Tensor) -> nn.Module:
    from vllm.model_executor.layers import utils

    layer = Unpacked(weight)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return nn.ModuleDict({"proj": layer})


@needs_cpu_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_that_a_cpu_kernel_packed_away(listening: None, dtype: torch.dtype) -> None:
    plain, same, other = (pack_plain(weight) for weight in (drawn(dtype), drawn(dtype), one_more(drawn(dtype))))
    assert not plain["proj"].weight.numel(), "this kernel hides nothing: another is needed"
    assert value(Worker(plain)) == value(Worker(same))
    assert value(Worker(plain)) != value(Worker(other))
    reading = drawn(dtype, 3, SIZE)
    assert not torch.equal(
        plain["proj"].cpu_linear(reading, plain["proj"].weight, None), other["proj"].cpu_linear(reading, other["proj"].weight, None)
    )


def test_a_reload_of_a_packed_weight(listening: None) -> None:
    """vLLM gives the layer a new parameter and packs again."""
    from vllm.model_executor.layers import utils

    model = pack_plain(drawn())
    before = value(Worker(model))
    for weight, equal in ((one_more(drawn()), False), (drawn(), True)):
        model["proj"].weight = nn.Parameter(weight, requires_grad=False)
        utils.dispatch_cpu_unquantized_gemm(model["proj"], remove_weight=True)
        assert (value(Worker(model)) == before) is equal


def pack_int8(weight: torch.Tensor, scale: torch.Tensor) -> nn.Module:
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import Int8ScaledMMLinearLayerConfig

    kind: Any = Int8ScaledMMLinearLayerConfig
    fields = {"is_static_input_scheme": False, "is_channelwise": True, "input_symmetric": True}
    others = {name: None for name in kind.__dataclass_fields__ if name not in fields}
    config = kind.__new__(kind)
    for name, given in {**others, **fields}.items():
        object.__setattr__(config, name, given)
    layer = Unpacked(weight, weight_scale=scale)
    layer.input_scale = layer.input_zero_point = layer.azp_adj = None  # as vLLM's quantization makes them; CPUs without AMX look
    kernel = CPUInt8ScaledMMLinearKernel.__new__(CPUInt8ScaledMMLinearKernel)
    kernel.config, kernel.layer_param_names = config, ("weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj")
    kernel.process_weights_after_loading(layer)
    return nn.ModuleDict({"proj": layer})


@needs_cpu_kernels
def test_a_quantised_weight_of_eight_bits_and_its_scales(listening: None) -> None:
    weight, scale = drawn(torch.int8), drawn(torch.float32, SIZE, 1, seed=2).abs()
    plain, same = pack_int8(weight, scale), pack_int8(weight.clone(), scale.clone())
    assert value(Worker(plain)) == value(Worker(same))
    scaled = scale.clone()
    scaled[SIZE - 1] *= 1.5
    others = {value(Worker(pack_int8(one_more(weight), scale))), value(Worker(pack_int8(weight, scaled)))}
    assert len(others | {value(Worker(plain))}) == 3
