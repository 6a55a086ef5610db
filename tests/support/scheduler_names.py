"""Several engines of one process that share a store: each has a root of its own where vLLM's is a global of the process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.support.scheduler import SharedStore


class OwnRoot:
    """In place of `hashing.GlobalRoot`: requests are hashed with an explicit parent, so nothing reads the global."""

    def __init__(self, root: bytes) -> None:
        self._root = root

    def ready(self) -> bool:
        """vLLM has set its own long ago."""
        return True

    def bind(self, root: bytes) -> None:
        """The parent of chains begun from now on."""
        self._root = root

    def is_bound(self, root: bytes) -> bool:
        """Nobody else writes here."""
        return self._root is root


def several(make_rig: Callable[..., Any], num: int, store: SharedStore | None = None, **options: Any) -> list[Any]:
    """Engines of epoch 0 on one store, none of which moves another into bypass."""
    shared = store or SharedStore()
    rigs = []
    for _ in range(num):
        rig = make_rig(store=shared, **options)
        rig.pins.root._global = OwnRoot(rig.pins.root.snapshot.root)
        rig.adopt(0)
        rigs.append(rig)
    return rigs
