"""The production agent and hub under every fault there is, and proof that the simulator would notice a missing rule."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from tests.model.fence_mutants import MUTANTS
from tests.model.fence_simulator import Violation, simulate

FIXED_SCHEDULES = 1500
FRESH_SCHEDULES = 300
MUTANT_BUDGET = 3000
FAULTS = ("lost", "duplicated", "timeouts", "freezes", "engine restarts", "hub restarts", "takeovers")


def test_invariants_hold_in_the_fixed_corpus() -> None:
    counts: Counter[str] = Counter()
    for seed in range(FIXED_SCHEDULES):
        counts.update(simulate(seed).counts)
    for fault in FAULTS:
        assert counts[fault] > FIXED_SCHEDULES / 4, f"the corpus hardly contains {fault}: {counts}"
    assert counts["published under faults"] > FIXED_SCHEDULES / 4, f"the corpus hardly publishes: {counts}"


def test_invariants_hold_in_fresh_schedules() -> None:
    base = random.SystemRandom().randrange(10**6, 10**9)
    print(f"fresh seeds {base}..{base + FRESH_SCHEDULES - 1}")
    for seed in range(base, base + FRESH_SCHEDULES):
        simulate(seed)


def test_a_schedule_is_replayable() -> None:
    first, second = simulate(7), simulate(7)
    assert first.trace == second.trace
    assert first.trace != simulate(8).trace


@pytest.mark.parametrize("rule", MUTANTS)
def test_a_missing_rule_is_noticed(rule: str) -> None:
    hint, mutant = MUTANTS[rule]
    for seed in (hint, *range(MUTANT_BUDGET)):
        try:
            simulate(seed, mutant)
        except Violation:
            return
    pytest.fail(f"{MUTANT_BUDGET} schedules without the rule and no violation: {rule}")
