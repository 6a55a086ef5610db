"""The host region of one worker rank and the copies between GPU blocks and its slots.

Only this region is ever registered with the store or the CUDA driver, so vLLM's sleep mode and expandable segments keep
working and a GPU block is held for one device-to-host copy instead of one network put. Copies of a job are one call
that does not hold the GIL. Depends on torch only: importable and testable without vLLM.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epochkv_connector.worker.layout import GroupSpec, GroupView, KVCache, group_view
from epochkv_connector.worker.slots import HEADER_BYTES, object_bytes, slot_stride

__all__ = ["GroupSpec", "HostRegion", "Pair", "Staging", "StagingStream"]


@dataclass(frozen=True, slots=True)
class Pair:
    """Copy between one GPU block of one group and one slot."""

    group: int
    gpu_block: int
    slot: int


class HostRegion:
    """Page-aligned anonymous memory of `num_slots` slots; page-locked where CUDA is present.

    The pages of the mapping are given no backing until they are touched (CPU) and are not inherited by forked children.
    """

    def __init__(self, num_slots: int, stride: int, *, pin: bool) -> None:
        """Map `num_slots * stride` bytes.

        Raises:
            ValueError: not at least one slot.
            OSError: the kernel refuses the mapping.
            RuntimeError: the driver refuses to page-lock it.
        """
        if num_slots <= 0 or stride <= 0:
            raise ValueError(f"a host region of {num_slots} slots of {stride} bytes is impossible; give at least one")
        self.num_slots = num_slots
        self.stride = stride
        self.num_bytes = num_slots * stride
        self._map = mmap.mmap(-1, self.num_bytes)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            with contextlib.suppress(AttributeError, OSError):  # not in every kernel; both are only hints
                self._map.madvise(getattr(mmap, advice))
        self.bytes = memoryview(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        self._pinned = pin and self._pin()

    def slot_address(self, slot: int) -> int:
        """Address of the slot's header.

        Raises:
            IndexError: no such slot.
        """
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot}: the host region has {self.num_slots} slots")
        return self.address + slot * self.stride

    def object_view(self, slot: int, payload_bytes: int) -> memoryview:
        """Writable view of header, payload and trailer of a slot."""
        start = self.slot_address(slot) - self.address
        return self.bytes[start : start + object_bytes(payload_bytes)]

    def payload(self, slot: int, payload_bytes: int) -> Tensor:
        """uint8 view `(payload_bytes,)` of a slot's payload."""
        start = self.slot_address(slot) - self.address + HEADER_BYTES
        return self.tensor[start : start + payload_bytes]

    def unpin(self) -> None:
        """Give page-locked memory back to the driver; the mapping itself lives as long as anybody refers to it."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(self.address)
            self._pinned = False

    def _pin(self) -> bool:
        error = torch.cuda.cudart().cudaHostRegister(self.address, self.num_bytes, 0)
        if int(error) != 0:
            raise RuntimeError(
                f"cudaHostRegister of {self.num_bytes} bytes failed with {error}; lower local.capacity_bytes or staging_slots"
            )
        return True


class Staging:
    """The groups of this rank, the host region, and the pairs of views a job copies."""

    def __init__(
        self,
        caches: Mapping[str, KVCache],
        groups: Sequence[GroupSpec],
        num_slots: int,
        num_blocks: int | None = None,
    ) -> None:
        """Read the layouts and map the region.

        Raises:
            LayoutError: the tensors cannot be cut into blocks.
            ValueError, OSError, RuntimeError: see `HostRegion`.
        """
        self.groups: tuple[GroupView, ...] = tuple(group_view(caches, spec, num_blocks) for spec in groups)
        self.device = self.groups[0].parts[0].device
        stride = slot_stride([group.payload_bytes for group in self.groups])
        self.region = HostRegion(num_slots, stride, pin=self.device.type == "cuda")

    def object_view(self, group: int, slot: int) -> memoryview:
        """Writable bytes of the store object in `slot` (a block of `group`)."""
        return self.region.object_view(slot, self.groups[group].payload_bytes)

    def views(self, pairs: Sequence[Pair]) -> tuple[list[Tensor], list[Tensor]]:
        """(views of GPU blocks, matching views of slots), same length and shapes.

        Raises:
            IndexError: a group, block or slot that does not exist.
        """
        blocks: list[Tensor] = []
        slots: list[Tensor] = []
        for pair in pairs:
            group = self.groups[pair.group]
            blocks += group.block(pair.gpu_block)
            slots += group.like_block(self.region.payload(pair.slot, group.payload_bytes))
        return blocks, slots


class StagingStream:
    """Runs copies in one direction on its own thread's stream. Made and used by exactly one thread.

    CPU: `copy` returns when the bytes are there. CUDA: copies are issued on a side stream behind `after` and `copy`
    waits for their own event, never for the device. Nobody else's work on the device is waited for.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._stream: torch.cuda.Stream | None = None
        if staging.device.type == "cuda":
            self._stream = torch.cuda.Stream(device=staging.device)
        else:
            _use_one_thread_for_copies()

    def gather(self, pairs: Sequence[Pair], after: torch.cuda.Event | None = None) -> None:
        """GPU blocks -> slots, after the compute stream has reached `after`."""
        blocks, slots = self._staging.views(pairs)
        self._copy(slots, blocks, after)

    def scatter(self, pairs: Sequence[Pair], after: torch.cuda.Event | None = None) -> None:
        """Slots -> GPU blocks, after the compute stream has reached `after` (older kernels may still read the blocks)."""
        blocks, slots = self._staging.views(pairs)
        self._copy(blocks, slots, after)

    def _copy(self, to: list[Tensor], source: list[Tensor], after: torch.cuda.Event | None) -> None:
        if not to:
            return
        if self._stream is None:
            torch._foreach_copy_(to, source)
            return
        # A strided device view would be copied through a temporary on the device; contiguous runs are plain
        # asynchronous memcpys.
        to, source = _contiguous_runs(to), _contiguous_runs(source)
        done = torch.cuda.Event(blocking=True)
        with torch.cuda.stream(self._stream):
            if after is not None:
                self._stream.wait_event(after)
            torch._foreach_copy_(to, source, non_blocking=True)
            done.record(self._stream)
        done.synchronize()


def compute_event(device: torch.device) -> torch.cuda.Event | None:
    """A recorded event at the end of what the calling thread's current stream has been given; None on CPU (work is over when issued)."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def _contiguous_runs(views: Sequence[Tensor]) -> list[Tensor]:
    """The same bytes as one-dimensional contiguous tensors, in order."""
    runs: list[Tensor] = []
    for view in views:
        runs += view.reshape(-1, view.shape[-1]).unbind(0) if view.is_contiguous() else _rows(view)
    return runs


def _rows(view: Tensor) -> list[Tensor]:
    if view.dim() == 1:
        return [view]
    rows: list[Tensor] = []
    for part in view.unbind(0):
        rows += _rows(part)
    return rows


def _use_one_thread_for_copies() -> None:
    """Keep the calling thread's copies on the calling thread.

    torch would split each of them over a team of OpenMP threads, which compete with the model's own team: 3 times
    slower on two cores. The setting is OpenMP's, per thread (`torch.set_num_threads` would change it for threads born
    later, too).
    """
    torch.zeros(1 << 17).add_(1)  # torch sets its own number once per thread, at the first parallel region
    with contextlib.suppress(AttributeError, OSError):  # torch without OpenMP: nothing to set
        ctypes.CDLL(None).omp_set_num_threads(1)
