"""Random pushes, silent writes, idling and requests on the ranks of a domain: real watches, workers' records and all-reduces, over a
model of caches whose blocks say with which weights they were computed. A rule that is taken away must be missed.

Weights are small numbers, of which a rank has one, experts and all else. A block is the tuple of all of them at its pass, and that of
the rank that has computed it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from epochkv_connector.weights import domain, rank, watch
from epochkv_connector.weights.domain import TOLD_BYTES, Domain
from epochkv_connector.weights.rank import Comparison, Held
from epochkv_connector.weights.watch import Watch

RANKS = 2
TOKENS = 3
EVENTS = 150
DIGEST_SECONDS = 0.02
"""So that the next one waits for a while (`watch.SHARE`), and passes run meanwhile."""
SCHEDULES = 60
Block = tuple[int, ...]


class Wrong(AssertionError):
    """A block was found, or stored, that its name does not describe."""


class Rank:
    """One data-parallel rank: its scheduler's watch, its worker's record and its GPU cache."""

    def __init__(self, world: World, number: int, pool: HashStore) -> None:
        self.world, self.number = world, number
        self.weights = self.seen = self.drawn = 0
        self.held = Held()
        self.held.domain = Domain(RANKS, number, pool, "0", self.held.claim, lambda: None)
        rank._ranks[f"rank{number}"] = self.held
        self.worker = SimpleNamespace(rank=0, vllm_config=SimpleNamespace(kv_transfer_config=SimpleNamespace(engine_id=f"rank{number}")))
        self.ended: set[tuple[int, bytes]] = set()
        self.cache: dict[tuple[int, bytes, int], Block] = {}
        self.queue: list[int] = []
        self.saves: list[tuple[Comparison, tuple[int, bytes, int], Block]] = []
        self.asleep, self.num_writes = False, 0
        self.watch = Watch(self, self, 1, world.clock, peers=SimpleNamespace(say=lambda *told: None))  # type: ignore[arg-type]

    # as `watch.Ranks`

    def digest_weights(self, number: int) -> list[dict[str, Any]]:
        held = self.held
        held.forget()
        self.world.now += DIGEST_SECONDS
        held.digested_at = held.domain.passes if held.domain else 0
        held.learn(number, bytes([self.weights + 1]) * 32)
        drawn = self.drawn = self.seen = self.weights

        def compare() -> Callable[[], bool]:
            holds = self.seen == drawn
            return lambda: holds

        held.sample = SimpleNamespace(compare=compare)  # type: ignore[assignment]
        held.places = SimpleNamespace(stay=lambda: True)  # type: ignore[assignment]
        return [{"number": number, "weights": held.value, "rest": held.value, "note": "", "rank": 0}]

    def are_unchanged(self, number: int) -> bool:
        return self.held.is_unchanged(number)

    def see_domain(self, number: int) -> list[dict[str, Any]]:
        answer = rank.see_domain(self.worker, number)
        if answer["columns"]:
            own = [watch.own_digest([column]) for column in answer["columns"]]
            name = vars(watch)["domain_digest"](own, self.watch._rest)
            self.world.meaning[name] = (*(column[0] - 1 for column in answer["columns"]), self.drawn)
        return [answer]

    def end_device_work(self) -> None:
        self.held.forget()

    # as `watch.WeightNames`

    def hold(self, weights: bytes | None) -> None:
        if weights is not None and (self.world.epoch, weights) in self.ended:
            self.world.epoch += 1

    def end(self, weights: bytes, *, at_once: bool = True) -> None:
        self.ended.add((self.world.epoch, weights))
        self.world.epoch += at_once

    def tell(self) -> None: ...
    def clear_encoder(self) -> bool:
        return True

    # what happens

    def push(self, weights: int) -> None:
        """By a call, whose writes no sample sees."""
        self.watch.calling("load")
        self.weights = weights
        self.world.wrote(self, silent=False)
        self.watch.called(idle=not self.queue)

    def write(self, weights: int) -> None:
        """Past vLLM. Samples see it."""
        self.weights = self.seen = weights
        self.world.wrote(self, silent=True)

    def schedule(self) -> Callable[[Block], Callable[[], None]] | None:
        """What a step does with the weights of its pass, and behind it; None: there is nothing to do."""
        if not self.queue:
            return None
        self.watch.before_schedule()
        if self.watch.awaits:
            return None
        token, value, number, epoch = self.queue.pop(), self.watch.value, self.watch.number, self.world.epoch
        if value is None or (epoch, value) in self.ended:
            value = None
        name = (epoch, value or b"", token)
        found = None if value is None else self.cache.get(name, self.world.store.get(name))
        if value is not None and found is not None:
            self.world.check(self, found, value, stored=name not in self.cache)

        def compute(block: Block) -> Callable[[], None]:
            self.held.begin()
            if value is None:
                return lambda: None
            block = (*block, self.weights)
            if found is None:
                self.cache[name] = block
            comparison = self.held.compare(number)
            if found is None and comparison.holds() and comparison.as_expected:
                self.saves.append((comparison, name, block))

            def behind() -> None:
                if not comparison.holds():
                    self.watch.late(number)
                elif not comparison.as_expected:
                    self.watch.mixed(number)

            return behind

        return compute

    def put(self) -> None:
        waiting = []
        for comparison, name, block in self.saves:
            settled = comparison.settled()
            if settled is None:
                waiting.append((comparison, name, block))
            elif settled:
                if block != self.world.meaning[name[1]]:
                    raise Wrong(f"{block} was stored as {self.world.meaning[name[1]]}")
                self.world.store[name] = block
        self.saves = waiting


class World:
    """All ranks, one store, one clock."""

    def __init__(self, seed: int, pool: ThreadPoolExecutor) -> None:
        self.random, self._pool = random.Random(seed), pool
        self.now, self.epoch = 100.0, 0
        self.meaning: dict[bytes, Block] = {}
        self.store: dict[tuple[int, bytes, int], Block] = {}
        self._passes_since, self._passed_at, self._silent = 9, 0.0, False
        self._writers: set[int] = set()  # since the newest pass
        self._undo: tuple[Rank, int] | None = None
        self._brought: list[torch.Tensor] = []
        self._all = Barrier(RANKS)
        keys = HashStore()
        self.ranks = [Rank(self, number, keys) for number in range(RANKS)]

    def clock(self) -> float:
        return self.now

    def wrote(self, writer: Rank, *, silent: bool) -> None:
        self._writers.add(writer.number)
        self._silent = silent or (self._silent and self._passes_since <= domain.SETTLED)
        self._passes_since = 0

    def check(self, finder: Rank, found: Block, value: bytes, *, stored: bool) -> None:
        """A block has to be what its name says, and the name what the ranks hold, but for the time that passes take to tell others."""
        current = (*(one.weights for one in self.ranks), finder.weights)
        fresh = self.now - self._passed_at <= 0.5
        silent = self._silent and self._passes_since <= domain.SETTLED
        if found != self.meaning[value] and (stored or not silent):
            raise Wrong(f"{found} was found as {self.meaning[value]}")
        unknown = (self._passes_since == 0 and fresh and self._writers - {finder.number}) or silent
        if found != current and not unknown:
            raise Wrong(f"{found} was found while the ranks hold {current}")

    def step(self) -> None:
        """One pass of all ranks, dummy ones of those that have nothing to do."""
        work = [one.schedule() for one in self.ranks]
        for one, compute in zip(self.ranks, work, strict=True):
            if compute is None:
                one.watch.before_pass()
        list(self._pool.map(self._all_reduce, self.ranks))
        self._writers = set()
        writer, before = self.random.choice(self.ranks), 0
        if in_the_middle := self._passes_since > 1 and self.random.random() < 0.05:
            before = writer.weights
            writer.write(self.random.randrange(3))
        block = tuple(one.weights for one in self.ranks)
        behind = [compute(block) if compute is not None else one.watch.passed for one, compute in zip(self.ranks, work, strict=True)]
        self._passed_at, self._passes_since = self.now, self._passes_since + 1
        self.now += 0.01
        self._undo = (writer, before) if in_the_middle else self._undo
        for one, then, compute in zip(self.ranks, behind, work, strict=True):
            if compute is not None:
                one.watch.stepped()
            then()
            one.put()

    def _all_reduce(self, one: Rank) -> None:
        tensor = torch.zeros((1, RANKS), dtype=torch.int32)

        def reduce(both: torch.Tensor) -> None:
            self._brought.append(both.clone())
            if self._all.wait(10) == 0:
                self._sum = torch.stack(self._brought).sum(0).to(torch.int32)
                self._brought = []
            self._all.wait(10)
            both.copy_(self._sum)

        assert one.held.domain is not None
        one.held.domain.carry(tensor, reduce)

    def run(self) -> None:
        draw = self.random
        for one in self.ranks:
            one.watch.before_schedule()
        for _ in range(EVENTS):
            one = draw.choice(self.ranks)
            compared = self._passes_since > 1 or not self._silent  # what is written and written back between comparisons, nobody sees
            if self._undo is not None and compared and draw.random() < 0.3:
                (writer, before), self._undo = self._undo, None
                writer.write(before)
            match draw.choices(("step", "ask", "push", "write", "idle"), (12, 8, 1, 0.5, 0.5))[0]:
                case "step":
                    self.step()
                case "ask":
                    one.queue.append(draw.randrange(TOKENS))
                case "push":
                    one.push(draw.randrange(3))
                case "write" if compared:
                    one.write(draw.randrange(3))
                case "idle":
                    self.now += draw.choice((0.3, 0.7, 5.0))


def live_by(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks tell the time by the clock of this world."""
    for module in (rank, domain):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=world.clock, sleep=None))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], int]]:
    """Run so many schedules; how many blocks were stored."""
    with ThreadPoolExecutor(RANKS) as pool:

        def schedules(number: int) -> int:
            stored = 0
            for seed in range(number):
                world = World(seed, pool)
                live_by(world, monkeypatch)
                world.run()
                stored += len(world.store)
            return stored

        yield schedules
    for number in range(RANKS):
        rank._ranks.pop(f"rank{number}", None)


