"""What goes wrong between the operator and the API server: spells of faults and of calm, drawn at random."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass
from typing import Final

from tests.cluster.fault_proxy import CUT, LATE, NO_ANSWER, WATCH, Fault, FaultProxy

ANSWERS: Final = (403, 409, 422, 429, 500, 503)
SPELL_SECONDS: Final = (0.5, 6.0)
CUT_WATCHES_EVERY: Final = (3.0, 12.0)


@dataclass(frozen=True)
class Spell:
    """For a while each request of some kind meets a fault with this probability.

    Attributes:
        kinds: statuses of `Fault`.
        lease: whether the Lease is hit, too.
        reads: whether reads and new watches are hit, too.
    """

    name: str
    share: float
    kinds: tuple[int, ...]
    lease: bool = False
    reads: bool = True


SPELLS: Final = (
    Spell("calm", 0.0, ANSWERS),
    Spell("drizzle", 0.1, (*ANSWERS, CUT, LATE, NO_ANSWER), lease=True),
    Spell("rain", 0.4, (*ANSWERS, CUT, LATE)),
    Spell("writes fail", 1.0, ANSWERS, reads=False),
    Spell("conflicts", 0.7, (409,), reads=False),
    Spell("rights taken away", 1.0, (403,)),
    Spell("slow", 1.0, (LATE,), lease=True),
    Spell("silence", 0.5, (NO_ANSWER,)),
    Spell("cable", 0.5, (CUT,), lease=True),
    Spell("outage", 1.0, (500, 503), lease=True),
)
WEIGHTS: Final = (3, 8, 4, 2, 2, 1, 2, 1, 2, 1)


def name_of(fault: Fault) -> str:
    """For people."""
    name = {CUT: "connection cut", NO_ANSWER: "no answer", LATE: "late"}.get(fault.status, str(fault.status))
    return f"{name}, but carried out" if fault.carried_out else name


class Weather:
    """Context manager: decides what happens to the requests of some proxies, and cuts their watches. `stop` ends all faults."""

    def __init__(self, proxies: tuple[FaultProxy, ...], seed: object) -> None:
        self._proxies = proxies
        self._random = random.Random(f"{seed}:weather")
        self._requests = random.Random(f"{seed}:requests")
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._spell = SPELLS[0]
        self._thread = threading.Thread(target=self._change)
        self.counts: Counter[str] = Counter()
        self.spells: Counter[str] = Counter()

    def __enter__(self) -> Weather:
        for proxy in self._proxies:
            proxy.decide = self._decide
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Blue sky from now on."""
        self._over.set()
        self._thread.join(30)

    def _change(self) -> None:
        cut_at = time.monotonic() + self._random.uniform(*CUT_WATCHES_EVERY)
        while not self._over.is_set():
            self._spell = self._random.choices(SPELLS, WEIGHTS)[0]
            self.spells[self._spell.name] += 1
            ends = time.monotonic() + self._random.uniform(*SPELL_SECONDS)
            while not self._over.wait(0.1) and time.monotonic() < ends:
                if time.monotonic() >= cut_at:
                    cut_at = time.monotonic() + self._random.uniform(*CUT_WATCHES_EVERY)
                    self._cut(self._random.random() < 0.5)

    def _cut(self, expired: bool) -> None:
        for proxy in self._proxies:
            self.counts["watch ended with 410" if expired else "watch cut"] += proxy.cut_watches(expired=expired)

    def _decide(self, method: str, path: str) -> Fault | None:
        if self._over.is_set():
            return None
        with self._lock:  # each proxy asks on its own thread
            fault = self._fault(method, path)
            if fault is not None:
                self.counts[name_of(fault)] += 1
            return fault

    def _fault(self, method: str, path: str) -> Fault | None:
        spell, rng = self._spell, self._requests
        if ("/leases" in path and not spell.lease) or (method in ("GET", WATCH) and not spell.reads) or rng.random() >= spell.share:
            return None
        # What an API server says to reads; an expired version is told in the stream (`_cut`).
        kinds = [kind for kind in spell.kinds if method not in ("GET", WATCH) or kind not in (409, 422)]
        if not kinds:
            return None
        status = rng.choice(kinds)
        seconds = rng.choice((0.0, 0.05, 0.3)) if status != LATE else rng.choice((0.05, 0.2, 1.0, 2.5))
        # A status that says no, and means it: 403, 409 and 422 are never given for what was carried out.
        lost = status in (500, 503, CUT, NO_ANSWER) and method not in ("GET", WATCH) and rng.random() < 0.4
        return Fault(status, carried_out=lost, seconds=seconds)
