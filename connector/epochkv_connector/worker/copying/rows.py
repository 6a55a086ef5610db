"""Where the bytes of a block lie, as plain addresses: the table that drives copies on every device.

A *row* is a contiguous run of bytes of one block in one tensor; a block's payload is its rows, one after another. Rows of
one length that are equally spaced in the payload are a `RowClass`. Depends on torch only.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


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
