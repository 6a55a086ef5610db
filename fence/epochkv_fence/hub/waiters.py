"""What a hub keeps for trainers: who waits for which epoch, and the pages of `Status`."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Final

import msgspec

from epochkv_fence.hub.boots import BootRecord
from epochkv_fence.protocol.messages import EngineStatus, Status
from epochkv_fence.protocol.pool import PoolConfig

MAX_WAITERS: Final = 1_000
MAX_QUESTIONS: Final = 256
STATUS_PAGE: Final = 64
STATUS_PAGE_BYTES: Final = 40_000
"""Of names, notes and labels in one page, so that it fits into a message whatever they are."""


class Trainers:
    """All of it in memory, and all of it repeated by the client: a trainer asks again until its epoch is published.

    Attributes:
        questions: who wants to know the state of the pool, to be answered after the next leadership read.
    """

    def __init__(self) -> None:
        self.questions: list[tuple[bytes, Status]] = []
        self._waiting: dict[tuple[bytes, int], int] = {}

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


def status_page(page: Status, records: Sequence[BootRecord], config: PoolConfig, now: float) -> Status:
    """`page` with the live boots after `page.after`, or from `page.first` on, by boot; fewer where their names are long."""
    alive = sorted((record for record in records if record.alive(config, now)), key=_boot)
    start = page.first if page.after is None else bisect_right(alive, page.after, key=_boot)
    engines: list[EngineStatus] = []
    room = STATUS_PAGE_BYTES - sum(len(label.encode()) for label in page.labels.values())
    for record in alive[start : start + STATUS_PAGE]:
        beat = record.newest
        room -= sum(len(name.encode()) for name in (beat.engine, beat.pod, beat.fingerprint, beat.weights_note))
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
        carried=beat.carried,
        age_seconds=beat.boot_age_seconds,
        silent_seconds=max(0.0, now - record.heard_at),
        fingerprint=beat.fingerprint,
        private=beat.private,
        weights=beat.weights,
        weights_note=beat.weights_note,
        since_seconds=max(0.0, now - record.weights_at),
    )
