"""What a hub keeps for trainers: who waits for which epoch, which boots got the weights of an epoch to come, and the pages
of `Status`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from epochkv_fence.boots import BootRecord
from epochkv_fence.messages import EngineStatus, Status
from epochkv_fence.pool import PoolConfig
from epochkv_fence.updates import Updates

MAX_WAITERS: Final = 1_000
MAX_QUESTIONS: Final = 256
MAX_MARKED_EPOCHS: Final = 16
MAX_MARKED_BOOTS: Final = 20_000
"""For one epoch; a list comes in several messages, and a client that makes boots up must not fill the memory of all pools."""
STATUS_PAGE: Final = 64
STATUS_PAGE_BYTES: Final = 40_000
"""Of names in one page, so that it fits into a message whatever they are."""


def add_marks(marked: set[bytes], boots: Iterable[bytes]) -> None:
    """Add boots to a list, up to the limit."""
    for boot in boots:
        if len(marked) >= MAX_MARKED_BOOTS:
            return
        marked.add(boot)


def same_weights(one: str, other: str) -> bool:
    """Whether two names of weights can be of the same ones; an empty name says nothing."""
    return one == other or not one or not other


@dataclass(slots=True)
class Marks:
    """The list of an epoch to come: these boots have weights called `version`."""

    version: str
    boots: set[bytes] = field(default_factory=set)


class Trainers:
    """All of it in memory, and all of it repeated by the client: a trainer asks again until its epoch is published.

    Attributes:
        questions: who wants to know the state of the pool, to be answered after the next leadership read.
        updates: whose weight update is open.
    """

    def __init__(self) -> None:
        self.updates = Updates()
        self.questions: list[tuple[bytes, Status]] = []
        self._waiting: dict[tuple[bytes, int], int] = {}
        self._marks: dict[int, Marks] = {}
        self._lost = 0  # highest epoch whose list found no room

    def ask(self, peer: bytes, question: Status) -> None:
        """Beyond a limit the oldest question is dropped; a client asks again."""
        self.questions.append((peer, question))
        del self.questions[:-MAX_QUESTIONS]

    def wait(self, peer: bytes, request: int, epoch: int) -> None:
        """`peer` is to be told when `epoch` is published; beyond a limit it has to ask again."""
        if len(self._waiting) < MAX_WAITERS:
            self._waiting[peer, request] = epoch

    @property
    def waiting(self) -> bool:
        """Somebody waits for an epoch."""
        return bool(self._waiting)

    def waiters(self) -> list[tuple[bytes, int, int]]:
        """(peer, request, epoch) of those who wait."""
        return [(peer, request, epoch) for (peer, request), epoch in self._waiting.items()]

    def served(self, published: int) -> list[tuple[bytes, int, int]]:
        """(peer, request, epoch) of those whose epoch is published, once."""
        done = [waiter for waiter in self.waiters() if waiter[2] <= published]
        for peer, request, _ in done:
            del self._waiting[peer, request]
        return done

    def mark(self, epoch: int, version: str, boots: Iterable[bytes]) -> None:
        """These boots got the weights of `epoch`, which is not the target yet. The first list of an epoch names them."""
        marks = self._marks.get(epoch)
        if marks is None:
            if len(self._marks) >= MAX_MARKED_EPOCHS:
                self._lost = max(self._lost, epoch)
                return
            marks = self._marks[epoch] = Marks(version)
        if same_weights(marks.version, version):
            marks.version = marks.version or version
            add_marks(marks.boots, boots)

    def marked(self, target: int) -> Marks | None:
        """The list for `target`; None: there is none."""
        found = self._marks.get(target)
        if found is None and target <= self._lost:
            return Marks("")  # there may have been one: nobody is known to be on it
        return found

    def forget_marks(self, target: int) -> None:
        """Lists of epochs up to the target are not to come any more."""
        self._marks = {epoch: marks for epoch, marks in self._marks.items() if epoch > target}


def status_page(page: Status, records: Sequence[BootRecord], config: PoolConfig, now: float) -> Status:
    """`page` with the live boots after `page.after`, or from `page.first` on, by boot; fewer where their names are long."""
    alive = sorted((record for record in records if record.alive(config, now)), key=_boot)
    start = page.first if page.after is None else bisect_right(alive, page.after, key=_boot)
    engines: list[EngineStatus] = []
    room = STATUS_PAGE_BYTES
    for record in alive[start : start + STATUS_PAGE]:
        room -= sum(len(name.encode()) for name in (record.newest.engine, record.newest.pod, record.newest.fingerprint))
        if room < 0:
            break
        engines.append(_engine_status(record, now))
    return msgspec.structs.replace(page, total=len(alive), engines=engines)


def _boot(record: BootRecord) -> bytes:
    return record.boot


def _engine_status(record: BootRecord, now: float) -> EngineStatus:
    beat = record.newest
    return EngineStatus(
        boot=record.boot,
        engine=beat.engine,
        pod=beat.pod,
        rank=beat.rank,
        epoch=record.epoch,
        mode=record.current_mode,
        carried=beat.carried,
        loading=beat.loading,
        age_seconds=beat.boot_age_seconds,
        silent_seconds=max(0.0, now - record.heard_at),
        fingerprint=beat.fingerprint,
        private=beat.private,
    )
