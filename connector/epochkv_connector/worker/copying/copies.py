"""Copies between GPU blocks and host slots: one class for each kind of device, with the same two methods.

`gather` copies GPU blocks to slots, `scatter` slots to GPU blocks, both behind the event `after`. They return when the bytes are
there. An object is made and used by one thread.

A *row* is a contiguous run of bytes of one block in one tensor; a block's payload is its rows, one after another.
Rows of one length that are equally spaced in the payload are a `RowClass`.

CPU: one torch call for each block, whatever the distances between its layers, because a tensor laid over the whole address
range of the KV tensors makes every row an index. It is 2 to 6 times faster than one view for each layer and block, which costs
more than the bytes of a small block. CUDA: one driver call for each job (`cudaMemcpyBatchAsync`, from CUDA 12.8 on), on a
side stream; without it one call for each row (`cuda`). Depends on torch only.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from epochkv_connector.worker.copying.cuda import SideStream, Submit
from epochkv_connector.worker.copying.layout import GroupView
from epochkv_connector.worker.copying.slots import HEADER_BYTES

if TYPE_CHECKING:
    from epochkv_connector.worker.copying.staging import HostRegion

logger = logging.getLogger(__name__)

Batch = Sequence[tuple[int, Sequence[int], Sequence[int]]]
"""(group, GPU blocks, slots) for each group of a job; the indices exist."""

ELEMENTS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Bytes -> the type that moves so many at a time, bit for bit."""


POLL_SECONDS = 0.001
SAY_SECONDS = 30.0
"""How often the log says that copies of a failed job have not ended."""

MAX_SERIES = 4
"""Rows of one block that lie in so few equally spaced series are written series by series."""


@dataclass(frozen=True, slots=True)
class RowClass:
    """Rows of equal length. Row r of block b is at `addresses[r] + b * block_strides[r]`, and at `offsets[r]` of the payload.

    Attributes:
        num_bytes: of one row.
        addresses, block_strides, offsets: int64, shape (rows,), in bytes, in payload order; offsets are equally spaced.
    """

    num_bytes: int
    addresses: Tensor
    block_strides: Tensor
    offsets: Tensor

    def of_blocks(self, blocks: Tensor) -> Tensor:
        """Addresses `(blocks, rows)` of these blocks' rows (`blocks`: int64, shape (blocks,))."""
        return self.addresses + blocks[:, None] * self.block_strides


def row_classes(parts: Sequence[Tensor]) -> tuple[RowClass, ...]:
    """The rows of a KV cache group.

    Args:
        parts: uint8 views `(num_blocks, *inner, run_bytes)`, one after another in the payload (`layout.GroupView.parts`).
    """
    found: list[tuple[int, list[tuple[int, int, int]]]] = []
    latest: dict[int, list[tuple[int, int, int]]] = {}  # by length: the class that takes the next row
    offset = 0
    for part in parts:
        run = int(part.shape[-1])
        inner = list(zip(part.shape[1:-1], part.stride()[1:-1], strict=True))
        for place in itertools.product(*(range(size) for size, _ in inner)):
            shift = sum(index * stride for index, (_, stride) in zip(place, inner, strict=True))
            rows = latest.get(run)
            if rows is None or (len(rows) > 1 and offset - rows[-1][2] != rows[1][2] - rows[0][2]):
                rows = latest[run] = []
                found.append((run, rows))
            rows.append((part.data_ptr() + shift, part.stride(0), offset))
            offset += run
    return tuple(RowClass(run, *torch.tensor(rows, dtype=torch.int64, device="cpu").unbind(1)) for run, rows in found)


def progressions(values: Tensor) -> list[tuple[int, int, Tensor]]:
    """Cut the values into few equally spaced ascending series: (first, step, indices of the values in that order)."""
    ascending, order = torch.sort(values)
    found: list[tuple[int, int, Tensor]] = []
    start, numbers = 0, ascending.tolist()
    while start < len(numbers):
        end = start + 1
        step = numbers[end] - numbers[start] if end < len(numbers) else 0
        while step > 0 and end < len(numbers) and numbers[end] - numbers[end - 1] == step:
            end += 1
        found.append((numbers[start], step, order[start:end]))
        start = end
    return found


class CpuCopies:
    """Copies within host memory, on the calling thread alone. `after` is for `CudaCopies`."""

    def __init__(self, groups: Mapping[int, GroupView], region: HostRegion) -> None:
        self._classes = {
            index: [_CpuRows(rows, group.num_blocks, region) for rows in row_classes(group.parts)] for index, group in groups.items()
        }
        _use_one_thread_for_copies()

    def gather(self, batch: Batch, after: Any = None) -> None:
        for group, blocks, slots in batch:
            for rows in self._classes[group]:
                rows.gather(blocks, slots)

    def scatter(self, batch: Batch, after: Any = None) -> None:
        for group, blocks, slots in batch:
            for rows in self._classes[group]:
                rows.scatter(blocks, slots)


class _Lens:
    """Both sides of a class of rows in elements of at most `most` bytes: block rows by index, the rows of a slot by stride."""

    def __init__(self, rows: RowClass, num_blocks: int, region: HostRegion, most: int) -> None:
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
        start, stride, strides = self._slot
        return self._host.as_strided(self.shape, strides, start + slot * stride)

    def rows_of(self, blocks: Sequence[int]) -> tuple[Tensor, ...]:
        """For each block, the indices of its rows in `self.blocks`."""
        return (self.index + torch.tensor(blocks, dtype=torch.int64, device="cpu")[:, None] * self.steps).unbind(0)


class _CpuRows:
    def __init__(self, rows: RowClass, num_blocks: int, region: HostRegion) -> None:
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
    """Copies between device memory and page-locked host memory on a side stream. Waits for its own event, never for the device."""

    def __init__(self, groups: Mapping[int, GroupView], region: HostRegion, stream: SideStream, submit: Submit) -> None:
        self._classes = {index: row_classes(group.parts) for index, group in groups.items()}
        self._region = region
        self._stream = stream
        self._submit = submit

    def gather(self, batch: Batch, after: Any = None) -> None:
        device, host, sizes = self._table(batch)
        self._copy(host, device, sizes, after)

    def scatter(self, batch: Batch, after: Any = None) -> None:
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
        """Issue copies and wait. An error is raised only when they have ended: the blocks of a failed job are given to others.

        So this has no deadline. A job whose copies never end is never reported, its blocks stay taken, and the log says so every
        `SAY_SECONDS`. Callers that wait for jobs (a step, sleep, shutdown) have deadlines of their own.
        """
        try:
            self._stream.behind(after)
            self._submit(to, source, sizes, self._stream.handle)
            self._stream.wait()
        except BaseException as error:
            _wait_until(self._stream.idle, error)
            raise


def _wait_until(idle: Callable[[], bool], error: BaseException) -> None:
    began = time.monotonic()
    next_word = began + SAY_SECONDS
    while not idle():
        time.sleep(POLL_SECONDS)
        if (now := time.monotonic()) >= next_word:
            next_word = now + SAY_SECONDS
            text = "copies were issued before %r and have not ended after %.0f s; their blocks stay taken until they do"
            logger.error(text, error, now - began)
