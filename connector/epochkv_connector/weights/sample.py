"""A few elements of every tensor, compared again after each scheduled step: weights that were written past vLLM show here.

This is the backstop; the hook on the executor is the mechanism. One comparison misses a push of one element in a thousand with a
chance of 4e-8.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable

import numpy
import torch

from epochkv_connector.weights.digest import in_storage_order, stored

NUM_ELEMENTS = 16384
"""Read in a quarter of a millisecond after a forward pass, when little of it is in a cache."""
MIN_PER_TENSOR = 32
RUN = 16
"""Elements that lie together and are drawn together: memory is read by the line."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class OnDevice:
    """Strided views of one type and number of dimensions on one device, and what they held."""

    def __init__(self, views: list[torch.Tensor]) -> None:
        self._views = views
        self.then = torch.cat(views)

    def differs(self) -> torch.Tensor:
        """bool, on the device; nothing waits for it here."""
        return (torch.cat(self._views) != self.then).any()


class OnHost:
    """The same in host memory, without torch: a forward pass leaves its code and tables out of the caches, and finding them again took
    more than reading the sample."""

    def __init__(self, views: list[torch.Tensor]) -> None:
        self._arrays = [view.numpy() for view in views]
        self.then = numpy.concatenate(self._arrays).tobytes()

    def differs(self) -> bool:
        return numpy.concatenate(self._arrays).tobytes() != self.then


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
        self._groups = [OnHost(views) if device.type == "cpu" else OnDevice(views) for (_, device, _), views in groups.items()]

    def look(self) -> Callable[[], bool]:
        """Compare on the compute stream, behind what was issued there. The result says whether nothing differs; it waits for
        the device, so ask when a copy that was issued later has ended."""
        flags = [group.differs() for group in self._groups]
        return lambda: not any(map(bool, flags))

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
