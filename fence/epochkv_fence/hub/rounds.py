"""Who waits for a hub: engines for a grant, trainers for the state of the pool or for the publication of their epoch.

A grant, or an answer to a question, needs a leadership read that began after the heartbeat or question came. One read serves
everything that came before it; that is a round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from epochkv_fence.hub.boots import NEVER, BootRecord
from epochkv_fence.protocol.authority import Term
from epochkv_fence.protocol.messages import Status

MAX_QUESTIONS: Final = 256
MAX_WAITERS: Final = 1_000


@dataclass(slots=True)
class Round:
    """A round whose leadership read is under way.

    Attributes:
        beats: the peer and the number of the heartbeat to answer, by boot.
        target: the durable target when the round began.
        publish: the epoch that the hub may publish after the read; None: there is none.
    """

    number: int
    term: Term
    beats: dict[bytes, tuple[bytes, int]]
    questions: list[tuple[bytes, Status]]
    target: int
    publish: int | None


class Rounds:
    """The rounds of one pool, one after the other.

    Attributes:
        beats, questions: what the next round answers.
        joining: a boot without a live grant of this hub waits among `beats`.
        current: the round whose leadership read is under way.
        last_at: when the newest round began.
    """

    def __init__(self) -> None:
        self.beats: dict[bytes, tuple[bytes, int]] = {}
        self.questions: list[tuple[bytes, Status]] = []
        self.joining = False
        self.current: Round | None = None
        self.last_at = NEVER

    def wait(self, record: BootRecord, peer: bytes, seq: int, now: float) -> None:
        """The next round answers this heartbeat, unless a younger one of the same boot waits already."""
        if seq >= self.beats.get(record.boot, (b"", -1))[1]:
            self.beats[record.boot] = (peer, seq)
            self.joining = self.joining or now >= max(record.live_until, record.below_until)

    def drop(self, boot: bytes) -> None:
        self.beats.pop(boot, None)

    def ask(self, peer: bytes, question: Status) -> None:
        """The next round answers this question. Beyond a limit the oldest question goes, because its client asks again."""
        self.questions.append((peer, question))
        del self.questions[:-MAX_QUESTIONS]

    def begin(self, number: int, term: Term, target: int, publish: int | None, *, grant: bool, now: float) -> None:
        """A round begins, which answers what came before it and nothing later. Without `grant` it leaves heartbeats to the next one."""
        beats: dict[bytes, tuple[bytes, int]] = {}
        if grant:
            beats, self.beats, self.joining = self.beats, {}, False
        questions, self.questions = self.questions, []
        self.current = Round(number, term, beats, questions, target, publish)
        self.last_at = now

    def take(self, number: int, term: Term | None) -> Round | None:
        """A round ends. None: the number is not that of the current round, or the round is of another term."""
        current = self.current
        if current is None or current.number != number:
            return None
        self.current = None
        return current if current.term == term else None

    def put_back(self, number: int, term: Term | None) -> None:
        """A round ends because the read gave no answer. The next round answers those who waited."""
        current = self.take(number, term)
        if current is not None:
            self.questions[:0] = current.questions
            for boot, beat in current.beats.items():
                self.beats.setdefault(boot, beat)

    def abandon(self) -> list[bytes]:
        """The term ends, and with it the round and what it evaluated. Returns who asked questions."""
        questions = self.questions + (self.current.questions if self.current is not None else [])
        self.questions, self.current = [], None
        return [peer for peer, _ in questions]


class Waiters:
    """Trainers that wait for epochs. The hub may forget them, because a trainer asks again until its epoch is published."""

    def __init__(self) -> None:
        self._epochs: dict[tuple[bytes, int], int] = {}

    def __bool__(self) -> bool:
        return bool(self._epochs)

    def wait(self, peer: bytes, request: int, epoch: int) -> None:
        """`peer` wants to hear when `epoch` is published. Beyond a limit it must ask again."""
        if len(self._epochs) < MAX_WAITERS:
            self._epochs[peer, request] = epoch

    def all(self) -> list[tuple[bytes, int, int]]:
        """(peer, request, epoch) of every trainer that waits."""
        return [(peer, request, epoch) for (peer, request), epoch in self._epochs.items()]

    def served(self, published: int) -> list[tuple[bytes, int, int]]:
        """Take out the trainers whose epoch is published; return them as `all` does."""
        done = [waiter for waiter in self.all() if waiter[2] <= published]
        for peer, request, _ in done:
            del self._epochs[peer, request]
        return done
