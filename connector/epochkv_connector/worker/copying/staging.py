"""The host region of one worker rank and the copies between GPU blocks and its slots.

Only this region is ever registered with the store or the CUDA driver, so vLLM's sleep mode and expandable segments keep working.
A GPU block is held for one device-to-host copy instead of one network put. How bytes are copied: `copies`. Depends on torch only.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epochkv_connector.touch import Touch, advise
from epochkv_connector.worker.copying import cuda
from epochkv_connector.worker.copying.copies import CpuCopies, CudaCopies
from epochkv_connector.worker.copying.layout import GroupSpec, GroupView, KVCache, group_view
from epochkv_connector.worker.copying.slots import HEADER_BYTES, object_bytes, slot_stride

PIN_CHUNK_BYTES = 64 << 30
"""One registration with the driver is never larger."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Copy between one GPU block of one group and one slot."""

    group: int
    gpu_block: int
    slot: int


class HostRegion:
    """Private anonymous memory of `num_slots` slots, page-aligned, in huge pages where the kernel gives them; page-locked for CUDA.

    Every page has its backing before anybody uses the region, and none is inherited by forked children.
    """

    def __init__(self, num_slots: int, stride: int, *, pin: bool, pin_limit: int = PIN_CHUNK_BYTES) -> None:
        """Map `num_slots * stride` bytes.

        Raises:
            ValueError: not at least one slot.
            OSError: the kernel refuses the mapping, or has no memory for it.
            RuntimeError: the driver refuses to page-lock it.
        """
        if num_slots <= 0 or stride <= 0:
            raise ValueError(f"a host region of {num_slots} slots of {stride} bytes is impossible; give at least one")
        self.num_slots = num_slots
        self.stride = stride
        self.num_bytes = num_slots * stride
        # Not the default MAP_SHARED, which is shared memory to the kernel: it gets no huge pages by advice.
        self._map = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = memoryview(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        advise(self.address, self.num_bytes)
        Touch(self.address, self.num_bytes, "EpochKV: host region").run()
        self._pinned: list[int] = []  # addresses of page-locked chunks
        if pin:
            self._pin(pin_limit)

    def slot_address(self, slot: int) -> int:
        """Address of the slot's header. Raises IndexError."""
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
        pinned, self._pinned = self._pinned, []
        for address in pinned:
            cuda.page_unlock(address)

    def _pin(self, limit: int) -> None:
        for start, size in pin_chunks(self.num_bytes, self.stride, limit):
            try:
                cuda.page_lock(self.address + start, size)
            except RuntimeError as error:
                self.unpin()
                raise RuntimeError(
                    f"bytes {start} to {start + size} of {self.num_bytes} of host memory cannot be page-locked: {error}; "
                    "lower local.capacity_bytes or staging_slots"
                ) from error
            self._pinned.append(self.address + start)


def pin_chunks(num_bytes: int, stride: int, limit: int = PIN_CHUNK_BYTES) -> Iterator[tuple[int, int]]:
    """(start, bytes) of the pieces in which a region is page-locked: whole slots and whole pages, about `limit` each.

    A copy must not cross from one registration to another, so no slot may.
    """
    unit = math.lcm(stride, mmap.PAGESIZE)
    chunk = max(1, limit // unit) * unit
    for start in range(0, num_bytes, chunk):
        yield start, min(chunk, num_bytes - start)


class Staging:
    def __init__(
        self,
        caches: Mapping[str, KVCache],
        groups: Mapping[int, GroupSpec],
        num_slots: int,
        num_blocks: int,
    ) -> None:
        """Read the layouts and map the region.

        Args:
            groups: those that are copied, by KV cache group id.

        Raises:
            UnsupportedDevice: the tensors are neither on a CPU nor on an NVIDIA GPU.
            LayoutError: the tensors cannot be cut into blocks.
            ValueError, OSError, RuntimeError: see `HostRegion`.
        """
        self.groups: dict[int, GroupView] = {group: group_view(caches, spec, num_blocks) for group, spec in groups.items()}
        stride = slot_stride([group.payload_bytes for group in self.groups.values()])
        self.device = next(part.device for group in self.groups.values() for part in group.parts)
        cuda.check_device(self.device)
        self.region = HostRegion(num_slots, stride, pin=self.device.type == "cuda")

    def object_view(self, group: int, slot: int) -> memoryview:
        """Writable bytes of the store object in `slot` (a block of `group`)."""
        return self.region.object_view(slot, self.groups[group].payload_bytes)

    def batch(self, pairs: Sequence[Pair]) -> list[tuple[int, list[int], list[int]]]:
        """(group, GPU blocks, slots) for each group. Raises IndexError for what does not exist."""
        found: dict[int, tuple[list[int], list[int]]] = {}
        for pair in pairs:
            if pair.group not in self.groups:
                raise IndexError(f"KV cache group {pair.group}: there are {sorted(self.groups)}")
            if not 0 <= pair.gpu_block < self.groups[pair.group].num_blocks:
                raise IndexError(f"block {pair.gpu_block}: the pool has {self.groups[pair.group].num_blocks} blocks")
            self.region.slot_address(pair.slot)
            blocks, slots = found.setdefault(pair.group, ([], []))
            blocks.append(pair.gpu_block)
            slots.append(pair.slot)
        return [(group, *ids) for group, ids in found.items()]


class StagingStream:
    """Runs copies in one direction on its own thread's stream. Made and used by exactly one thread.

    Both calls return when the bytes are there. On CUDA the copies run on a side stream behind `after` and their own event
    is waited for, never the device: nobody else's work on it is waited for.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._copies: CpuCopies | CudaCopies
        if staging.device.type == "cuda":
            self._copies = CudaCopies(staging.groups, staging.region, cuda.SideStream(staging.device), cuda.batch_copy())
        else:
            self._copies = CpuCopies(staging.groups, staging.region)

    def gather(self, pairs: Sequence[Pair], after: torch.cuda.Event | None = None) -> None:
        """GPU blocks -> slots, after the compute stream has reached `after`."""
        if pairs:
            self._copies.gather(self._staging.batch(pairs), after)

    def scatter(self, pairs: Sequence[Pair], after: torch.cuda.Event | None = None) -> None:
        """Slots -> GPU blocks, after the compute stream has reached `after` (older kernels may still read the blocks)."""
        if pairs:
            self._copies.scatter(self._staging.batch(pairs), after)


def compute_event(device: torch.device) -> torch.cuda.Event | None:
    """A recorded event at the end of what the calling thread's current stream has been given; None on CPU (work is over when issued)."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
