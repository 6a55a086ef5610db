"""Kinds of models that a soak can run with."""

from __future__ import annotations

from dataclasses import dataclass

from hack.models import HybridShape, Shape


@dataclass(frozen=True)
class Kind:
    """A model, and engines that are too small for the prompts together.

    Attributes:
        l1_bytes: of each engine: less than the prompts need, so that L1 evicts.
        args: of each engine.
    """

    shape: Shape | HybridShape
    l1_bytes: int
    args: tuple[str, ...] = ()


KINDS = {
    "attention": Kind(Shape(), 12 << 20),  # about 60 blocks
    # About 110 blocks and states. vLLM keeps a state at each block, not at the end of a prompt alone.
    "hybrid": Kind(HybridShape(), 4 << 20, ("--prefix-cache-retention-interval", "128")),
}
