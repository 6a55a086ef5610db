"""The calendar against a look at every request: on random schedules no new block is missed, and none is seen late."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field

import pytest

from epochkv_connector.scheduler.steps import Boundaries

SIZE = 16


@dataclass
class Running:
    """A request as a scheduler that runs ahead of its model knows it: optimistic, and corrected when results come."""

    known: int
    computed: int = 0
    steps: deque[tuple[int, int, bool]] = field(default_factory=deque)  # under way: tokens, drafts, gives tokens
    offered: int = 0
    waits: bool = True

    @property
    def in_flight(self) -> int:
        return sum(tokens for tokens, *_ in self.steps)


class World:
    """Requests that are scheduled, starved, preempted, resumed and aborted; results are `depth` steps late or less."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        self.num_drafts = source.choice([0, 0, 1, 3, 20])
        self.depth = source.choice([1, 2, 4])
        self.boundaries = Boundaries(1 + self.num_drafts)
        self.requests: dict[str, Running] = {}
        self.num_new = self.num_looks = self.num_steps = self.serial = 0

    def act(self) -> None:
        """One step, and what happens before the next."""
        if len(self.requests) < 12 and self.source.random() < 0.3:
            self.serial += 1
            self.requests[f"r{self.serial}"] = Running(self.source.randrange(1, 6 * SIZE))
        self.step()
        for name in list(self.requests):
            self.results(name)
            chance = self.source.random()
            if chance < 0.01:
                del self.requests[name]
                self.boundaries.forget(name)
            elif chance < 0.02:  # the results of what is under way still come
                request = self.requests[name]
                request.computed, request.waits = 0, True
                if self.source.random() < 0.5:
                    request.offered = 0  # it has new names

    def step(self) -> None:
        """Schedule some, then compare."""
        started, scheduled = [], {}
        for name, request in self.requests.items():
            if self.source.random() < 0.2 or len(request.steps) >= self.depth or (request.waits and request.steps):
                continue
            missing = request.known - request.computed
            pending = sum(1 for *_, gives in request.steps if gives)
            drafts = self.source.randint(0, self.num_drafts) if missing <= 1 else 0
            if missing <= 0 and not pending:
                continue
            given = self.source.randint(1, missing) if missing > 1 else 1
            if request.waits:
                request.waits = False
                started.append(name)
            scheduled[name] = (given + drafts, drafts, request.computed + given >= request.known)
        self.compare(started, scheduled)
        for name, (tokens, drafts, gives) in scheduled.items():
            self.requests[name].steps.append((tokens, drafts, gives))
            self.requests[name].computed += tokens

    def compare(self, started: list[str], scheduled: dict[str, tuple[int, int, bool]]) -> None:
        """What the calendar finds is what a look at everybody finds."""
        confirmed = {
            name: min(self.requests[name].computed + tokens - drafts, self.requests[name].known)
            for name, (tokens, drafts, _) in scheduled.items()
        }
        naive = {name for name, count in confirmed.items() if count // SIZE > self.requests[name].offered}
        self.boundaries.start(started)
        due = self.boundaries.due(scheduled)
        assert len(due) == len(set(due))
        assert set(due) <= scheduled.keys()
        assert naive <= set(due)
        for name in due:
            request, count = self.requests[name], confirmed[name]
            self.boundaries.later(name, count - count % SIZE + SIZE - request.known - request.in_flight)
            request.offered = max(request.offered, count // SIZE)
        self.num_new += len(naive)
        self.num_looks += len(due)
        self.num_steps += len(scheduled)

    def results(self, name: str) -> None:
        """Some of what is under way is told, in order: drafts that were rejected are taken back."""
        request = self.requests[name]
        while request.steps and (len(request.steps) >= self.depth or self.source.random() < 0.4):
            _, drafts, gives = request.steps.popleft()
            accepted = self.source.randint(0, drafts)
            request.known += accepted + 1 if gives else 0
            request.computed = max(0, request.computed - (drafts - accepted))


@pytest.mark.parametrize("seed", range(60))
def test_what_a_look_at_everybody_finds_the_calendar_finds_in_the_same_step(seed: int) -> None:
    world = World(random.Random(seed))
    for _ in range(600):
        world.act()
    assert world.num_new > 50
    for name in list(world.requests):
        world.boundaries.forget(name)
    assert len(world.boundaries) == 0


def test_decoding_requests_are_looked_at_once_a_block() -> None:
    boundaries = Boundaries(1)
    names = [f"r{index}" for index in range(100)]
    known = {name: index for index, name in enumerate(names)}
    boundaries.start(names)
    assert boundaries.due(names) == names
    for name in names:
        boundaries.later(name, SIZE - known[name] % SIZE)
    for step in range(1, 1 + 4 * SIZE):
        due = boundaries.due(names)
        assert due == sorted((name for name in names if (known[name] + step) % SIZE == 0), key=due.index)
        assert len(due) in (6, 7)
        for name in due:
            boundaries.later(name, SIZE)
