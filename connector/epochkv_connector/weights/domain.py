"""A domain: data-parallel ranks that hold a model's experts together, so that KV of one rank depends on weights of all.

Routed experts are spread over the ranks; all else each rank has for itself, and computes its own tokens with it. So a name is made of
what all ranks hold, and of what this one has beside experts: the same on all ranks, unless a push has reached some of them alone.

Before each forward pass, dummy ones included, vLLM runs a small all-reduce over these ranks, in which each fills its own column. We
let it carry `WORDS` more rows: a digest of what this worker holds, or zeros. So each rank knows of each pass with which weights every
rank began it. No collective is added, and none can get out of step.

A rank without us reduces fewer rows. So every rank that has us says so in the store of its process group before its first pass. Rank 0
then writes from which all-reduce on all carry more, two before it; the others look behind each one, so one that fails to look can look
again. Who lacks us has said nothing when the first one has ended: then nobody ever carries more, and each rank keeps a cache of its own.

`Domain` lives in each worker. `Peers` lives beside a scheduler, and tells what the domain holds while nobody steps.
"""

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch

logger = logging.getLogger("vllm.epochkv.weights")

TOLD_BYTES = 16
"""Of a digest that a rank tells the others."""
WORDS = 5
"""Rows of 32 bits: the digest, and how often weights changed without a call."""
SETTLED = 2
"""Passes after which ranks would have told that weights were written during one: each compares behind a pass, and waits for its device
in the one after that."""
UNKNOWN = bytes(TOLD_BYTES)
NEVER = 1 << 62
LOOK_SECONDS = 0.1
"""Between two looks at what the others say: a call to one rank alone is known on all others so much later, or behind the next pass."""
PAUSE_SECONDS = 5.0
SAID = "epochkv/said"
"""The store's count of what ranks have said."""

T = TypeVar("T")
Column = bytes
"""What one rank said: its digest, or zeros, and the number of changes that no call announced."""


def domain_digest(own: Sequence[bytes], rest: bytes) -> bytes:
    """32 bytes: what KV of one rank depends on.

    Args:
        own: what the ranks hold, in their order.
        rest: what this rank holds beside routed experts. It computes its own tokens with that, so ranks of which it is not equal share
            nothing, such as after half a push.
    """
    return hashlib.sha256(b"epochkv domain %d " % len(own) + b"".join(own) + rest).digest()


class Store(Protocol):
    """`torch.distributed.Store`, of which every rank of the domain has a client."""

    def set(self, key: str, value: bytes) -> None: ...
    def get(self, key: str) -> bytes: ...
    def multi_get(self, keys: list[str]) -> list[bytes]: ...
    def add(self, key: str, amount: int) -> int: ...
    def check(self, keys: list[str]) -> bool: ...


class Domain:
    """One worker's part. The worker's thread.

    Args:
        store: of the process group that spans the domain.
        group: names this worker's all-reduces among those of other workers of its engine.
        claim: what this worker holds now: see `Column`.

    Attributes:
        size: how many ranks.
        alone: why the ranks carry nothing, in words; empty: they do, or will.
        calls: all-reduces so far; `passes`: those that carried more.
        columns: what the ranks said in the newest pass; `since`: the first pass from which on they have said the same.
        at: when that pass began, on the monotonic clock.
    """

    def __init__(self, size: int, rank: int, store: Store, group: str, claim: Callable[[], Column], after_pass: Callable[[], None]) -> None:
        self.size, self.alone = size, ""
        self.calls = self.passes = self.since = 0
        self.columns: tuple[Column, ...] = ()
        self.at = float("-inf")
        self._rank, self._store, self._claim, self._after_pass = rank, store, claim, after_pass
        self._ready = [f"epochkv/{group}/{number}" for number in range(size)]
        self._verdict = f"epochkv/{group}/from"
        self._from: int | None = None  # the first all-reduce that carries more; None: not agreed yet
        store.set(self._ready[rank], b"1")

    def carry(self, tensor: torch.Tensor, reduce: Callable[[torch.Tensor], Any]) -> Any:
        """Run an all-reduce of vLLM's (`tensor`: [rows, ranks], of which each rank fills a column, summed in place)."""
        self.calls += 1
        if not self.alone and (tensor.dim() != 2 or tensor.shape[1] != self.size):
            shape = tuple(tensor.shape)
            self.alone = (
                f"vLLM's all-reduce over data-parallel ranks has the shape {shape}, not one that is known; use a version that was tested"
            )
        if self.alone:
            return reduce(tensor)
        if self._from is None and self._rank == 0:
            self._guarded(self._decide, None)
        if self._from is None or self.calls < self._from:
            done = reduce(tensor)
            if self._from is None and self._rank != 0:
                self._guarded(lambda: self._look(tensor), None)
            return done
        more = torch.zeros((WORDS, self.size), dtype=torch.int32)
        more[:, self._rank] = torch.frombuffer(bytearray(self._guarded(self._claim, UNKNOWN + bytes(4))), dtype=torch.int32)
        both = torch.cat([tensor, more.to(tensor.device, tensor.dtype)])
        done = reduce(both)
        tensor.copy_(both[: len(tensor)])
        columns = tuple(column.numpy().tobytes() for column in both[len(tensor) :].to("cpu", torch.int32).t().contiguous())
        if columns != self.columns:
            self.since, self.columns = self.passes + 1, columns
        self.passes += 1  # at last: `settled` reads it first
        self.at = time.monotonic()
        self._guarded(self._after_pass, None)
        return done

    def settled(self, number: int, columns: tuple[Column, ...]) -> bool | None:
        """Whether pass `number`, which began with these columns, ended with them on all ranks. None: a later pass will tell. Any thread."""
        passes = self.passes
        if self.columns != columns or self.since > number:
            return False
        return True if passes >= number + SETTLED else None

    @staticmethod
    def _guarded(work: Callable[[], T], otherwise: T) -> T:
        """No exception of ours ends a pass of vLLM's."""
        try:
            return work()
        except Exception:
            logger.exception("EpochKV: data-parallel ranks were not told what this one holds")
            return otherwise

    def _decide(self) -> None:
        """Rank 0, before it enters an all-reduce: whoever ends that one can read what is written here."""
        if self.calls > 2 or self._store.check([self._verdict]):  # the store has failed us, and the others take what they have found
            self._read()
            return
        missing = [str(rank) for rank, key in enumerate(self._ready) if not self._store.check([key])]
        if missing and self.calls == 1:
            return  # another rank may still start
        verdict = f"{NEVER} {', '.join(missing)}" if missing else str(self.calls + 2)
        self._store.set(self._verdict, verdict.encode())
        self._take(verdict)

    def _look(self, tensor: torch.Tensor) -> None:
        """Any other rank, behind an all-reduce."""
        if tensor.is_cuda:
            torch.cuda.current_stream().synchronize()
        self._read()

    def _read(self) -> None:
        if self._store.check([self._verdict]):
            self._take(self._store.get(self._verdict).decode())
        elif self.calls > 1:
            self._take(f"{NEVER} 0")

    def _take(self, verdict: str) -> None:
        number, _, missing = verdict.partition(" ")
        self._from = int(number)
        if missing:
            self.alone = f"data-parallel rank {missing} runs without EpochKV, so nobody knows what all ranks hold; start all ranks alike"


