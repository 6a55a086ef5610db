"""Random schedules: everything that can happen between any two steps, in any order, with the oracle watching.

Invariants after every step: no request is admitted with KV of other tokens or other weights; at the end nothing is left
(pins, plans, jobs, GPU blocks) and every request has ended. A failing test prints its seed.
"""

import os
import random
from collections import Counter
from typing import Any

import pytest
from vllm.v1.core.sched.interface import PauseState

from epochkv_connector.wire import Tier
from tests.scheduler.rigs import SLOT_BYTES, MakeRig, abort_one, hold_some, preempt_last, release, work_some
from tests.support.scheduler import BLOCK, SharedStore, prompt
from tests.support.scheduler_config import STATE

DRAWN = int(os.environ.get("EPOCHKV_SEED", random.SystemRandom().randrange(10**6)))
SEEDS = [*map(str, range(int(os.environ.get("EPOCHKV_SEEDS", "12")))), "drawn"]
CASES = [*(("attention", seed) for seed in SEEDS), *(("hybrid", seed) for seed in SEEDS[::2])]
TIERS = ["l1", "l2", "both"]

# vLLM's own lookup answers wrongly where a chunk is no whole number of blocks.
LAYOUTS = {
    "attention": [("full",), ("full",), ("48", "full"), ("full", "32", "80")],
    "hybrid": [("full", "state"), ("full", "state", "48"), ("full", "chunk48"), ("state", "full", "chunk64")],
}
reached: dict[str, Counter[str]] = {kind: Counter() for kind in LAYOUTS}
WEIGHTS = {"step": 110, "add": 30, "adopt": 3, "bypass": 1, "lease": 1, "abort": 4, "preempt": 3, "reset": 1, "hold": 8, "fail": 3}
WEIGHTS |= {"lose": 3, "shrink": 2, "pause": 1}
"""How often each thing happens beside the others."""


class Chaos:
    """One random schedule over one engine."""

    def __init__(self, rig: Any, store: SharedStore | None, source: random.Random, weights: dict[str, int] = WEIGHTS) -> None:
        self.rig, self.store, self.source, self.weights = rig, store, source, weights
        self.epoch = 0
        self.families = [prompt(seed, 9 * BLOCK) for seed in range(3)]
        self.happened: Counter[str] = Counter()
        self.num_held = self.num_states_loaded = self.num_prefetches = 0
        self.fetched_in_bypass: int | None = None
        rig.adopt(0, weights="w0")

    def tokens(self) -> list[int]:
        """Prompts share prefixes of random length, some shorter than a block; some continue what another request said."""
        living = list(self.rig.scheduler.requests.values())
        if living and self.source.random() < 0.2:
            return list(self.source.choice(living).all_token_ids)[: 10 * BLOCK] + prompt(7, BLOCK)
        family = self.source.choice(self.families)
        if self.source.random() < 0.5:
            return [*family, 5]
        kept = self.source.choice([BLOCK - 3, 3 * BLOCK, 5 * BLOCK + 7, 9 * BLOCK])
        return family[:kept] + prompt(self.source.randrange(4), self.source.randrange(3, 2 * BLOCK))

    def act(self) -> None:
        (name,) = self.source.choices(list(self.weights), list(self.weights.values()))
        self.happened[name] += 1
        getattr(self, f"_{name}")()
        self.check_reads()

    def check_reads(self) -> None:
        """In bypass, once nothing is read, nothing begins to be."""
        held = [job for worker in self.rig.workers for job in worker.loads if any(m.source is Tier.STORE for m in job.moves)]
        if held:
            self.num_held += 1
        assert self.rig.tiers.leak_report()["prefetches"] <= 1
        if self.rig.pins.root.refresh().in_use or any(self.rig.tiers.leak_report()[name] for name in ("loads", "prefetches", "busy_slots")):
            self.fetched_in_bypass = None
        elif self.store is not None:
            fetched = len(self.store.fetched)
            assert self.fetched_in_bypass in (None, fetched), "a read began in bypass"
            self.fetched_in_bypass = fetched

    def _step(self) -> None:
        metadata = self.rig.step().kv_connector_metadata
        jobs = metadata.loads if metadata is not None else ()
        self.num_prefetches += sum(job.prefetch for job in jobs)
        self.num_states_loaded += sum(self.rig.options.groups[move.group] == STATE for job in jobs for move in job.moves)
        work_some(self.rig, self.source)

    def _add(self) -> None:
        if len(self.rig.scheduler.requests) < 10:
            tokens, most = self.tokens(), self.source.choice([1, 4, BLOCK, 2 * BLOCK])
            self.rig.add(tokens, max_tokens=most, skip_reading_prefix_cache=True if self.source.random() < 0.1 else None)

    def _go_on(self) -> None:
        for _ in range(self.source.randrange(8)):
            self._add()
            self._step()

    def _adopt(self) -> None:
        self.epoch += 1
        self.rig.adopt(self.epoch, weights=f"w{self.epoch}")

    def _bypass(self) -> None:
        """The lease is lost and comes back under the same epoch, and weights change meanwhile."""
        self.rig.lease_until = 0.0
        for _ in range(self.source.randrange(8)):
            self._add()
            self._step()
            self.check_reads()
        self.fetched_in_bypass = None
        self.rig.weights += "+"
        self.rig.lease_until = float("inf")

    def _lease(self) -> None:
        """While the lease is lost the pool moves on and weights change; the next grant carries a higher epoch."""
        self.rig.lease_until = 0.0
        self.rig.weights += "'"
        self._go_on()
        self._adopt()
        self.rig.lease_until = float("inf")

    def _abort(self) -> None:
        abort_one(self.rig, self.source)

    def _preempt(self) -> None:
        preempt_last(self.rig)

    def _reset(self) -> None:
        """Somebody resets this engine and pushes weights; the pool follows later."""
        self.rig.scheduler.reset_prefix_cache(reset_connector=True)
        self.rig.weights += "'"
        self._go_on()
        self._adopt()

    def _pause(self) -> None:
        """`keep`: everybody keeps his blocks, and the pool moves on meanwhile, or not."""
        self.rig.scheduler.set_pause_state(self.source.choice([PauseState.PAUSED_ALL, PauseState.PAUSED_NEW]))
        self._go_on()
        if self.source.random() < 0.5:
            self._adopt()
        self.rig.scheduler.set_pause_state(PauseState.UNPAUSED)

    def _hold(self) -> None:
        hold_some(self.rig, self.source)

    def _fail(self) -> None:
        chance = self.source.choice([0.0, 0.3])
        for worker in self.rig.workers:
            worker.fail_loads = lambda job, chance=chance: self.source.random() < chance

    def _lose(self) -> None:
        if self.store is not None:
            chance = self.source.choice([0.0, 0.2])
            self.store.lose = lambda key, chance=chance: self.source.random() < chance
            self.store.down = self.source.random() < 0.2

    def _shrink(self) -> None:
        """A plan that nobody commits, and one that is committed in part, as other parts of vLLM make them."""
        answer = type(self.rig.connector).get_num_new_matched_tokens
        mode = self.source.choice(["drop", "shrink", "off"])

        def altered(request: Any, num_local: int) -> Any:
            found, load = answer(self.rig.connector, request, num_local)
            if not found or mode == "off":
                return found, load
            kept = 0 if mode == "drop" else max(0, found - BLOCK)
            return kept, kept > 0

        self.rig.connector.get_num_new_matched_tokens = altered


