"""A digest of tensors where they lie: every byte, its place, the tensors' names, types and shapes. CPU and CUDA.

On the host, slabs go through XXH3 (128 bits), on several threads. On a device, rows of 16 KiB are multiplied by a fixed random
int8 matrix of 16 columns with exact int32 arithmetic (`torch._int_mm`). The results are the rows of the next level. The last
64 KiB go through SHA-256. Two sets of weights that were not chosen in view of the matrix have one digest with a chance of 2^-128.
Sums and XOR miss swapped rows and columns, negation and transposition; both ways here see them.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

ROW_BYTES = 16384
COLUMNS = 16
SLAB_BYTES = 64 << 20
HOST_SLAB_BYTES = 4 << 20
SMALL_BYTES = 256 << 10
"""Smaller tensors are collected: each would cost a launch of its own."""
LAST_BYTES = 64 << 10
MIN_ROWS = 32
"""`torch._int_mm` on CUDA takes more than 16."""

_matrices: dict[torch.device, torch.Tensor] = {}


class Unreadable(RuntimeError):
    """These tensors have no digest now; the message says which one and why."""


def why_unreadable(error: Exception) -> str:
    """In words. Any error means the same: whatever these tensors are, they have no digest."""
    return str(error) if isinstance(error, Unreadable) else f"{type(error).__name__}: {error}"


@dataclass(frozen=True, slots=True)
class Digested:
    """A digest and the bytes it was made of."""

    value: bytes
    num_bytes: int


def parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor itself, or the tensors that a wrapper keeps its bytes in (torchao, GGUF's partitions)."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    partitions = getattr(tensor, "partitions", None)
    if isinstance(partitions, dict):
        for index, part in partitions.items():
            yield from parts(f"{name}.{index}", part)
    elif is_traceable_wrapper_subclass(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:
            yield from parts(f"{name}.{attribute}", getattr(tensor, attribute))
    else:
        yield name, tensor


def stored(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """`parts` to be read: no gradient follows them."""
    for part, inner in parts(name, tensor):
        yield part, inner.detach()


def in_storage_order(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A view whose last dimension has the smallest stride, and the order of dimensions that makes it. Dimensions of one element,
    whose strides say nothing, come first."""
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (tensor.shape[d] != 1, -tensor.stride(d) if tensor.shape[d] != 1 else 0, d)))
    return (tensor.permute(order) if tensor.dim() else tensor), order


