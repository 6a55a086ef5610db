"""Random schedules: every way vLLM accepts, shrinks, drops or cancels, on ranks that are late, partial or failing.

Held at every moment: no slot and no GPU block has two owners, a referenced block is not evicted, a load never fills a block
with anything but what its name says. At the end nothing is left.
"""

import os
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epochkv_connector.naming.identity import Snapshot
from epochkv_connector.scheduler.requests import LoadState
from epochkv_connector.tiers.layout import CacheLayout, GroupKind, RequestView
from epochkv_connector.wire import LoadJob, Tier
from tests.unit.connector_scheduler.rig import HASH_BLOCK, LAYOUTS, World, chain, check_index, config, scheduled, snap_of, view

NUM_SCHEDULES = int(os.environ.get("EPOCHKV_SCHEDULES", "4500"))
"""Of all modes and layouts together."""
OUTCOMES = ("ok",) * 15 + ("partial", "drop", "late")


@dataclass
class Live:
    request_id: str
    tokens: list[int]
    root: bytes
    state: str = "waiting"  # waiting, loading, running
    blocks: list[list[int]] = field(default_factory=list)
    computed: int = 0
    loaded_to: int = 0
    invalidated: bool = False
    finished: bool = False
    cooldown: bool = False
    asleep: int = 0  # steps in which vLLM does not get to this request
    states: list[tuple[int, int, int]] = field(default_factory=list)  # offered in this step


def end_of_step(rng: random.Random, layout: CacheLayout, live: Live) -> int:
    """How far the request gets in a step. With recurrent states vLLM ends steps at blocks."""
    end, unit = min(len(live.tokens), live.computed + rng.randrange(1, 50)), layout.alignment_tokens
    has_states = any(group.kind is GroupKind.STATE for group in layout.groups)
    if has_states and end - end % unit > live.computed and rng.random() < 0.8:
        end -= end % unit
    return end


def misoffer(rng: random.Random, live: Live, everybody: list[Live]) -> None:
    """Offers of vLLM that are not what they say, or come twice: of another request's block, of other tokens."""
    if not live.states or rng.random() < 0.7:
        return
    group, block, tokens = rng.choice(live.states)
    other = rng.choice([one for one in everybody if one.blocks]).blocks[group]
    wrong = [(group, block, tokens), (group, block, tokens - 4), (group, 0, tokens), (group, block, tokens + 4000)]
    wrong += [(group, rng.choice(other), tokens)] if other else []
    live.states.insert(rng.randrange(2), rng.choice(wrong))


