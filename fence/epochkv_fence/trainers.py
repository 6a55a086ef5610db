"""What a hub keeps for trainers: who waits for which epoch, and which boots got the weights of an epoch to come."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from epochkv_fence.messages import EngineStatus, Status
from epochkv_fence.pool import EngineView

MAX_WAITERS: Final = 1_000
MAX_MARKED_EPOCHS: Final = 16
MAX_MARKED_BOOTS: Final = 20_000
"""For one epoch; a list comes in several messages, and a client that makes boots up must not fill the memory of all pools."""
STATUS_PAGE: Final = 64


def add_marks(marked: set[bytes], boots: Iterable[bytes]) -> None:
    """Add boots to a list, up to the limit."""
    for boot in boots:
        if len(marked) >= MAX_MARKED_BOOTS:
            return
        marked.add(boot)


class Trainers:
    """All of it in memory, and all of it repeated by the client: a trainer asks again until its epoch is published."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[bytes, int], int] = {}
        self._marks: dict[int, set[bytes]] = {}

    def wait(self, peer: bytes, request: int, epoch: int) -> None:
        """`peer` is to be told when `epoch` is published; beyond a limit it has to ask again."""
        if len(self._waiting) < MAX_WAITERS:
            self._waiting[peer, request] = epoch

    def served(self, published: int) -> list[tuple[bytes, int, int]]:
        """(peer, request, epoch) of those whose epoch is published, once."""
        done = [(peer, request, epoch) for (peer, request), epoch in self._waiting.items() if epoch <= published]
        for peer, request, _ in done:
            del self._waiting[peer, request]
        return done

    def mark(self, epoch: int, boots: Iterable[bytes]) -> None:
        """These boots got the weights of `epoch`, which is not the target yet."""
        if epoch in self._marks or len(self._marks) < MAX_MARKED_EPOCHS:
            add_marks(self._marks.setdefault(epoch, set()), boots)

    def marked(self, target: int) -> set[bytes]:
        """The boots marked for `target`; marks up to it are forgotten."""
        found = self._marks.get(target, set())
        self._marks = {epoch: boots for epoch, boots in self._marks.items() if epoch > target}
        return found


def status_page(request: int, first: int, target: int, published: int, views: Sequence[EngineView]) -> Status:
    """The answer to a `Status` question: live boots, one page of them."""
    alive = [view for view in views if view.alive]
    page = [
        EngineStatus(view.boot, view.engine, view.pod, view.rank, view.epoch, view.mode, view.carried)
        for view in alive[first : first + STATUS_PAGE]
    ]
    return Status(request, first, target, published, len(alive), page)
