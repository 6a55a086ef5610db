"""A worker role over host memory, and a store that does what a test tells it."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from epochkv_connector.store.client import Ticket, Transfer, resolve
from epochkv_connector.store.connection import StoreOutcome
from epochkv_connector.wire import BlockMove, JobAck, LoadJob, Phase, SaveJob, StepMetadata, Tier
from epochkv_connector.worker.jobs import Report
from epochkv_connector.worker.layout import HEADER_BYTES, TRAILER_BYTES, GroupSpec
from epochkv_connector.worker.role import JobRunner
from epochkv_connector.worker.staging import Staging, StagingStream
from hack.waiting import eventually

NUM_BLOCKS, NUM_SLOTS, LAYERS = 16, 12, 3
NAMESPACE = "0a1b2c3d/00112233445566ff/e7/w0123456789abcdef"


@dataclass
class Request:
    kind: str
    transfers: list[Transfer]
    ticket: Ticket
    timeout: float


@dataclass
class ObedientStore:
    """Keeps objects in a dictionary; `policy` decides what becomes of a request, `open` has those it decided to leave open."""

    objects: dict[str, bytes] = field(default_factory=dict)
    policy: Callable[[str, Sequence[Transfer]], StoreOutcome | None] = lambda kind, transfers: StoreOutcome.OK
    open: list[Request] = field(default_factory=list)
    seen: list[Request] = field(default_factory=list)
    ready: bool = True
    closed: bool = False

    def get(self, transfers: Sequence[Transfer], timeout: float) -> Ticket:
        return self._take("get", transfers, timeout)

    def put(self, transfers: Sequence[Transfer], timeout: float) -> Ticket:
        return self._take("put", transfers, timeout)

    def _take(self, kind: str, transfers: Sequence[Transfer], timeout: float) -> Ticket:
        request = Request(kind, list(transfers), Ticket(), timeout)
        self.seen.append(request)
        outcome = self.policy(kind, transfers)
        if outcome is None:
            self.open.append(request)
        else:
            self.answer(request, outcome)
            self.release(request)
        return request.ticket

    def answer(self, request: Request, outcome: StoreOutcome) -> None:
        resolve(request.ticket.done, [self._end(request.kind, transfer, outcome) for transfer in request.transfers])

    def bring(self, request: Request, count: int) -> None:
        """The first `count` objects are there; the rest is under way."""
        request.ticket.on_progress([self._end(request.kind, transfer, StoreOutcome.OK) for transfer in request.transfers[:count]])

    def _end(self, kind: str, transfer: Transfer, outcome: StoreOutcome) -> StoreOutcome:
        if outcome is StoreOutcome.OK and kind == "put":
            self.objects[transfer.key] = bytes(transfer.view[HEADER_BYTES:-TRAILER_BYTES])
        elif outcome is StoreOutcome.OK:
            if transfer.key not in self.objects:
                return StoreOutcome.ABSENT
            transfer.view[HEADER_BYTES:-TRAILER_BYTES] = self.objects[transfer.key]
        return outcome

    def release(self, request: Request) -> None:
        resolve(request.ticket.released, None)

    def end_all(self) -> None:
        for request in self.open:
            self.answer(request, StoreOutcome.TIMEOUT)
            self.release(request)

    def close(self, timeout: float) -> bool:
        self.closed = True
        return not self.open

    def stats(self) -> dict[str, float]:
        return {"state": 2.0}


class Rig:
    """A runner over random KV tensors, and a collector that insists on exactly once."""

    def __init__(self, store: ObedientStore | None = None, **ranks: Any) -> None:
        raw = np.random.default_rng(1).integers(0, 256, (LAYERS, NUM_BLOCKS, 64), dtype=np.uint8)
        self.kv = torch.from_numpy(raw)
        self.store = store
        names = [f"l{i}" for i in range(LAYERS)]
        caches = {name: self.kv[i] for i, name in enumerate(names)}
        self.staging = Staging(caches, {0: GroupSpec(names, 16)}, NUM_SLOTS, NUM_BLOCKS)
        open_store: Any = (lambda region: store) if store else None
        self.worker = JobRunner(self.staging, open_store=open_store, **ranks)
        self.finished: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.acks: dict[tuple[int, Phase], JobAck] = {}

    def address(self, slot: int) -> int:
        return self.staging.region.slot_address(slot)

    def block(self, block: int) -> bytes:
        return self.kv[:, block].numpy().tobytes()

    def step(self, finish: bool = True, **parts: Any) -> None:
        self.worker.start_step(StepMetadata(**parts))
        if finish:
            self.worker.finish_step()

    def collect(self, wait_seconds: float = 0.0) -> Report:
        return self.note(self.worker.results(wait_seconds))

    def note(self, report: Report) -> Report:
        assert report.failed_recving <= report.finished_recving
        self.finished.update(report.finished_recving)
        self.failed.update(report.failed_recving)
        for ack in report.acks:
            assert (ack.job_id, ack.phase) not in self.acks, f"acknowledged twice: {ack}"
            self.acks[ack.job_id, ack.phase] = ack
        return report

    def until(self, condition: Callable[[], object], what: str, timeout: float = 10.0) -> None:
        def poll() -> object:
            self.collect(0.001)
            return condition()

        eventually(poll, what, timeout)

    def until_acked(self, job_id: int, phase: Phase) -> JobAck:
        self.until(lambda: (job_id, phase) in self.acks, f"job {job_id} {phase.name}")
        return self.acks[job_id, phase]


class HeldCopies:
    """Every copy in one direction (`gather`: to the host) says that it began and waits to be let on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, direction: str = "gather") -> None:
        self.began, self.go_on = threading.Event(), threading.Event()
        copy = getattr(StagingStream, direction)

        def held(*args: Any) -> None:
            self.began.set()
            assert self.go_on.wait(10)
            copy(*args)

        monkeypatch.setattr(StagingStream, direction, held)


def name_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def move(block: int, slot: int, name: int, source: Tier = Tier.HOST, copy: bool = True) -> BlockMove:
    return BlockMove(0, block, block, slot, name_of(name), source, copy)


def save(job_id: int, moves: Sequence[BlockMove], namespace: str | None = None, deadline: float = 20.0) -> SaveJob:
    return SaveJob(job_id, f"s{job_id}", namespace, tuple(moves), deadline)


def load(job_id: int, moves: Sequence[BlockMove], namespace: str | None = None, deadline: float = 20.0) -> LoadJob:
    return LoadJob(job_id, f"r{job_id}", namespace, tuple(moves), deadline)
