"""What goes into and comes out of the hub's state machine (`hub.Hub.step`)."""

from __future__ import annotations

from dataclasses import dataclass

from epochkv_fence.authority import PoolRecord, Term
from epochkv_fence.messages import Message
from epochkv_fence.pool import PoolConfig

# ---------------------------------------------------------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class Acquired:
    """Leadership was won in `term`, and `record` was read, linearizably, after that write had returned."""

    term: Term
    record: PoolRecord


@dataclass(frozen=True, slots=True)
class SteppedDown:
    """This hub does not lead any more, or cannot tell."""


@dataclass(frozen=True, slots=True)
class Configured:
    """The pool's configuration was changed."""

    config: PoolConfig


@dataclass(frozen=True, slots=True)
class Heard:
    """A message from a client of this pool; `peer` is where an answer goes."""

    peer: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class Asked:
    """The pool's owner asks for `epoch`. Also taken before this hub leads.

    Attributes:
        at: when it was asked for, on the hub's clock, or earlier; None: unknown, so no boot's age proves anything.
    """

    epoch: int
    at: float | None


@dataclass(frozen=True, slots=True)
class Recorded:
    """The `Record` asked for is durable."""

    epoch: int


@dataclass(frozen=True, slots=True)
class RecordFailed:
    """The `Record` asked for did not answer or was refused; it may still land."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Observed:
    """The pool's durable record was seen, however late; it never decreases anything."""

    record: PoolRecord


@dataclass(frozen=True, slots=True)
class Noted:
    """The `NoteGranting` asked for is durable."""


@dataclass(frozen=True, slots=True)
class NoteFailed:
    """The `NoteGranting` asked for did not answer or was refused."""


@dataclass(frozen=True, slots=True)
class RoundBegan:
    """Collect the heartbeats received so far and evaluate publication; the leadership read starts after this."""

    round: int


@dataclass(frozen=True, slots=True)
class RoundVerified:
    """The leadership read that was started after `RoundBegan` found the term it was asked about."""

    round: int


@dataclass(frozen=True, slots=True)
class RoundDropped:
    """The leadership read gave no answer in time: no grants this round."""

    round: int


@dataclass(frozen=True, slots=True)
class Published:
    """The `Publish` asked for is durable."""

    epoch: int


@dataclass(frozen=True, slots=True)
class PublishFailed:
    """The `Publish` asked for did not answer or was refused; it may still land, which is harmless."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Tick:
    """`Hub.tick_at` has come, or time has passed."""


Event = (
    Acquired
    | SteppedDown
    | Configured
    | Heard
    | Asked
    | Recorded
    | RecordFailed
    | Observed
    | Noted
    | NoteFailed
    | RoundBegan
    | RoundVerified
    | RoundDropped
    | Published
    | PublishFailed
    | Tick
)

# --------------------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message to `peer`; it may be lost."""

    peer: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class Record:
    """Durably raise the target to `epoch`, then say `Recorded` or `RecordFailed`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class NoteGranting:
    """Durably note that grants may be out, then say `Noted` or `NoteFailed`."""


@dataclass(frozen=True, slots=True)
class Publish:
    """Durably raise the published epoch to `epoch`, then say `Published` or `PublishFailed`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Changed:
    """What a snapshot shows has changed."""


Action = Send | Record | NoteGranting | Publish | Changed
