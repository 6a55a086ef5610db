"""Everything a hub knows about one pool, and what can be read from it. What changes it is in `hub`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from epochkv_fence.hub.boots import NEVER, BootRecord
from epochkv_fence.hub.holdings import Holdings, Reported, groups, with_divergence
from epochkv_fence.hub.labels import Labels
from epochkv_fence.hub.reclaim import Reclaimer
from epochkv_fence.hub.waiters import Trainers, status_page
from epochkv_fence.hub.wipe import Wiper
from epochkv_fence.protocol.authority import Origin, Term
from epochkv_fence.protocol.messages import MAX_EPOCH, BumpStatus, Source, Status
from epochkv_fence.protocol.pool import PoolConfig, PoolSnapshot

ROUND_SECONDS: Final = 1.0
"""Longest pause between grant rounds while no reset is open."""
ROUNDS_PER_LEASE: Final = 10
"""A grant is worth what is left of its lease since the heartbeat was sent, so short leases need quicker rounds."""
MAX_COUNT: Final = 2**63 - 1
JOIN_SECONDS: Final = 0.05
"""The same while a boot waits that has no grant of this hub: it may share nothing because of that, as after a restart."""
QUESTION_SECONDS: Final = 0.05
"""Shortest pause between rounds that are for a trainer's question alone."""


@dataclass(frozen=True, slots=True)
class Ask:
    """One ask for an epoch. `seen`: when the hub first saw it, for status."""

    epoch: int
    seen: float
    origin: Origin

    @property
    def possible(self) -> bool:
        """An epoch that every part of the system can carry."""
        return 0 <= self.epoch <= MAX_EPOCH


@dataclass(slots=True)
class Round:
    """A grant round whose leadership read is under way; `target` is the durable one when it began, `publish` names the epoch
    that publication was evaluated for."""

    number: int
    term: Term
    beats: dict[bytes, tuple[bytes, int]]
    target: int
    publish: int | None
    questions: list[tuple[bytes, Status]] = field(default_factory=list)


