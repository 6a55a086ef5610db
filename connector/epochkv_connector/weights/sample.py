"""A few elements of every tensor, compared again after each step that saves: weights that were written past vLLM show here.

This is the backstop; the hook on the executor is the mechanism. One comparison misses a push of one element in a thousand with a
chance of 4e-8.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

from epochkv_connector.weights.digest import in_storage_order, stored

NUM_ELEMENTS = 16384
"""Below the 32768 from which torch spreads work on a CPU over threads, which waits for every one of them on a busy machine."""
MIN_PER_TENSOR = 32
RUN = 16
"""Elements that lie together and are drawn together: memory is read by the line."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class _Views:
    """Strided views of one type and number of dimensions on one device, and what they held."""

    views: list[torch.Tensor]
    then: torch.Tensor

    def differs(self) -> torch.Tensor:
        """bool, on the device; nothing waits for it here."""
        return (torch.cat(self.views) != self.then).any()


class Sample:
    """What was there when it was drawn. Every tensor has at least `MIN_PER_TENSOR` elements in it, or all of its own."""

    def __init__(
        self, tensors: Iterable[tuple[str, torch.Tensor]], num_elements: int = NUM_ELEMENTS, draw: random.Random | None = None
    ) -> None:
        draw = draw or random.Random()
        visible = [tensor for name, whole in tensors for _, tensor in stored(name, whole) if tensor.numel() and not tensor.is_meta]
        total = sum(tensor.numel() for tensor in visible)
        groups: dict[tuple[torch.dtype, torch.device, int], list[torch.Tensor]] = {}
        for tensor in visible:
            ordered, _ = in_storage_order(tensor)
            if not ordered.is_contiguous():
                ordered = ordered[tuple(slice(draw.randrange(size), None) for size in ordered.shape[:-1])]  # one corner of it
                ordered = ordered[(0,) * (ordered.dim() - 1)]
            bits = _BITS.get(tensor.element_size())
            flat = ordered.reshape(-1) if bits is None else ordered.reshape(-1).view(bits)
            wanted = max(MIN_PER_TENSOR, round(num_elements * tensor.numel() / total))
            for view in _runs(flat, wanted, draw):
                if view.numel():
                    groups.setdefault((flat.dtype, flat.device, view.dim()), []).append(view)
        self.num_elements = sum(view.numel() for views in groups.values() for view in views)
        self._groups = [_Views(views, torch.cat(views)) for views in groups.values()]

    def look(self) -> Callable[[], bool]:
        """Compare on the compute stream, behind what was issued there. The result says whether nothing differs; it waits for
        the device, so ask when a copy that was issued later has ended."""
        flags = [group.differs() for group in self._groups]
        return lambda: not any(bool(flag.item()) for flag in flags)

    def holds(self) -> bool:
        """Whether nothing differs now."""
        return self.look()()


def _runs(flat: torch.Tensor, wanted: int, draw: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """About `wanted` elements: [runs, RUN] at equal distances from a random first one (odd distances, so that no column is followed),
    and the last elements that make no run."""
    whole = flat.numel() // RUN
    rows = flat[: whole * RUN].view(whole, RUN)
    step = max(1, whole // max(1, wanted // RUN)) | 1
    return rows[draw.randrange(max(1, min(step, whole))) :: step], flat[whole * RUN :]
