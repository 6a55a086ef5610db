"""What goes into and comes out of the hub's state machine (`hub.Hub.step`)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

from epochkv_fence.protocol.authority import PoolRecord, Term
from epochkv_fence.protocol.messages import Message, Source
from epochkv_fence.protocol.pool import PoolConfig

RETRY_SECONDS: Final = 0.25
"""After a write that failed, before the next one."""

# ---------------------------------------------------------------------------------------------------------------- events


class Acquired(msgspec.Struct, frozen=True):
    """Leadership was won in `term`, and `record` was read, linearizably, after that write had returned."""

    term: Term
    record: PoolRecord


class SteppedDown(msgspec.Struct, frozen=True):
    """This hub does not lead any more, or cannot tell."""


class Configured(msgspec.Struct, frozen=True):
    """The pool's configuration was changed."""

    config: PoolConfig


class Heard(msgspec.Struct, frozen=True):
    """A message from a client of this pool.

    Attributes:
        peer: where an answer goes.
        key_index: which of the pool's accepted keys the peer proved to have, 0 the newest.
    """

    peer: bytes
    message: Message
    key_index: int = 0


class Asked(msgspec.Struct, frozen=True):
    """The pool's owner asks for `epoch`. Also taken before this hub leads."""

    epoch: int
    origin: Source = Source.SPEC


class Recorded(msgspec.Struct, frozen=True):
    """The `RecordTarget` asked for is durable."""

    epoch: int


class RecordFailed(msgspec.Struct, frozen=True):
    """The `RecordTarget` asked for did not answer or was refused; it may still land."""

    epoch: int


class Observed(msgspec.Struct, frozen=True):
    """The pool's durable record was seen, however late; it never decreases anything."""

    record: PoolRecord


class Noted(msgspec.Struct, frozen=True):
    """The `NoteGranting` asked for is durable."""


class NoteFailed(msgspec.Struct, frozen=True):
    """The `NoteGranting` asked for did not answer or was refused."""


class LabelsNoted(msgspec.Struct, frozen=True):
    """The `NoteLabels` asked for is durable."""

    labels: Mapping[bytes, str]


class LabelsNoteFailed(msgspec.Struct, frozen=True):
    """The `NoteLabels` asked for did not answer or was refused; it may still land."""

    labels: Mapping[bytes, str]


class RoundBegan(msgspec.Struct, frozen=True):
    """Collect the heartbeats received so far and evaluate publication; the leadership read starts after this."""

    round: int


class RoundVerified(msgspec.Struct, frozen=True):
    """The leadership read that was started after `RoundBegan` found the term it was asked about."""

    round: int


class RoundDropped(msgspec.Struct, frozen=True):
    """The leadership read gave no answer in time: no grants this round."""

    round: int


class Published(msgspec.Struct, frozen=True):
    """The `Publish` asked for is durable."""

    epoch: int


class PublishFailed(msgspec.Struct, frozen=True):
    """The `Publish` asked for did not answer or was refused; it may still land, which is harmless."""

    epoch: int


class Wiped(msgspec.Struct, frozen=True):
    """The `Wipe` asked for is done: the store removed so many keys, and `num_bytes` of them when that is known."""

    epoch: int
    keys: int
    num_bytes: int | None = None


class WipeFailed(msgspec.Struct, frozen=True):
    """The `Wipe` asked for did not answer or was refused; it may still land."""

    epoch: int


class Swept(msgspec.Struct, frozen=True):
    """The `Sweep` asked for is done: the store removed so many keys that nobody read."""

    below: int
    keys: int
    num_bytes: int | None = None


class SweepFailed(msgspec.Struct, frozen=True):
    """The `Sweep` asked for did not answer or was refused."""

    below: int


class Tick(msgspec.Struct, frozen=True):
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


class Send(msgspec.Struct, frozen=True):
    """Send this message to `peer`; it may be lost."""

    peer: bytes
    message: Message


class RecordTarget(msgspec.Struct, frozen=True):
    """Durably raise the target to `epoch`, which `origin` asked for, then say `Recorded` or `RecordFailed`."""

    epoch: int
    origin: Source | None = None


class NoteGranting(msgspec.Struct, frozen=True):
    """Durably note that grants may be out, then say `Noted` or `NoteFailed`."""


class NoteLabels(msgspec.Struct, frozen=True):
    """Durably add these labels, then say `LabelsNoted` or `LabelsNoteFailed`."""

    labels: Mapping[bytes, str]


class Publish(msgspec.Struct, frozen=True):
    """Durably raise the published epoch to `epoch`, then say `Published` or `PublishFailed`."""

    epoch: int


class Wipe(msgspec.Struct, frozen=True):
    """`epoch` is published: remove everything that nobody reads from the pool's store, then say `Wiped` or `WipeFailed`, once."""

    epoch: int


class Sweep(msgspec.Struct, frozen=True):
    """Remove everything that nobody reads from the pool's store, then say `Swept` or `SweepFailed`."""

    below: int


class Changed(msgspec.Struct, frozen=True):
    """What a snapshot shows has changed."""


Action = Send | RecordTarget | NoteGranting | NoteLabels | Publish | Wipe | Sweep | Changed
