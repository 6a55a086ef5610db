"""Layouts that hide weights, made by vLLM's own kernels: packed away by oneDNN, packed anew, quantised.

For each: one changed weight changes the digest, although no tensor of the model may show it any more.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from epochkv_connector.engine import patches
from epochkv_connector.weights import digest as packing
from epochkv_connector.weights.digest import digest, packed, weights
from tests.unit.connector_naming.workers import Worker

SIZE = 64


def value(model: nn.Module) -> bytes:
    worker = Worker(model)
    return digest(weights(worker), packed(worker))


class Linear(nn.Module):
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
    """One element changed."""
    changed = weight.clone()
    changed[SIZE // 2, 3] += 1
    return changed


def pack_plain(weight: torch.Tensor) -> nn.Module:
    from vllm.model_executor.layers import utils

    layer = Linear(weight)
    utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
    return nn.ModuleDict({"proj": layer})


@needs_cpu_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_weight_that_a_cpu_kernel_packed_away(listening: None, dtype: torch.dtype) -> None:
    plain, same, other = (pack_plain(weight) for weight in (drawn(dtype), drawn(dtype), one_more(drawn(dtype))))
    assert not plain["proj"].weight.numel(), "this kernel hides nothing: another is needed"
    assert value(plain) == value(same)
    assert value(plain) != value(other)
    reading = drawn(dtype, 3, SIZE)
    assert not torch.equal(
        plain["proj"].cpu_linear(reading, plain["proj"].weight, None), other["proj"].cpu_linear(reading, other["proj"].weight, None)
    )


def test_a_reload_of_a_packed_weight(listening: None) -> None:
    """vLLM gives the layer a new parameter and packs again."""
    from vllm.model_executor.layers import utils

    model = pack_plain(drawn())
    before = value(model)
    for weight, equal in ((one_more(drawn()), False), (drawn(), True)):
        model["proj"].weight = nn.Parameter(weight, requires_grad=False)
        utils.dispatch_cpu_unquantized_gemm(model["proj"], remove_weight=True)
        assert (value(model) == before) is equal


def pack_int8(weight: torch.Tensor, scale: torch.Tensor) -> nn.Module:
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUInt8ScaledMMLinearKernel
    from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import Int8ScaledMMLinearLayerConfig

    kind: Any = Int8ScaledMMLinearLayerConfig
    fields = {"is_static_input_scheme": False, "is_channelwise": True, "input_symmetric": True}
    others = {name: None for name in kind.__dataclass_fields__ if name not in fields}
    config = kind.__new__(kind)
    for name, given in {**others, **fields}.items():
        object.__setattr__(config, name, given)
    layer = Linear(weight, weight_scale=scale)
    layer.input_scale = layer.input_zero_point = layer.azp_adj = None  # as vLLM's quantization makes them; CPUs without AMX look
    kernel = CPUInt8ScaledMMLinearKernel.__new__(CPUInt8ScaledMMLinearKernel)
    kernel.config, kernel.layer_param_names = config, ("weight", "weight_scale", "input_scale", "input_zero_point", "azp_adj")
    kernel.process_weights_after_loading(layer)
    return nn.ModuleDict({"proj": layer})


@needs_cpu_kernels
def test_a_quantised_weight_of_eight_bits_and_its_scales(listening: None) -> None:
    weight, scale = drawn(torch.int8), drawn(torch.float32, SIZE, 1, seed=2).abs()
    plain, same = pack_int8(weight, scale), pack_int8(weight.clone(), scale.clone())
    assert value(plain) == value(same)
    scaled = scale.clone()
    scaled[SIZE - 1] *= 1.5
    others = {value(pack_int8(one_more(weight), scale)), value(pack_int8(weight, scaled))}
    assert len(others | {value(plain)}) == 3
