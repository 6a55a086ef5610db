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

# --------------------------------------------------------------------------------------------------------------- actions


class Send(msgspec.Struct, frozen=True):
    """Send this message to `peer`; it may be lost."""

    peer: bytes
    message: Message


class RecordTarget(msgspec.Struct, frozen=True):
    """Durably raise the target to `epoch`, which `origin` asked for."""

    epoch: int
    origin: Source | None = None


class NoteGranting(msgspec.Struct, frozen=True):
    """Durably note that grants may be out."""


class NoteLabels(msgspec.Struct, frozen=True):
    """Durably add these labels."""

    labels: Mapping[bytes, str]


class Publish(msgspec.Struct, frozen=True):
    """Durably raise the published epoch to `epoch`."""

    epoch: int


class RemoveAll(msgspec.Struct, frozen=True):
    """`epoch` is published: remove everything that nobody reads from the pool's store.

    Attributes:
        sweep: because no engine can remove the keys of older epochs; else to give their memory back at once.
    """

    epoch: int
    sweep: bool = False


class Changed(msgspec.Struct, frozen=True):
    """What a snapshot shows has changed."""


Call = RecordTarget | NoteGranting | NoteLabels | Publish | RemoveAll
"""What a hub asks of the authority or of a store; each is answered by one `Done`."""
Action = Send | Call | Changed

# ---------------------------------------------------------------------------------------------------------------- events


class Done(msgspec.Struct, frozen=True):
    """A call has ended.

    Attributes:
        ok: what was asked for is durable, or done. Else there was no answer, or it was refused; it may still land.
        removed: by `RemoveAll`: how many keys, and how many bytes when that is known.
    """

    call: Call
    ok: bool
    removed: tuple[int, int | None] = (0, None)


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


class Observed(msgspec.Struct, frozen=True):
    """The pool's durable record was seen, however late; it never decreases anything."""

    record: PoolRecord


class RoundBegan(msgspec.Struct, frozen=True):
    """Collect the heartbeats received so far and evaluate publication; the leadership read starts after this."""

    round: int


class RoundVerified(msgspec.Struct, frozen=True):
    """The leadership read that was started after `RoundBegan` found the term it was asked about."""

    round: int


class RoundDropped(msgspec.Struct, frozen=True):
    """The leadership read gave no answer in time: no grants this round."""

    round: int


class Tick(msgspec.Struct, frozen=True):
    """`Hub.tick_at` has come, or time has passed."""


Event = Acquired | SteppedDown | Configured | Heard | Asked | Done | Observed | RoundBegan | RoundVerified | RoundDropped | Tick
