"""A hub under a clock that the test moves, with an authority that answers at once."""

from typing import Any, TypeVar

from epochkv_fence.hub.machine import Hub
from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.messages import Grant, Heartbeat, Message, Nudge
from epochkv_fence.protocol.pool import PoolConfig, PoolRecord, Term

M = TypeVar("M", bound=Message)
LEASE, HOLD = 30.0, 33.0
TERM = Term("hub-a", 1)


def instance(number: int) -> bytes:
    return bytes([number]) * 16


def config(**keys: Any) -> PoolConfig:
    return PoolConfig("uid", "ns/pool", (), **{"lease_seconds": LEASE, **keys})


class Driver:
    """Steps a hub. Writes are answered at once unless `hold_writes`; rounds are begun and verified by hand, and the store
    answers a wipe or a sweep by hand."""

    def __init__(self, **keys: Any) -> None:
        self.hub = Hub(config(**keys))
        self.now = 1000.0
        self.stores: list[ev.RemoveAll] = []
        self.sent: list[tuple[bytes, Message]] = []
        self.writes: list[ev.Action] = []
        self.hold_writes = False
        self.rounds = 0
        self.seqs: dict[bytes, int] = {}

    def step(self, event: ev.Event) -> list[ev.Action]:
        actions = self.hub.step(event, self.now)
        for action in actions:
            match action:
                case ev.Send(peer, message):
                    self.sent.append((peer, message))
                case ev.RemoveAll():
                    self.stores.append(action)
                case ev.RecordTarget() | ev.Publish() | ev.NoteGranting() | ev.NoteLabels():
                    self.writes.append(action)
                    if not self.hold_writes:
                        self.step(ev.Done(action, ok=True))
                case ev.Changed():
                    pass
        return actions

    def lead(self, target: int = 0, published: int = 0, granting: bool = False, term: Term = TERM, **more: Any) -> None:
        self.step(ev.Acquired(term, PoolRecord(target, published, granting, **more)))

    def wait(self, seconds: float) -> list[ev.Action]:
        """Time passes, and it is told."""
        self.now += seconds
        return self.step(ev.Tick())

    def ask(self, epoch: int) -> None:
        self.step(ev.Asked(epoch))

    def hear(self, message: Message, peer: bytes = b"trainer") -> None:
        self.step(ev.Heard(peer, message))

    def beat(self, number: int, epoch: int | None = None, age: float = 1000.0, **extra: Any) -> int:
        seq = extra.pop("seq", None)
        if seq is None:
            seq = self.seqs.get(instance(number), -1) + 1
            self.seqs[instance(number)] = seq
        beat = Heartbeat(instance(number), seq, epoch, instance_age_seconds=age, **extra)
        self.step(ev.Heard(b"peer%d" % number, beat))
        return seq

    def begin(self) -> int:
        self.rounds += 1
        self.step(ev.RoundBegan(self.rounds))
        return self.rounds

    def round(self) -> list[Grant]:
        """A round whose leadership read passes; returns its grants."""
        before = len(self.sent)
        self.step(ev.RoundVerified(self.begin()))
        return [message for _, message in self.sent[before:] if isinstance(message, Grant)]

    def of(self, kind: type[M]) -> list[M]:
        return [message for _, message in self.sent if isinstance(message, kind)]

    def kinds(self) -> list[tuple[str, int]]:
        """The writes so far: what, and of which epoch."""
        return [(type(action).__name__, getattr(action, "epoch", 0)) for action in self.writes]

    def nudged(self) -> list[bytes]:
        return [nudge.instance for nudge in self.of(Nudge)]

    @property
    def published(self) -> list[int]:
        return [action.epoch for action in self.writes if isinstance(action, ev.Publish)]


def leading(**keys: Any) -> Driver:
    hub = Driver(**keys)
    hub.lead(granting=True)
    return hub


def waited(**keys: Any) -> Driver:
    hub = leading(**keys)
    hub.now += HOLD
    return hub


def alive(hub: Driver, epoch: int = 1) -> None:
    """Instances 1 and 2 say that they are at it."""
    for number in (1, 2):
        hub.beat(number, epoch=epoch)


def led(epoch: int = 0, **keys: Any) -> Driver:
    """A hub long past its own leadership wait, with instances 1 and 2 at `epoch`."""
    hub = Driver(**keys)
    hub.lead(target=epoch, published=epoch, granting=True)
    hub.now += HOLD
    for number in (1, 2):
        hub.beat(number)
    hub.round()
    alive(hub, epoch)
    hub.round()
    return hub


def publishes_at(hub: Driver, moment: float, epoch: int = 1) -> None:
    """This epoch, and nothing before."""
    hub.now = moment - 0.01
    hub.round()
    assert hub.published == []
    hub.now = moment
    hub.round()
    assert hub.published == [epoch]
