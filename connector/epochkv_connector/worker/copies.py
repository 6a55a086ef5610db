"""Copies between GPU blocks and host slots: one class for each kind of device, behind one interface (`Copies`).

CPU: one torch call for each block, whatever the distances between its layers, because a tensor laid over the whole address
range of the KV tensors makes every row an index. It is 2 to 6 times faster than one view for each layer and block, which costs
more than the bytes of a small block. CUDA: one driver call for each job (`cudaMemcpyBatchAsync`, from CUDA 12.8 on), on a
side stream; without it torch's own batched copy. Depends on torch only.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from epochkv_connector.worker.layout import GroupView
from epochkv_connector.worker.rows import RowClass, progressions, row_classes
from epochkv_connector.worker.slots import HEADER_BYTES

logger = logging.getLogger(__name__)

Batch = Sequence[tuple[int, Sequence[int], Sequence[int]]]
"""(group, GPU blocks, slots) for each group of a job; the indices exist."""

ELEMENTS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Bytes -> the type that moves so many at a time, bit for bit."""


NOT_SUPPORTED = (36, 801)
"""CUDA errors of a driver that is older than its runtime, or of a device that cannot."""

MAX_SERIES = 4
"""Rows of one block that lie in so few equally spaced series are written series by series."""


class Region(Protocol):
    """`staging.HostRegion`."""

    stride: int
    address: int
    tensor: Tensor


class Copies(Protocol):
    """Made and used by one thread. Both return when the bytes are there; `after`: event behind which to begin."""

    def gather(self, batch: Batch, after: Any = None) -> None:
        """GPU blocks -> slots."""

    def scatter(self, batch: Batch, after: Any = None) -> None:
        """Slots -> GPU blocks."""


class CpuCopies:
    """Copies within host memory, on the calling thread alone."""

    def __init__(self, groups: Sequence[GroupView], region: Region) -> None:
        self._classes = [[_CpuRows(rows, group.num_blocks, region) for rows in row_classes(group.parts)] for group in groups]
        _use_one_thread_for_copies()

    def gather(self, batch: Batch, after: Any = None) -> None:
        """See `Copies`."""
        for group, blocks, slots in batch:
            for rows in self._classes[group]:
                rows.gather(blocks, slots)

    def scatter(self, batch: Batch, after: Any = None) -> None:
        """See `Copies`."""
        for group, blocks, slots in batch:
            for rows in self._classes[group]:
                rows.scatter(blocks, slots)