def test_no_block_is_found_or_stored_that_its_name_does_not_describe(run: Callable[[int], int]) -> None:
    assert run(SCHEDULES) > 5 * SCHEDULES, "blocks are stored"


def test_a_call_that_leaves_the_weights_as_they_are_costs_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadPoolExecutor(RANKS) as pool:
        world = World(0, pool)
        live_by(world, monkeypatch)
        world.random.random = lambda: 1.0  # type: ignore[method-assign]
        asker, other = world.ranks
        for one in world.ranks:
            one.watch.before_schedule()

        def ask() -> None:
            asker.queue.append(len(asker.cache))
            while asker.queue:
                world.step()

        ask()
        ask()
        name = asker.watch.value
        assert name is not None
        for called in (asker, other):
            called.push(0)
            ask()
            ask()
        assert (asker.watch.value, world.epoch, asker.watch.counters["mixed"]) == (name, 0, 0)


def take_away(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    match rule:
        case "all ranks know what they hold":
            monkeypatch.setattr(rank, "UNKNOWN", b"\xff" * TOLD_BYTES)
            monkeypatch.setattr(Held, "claim", lambda held: (held.value or b"\x01" * 32)[:TOLD_BYTES] + held.silent.to_bytes(4, "little"))
        case "a step is compared":
            monkeypatch.setattr(Comparison, "as_expected", property(lambda self: True, lambda self, value: None), raising=False)
        case "the order of ranks counts":
            monkeypatch.setattr(watch, "domain_digest", lambda own, rest: domain.domain_digest(sorted(own), rest))
        case "what a rank has beside experts counts":
            monkeypatch.setattr(watch, "domain_digest", lambda own, rest: domain.domain_digest(own, b""))
        case "after idling a pass is waited for":
            monkeypatch.setattr(watch, "IDLE_SECONDS", 1e9)
            monkeypatch.setattr(rank, "IDLE_SECONDS", 1e9)
        case "a worker is suspect before the write":
            monkeypatch.setattr(Rank, "end_device_work", lambda self: None)
        case "a put waits for later passes":
            monkeypatch.setattr(domain, "SETTLED", 0)
        case "names of a mixed step end":
            monkeypatch.setattr(Watch, "mixed", lambda self, number: self._set(None, "mixed") or setattr(self, "_confirmed", False))
        case "silent changes are counted":
            monkeypatch.setattr(Held, "silent", property(lambda self: 0, lambda self, value: None))
        case "the pass follows the digest":
            monkeypatch.setattr(Held, "digested_at", property(lambda self: -1, lambda self, value: None))


RULES = (
    "all ranks know what they hold",
    "a step is compared",
    "the order of ranks counts",
    "what a rank has beside experts counts",
    "after idling a pass is waited for",
    "a worker is suspect before the write",
    "a put waits for later passes",
    "names of a mixed step end",
    "silent changes are counted",
    "the pass follows the digest",
)


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(rule: str, run: Callable[[int], int], monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(rule, monkeypatch)
    with pytest.raises(Wrong):
        run(20 * SCHEDULES)
