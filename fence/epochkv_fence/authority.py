"""What a hub needs from the outside: durable memory for two numbers and two notes per pool, and a leadership it can check.

Implementations: the pool object's status and a Lease in Kubernetes (in the operator). All of a hub's safety rests on the
three promises below, so an implementation states how it keeps each of them.

1. `verify` is linearizable: it is True only if, at some moment between call and return, the stored holder *and*
   transitions were those of the term asked about.
2. `load` is linearizable: it sees every write that returned before it was called. Never a watch cache.
3. `record`, `publish` and the notes never decrease anything, whoever calls them and however late they land. `record` writes a target
   and its origin in one atomic write, and leaves both alone unless it raises the target. What an origin inherits, it inherits in
   that write: the hub that asks for it may have missed the target before.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from epochkv_fence.messages import Source


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
class Origin:
    """Where a target comes from.

    Attributes:
        source: who asked for it first.
        weights_version: what the weights of this epoch are called; empty: nobody said.
        listed: a trainer listed the boots that have these weights, for this epoch or for one before with the same weights, so no
            boot's age proves anything. None, to be recorded: as of the target before; never read.
        inherited: the asker brought no weights: list and name are those of the target before.
    """

    source: Source
    weights_version: str = ""
    listed: bool | None = False
    inherited: bool = False

    def after(self, before: Origin | None) -> Origin:
        """As it is recorded over `before`, with what it inherits."""
        if self.listed is not None:
            return self
        if before is None or not before.listed:
            return replace(self, listed=False)
        return replace(self, listed=True, inherited=True, weights_version=before.weights_version)


@dataclass(frozen=True, slots=True)
class UpdateNote:
    """The newest weight update of a pool that a hub let begin.

    Attributes:
        serial: 1, 2, ... in the order of beginning.
        number: drawn at random by its trainer, 16 bytes.
        holder: who the trainer is, and `version` what he pushes, for people.
        open: what engines hold is not known: it has not ended, or the epoch that says how it ended is not durable.
    """

    serial: int
    number: bytes
    holder: str
    version: str
    open: bool = True

    def follows(self, other: UpdateNote | None) -> bool:
        """Written over `other`: a later update, or the end of the same one. However late a write lands, nothing else is."""
        return other is None or (self.serial, not self.open) > (other.serial, not other.open)


@dataclass(frozen=True, slots=True)
class PoolRecord:
    """Everything a hub must remember about a pool.

    Attributes:
        target: highest epoch durably recorded.
        published: highest epoch proved to be the oldest in use; never above `target`.
        granting: some hub has (or may have) granted for this pool; never taken back.
        origin: of `target`; None: target 0, or a record from before origins were kept.
        update: the newest weight update; None: there was none.
    """

    target: int = 0
    published: int = 0
    granting: bool = False
    origin: Origin | None = None
    update: UpdateNote | None = None


class Authority(Protocol):
    """All calls are made with a deadline by the caller; a call that is cancelled may still take effect later."""

    async def verify(self, term: Term) -> bool:
        """Whether `term` is the current one, holder and transitions (promise 1). Raises when that is unknown."""

    async def load(self, pool_uid: str) -> PoolRecord:
        """What is durably recorded (promise 2)."""

    async def record(self, pool_uid: str, target: int, origin: Origin | None = None) -> None:
        """Raise the durable target to at least `target`; returns after the write is durable.

        `origin` is written with it, in the same atomic write, and only if the target rises.
        """

    async def publish(self, pool_uid: str, epoch: int) -> None:
        """Raise the durable published epoch to at least `epoch`; returns after the write is durable."""

    async def note_granting(self, pool_uid: str) -> None:
        """Set the `granting` note; returns after the write is durable."""

    async def note_update(self, pool_uid: str, note: UpdateNote) -> None:
        """Write which weight update is open, unless what is there `follows` it; returns after the write is durable."""