class Schedule:
    def __init__(self, seed: int, layout: CacheLayout, *, l1: bool, l2: bool, ranks: int) -> None:
        self.random = random.Random(seed)
        self.layout = layout
        slots = self.random.choice([12, 30, 60])
        wait = 0.0  # queries that are not answered at once are left to `disturb_store` and to time, which nobody waits for here
        cfg = config(l1_slots=slots if l1 else 0, l2=l2, ranks=ranks, staging_slots=slots, lookup_wait_ms=wait)
        self.world = World(cfg, layout, ranks)
        self.world.keeps = lambda: self.random.random() < 0.8
        self.l2 = l2
        self.l1 = l1
        self.snap = snap_of(0)
        self.world.tiers.adopt(self.snap)
        self.epoch = 0
        self.live: dict[str, Live] = {}
        self.loads: list[LoadJob] = []
        self.heard: dict[str, int] = {}  # request id -> final reports of its load so far
        self.failed: set[str] = set()
        self.number = 0

    # -- what vLLM does ----------------------------------------------------------------------------------------------
    def arrive(self) -> None:
        self.number += 1
        family = self.random.randrange(2)
        length = self.random.choice([3, 20, 33, 41, 44])
        tokens = [family * 1000 + position for position in range(length)]
        if self.random.random() < 0.3 and length > 12:
            tokens[12:] = [self.number * 10_000 + position for position in range(length - 12)]
        live = Live(f"r{self.number}", tokens, self.snap.root, asleep=self.random.choice([0, 0, 2]))  # behind others
        if self.l2 and self.snap.namespace and self.random.random() < 0.4:
            self.world.stored(tokens, self.snap)
        self.live[live.request_id] = live
        if self.random.random() < 0.7:
            self.world.tiers.hits.begin(view(live.request_id, tokens, live.root), self.snap)

    def schedule(self) -> None:
        tiers, snap = self.world.tiers, self.snap
        for live in list(self.live.values()):
            live.asleep -= live.asleep > 0
            if live.state == "waiting" and not live.finished and not live.asleep:
                self._admit(live, snap)
            if live.state == "running" and not live.finished:
                end = end_of_step(self.random, self.layout, live)
                live.states = self.world.compute(live.blocks, chain(live.root, live.tokens), live.computed, end)
                misoffer(self.random, live, list(self.live.values()))
                live.computed, live.cooldown = end, False
        views = [
            scheduled(live.request_id, live.tokens, live.root, live.blocks, live.computed, live.states)
            for live in self.live.values()
            if live.state == "running" and not live.finished and live.root == snap.root
        ]
        tiers.saves.collect(views, snap)
        jobs = self.world.step()
        self.loads.extend(jobs.loads)

    def _admit(self, live: Live, snap: Snapshot) -> None:
        tiers, request = self.world.tiers, view(live.request_id, live.tokens, snap.root)
        live.root = snap.root  # a waiting request holds no blocks and is re-pinned
        local = 0
        if self.random.random() < 0.3:  # the GPU's own prefix cache has something
            local = self.random.randrange(len(live.tokens)) // self.layout.alignment_tokens
            local *= self.layout.alignment_tokens
        if live.cooldown:
            hit_tokens = 0
        else:
            hit = tiers.hits.answer(request, local, snap)
            held, queries = tiers.leak_report(), len(self.world.store.queries)
            again = tiers.hits.answer(request, local, snap)
            assert again == hit or hit is None
            if hit is not None:
                assert tiers.leak_report() == held, "asking again pinned something"
            assert len(self.world.store.queries) == queries, "asking again looked up again"
            if again is None:
                return
            hit_tokens = again
            assert local + hit_tokens < len(live.tokens)
        choice = self.random.random()
        if choice < 0.15:
            live.asleep = self.random.choice([0, 12])
            return  # dropped silently: no budget, no blocks, ...
        if choice < 0.3:
            self._run(live, request, local, 0)
            return
        if hit_tokens and choice < 0.45:
            units = hit_tokens // self.layout.alignment_tokens
            hit_tokens = self.random.randrange(units) * self.layout.alignment_tokens
        self._run(live, request, local, hit_tokens)

    def _run(self, live: Live, request: RequestView, local: int, num_external: int) -> None:
        live.blocks = self.world.allocate(local, local + num_external)
        self.world.compute(live.blocks, request.block_hashes, 0, local)
        outcome = self.world.commit(request, live.blocks, num_external, self.snap)
        if num_external == 0:
            assert outcome is None
            live.state, live.computed = "running", local
            return
        live.state, live.loaded_to = "loading", local + num_external
        live.invalidated = outcome is False
        assert self.world.tiers.loads.is_open(live.request_id) == (outcome is True)

    def finish(self) -> None:
        """A request ends, or is cancelled in whatever state it is."""
        if self.live:
            live = self.random.choice(list(self.live.values()))
            if not live.finished:
                live.finished = True
                self.world.finish(live.request_id)
                planner = self.world.tiers.hits
                assert planner.plans.get(live.request_id) is None, "a cancelled request keeps its plan"
                assert live.request_id not in planner._lookups._queries
            if live.state != "loading":
                self._remove(live)

    def _remove(self, live: Live) -> None:
        self.world.free(live.blocks)
        del self.live[live.request_id]

    def preempt(self) -> None:
        running = [live for live in self.live.values() if live.state == "running" and not live.finished]
        if running:
            live = self.random.choice(running)
            self.world.free(live.blocks)
            live.blocks, live.computed, live.state = [], 0, "waiting"

    # -- what ranks do -----------------------------------------------------------------------------------------------
    def work(self) -> None:
        worker, how = self.random.choice(self.world.workers), self.random.choice(OUTCOMES)
        acks = worker.release() if self.random.random() < 0.2 else worker.work(how)
        self.world.tiers.on_acks(acks)
        self._reports()

    def _reports(self) -> None:
        """Count each rank's reports of a load; the last one ends it, as vLLM's aggregator does."""
        for worker in self.world.workers:
            for request_id, failed in worker.reports:
                self.heard[request_id] = self.heard.get(request_id, 0) + 1
                if failed:
                    self.failed.add(request_id)
            worker.reports.clear()
        for request_id, count in list(self.heard.items()):
            if count == len(self.world.workers):
                del self.heard[request_id]
                self._load_over(self.live[request_id])

    def _load_over(self, live: Live) -> None:
        failed = live.request_id in self.failed
        self.failed.discard(live.request_id)
        assert not self.world.tiers.loads.is_open(live.request_id)
        record = self.world.requests.report(live.request_id, failed=failed)
        if record is not None and record.load is LoadState.REPEATED:
            assert live.invalidated, "a success was held back for nothing"
            return  # every rank reports once more
        assert failed or live.finished or not live.invalidated, "vLLM heard of a success under names of before"
        live.invalidated = False
        if not failed:
            self._check_filled(live)
        if live.finished:
            self._remove(live)
            return
        if failed:
            self.world.free(live.blocks)
            live.blocks, live.computed, live.state, live.cooldown = [], 0, "waiting", True
        else:
            live.state, live.computed = "running", live.loaded_to

    def _check_filled(self, live: Live) -> None:
        hashes = chain(live.root, live.tokens)
        for group, spec in self.layout.restored:
            scale = spec.block_size // HASH_BLOCK
            for index, block in enumerate(live.blocks[group]):
                if block:
                    expected = (group, hashes[(index + 1) * scale - 1])
                    for worker in self.world.workers:
                        assert worker.gpu[block] == expected, "a load brought something else than its name says"

    # -- what else happens -------------------------------------------------------------------------------------------
    def change_names(self) -> None:
        kind = self.random.randrange(4)
        if kind == 0:
            self.world.rename(None)
        else:
            self.epoch += kind == 1
            self.snap = snap_of(self.epoch, shared=kind != 2)
            self.world.rename(self.snap)
        for live in self.live.values():
            live.invalidated = live.state == "loading"

    def disturb_store(self) -> None:
        kind = self.random.randrange(12)
        self.world.store.answering = kind != 0
        self.world.store.failing = kind == 1
        if kind == 2:
            self.world.store.objects.clear()
        if kind == 3:
            self.world.store.answer()

    def wait(self) -> None:
        self.world.now += self.random.choice([0.001, 0.03, 1.0, 6.0])

    def run(self, steps: int) -> None:
        actions = [self.arrive, self.schedule, self.schedule, self.work, self.work, self.work, self.work, self.finish]
        actions += [self.preempt, self.wait, self.change_names, self.disturb_store]
        for number in range(steps):
            action = self.random.choice(actions)
            if action == self.work:
                for _ in range(self.random.randrange(1, 6)):
                    self.work()
            elif action != self.change_names or self.random.random() < 0.2:
                action()
            if number % 5 == 0:
                check_index(self.world.tiers.state.index)
        self.end()

    def end(self) -> None:
        for live in list(self.live.values()):
            if not live.finished:
                live.finished = True
                self.world.finish(live.request_id)
            if live.state != "loading":
                self._remove(live)
        for _ in range(3):  # an invalidated load needs one more round
            self.world.step()
            for worker in self.world.workers:
                while acks := worker.work() + worker.release():
                    self.world.tiers.on_acks(acks)
            self._reports()
        assert self.live == {}, "a load was never reported"
        assert sum(self.world.pool.refs.values()) == 0, "GPU blocks leaked"
        self.world.assert_idle()
        assert not any(self.world.requests.leak_report().values())
        counts = self.world.tiers.stats()
        ends = ("committed", "aborted", "expired", "over_cap", "dropped")
        assert counts["plans_opened"] == sum(counts[f"plans_{end}"] for end in ends), "a plan has no end, or two"