@pytest.mark.parametrize(("kind", "seed"), CASES)
@pytest.mark.parametrize("tiers", TIERS)
def test_random_schedules(make_rig: MakeRig, kind: str, tiers: str, seed: str) -> None:
    number = DRAWN if seed == "drawn" else int(seed)
    print(f"EPOCHKV_SEED={number}")  # the ids are the same in every process
    source = random.Random(f"{tiers}{number}")
    store = SharedStore() if tiers != "l1" else None
    groups = source.choice(LAYOUTS[kind])
    rig = make_rig(
        groups=groups,
        num_blocks=source.choice([16, 20, 40]) + 12 * (len(groups) - 1),
        store=store,
        l1_bytes=None if tiers == "l2" else source.choice([40, 400]) * SLOT_BYTES,
        retention=source.choice([None, 0, 2 * BLOCK]) if "state" in groups else None,
        num_ranks=source.choice([1, 2]),
        max_batched_tokens=source.choice([64, 8192]),
        extra={"staging_slots": source.choice([16, 64]), "lookup_wait_ms": 20.0, "lookup_deadline_ms": 100.0},
    )
    chaos = Chaos(rig, store, source)
    for _ in range(400):
        chaos.act()
        assert not any(rig.foreign_tokens.values()), f"KV of other tokens: {rig.foreign_tokens}"
        assert not any(rig.stale_tokens.values()), f"KV of other weights: {rig.stale_tokens}"
    release(rig)
    rig.run(3000)
    reached[kind].update({name: int(value) for name, value in (*rig.tiers.stats().items(), *rig.side.counters.items())})
    reached[kind].update(held_reads=chaos.num_held, states_loaded=chaos.num_states_loaded, prefetches=chaos.num_prefetches, schedules=1)
    assert chaos.happened["adopt"] > 0
    assert len(rig.finished) > 5


@pytest.mark.parametrize("kind", LAYOUTS)
def test_the_schedules_reached_what_they_are_for(kind: str) -> None:
    """Runs after them: a schedule that never loads proves nothing."""
    if reached[kind]["schedules"] < len(TIERS) * sum(case[0] == kind for case in CASES):
        pytest.skip("this process has not run all of the random schedules")
    assert reached[kind]["loads_done"] > 20
    assert reached[kind]["held_reads"] > 20
    assert reached[kind]["loads_failed"] > 0
    assert reached[kind]["invalidated_loads"] > 0
    assert reached[kind]["plans_committed"] > 20
    assert reached[kind]["prefetches"] > 0
    assert reached[kind]["states_loaded"] > (20 if kind == "hybrid" else -1)