def in_a_line(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as one dimension whose stride is 1, also where there is one element of any stride."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _flat(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Its bytes (int8, one dimension) in storage order: one view, or copies of at most about a slab where there are gaps."""
    if tensor.is_contiguous():
        yield in_a_line(tensor).view(torch.int8)
    elif tensor.dim() == 1 or tensor[0].numel() * tensor.element_size() * 2 > SLAB_BYTES:
        for row in tensor if tensor.dim() > 1 else (tensor.contiguous(),):
            yield from _flat(row)
    else:
        for rows in tensor.split(max(1, SLAB_BYTES // (tensor[0].numel() * tensor.element_size()))):
            yield in_a_line(rows.contiguous()).view(torch.int8)


def digest(tensors: Iterable[tuple[str, torch.Tensor]], extra: Any = (), *, deadline: float = float("inf")) -> Digested:
    """One digest for all of them.

    Args:
        tensors: by name, all on one device or on the host.
        extra: JSON that counts, too.
        deadline: on the monotonic clock.

    Raises:
        Unreadable: one is on `meta` (it is being loaded), or the deadline has passed.
    """
    book = _Book(deadline)
    for name, whole in tensors:
        for part, tensor in stored(name, whole):
            book.add(part, tensor)
    return book.close(extra)


@dataclass(slots=True)
class _Book:
    """The digest under way: what was seen, and each device's bytes."""

    deadline: float
    header: list[Any] = field(default_factory=list)
    sums: dict[torch.device, _Host | _Device] = field(default_factory=dict)
    seen: dict[tuple[Any, ...], str] = field(default_factory=dict)
    num_bytes: int = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.is_meta:
            raise Unreadable(f"{name} is on meta: weights are being loaded")
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and place in self.seen:  # tied
            self.header.append([name, "is", self.seen[place]])
            return
        self.seen[place] = name
        ordered, order = in_storage_order(tensor)
        self.header.append([name, str(tensor.dtype), list(tensor.shape), list(order), tensor.device.type])
        if not tensor.numel():
            return
        device = self.sums.get(tensor.device)
        if device is None:
            device = self.sums[tensor.device] = _Host() if tensor.device.type == "cpu" else _Device(tensor.device)
        for data in _flat(ordered):
            self.num_bytes += data.numel()
            device.add(data, self.check)

    def check(self) -> None:
        if time.monotonic() > self.deadline:
            raise Unreadable("reading the weights took too long")

    def close(self, extra: Any) -> Digested:
        final = hashlib.sha256(json.dumps([self.header, extra], separators=(",", ":")).encode())
        for device in self.sums.values():
            final.update(device.close())
        return Digested(final.digest(), self.num_bytes)


class _Host:
    """XXH3 of slabs, a few of them at a time: the library lets go of the interpreter while it sums."""

    def __init__(self) -> None:
        import xxhash  # a machine whose weights are on a GPU need not have it

        self._hash: Callable[[Any], bytes] = xxhash.xxh3_128_digest
        self._num_threads = max(1, torch.get_num_threads())
        self._threads = ThreadPoolExecutor(self._num_threads, "epochkv-digest")
        self._sums: list[Future[bytes]] = []
        self._small = xxhash.xxh3_128()

    def add(self, data: torch.Tensor, check: Callable[[], None]) -> None:
        check()
        if data.numel() < SMALL_BYTES:
            self._small.update(data.numpy())
            return
        for slab in data.split(HOST_SLAB_BYTES):
            self._sums.append(self._threads.submit(self._hash, slab.numpy()))
            if len(self._sums) > 4 * self._num_threads:  # a copy of a tensor with gaps lives until it is summed
                self._sums[-4 * self._num_threads].result()

    def close(self) -> bytes:
        try:
            return b"".join([*(one.result() for one in self._sums), self._small.digest()])
        finally:
            self._threads.shutdown()


class _Device:
    """The tree of matrix products; the host waits once, at the end."""

    def __init__(self, device: torch.device) -> None:
        self._matrix = _matrix(device)
        self._levels: list[torch.Tensor] = []
        self._small: list[torch.Tensor] = []
        self._held = 0

    def add(self, data: torch.Tensor, check: Callable[[], None]) -> None:
        check()
        if data.numel() > SMALL_BYTES:
            self._levels += self._level(data)
            return
        self._small.append(data)
        self._held += data.numel()
        if self._held > SLAB_BYTES:
            self._collect()

    def _collect(self) -> None:
        if self._small:
            self._levels += self._level(torch.cat(self._small))
            self._small, self._held = [], 0

    def _level(self, data: torch.Tensor) -> list[torch.Tensor]:
        return [self._rows(slab) for slab in data.split(SLAB_BYTES)]

    def _rows(self, data: torch.Tensor) -> torch.Tensor:
        """int32 [rows, COLUMNS] of up to a slab of bytes; what is missing of the last row is 0."""
        num = data.numel()
        rows = -(-num // ROW_BYTES)
        if max(rows, MIN_ROWS) * ROW_BYTES != num or data.data_ptr() % 16:
            padded = torch.zeros(max(rows, MIN_ROWS) * ROW_BYTES, dtype=torch.int8, device=data.device)
            padded[:num] = data
            data = padded
        return torch._int_mm(data.view(-1, ROW_BYTES), self._matrix)[:rows]

    def close(self) -> bytes:
        self._collect()
        if not self._levels:
            return b""
        data = torch.cat(self._levels).view(-1).view(torch.int8)
        while data.numel() > LAST_BYTES:
            data = torch.cat(self._level(data)).view(-1).view(torch.int8)
        return bytes(data.cpu().numpy().tobytes())


def _matrix(device: torch.device) -> torch.Tensor:
    """int8 [ROW_BYTES, COLUMNS], column-major as cuBLASLt wants it."""
    if device not in _matrices:
        raw = bytearray(hashlib.shake_256(b"epochkv weights 1").digest(ROW_BYTES * COLUMNS))
        _matrices[device] = torch.frombuffer(raw, dtype=torch.int8).view(COLUMNS, ROW_BYTES).to(device).t()
    return _matrices[device]
