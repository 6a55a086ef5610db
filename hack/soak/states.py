"""Kinds of models that a soak can run with, and the sets of weights that its engines may hold.

There are whole ones, what half a push leaves, and what a write past vLLM makes of them. Each is a folder that an engine without
any cache can load, so every answer has weights that it can be compared with.
"""

from __future__ import annotations

import json
import shutil
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hack.models import HybridShape, Shape

FILE = "model.safetensors"
EMBEDDING = "model.embed_tokens.weight"
FLIPPED = "model.layers.0.input_layernorm.weight"
"""Times -1: every input of the first layer points the other way, and doing it again takes it back, bit by bit."""


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


@dataclass(frozen=True)
class States:
    """Folders of weights of one architecture.

    Attributes:
        whole: what is pushed; engines start with the first.
        donors: of each whole one, the next.
        halves: of each whole one, itself with the embedding of its donor.
        flips: of each whole one, itself with `FLIPPED` times -1, and the other way round.
    """

    whole: tuple[Path, ...]
    donors: dict[Path, Path]
    halves: dict[Path, Path]
    flips: dict[Path, Path]

    @classmethod
    def make(cls, folder: Path, whole: Sequence[Path]) -> States:
        """Write what is missing into `folder`."""
        donors = dict(zip(whole, (*whole[1:], whole[0]), strict=True))
        halves = {
            base: _changed(base, folder / f"{base.name}-half", EMBEDDING, tensor_of(donor, EMBEDDING)) for base, donor in donors.items()
        }
        flips = {base: _changed(base, folder / f"{base.name}-flipped", FLIPPED, _negative(tensor_of(base, FLIPPED))) for base in whole}
        return cls(tuple(whole), donors, halves, flips | {flipped: base for base, flipped in flips.items()})

    @property
    def all(self) -> tuple[Path, ...]:
        """Every one of them once."""
        return tuple(dict.fromkeys((*self.whole, *self.halves.values(), *self.flips)))


def tensor_of(folder: Path, name: str) -> bytes:
    """The bytes of a tensor of these weights."""
    data = (folder / FILE).read_bytes()
    begin, end = _place(data, name)
    return data[begin:end]


def _changed(base: Path, out: Path, name: str, tensor: bytes) -> Path:
    shutil.copytree(base, out, dirs_exist_ok=True)
    data = (base / FILE).read_bytes()
    begin, end = _place(data, name)
    (out / FILE).write_bytes(data[:begin] + tensor + data[end:])
    return out


def _place(data: bytes, name: str) -> tuple[int, int]:
    """Where a tensor lies: behind the length of the header (u64) and the header, which says it."""
    header = int.from_bytes(data[:8], "little")
    begin, end = json.loads(data[8 : 8 + header])[name]["data_offsets"]
    return 8 + header + begin, 8 + header + end


def _negative(data: bytes) -> bytes:
    return array("f", (-value for value in array("f", data))).tobytes()
