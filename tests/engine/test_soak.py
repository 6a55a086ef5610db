"""Two minutes of `make soak`: three engines under random faults, resets and weight changes, from a fixed seed."""

from __future__ import annotations

from pathlib import Path

import pytest

from hack.soak.run import soak, work_out_answers
from tests.engine.conftest import Reference, Weights

MINUTES, SEED = 2.0, 20


@pytest.mark.timeout(900)
def test_two_minutes_of_random_faults_leave_nothing_wrong(weights: Weights, reference: Reference, tmp_path: Path) -> None:
    folders = [weights.base, weights.new, weights.third]
    prompts = work_out_answers(tmp_path, folders, SEED, print, reference.lend())
    verdict = soak(tmp_path, folders, prompts, MINUTES, SEED, print)
    print(*verdict.lines, verdict.closing, sep="\n")
    assert verdict.problems == ()
    faults, resets, asked = (int(part.split()[0]) for part in verdict.closing.split(", ")[1:4])
    assert faults >= 20
    assert resets >= 5
    assert asked >= 50
