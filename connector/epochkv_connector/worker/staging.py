"""The host region of one worker rank, and the copies between GPU blocks and its slots. Knows nothing of vLLM.

Only this region is ever registered with the store or the CUDA driver, so vLLM's sleep mode and expandable segments keep working.
A GPU block is held for one device-to-host copy instead of one network put.

There is one class of copies for each kind of device, with the same two methods: `gather` copies GPU blocks to slots, `scatter` slots
to GPU blocks, both behind the event `after`. They return when the bytes are there. An object is made and used by one thread.
A *row* is a contiguous run of bytes of one block in one tensor; a block's payload is its rows, one after another.
Rows of one length that are equally spaced in the payload are a `RowClass`.

CPU: one torch call for each block, whatever the distances between its layers, because a tensor laid over the whole address
range of the KV tensors makes every row an index. It is 2 to 6 times faster than one view for each layer and block, which costs
more than the bytes of a small block. CUDA: one driver call for each job (`cudaMemcpyBatchAsync`, from CUDA 12.8 on), on a
side stream; without it one call for each row. Both, page-locking and the error that the runtime remembers are reached by the
runtime's C names. torch has no call for batches, and its own page-locking leaves the error of a refusal in the thread, where the
model's next kernel launch would raise it.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import itertools
import logging
import math
import mmap
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from epochkv_connector.config import shown_size
from epochkv_connector.wire import BlockMove
from epochkv_connector.worker.layout import HEADER_BYTES, GroupSpec, GroupView, KVCache, group_view, object_bytes, slot_stride

logger = logging.getLogger(__name__)

NOT_SUPPORTED = (36, 801)
"""CUDA errors of a driver that is older than its runtime, or of a device that cannot."""

Submit = Callable[[Tensor, Tensor, Tensor, int], None]
"""(target addresses, source addresses, sizes, stream): issue the copies. Raises RuntimeError when the driver refuses; some
of them may have been issued by then."""


def check_device(device: torch.device, hip: str | None = torch.version.hip) -> None:
    """Raise RuntimeError for what is neither host memory nor an NVIDIA GPU. torch calls the GPUs of ROCm `cuda`, too."""
    if device.type == "cuda" and hip is not None:
        name = f"ROCm (HIP {hip})"
    elif device.type not in ("cpu", "cuda"):
        name = f"a device of type {device.type!r}"
    else:
        return
    raise RuntimeError(
        f"the KV cache is on {name}; EpochKV copies KV on NVIDIA GPUs and on CPUs only, so this engine keeps none outside its own "
        "cache; take EpochKV's connector out of --kv-transfer-config here"
    )


@functools.cache
def runtime() -> Any:
    """The CUDA runtime that torch has loaded. Raises RuntimeError where it cannot be opened."""
    name = f"libcudart.so.{_major()}"
    try:
        return ctypes.CDLL(name)
    except OSError as error:
        raise RuntimeError(f"the CUDA runtime cannot be opened ({error}); torch was built for CUDA {torch.version.cuda}") from error


def page_lock(address: int, num_bytes: int) -> None:
    """Page-lock exactly these bytes (torch's own pinned allocator rounds up to a power of two). Raises RuntimeError.

    The runtime remembers no error of a refusal.
    """
    code = runtime().cudaHostRegister(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), ctypes.c_uint(0))
    if code != 0:
        runtime().cudaGetLastError()
        forbidden = "this device forbids page-locking of host memory, as confidential GPUs do"
        remedy = forbidden if code in NOT_SUPPORTED else "lower local.capacity_bytes or staging_slots"
        raise RuntimeError(f"cudaHostRegister returned CUDA error {code}; {remedy}")


def batch_copy(library: Any = None) -> Submit:
    """The fastest way that this CUDA runtime (default: the one that torch has loaded) has: one call for all, or one for each row."""
    library = library if library is not None else runtime()
    single = library.cudaMemcpyAsync
    single.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]

    def one_by_one(to: Tensor, source: Tensor, sizes: Tensor, stream: int) -> None:
        for target, origin, size in zip(to.tolist(), source.tolist(), sizes.tolist(), strict=True):
            check("cudaMemcpyAsync", single(target, origin, size, 4, stream))  # 4: the direction follows from the addresses

    def check(name: str, code: int) -> None:
        if code != 0:
            library.cudaGetLastError()
            raise RuntimeError(f"{name} returned CUDA error {code}")

    batch = getattr(library, "cudaMemcpyBatchAsync", None)
    if batch is None:
        logger.info("this CUDA runtime (%s) has no batched copy (12.8 brought it); blocks are copied row by row", torch.version.cuda)
        return one_by_one
    # cudaMemcpyAttributes: its first field says that sources are read in stream order; the rest, whatever its size, is 0.
    attributes = (ctypes.c_int * 16)(1)
    start, failed = ctypes.c_size_t(0), ctypes.c_size_t(0)
    refused: list[int] = []

    def all_at_once(to: Tensor, source: Tensor, sizes: Tensor, stream: int) -> None:
        arrays = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (to, source, sizes)]
        last = [ctypes.byref(failed)] if _major() < 13 else []  # 13 dropped the index of the failure
        count = ctypes.c_size_t(to.numel())
        attrs = (ctypes.byref(attributes), ctypes.byref(start), ctypes.c_size_t(1))
        code = 0 if refused else batch(*arrays, count, *attrs, *last, ctypes.c_void_p(stream))
        if code in NOT_SUPPORTED:
            library.cudaGetLastError()
            refused.append(code)
            logger.warning("this driver refuses batched copies (CUDA error %d); blocks are copied row by row", code)
            code = 0
        check("cudaMemcpyBatchAsync", code)
        if refused:
            one_by_one(to, source, sizes, stream)

    return all_at_once


class SideStream:
    """A stream beside the model's, where the copies of one thread are issued in order. `handle`: its `cudaStream_t`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        with torch.cuda.device(device):
            self._stream = torch.cuda.Stream(device=device)
        self.handle = self._stream.cuda_stream

    def behind(self, after: Any) -> None:
        """What is issued from now on begins when `after` has come (None: at once). Makes the stream's device the thread's."""
        torch.cuda.set_device(self._device)
        if after is not None:
            self._stream.wait_event(after)

    def wait(self) -> None:
        """Sleep until everything issued so far has ended."""
        done = torch.cuda.Event(blocking=True)
        done.record(self._stream)
        done.synchronize()

    def idle(self) -> bool:
        """Whether nothing issued so far is under way. A device that answers with an error does nothing any more."""
        try:
            return bool(self._stream.query())
        except RuntimeError:
            return True


def _major() -> int:
    return int((torch.version.cuda or "0").split(".")[0])


Batch = Sequence[tuple[int, Sequence[int], Sequence[int]]]
"""(group, GPU blocks, slots) for each group of a job; the indices exist."""

ELEMENTS = {16: torch.complex128, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Bytes -> the type that moves so many at a time, bit for bit."""


POLL_SECONDS = 0.001
SAY_SECONDS = 30.0
"""How often the log says that copies of a failed job have not ended."""


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
    """The rows of a KV cache group, of which `parts` are one after another in the payload (`layout.GroupView`)."""
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


class CpuCopies:
    """Copies within host memory, on the calling thread alone. `after` is for `CudaCopies`."""

    def __init__(self, groups: Mapping[int, GroupView], region: HostRegion) -> None:
        # index_select copies whole rows, fastest with 8 bytes to an element; index_copy_ element by element.
        self._narrow, self._wide = (
            {index: [_Lens(rows, group.num_blocks, region, most) for rows in row_classes(group.parts)] for index, group in groups.items()}
            for most in (8, 16)
        )
        _use_one_thread_for_copies()

    def gather(self, batch: Batch, after: Any = None) -> None:
        for group, blocks, slots in batch:
            for lens in self._narrow[group]:
                for rows, slot in zip(lens.rows_of(blocks), slots, strict=True):
                    torch.index_select(lens.blocks, 0, rows, out=lens.payload(slot))

    def scatter(self, batch: Batch, after: Any = None) -> None:
        for group, blocks, slots in batch:
            for lens in self._wide[group]:
                for rows, slot in zip(lens.rows_of(blocks), slots, strict=True):
                    lens.blocks.index_copy_(0, rows, lens.payload(slot))


class _Lens:
    """Both sides of a class of rows in elements of at most `most` bytes: block rows by index, the rows of a slot by stride."""

    def __init__(self, rows: RowClass, num_blocks: int, region: HostRegion, most: int) -> None:
        low = int(rows.addresses.min())
        high = int((rows.addresses + (num_blocks - 1) * rows.block_strides).max()) + rows.num_bytes
        first, spacing = int(rows.offsets[0]), int(rows.offsets[1] - rows.offsets[0]) if len(rows.offsets) > 1 else 0
        unit = math.gcd(most, region.address, region.stride, rows.num_bytes, first, spacing, low)
        unit = math.gcd(unit, *rows.addresses.tolist(), *rows.block_strides.tolist())
        # Only rows of KV tensors are ever touched in this range; what lies between them is not ours and may not be mapped.
        span = (ctypes.c_uint8 * (high - low)).from_address(low)
        self.shape = (len(rows.addresses), rows.num_bytes // unit)
        shape = ((high - low - rows.num_bytes) // unit + 1, self.shape[1])
        self.blocks = torch.frombuffer(span, dtype=ELEMENTS[unit]).as_strided(shape, (1, 1))
        self.index, self.steps = (rows.addresses - low) // unit, rows.block_strides // unit
        self._host = region.tensor.view(ELEMENTS[unit])
        self._slot = ((HEADER_BYTES + first) // unit, region.stride // unit, (spacing // unit, 1))

    def payload(self, slot: int) -> Tensor:
        start, stride, strides = self._slot
        return self._host.as_strided(self.shape, strides, start + slot * stride)

    def rows_of(self, blocks: Sequence[int]) -> tuple[Tensor, ...]:
        """For each block, the indices of its rows in `self.blocks`."""
        return (self.index + torch.tensor(blocks, dtype=torch.int64, device="cpu")[:, None] * self.steps).unbind(0)


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


POPULATE_BYTES = 64 << 20
MAX_THREADS = 8
"""More do not make it faster: they clear memory."""
_MADV_HUGEPAGE, _MADV_DONTFORK, _MADV_POPULATE_WRITE = 14, 10, 23
_libc = ctypes.CDLL(None, use_errno=True)  # its calls let other threads run, `mmap.madvise` does not
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def populate(address: int, num_bytes: int) -> None:
    """Give fresh memory its pages, huge ones where the kernel has them, and leave it out of forked children.

    Otherwise the first write to each page waits until the kernel has found and cleared one: seconds, on a busy or virtual machine, in
    which Mooncake's only TCP thread answers nobody. Also, memory that cannot be had is missing now and not hours later.

    Raises:
        OSError: the machine, or this process's limit, has no more memory.
    """
    whole, began = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE, time.monotonic()
    for advice in (_MADV_HUGEPAGE, _MADV_DONTFORK):  # only hints: a kernel without them goes on without
        _libc.madvise(address, whole, advice)

    def chunk(start: int) -> None:
        size = min(POPULATE_BYTES, num_bytes - start)
        if _libc.madvise(address + start, size, _MADV_POPULATE_WRITE) == 0:
            return
        if (code := ctypes.get_errno()) != errno.EINVAL:
            raise OSError(code, f"{shown_size(num_bytes)} of host memory cannot be had: {os.strerror(code)}")
        ctypes.memset(address + start, 0, size)  # before Linux 5.14

    with ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))), "epochkv-populate") as pool:
        list(pool.map(chunk, range(0, num_bytes, POPULATE_BYTES)))
    logger.info("EpochKV: %s of host memory populated in %.1f s", shown_size(num_bytes), time.monotonic() - began)


PIN_CHUNK_BYTES = 1 << 30
"""One registration with the driver is hardly larger. Linux 6.11 to 6.13 refuse more than 2 GB, and while one lasts, CUDA calls of other
processes on the machine wait."""


class HostRegion:
    """Private anonymous memory of `num_slots` slots, page-aligned, in huge pages where the kernel gives them; page-locked for CUDA.

    Every page has its backing before anybody uses the region, and none is inherited by forked children.
    """

    def __init__(self, num_slots: int, stride: int, *, pin: bool, pin_limit: int = PIN_CHUNK_BYTES) -> None:
        """Map `num_slots * stride` bytes.

        Raises:
            OSError: the kernel refuses the mapping, or has no memory for it.
            RuntimeError: the driver refuses to page-lock it.
        """
        self.num_slots = num_slots
        self.stride = stride
        self.num_bytes = num_slots * stride
        # Not the default MAP_SHARED, which is shared memory to the kernel: it gets no huge pages by advice.
        self._map = mmap.mmap(-1, self.num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.bytes = memoryview(self._map)
        self.tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self.address = self.tensor.data_ptr()
        populate(self.address, self.num_bytes)
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

    def unpin(self) -> None:
        """Give page-locked memory back to the driver; the mapping itself lives as long as anybody refers to it."""
        pinned, self._pinned = self._pinned, []
        for address in pinned:
            if runtime().cudaHostUnregister(ctypes.c_void_p(address)) != 0:  # never raised: a caller could do nothing about it
                runtime().cudaGetLastError()

    def _pin(self, limit: int) -> None:
        for start, size in pin_chunks(self.num_bytes, self.stride, limit):
            try:
                page_lock(self.address + start, size)
            except RuntimeError as error:
                self.unpin()
                raise RuntimeError(f"bytes {start} to {start + size} of {self.num_bytes} cannot be page-locked: {error}") from error
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
    def __init__(self, caches: Mapping[str, KVCache], groups: Mapping[int, GroupSpec], num_slots: int, num_blocks: int) -> None:
        """Read the layouts and map the region.

        Args:
            groups: those that are copied, by KV cache group id.

        Raises:
            RuntimeError: the tensors are neither on a CPU nor on an NVIDIA GPU.
            LayoutError: the tensors cannot be cut into blocks.
            ValueError, OSError, RuntimeError: see `HostRegion`.
        """
        self.groups: dict[int, GroupView] = {group: group_view(caches, spec, num_blocks) for group, spec in groups.items()}
        stride = slot_stride([group.payload_bytes for group in self.groups.values()])
        self.device = next(part.device for group in self.groups.values() for part in group.parts)
        check_device(self.device)
        self.region = HostRegion(num_slots, stride, pin=self.device.type == "cuda")

    def object_view(self, group: int, slot: int) -> memoryview:
        """Writable bytes of the store object in `slot` (a block of `group`)."""
        return self.region.object_view(slot, self.groups[group].payload_bytes)

    def batch(self, moves: Sequence[BlockMove]) -> list[tuple[int, list[int], list[int]]]:
        """(group, GPU blocks, slots) for each group that has layers here. Raises IndexError for what does not exist."""
        found: dict[int, tuple[list[int], list[int]]] = {}
        for move in moves:
            if move.group not in self.groups:
                raise IndexError(f"KV cache group {move.group}: there are {sorted(self.groups)}")
            if not 0 <= move.gpu_block < self.groups[move.group].num_blocks:
                raise IndexError(f"block {move.gpu_block}: the pool has {self.groups[move.group].num_blocks} blocks")
            self.region.slot_address(move.slot)
            blocks, slots = found.setdefault(move.group, ([], []))
            blocks.append(move.gpu_block)
            slots.append(move.slot)
        return [(group, *ids) for group, ids in found.items() if self.groups[group].parts]


class StagingStream:
    """Runs copies in one direction on its own thread's stream. Made and used by exactly one thread.

    Both calls return when the bytes are there.
    """

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._copies: CpuCopies | CudaCopies
        if staging.device.type == "cuda":
            self._copies = CudaCopies(staging.groups, staging.region, SideStream(staging.device), batch_copy())
        else:
            self._copies = CpuCopies(staging.groups, staging.region)

    def gather(self, moves: Sequence[BlockMove], after: torch.cuda.Event | None = None) -> None:
        """GPU blocks -> slots, after the compute stream has reached `after`."""
        if batch := self._staging.batch(moves):
            self._copies.gather(batch, after)

    def scatter(self, moves: Sequence[BlockMove], after: torch.cuda.Event | None = None) -> None:
        """Slots -> GPU blocks, after the compute stream has reached `after` (older kernels may still read the blocks)."""
        if batch := self._staging.batch(moves):
            self._copies.scatter(batch, after)


def compute_event(device: torch.device) -> torch.cuda.Event | None:
    """A recorded event at the end of what the calling thread's current stream has been given; None on CPU (work is over when issued)."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event
