"""Many schedules in a process pool: what the tests run, and `make simulate` and `make simulate-mutants` with them.

What is found does not depend on the number of processes: every seed is a world of its own.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from tests.model.mutants import ALL_MUTANTS
from tests.model.parts import Violation
from tests.model.world import World, simulate

CHUNK = 50
CHUNK_STEPS = 30_000
MUTANT_BUDGET = 20_000
"""Schedules after which a mutant counts as not caught."""


@dataclass
class Failure:
    seed: int
    text: str
    focus: str = ""
    steps: int | None = None

    def __str__(self) -> str:
        options = (f" --focus {self.focus!r}" if self.focus else "") + (f" --steps {self.steps}" if self.steps else "")
        return f"{self.text}\nreplay: .build/venv/bin/python -m hack.simulate replay {self.seed}{options}"


@dataclass
class Report:
    """What some schedules gave."""

    schedules: int = 0
    steps: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    failures: list[Failure] = field(default_factory=list)

    def add_world(self, world: World) -> None:
        self.steps += world.profile.steps
        self.counts.update(world.counts)

    def add(self, other: Report) -> None:
        self.schedules += other.schedules
        self.steps += other.steps
        self.counts.update(other.counts)
        self.failures += other.failures


@dataclass(frozen=True)
class Catch:
    """A mutant and the schedule that noticed it; `seed` is None when none did."""

    name: str
    seed: int | None
    schedules: int
    violation: str


def focused(focus: str = "", steps: int | None = None) -> dict[str, Any]:
    """Fields of the profile that are not drawn: those of a mutant, and the number of steps."""
    return {**(ALL_MUTANTS[focus].focus if focus else {}), **({"steps": steps} if steps else {})}


def run_chunk(first: int, count: int, focus: str = "", steps: int | None = None) -> Report:
    """Schedules of consecutive seeds, in this process."""
    report = Report()
    fields = focused(focus, steps)
    for seed in range(first, first + count):
        report.schedules += 1
        try:
            report.add_world(simulate(seed, focus=fields))
        except Violation as violation:
            report.failures.append(Failure(seed, str(violation), focus, steps))
    return report


def hunt(name: str, budget: int = MUTANT_BUDGET, hinted: bool = False) -> Catch:
    """Schedules without the rule, until one violates an invariant: of `Mutant.seen` if `hinted`, and then of all from 0."""
    mutant = ALL_MUTANTS[name]
    for number, seed in enumerate(chain([mutant.seen] if hinted and mutant.seen is not None else [], range(budget)), 1):
        try:
            simulate(seed, mutant.rules, mutant.focus)
        except Violation as violation:
            found = str(violation).splitlines()[0].split(": ", 1)[1]
            try:
                simulate(seed, None, mutant.focus)
            except Violation as real:
                return Catch(name, None, number, f"violated with the rule, too: {real}")
            return Catch(name, seed, number, found)
    return Catch(name, None, budget, "")


@contextmanager
def pool(processes: int | None = None) -> Iterator[ProcessPoolExecutor]:
    """Worker processes, one per core."""
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(processes or os.cpu_count() or 1, mp_context=context) as executor:
        try:
            yield executor
        finally:
            executor.shutdown(cancel_futures=True)


def run(
    first: int,
    count: int,
    *,
    focus: str = "",
    steps: int | None = None,
    processes: int | None = None,
    progress: Callable[[Report, float], None] | None = None,
    stop_after: int = 5,
) -> Report:
    """Schedules of `count` seeds from `first` on.

    Args:
        focus: draw them as for this mutant.
        steps: of every schedule; None: drawn.
        progress: called now and then with what is done and the seconds it took.
        stop_after: failures after which no more chunks are begun.
    """
    total = Report()
    began = time.monotonic()
    size = CHUNK if steps is None else max(1, min(CHUNK, CHUNK_STEPS // steps))
    chunks = [(seed, min(size, first + count - seed)) for seed in range(first, first + count, size)]
    with pool(processes) as executor:
        open_chunks: set[Future[Report]] = set()
        while chunks or open_chunks:
            while chunks and len(open_chunks) < 2 * (processes or os.cpu_count() or 1):
                open_chunks.add(executor.submit(run_chunk, *chunks.pop(0), focus, steps))
            done, open_chunks = wait(open_chunks, return_when=FIRST_COMPLETED)
            for future in done:
                total.add(future.result())
            if progress is not None:
                progress(total, time.monotonic() - began)
            if len(total.failures) >= stop_after:
                chunks = []
    total.failures.sort(key=lambda failure: failure.seed)
    return total


def hunt_all(
    names: list[str],
    *,
    budget: int = MUTANT_BUDGET,
    hinted: bool = False,
    processes: int | None = None,
    caught: Callable[[Catch], None] | None = None,
) -> dict[str, Catch]:
    """Every mutant, side by side; `caught` is called with each as it ends."""
    found: dict[str, Catch] = {}
    with pool(processes) as executor:
        waiting = {executor.submit(hunt, name, budget, hinted) for name in names}
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for future in done:
                catch = future.result()
                found[catch.name] = catch
                if caught is not None:
                    caught(catch)
    return found