MODES = {"L1": (True, False), "L2": (False, True), "L1+L2": (True, True)}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@given(seed=st.integers(0, 2**32), ranks=st.integers(1, 3))
@settings(max_examples=NUM_SCHEDULES // 18, deadline=None)
def test_nothing_leaks_and_nothing_lies(mode: tuple[bool, bool], layout: CacheLayout, seed: int, ranks: int) -> None:
    Schedule(seed, layout, l1=mode[0], l2=mode[1], ranks=ranks).run(150)


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
def test_the_schedules_exercise_what_they_claim(mode: tuple[bool, bool]) -> None:
    """Hits, loads from both tiers, evictions, refusals, failures and expiries all happen in a handful of seeds."""
    seen: dict[str, float] = {}
    sources: set[Tier] = set()
    for seed in range(80):
        schedule = Schedule(seed, LAYOUTS["sliding first"], l1=mode[0], l2=mode[1], ranks=2)
        schedule.run(200)
        for name, value in schedule.world.tiers.stats().items():
            seen[name] = seen.get(name, 0) + value
        sources |= {move.source for job in schedule.loads for move in job.moves}
    assert sources == {source for source, on in zip((Tier.HOST, Tier.STORE), mode, strict=True) if on}
    expected = ["plans_committed", "plans_aborted", "plans_expired", "plans_dropped", "loads_failed", "saves_deferred"]
    expected += ["evictions"] if mode[0] else []
    expected += ["queries_late", "queries_failed", "lookups_deferred"] if mode[1] else []
    expected += ["blocks_prefetched", "dropped_unused"] if all(mode) else []
    assert {name for name in expected if not seen[name]} == set()