class PoolState:
    """One pool, as the hub in this process knows it.

    Attributes:
        term: the term in which this hub leads this pool; None while it does not lead or has not read the record.
        target, published: as known here; both were durable before they were raised here.
    """

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.term: Term | None = None
        self.target = 0
        self.published = 0
        self._origin: Origin | None = None  # of the target
        self._durable = 0  # the target known to be durable in this term
        self._proven = 0  # the target that no hub can miss any more when it grants
        self._stored = 0  # what the record says is published, as it was read in this term and written since
        self._noted = False
        self._noting = False
        self._led_at = math.inf  # when this hub began to lead
        self._lead_until = math.inf
        self._boots: dict[bytes, BootRecord] = {}
        self._departed: dict[bytes, None] = {}  # boots that said that they have left, the newest last
        self._behind: dict[bytes, None] = {}  # boots not at the target, in a replayable order
        self._waiting: dict[bytes, tuple[bytes, int]] = {}
        self._round: Round | None = None
        self._last_round = NEVER
        self._joining = False  # among those waiting is one without a live grant of ours
        self._ask: Ask | None = None
        self._recording: int | None = None
        self._publishing: int | None = None
        self._retry_at = NEVER
        self._nudge_at = math.inf
        self._forget_at = math.inf
        self._reported = Reported()
        self._holdings = Holdings()
        self._wiper = Wiper()
        self._reclaimer = Reclaimer()
        self._trainers = Trainers()
        self._labels = Labels()
        self._started_at: float | None = None
        self._published_at: float | None = None
        self._reset_seconds: float | None = None

    # ------------------------------------------------------------------ for the driver

    @property
    def open(self) -> bool:
        """A reset is under way: rounds follow heartbeats at once."""
        return self.term is not None and (self.target > self.published or self._recording is not None)

    @property
    def num_boots(self) -> int:
        """Boots that are remembered."""
        return len(self._boots)

    @property
    def round_open(self) -> bool:
        """The round that began has something that needs its leadership read."""
        current = self._round
        if current is None:
            return False
        return bool(current.beats or current.questions) or self._proof_wanted() or current.publish is not None

    def round_at(self, now: float) -> float:
        """When the next round should begin; infinity while there is nothing to do."""
        if self.term is None or self._round is not None:
            return math.inf
        due = math.inf
        if self._waiting and self._noted:
            pause = min(JOIN_SECONDS if self._joining else ROUND_SECONDS, self.config.lease_seconds / ROUNDS_PER_LEASE)
            due = max(now, self._last_round + (0.0 if self.open else pause))
        if self._trainers.questions or self._proof_wanted():
            due = min(due, max(now, self._last_round + QUESTION_SECONDS))
        if self._durable >= self.target > self._stored and self._publishing is None:
            due = min(due, self._publish_at())
        return due

    def _await_round(self, record: BootRecord, peer: bytes, seq: int, now: float) -> None:
        """The next round answers this heartbeat, unless a younger one of the same boot waits already."""
        if seq >= self._waiting.get(record.boot, (b"", -1))[1]:
            self._waiting[record.boot] = (peer, seq)
            self._joining = self._joining or now >= max(record.live_until, record.below_until)

    def tick_at(self) -> float:
        """When the next `Tick` is due."""
        if self.term is None:
            return self._forget_at
        due = min(self._forget_at, self._reclaimer.due_at, self._wiper.due_at(), self._reported.look_at())
        if self.open and self._behind:
            due = min(due, self._nudge_at)
        pending = self._record_due() or (bool(self._waiting) and not self._noted and not self._noting)
        return min(due, self._retry_at) if pending else due

    def _drop(self, boot: bytes, now: float) -> bool:
        """Forget a boot; False: it was not known."""
        self._behind.pop(boot, None)
        self._waiting.pop(boot, None)
        record = self._boots.pop(boot, None)
        if record is not None:
            self._holdings.change(record.newest, None, now)
        return record is not None

    def _publish_at(self) -> float:
        """When the passing of time alone fences everyone off the epochs below the target (in the past if it does)."""
        due = max(self._lead_until, self._retry_at)
        return max(due, max((self._boots[boot].below_until for boot in self._behind), default=NEVER))

    def _record_due(self) -> bool:
        return self.term is not None and self._recording is None and self._wanted() > self._durable

    def _proof_wanted(self) -> bool:
        """Trainers wait to hear that the target is on record."""
        return self._durable >= self.target > self._proven and self._trainers.waiting

    def _wanted(self) -> int:
        """The target that has to be durable: what was asked for, and never less than what was granted."""
        return max(self.target, self._ask.epoch if self._ask is not None else 0)

    # ------------------------------------------------------------------ for people and trainers

    def snapshot(self, now: float) -> PoolSnapshot:
        """The pool at `now`; times are on this hub's clock (the driver turns them into Unix seconds)."""
        views = sorted(
            (record.view(self.target, self.config, now) for record in self._boots.values()),
            key=lambda view: (view.engine, view.pod, view.rank, view.boot),
        )
        engines = with_divergence(views, self._holdings, now)
        return PoolSnapshot(
            uid=self.config.uid,
            leading=self.term is not None,
            target=self.target,
            published=self.published,
            asked=self._wanted(),
            engines=engines,
            laggards=[view for view in engines if view.alive and not view.converged],
            carried=self._carried(),
            started_at=self._started_at,
            published_at=self._published_at,
            reset_seconds=self._reset_seconds,
            reclaimed=self._reclaimer.done_below,
            origin=self._origin,
            reclaim_policy=self.config.reclaim,
            reclaimed_keys=self._reclaimer.keys,
            reclaimed_bytes=self._reclaimer.num_bytes,
            wipe_failed=self._wiper.failed,
            labels=dict(self._labels.known),
            weights=groups(engines, self._labels.known),
            diverged=[view for view in engines if view.diverged_seconds is not None],
        )

    def _carried(self) -> int:
        return min(sum(record.newest.carried for record in self._boots.values()), MAX_COUNT)

    def _bump_statuses(self, asks: Sequence[tuple[int, int]]) -> list[BumpStatus]:
        """The answers to asks of (request, epoch). All boots are counted once, however many ask."""
        if not asks:
            return []
        carried = self._carried()
        return [
            BumpStatus(
                request=request,
                epoch=epoch,
                target=self.target,
                published=self.published,
                engines=len(self._boots),
                laggards=len(self._behind),
                carried=carried,
                lease_seconds=self.config.lease_seconds,
            )
            for request, epoch in asks
        ]

    def _status(self, question: Status, now: float) -> Status:
        first_page = question.first == 0 and question.after is None
        page = Status(
            question.request,
            question.first,
            self.target,
            self.published,
            lease_seconds=self.config.lease_seconds,
            origin=self._origin.source if self._origin is not None else Source.SPEC,
            pool=self.config.uid[:253],
            after=question.after,
            labels={weights.hex(): label for weights, label in self._labels.known.items()} if first_page else {},
            settling_seconds=max(0.0, self._lead_until - now),
        )
        return status_page(page, list(self._boots.values()), self.config, now)