class _Lens:
    """Both sides of a class of rows in elements of at most `most` bytes: block rows by index, the rows of a slot by stride."""

    def __init__(self, rows: RowClass, num_blocks: int, region: Region, most: int) -> None:
        low = int(rows.addresses.min())
        high = int((rows.addresses + (num_blocks - 1) * rows.block_strides).max()) + rows.num_bytes
        first, spacing = _spacing(rows.offsets)
        unit = math.gcd(most, region.address, region.stride, rows.num_bytes, first, spacing, low)
        unit = math.gcd(unit, *rows.addresses.tolist(), *rows.block_strides.tolist())
        # Only rows of KV tensors are ever touched in this range; what lies between them is not ours and may not be mapped.
        span = (ctypes.c_uint8 * (high - low)).from_address(low)
        self.span = torch.frombuffer(span, dtype=ELEMENTS[unit])
        self.shape = (len(rows.addresses), rows.num_bytes // unit)
        self.blocks = self.span.as_strided(((high - low - rows.num_bytes) // unit + 1, self.shape[1]), (1, 1))
        self.index, self.steps = (rows.addresses - low) // unit, rows.block_strides // unit
        self._host = region.tensor.view(ELEMENTS[unit])
        self._slot = ((HEADER_BYTES + first) // unit, region.stride // unit, (spacing // unit, 1))

    def payload(self, slot: int) -> Tensor:
        """The rows in a slot."""
        start, stride, strides = self._slot
        return self._host.as_strided(self.shape, strides, start + slot * stride)

    def rows_of(self, blocks: Sequence[int]) -> tuple[Tensor, ...]:
        """For each block, the indices of its rows in `self.blocks`."""
        return (self.index + torch.tensor(blocks, dtype=torch.int64, device="cpu")[:, None] * self.steps).unbind(0)


class _CpuRows:
    """Copies one class of rows of one group."""

    def __init__(self, rows: RowClass, num_blocks: int, region: Region) -> None:
        # index_select copies whole rows, fastest with 8 bytes to an element; index_copy_ element by element.
        self._lens = _Lens(rows, num_blocks, region, 8)
        self._wide = _Lens(rows, num_blocks, region, 16)
        self._series: list[tuple[tuple[int, int], tuple[int, int], int, Tensor]] = []
        series, steps, width = progressions(self._lens.index), self._lens.steps, self._lens.shape[1]
        if len(series) <= MAX_SERIES and bool((steps == steps[0]).all()):
            self._series = [((len(order), width), (max(step, 1), 1), first, order) for first, step, order in series]

    def gather(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        lens = self._lens
        for rows, slot in zip(lens.rows_of(blocks), slots, strict=True):
            torch.index_select(lens.blocks, 0, rows, out=lens.payload(slot))

    def scatter(self, blocks: Sequence[int], slots: Sequence[int]) -> None:
        if not self._series:
            for rows, slot in zip(self._wide.rows_of(blocks), slots, strict=True):
                self._wide.blocks.index_copy_(0, rows, self._wide.payload(slot))
            return
        lens, step = self._lens, int(self._lens.steps[0])
        for block, slot in zip(blocks, slots, strict=True):
            payload = lens.payload(slot)
            for shape, strides, first, order in self._series:
                torch.index_select(payload, 0, order, out=lens.span.as_strided(shape, strides, first + block * step))


def _spacing(offsets: Tensor) -> tuple[int, int]:
    return int(offsets[0]), int(offsets[1] - offsets[0]) if len(offsets) > 1 else 0


def _use_one_thread_for_copies() -> None:
    """Keep the calling thread's copies on the calling thread.

    torch would split each of them over a team of OpenMP threads, which compete with the model's own team: 3 times
    slower on two cores. The setting is OpenMP's, per thread (`torch.set_num_threads` would change it for threads born
    later, too).
    """
    torch.zeros(1 << 17).add_(1)  # torch sets its own number once per thread, at the first parallel region
    with contextlib.suppress(AttributeError, OSError):  # torch without OpenMP: nothing to set
        ctypes.CDLL(None).omp_set_num_threads(1)


class CudaCopies:
    """Copies between device memory and page-locked host memory on a side stream; waits for their own event, never for the device."""

    def __init__(self, groups: Sequence[GroupView], region: Region, device: torch.device) -> None:
        self._classes = [row_classes(group.parts) for group in groups]
        self._region = region
        self._device = device
        self._stream = torch.cuda.Stream(device=device)
        self._submit = batch_copy()

    def gather(self, batch: Batch, after: Any = None) -> None:
        """See `Copies`."""
        device, host, sizes = self._table(batch)
        self._copy(host, device, sizes, after)

    def scatter(self, batch: Batch, after: Any = None) -> None:
        """See `Copies`."""
        device, host, sizes = self._table(batch)
        self._copy(device, host, sizes, after)

    def _table(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        """Device addresses, host addresses and sizes of every row, int64, same shape."""
        device, host, sizes = [], [], []
        for group, block_ids, slot_ids in batch:
            blocks, slots = (torch.tensor(ids, dtype=torch.int64, device="cpu") for ids in (block_ids, slot_ids))
            for rows in self._classes[group]:
                device.append(rows.of_blocks(blocks).flatten())
                payloads = self._region.address + HEADER_BYTES + slots * self._region.stride
                host.append((payloads[:, None] + rows.offsets).flatten())
                sizes.append(torch.full_like(device[-1], rows.num_bytes))
        return torch.cat(device), torch.cat(host), torch.cat(sizes)

    def _copy(self, to: Tensor, source: Tensor, sizes: Tensor, after: Any) -> None:
        done = torch.cuda.Event(blocking=True)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            self._submit(to, source, sizes, self._stream.cuda_stream)
            done.record(self._stream)
        done.synchronize()


Submit = Callable[[Tensor, Tensor, Tensor, int], None]
"""(target addresses, source addresses, sizes, stream): issue the copies. Raises RuntimeError when the driver refuses."""


def batch_copy(library: Any = None) -> Submit:
    """The fastest way this CUDA runtime has: one call for all, or one call for each row.

    Args:
        library: the CUDA runtime; default: the one that torch has loaded.
    """
    major = int((torch.version.cuda or "0").split(".")[0])
    runtime = library if library is not None else ctypes.CDLL(f"libcudart.so.{major}")
    single = runtime.cudaMemcpyAsync
    single.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]

    def one_by_one(to: Tensor, source: Tensor, sizes: Tensor, stream: int) -> None:
        for target, origin, size in zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True):
            _check("cudaMemcpyAsync", single(target, origin, size, 4, stream))  # 4: the direction follows from the addresses

    batch = getattr(runtime, "cudaMemcpyBatchAsync", None)
    if batch is None:
        logger.info("this CUDA runtime (%s) has no batched copy (12.8 brought it); blocks are copied row by row", torch.version.cuda)
        return one_by_one
    # cudaMemcpyAttributes: its first field says that sources are read in stream order; the rest, whatever its size, is 0.
    attributes = (ctypes.c_int * 16)(1)
    start, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
    refused: list[int] = []

    def all_at_once(to: Tensor, source: Tensor, sizes: Tensor, stream: int) -> None:
        arrays = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (to, source, sizes)]
        last = [ctypes.byref(failed)] if major < 13 else []  # 13 dropped the index of the failure
        count = ctypes.c_size_t(to.numel())
        attrs = (ctypes.byref(attributes), ctypes.byref(start), ctypes.c_size_t(1))
        code = 0 if refused else batch(*arrays, count, *attrs, *last, ctypes.c_void_p(stream))
        if code in NOT_SUPPORTED:
            refused.append(code)
            logger.warning("this driver refuses batched copies (CUDA error %d); blocks are copied row by row", code)
            code = 0
        _check("cudaMemcpyBatchAsync", code)
        if refused:
            one_by_one(to, source, sizes, stream)

    return all_at_once


def _check(name: str, code: int) -> None:
    if code != 0:
        raise RuntimeError(f"{name} returned CUDA error {code}")
