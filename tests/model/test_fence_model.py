"""The production agent and hub under every fault there is, and proof that the simulator would notice a missing rule."""

import random
from functools import partial

import pytest

from tests.model import schedules
from tests.model.mutants import MUTANTS
from tests.model.parts import ORDERS
from tests.model.world import simulate

FIXED_SCHEDULES = 2_000
NEW_SCHEDULES = 6_000
FOCUS_SCHEDULES = 30
FAULTS = ("lost", "duplicated", "timeouts", "freezes", "engine restarts", "hub restarts", "takeovers")
RARER = (
    *("trainer restarts", "configurations", "invalidated loads", "schedules that publish", "proposals", "pushes", "roll-backs"),
    *("unknown weights", "labels", "removals", "sweeps", "wipes of the store"),
)
pytestmark = pytest.mark.timeout(3_000)  # its layer runs at the lowest priority: on a busy machine each test may take ten times longer


def failures(report: schedules.Report) -> str:
    return "\n\n".join(str(failure) for failure in report.failures)


def test_invariants_hold_in_the_fixed_corpus() -> None:
    report = schedules.run(0, FIXED_SCHEDULES)
    assert not report.failures, failures(report)
    assert report.schedules == FIXED_SCHEDULES
    for event, share in {**dict.fromkeys(FAULTS, 4), **dict.fromkeys((*RARER, *ORDERS), 20)}.items():
        assert report.counts[event] > FIXED_SCHEDULES / share, f"the corpus hardly contains {event!r}: {report.counts}"
    assert report.counts["blocks reused"] > report.counts["blocks computed"] > FIXED_SCHEDULES, report.counts


@pytest.mark.slow
def test_invariants_hold_in_new_schedules() -> None:
    first = random.SystemRandom().randrange(2 * 10**9, 3 * 10**9)
    print(f"seeds {first}..{first + NEW_SCHEDULES - 1}")
    report = schedules.run(first, NEW_SCHEDULES)
    assert not report.failures, failures(report)
    assert report.schedules == NEW_SCHEDULES


def test_an_epoch_that_a_restored_record_lost_is_new_to_an_engine_that_never_had_it() -> None:
    """e1 resets its caches without a lease while 1 is published, the record comes back with 0, and 1 is reached again."""
    assert simulate(2_786_477_205).counts["restores"]


def test_a_schedule_is_replayable() -> None:
    first, second = simulate(7), simulate(7)
    assert first.trace == second.trace
    assert first.counts == second.counts
    assert first.trace != simulate(8).trace


# ------------------------------------------------------------------ the check of the checker


@pytest.fixture(scope="module")
def catches() -> dict[str, schedules.Catch]:
    return schedules.hunt_all(list(MUTANTS), hinted=True)


@pytest.mark.parametrize("rule", MUTANTS)
def test_a_missing_rule_is_noticed(rule: str, catches: dict[str, schedules.Catch]) -> None:
    catch = catches[rule]
    assert catch.seed is not None, f"{catch.schedules} schedules without the rule {rule!r} and not noticed {catch.violation}"


def test_what_mutants_focus_on_is_clean_without_them() -> None:
    with schedules.pool() as executor:
        for report in executor.map(partial(schedules.run_chunk, 10_000, FOCUS_SCHEDULES), MUTANTS):
            assert not report.failures, failures(report)
            assert report.schedules == FOCUS_SCHEDULES
