"""What a hub needs from the outside: durable memory for two numbers, a note and some labels per pool, and a leadership it can check.

Implementations: the pool object's status and a Lease in Kubernetes (in the operator). All of a hub's safety rests on the
three promises below, so an implementation states how it keeps each of them.

1. `verify` is linearizable: it is True only if, at some moment between call and return, the stored holder *and*
   transitions were those of the term asked about.
2. `load` is linearizable: it sees every write that returned before it was called. Never a watch cache.
3. `record`, `publish` and `note_granting` never decrease anything, whoever calls them and however late they land. `record` writes
   a target and its origin in one atomic write, and leaves both alone unless it raises the target.

Labels are for people: `note_labels` adds to those on record in one atomic write, and drops the oldest beyond `MAX_LABELS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from epochkv_fence.protocol.messages import MAX_LABELS, Source


class AuthorityError(Exception):
    """The authority did not answer or refused. The outcome of a write is then unknown; the hub tries again."""


class PoolGone(AuthorityError):
    """The pool (this uid) does not exist any more. The hub waits for its owner to remove it."""


@dataclass(frozen=True, slots=True)
class Term:
    """One stretch of leadership.

    Attributes:
        holder: unique per process start.
        transitions: grows whenever leadership is taken, also when the same holder takes it again.
    """

    holder: str
    transitions: int


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """Everything a hub must remember about a pool.

    Attributes:
        target: highest epoch durably recorded.
        published: highest epoch proved to be the oldest in use; never above `target`.
        granting: some hub has (or may have) granted for this pool; never taken back.
        origin: who asked for `target` first; None: target 0, or a record from before origins were kept.
        labels: what weights were called, by their digest, newest last.
    """

    target: int = 0
    published: int = 0
    granting: bool = False
    origin: Source | None = None
    labels: Mapping[bytes, str] = field(default_factory=dict)


def merged_labels(known: Mapping[bytes, str], added: Mapping[bytes, str]) -> dict[bytes, str]:
    """Both, newest last, at most `MAX_LABELS`; of the same weights `added` counts, and is the newer."""
    merged = {weights: label for weights, label in known.items() if weights not in added} | dict(added)
    return dict(list(merged.items())[-MAX_LABELS:])


class Authority(Protocol):
    """All calls are made with a deadline by the caller; a call that is cancelled may still take effect later."""

    async def verify(self, term: Term) -> bool:
        """Whether `term` is the current one, holder and transitions (promise 1). Raises when that is unknown."""

    async def load(self, pool_uid: str) -> PoolRecord:
        """What is durably recorded (promise 2)."""

    async def record(self, pool_uid: str, target: int, origin: Source | None = None) -> None:
        """Raise the durable target to at least `target`; returns after the write is durable.

        `origin` is written with it, in the same atomic write, and only if the target rises.
        """

    async def publish(self, pool_uid: str, epoch: int) -> None:
        """Raise the durable published epoch to at least `epoch`; returns after the write is durable."""

    async def note_granting(self, pool_uid: str) -> None:
        """Set the `granting` note; returns after the write is durable."""

    async def note_labels(self, pool_uid: str, labels: Mapping[bytes, str]) -> None:
        """Make the record's labels `merged_labels` of them and these; returns after the write is durable."""