class Peers:
    """Beside a scheduler: what the ranks of its domain say that they hold, also while nobody steps. Nothing is found or named by it.

    Args:
        store: of the engine cores, whose calls may block: a thread of its own makes them.
        changed: called when what `foretold` is has changed.

    Attributes:
        foretold: what the domain holds, 32 bytes; None: some rank does not know. Any thread.
        changes: how often a rank has said anything, also what it had said before.
        missing: ranks that have said nothing, not even that they do not know. Any thread.
    """

    def __init__(self, size: int, rank: int, store: Store, changed: Callable[[], None]) -> None:
        self.foretold: bytes | None = None
        self.changes = 0
        self.missing = ""
        self._keys = [f"epochkv/holds/{number}" for number in range(size)]
        self._rank, self._store, self._changed = rank, store, changed
        self._holds = UNKNOWN, b""  # both at once, or `foretold` were of weights that nobody had
        self._lock, self._said = threading.Lock(), threading.Event()
        self._over = False
        threading.Thread(target=self._follow, name="epochkv-domain", daemon=True).start()

    def say(self, own: bytes | None, rest: bytes = b"") -> None:
        """This rank holds weights of this digest now (see `domain_digest`); None: it does not know."""
        with self._lock:
            if own is None:
                self.foretold = None  # at once, as the store may hang
            self._holds = (own or UNKNOWN) + time.monotonic_ns().to_bytes(8, "little"), rest  # each time something else
        self._said.set()

    def stop(self) -> None:
        """The thread ends, once the call that it is in has."""
        self._over = True
        self._said.set()

    def _follow(self) -> None:
        told: bytes | None = None
        announced: bytes | None = None
        count, heard, known = 0, list[bytes](), [UNKNOWN]
        while not self._over:
            self._said.wait(LOOK_SECONDS)
            self._said.clear()
            own, rest = self._holds
            try:
                if own != told:
                    self._store.set(self._keys[self._rank], own)
                    self._store.add(SAID, 1)
                    told = own
                before, count = count, self._store.add(SAID, 0)
                if count != before:  # else each look of each rank would read what all have said
                    missing = [] if self._store.check(self._keys) else [key for key in self._keys if not self._store.check([key])]
                    self.missing = ", ".join(key.rpartition("/")[2] for key in missing)
                    known = self._store.multi_get(self._keys) if not missing else [UNKNOWN]
            except Exception as error:  # the domain ends, or its first rank does not answer
                logger.debug("EpochKV: the ranks of the domain cannot be asked: %r", error)
                known, told, count = [UNKNOWN], None, 0
            held = [one[:TOLD_BYTES] for one in known]
            with self._lock:
                if self._holds[0] == own:  # else it is of what this rank has held
                    self.foretold = None if UNKNOWN in held else domain_digest(held, rest)
            self.changes += known != heard
            heard = known
            if self.foretold != announced:
                announced = self.foretold
                self._changed()
            if told is None:
                time.sleep(PAUSE_SECONDS)
