"""KV tensors with known bytes, a staging over them, and what the tests of a GPU have in common."""

import ctypes
import unittest

import torch
from torch import Tensor

from epochkv_connector.wire import BlockMove
from epochkv_connector.worker.layout import HEADER_BYTES, GroupSpec
from epochkv_connector.worker.staging import Staging

needs_cuda = unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA device")

BLOCKS = 9
LAYOUTS = ("blocks first", "K and V first", "one storage", "uneven")
LONG = 1_000_000_000
"""Cycles of `torch.cuda._sleep`: about half a second."""


def copied(group: int, gpu_block: int, slot: int) -> BlockMove:
    return BlockMove(group, 0, gpu_block, slot, b"")


class Rig:
    """`layers` KV tensors in one layout on one device, with random bytes, and twice as many slots as blocks."""

    def __init__(self, layout: str = "K and V first", layers: int = 3, device: str = "cuda", row_bytes: int = 640) -> None:
        self.block_dim = 1 if layout == "K and V first" else 0
        self.tensors = [_tensor(layout, layer, device, row_bytes) for layer in range(layers)]
        if layout == "one storage":
            whole = torch.randint(0, 255, (layers, BLOCKS, row_bytes), dtype=torch.uint8, device=device)
            self.tensors = list(whole.unbind(0))
        names = [f"layer {index}" for index in range(layers)]
        self.stage = Staging(dict(zip(names, self.tensors, strict=True)), {0: GroupSpec(names)}, 2 * BLOCKS, BLOCKS)
        self.payload_bytes = self.stage.groups[0].payload_bytes

    def block(self, block: int) -> Tensor:
        """The bytes of a block by plain indexing, on the CPU."""
        parts = [tensor.select(self.block_dim, block).contiguous().view(torch.uint8).flatten().cpu() for tensor in self.tensors]
        return torch.cat(parts)

    def _payload(self, slot: int) -> Tensor:
        start = self.stage.region.slot_address(slot) - self.stage.region.address + HEADER_BYTES
        return self.stage.region.tensor[start : start + self.payload_bytes]

    def slot(self, slot: int) -> Tensor:
        return self._payload(slot).clone()

    def fill_slot(self, slot: int, value: int) -> None:
        self._payload(slot).fill_(value)

    def fill(self, value: int) -> None:
        """Every block, on the current stream."""
        for tensor in self.tensors:
            tensor.view(torch.uint8).fill_(value)


def _tensor(layout: str, layer: int, device: str, row_bytes: int) -> Tensor:
    shape = (2, BLOCKS, row_bytes // 2) if layout == "K and V first" else (BLOCKS, row_bytes)
    if layout == "uneven":
        extra = layer * layer % 7 * 256
        raw = torch.randint(0, 255, (BLOCKS * row_bytes + extra,), dtype=torch.uint8, device=device)
        return raw[extra:].view(shape)
    made = torch.randint(0, 255, shape, dtype=torch.uint8, device=device)
    return made.view(torch.bfloat16) if layout == "blocks first" else made


def last_error() -> int:
    """What the runtime remembers of this thread, and would raise at the next kernel launch."""
    from epochkv_connector.worker import staging

    code: int = staging.runtime().cudaPeekAtLastError()
    return code


def is_page_locked(address: int) -> bool:
    """Whether the driver knows this host address."""
    from epochkv_connector.worker import staging

    flags = ctypes.c_uint(0)
    code: int = staging.runtime().cudaHostGetFlags(ctypes.byref(flags), ctypes.c_void_p(address))
    if code:
        staging.runtime().cudaGetLastError()
    return code == 0
