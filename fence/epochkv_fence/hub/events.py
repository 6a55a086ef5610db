"""What goes into and comes out of the hub's state machine (`hub.Hub.step`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from epochkv_fence.protocol.authority import PoolRecord, Term
from epochkv_fence.protocol.messages import Message, Source
from epochkv_fence.protocol.pool import PoolConfig

RETRY_SECONDS: Final = 0.25
"""After a write that failed, before the next one."""

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
    """A message from a client of this pool.

    Attributes:
        peer: where an answer goes.
        key_index: which of the pool's accepted keys the peer proved to have, 0 the newest.
    """

    peer: bytes
    message: Message
    key_index: int = 0


@dataclass(frozen=True, slots=True)
class Asked:
    """The pool's owner asks for `epoch`. Also taken before this hub leads."""

    epoch: int
    origin: Source = Source.SPEC


@dataclass(frozen=True, slots=True)
class Recorded:
    """The `RecordTarget` asked for is durable."""

    epoch: int


@dataclass(frozen=True, slots=True)
class RecordFailed:
    """The `RecordTarget` asked for did not answer or was refused; it may still land."""

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
class LabelsNoted:
    """The `NoteLabels` asked for is durable."""

    labels: Mapping[bytes, str]


@dataclass(frozen=True, slots=True)
class LabelsNoteFailed:
    """The `NoteLabels` asked for did not answer or was refused; it may still land."""

    labels: Mapping[bytes, str]


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
class Wiped:
    """The `Wipe` asked for is done: the store removed so many keys, and `num_bytes` of them when that is known."""

    epoch: int
    keys: int
    num_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class WipeFailed:
    """The `Wipe` asked for did not answer or was refused; it may still land."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Swept:
    """The `Sweep` asked for is done: the store removed so many keys that nobody read."""

    below: int
    keys: int
    num_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class SweepFailed:
    """The `Sweep` asked for did not answer or was refused."""

    below: int


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
    | LabelsNoted
    | LabelsNoteFailed
    | RoundBegan
    | RoundVerified
    | RoundDropped
    | Published
    | PublishFailed
    | Wiped
    | WipeFailed
    | Swept
    | SweepFailed
    | Tick
)

# --------------------------------------------------------------------------------------------------------------- actions


@dataclass(frozen=True, slots=True)
class Send:
    """Send this message to `peer`; it may be lost."""

    peer: bytes
    message: Message


@dataclass(frozen=True, slots=True)
class RecordTarget:
    """Durably raise the target to `epoch`, which `origin` asked for, then say `Recorded` or `RecordFailed`."""

    epoch: int
    origin: Source | None = None


@dataclass(frozen=True, slots=True)
class NoteGranting:
    """Durably note that grants may be out, then say `Noted` or `NoteFailed`."""


@dataclass(frozen=True, slots=True)
class NoteLabels:
    """Durably add these labels, then say `LabelsNoted` or `LabelsNoteFailed`."""

    labels: Mapping[bytes, str]


@dataclass(frozen=True, slots=True)
class Publish:
    """Durably raise the published epoch to `epoch`, then say `Published` or `PublishFailed`."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Wipe:
    """`epoch` is published: remove everything that nobody reads from the pool's store, then say `Wiped` or `WipeFailed`, once."""

    epoch: int


@dataclass(frozen=True, slots=True)
class Sweep:
    """Remove everything that nobody reads from the pool's store, then say `Swept` or `SweepFailed`."""

    below: int


@dataclass(frozen=True, slots=True)
class Changed:
    """What a snapshot shows has changed."""


Action = Send | RecordTarget | NoteGranting | NoteLabels | Publish | Wipe | Sweep | Changed
