"""A minute of `make soak`: three engines under random faults, resets and weight changes, from a fixed seed."""

from pathlib import Path

import pytest

from hack.soak.run import soak, work_out_answers
from hack.soak.states import States
from tests.engine.conftest import Reference, Weights
from tests.support.nursery import Nursery

MINUTES, SEED = 1.0, 20


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_minute_of_random_faults_leave_nothing_wrong(weights: Weights, reference: Reference, servers: Nursery, tmp_path: Path) -> None:
    states = States.make(tmp_path, [weights.base, weights.new, weights.third])
    prompts = work_out_answers(tmp_path, states, SEED, print, reference.lend())
    verdict = soak(tmp_path, states, prompts, MINUTES, SEED, print, popen=servers.popen)
    print(*verdict.lines, verdict.closing, sep="\n")
    assert not verdict.problems, "\n".join(
        (
            *verdict.problems,
            f"{tmp_path}/soak.log tells what happened around each PROBLEM, to the second; {tmp_path}/A1.log, B2.log and so on what the",
            f"engines said, hub.log the hub, mooncake/ the store; again: python -m hack.soak --minutes {MINUTES:g} --seed {SEED}",
        )
    )
    enough = (verdict.faults >= 10, verdict.resets >= 3, verdict.updates >= 1, verdict.ways >= 2, verdict.hits >= 10)
    assert enough == (True,) * 5, (*verdict.lines, verdict.closing)
