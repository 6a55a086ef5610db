"""Random edits while the API server fails and operators die; afterwards the namespace equals a fresh install. More: `make chaos`."""

import os
import random
from pathlib import Path

import pytest

from hack.chaos.run import chaos
from hack.cluster.controlplane import ControlPlane

SECONDS = float(os.environ.get("EPOCHKV_CHAOS_SECONDS", "45"))


@pytest.mark.slow  # each kind of edit, fault and death has a test of its own in this layer
@pytest.mark.timeout(900)
def test_a_storm_ends_as_a_fresh_install(plane: ControlPlane, tmp_path: Path) -> None:
    seed = random.SystemRandom().randrange(1 << 31)
    print(f"seed {seed}")
    verdict = chaos(plane, tmp_path, "operator-chaos", SECONDS, seed, print)
    assert not verdict.problems, "\n".join((f"replay: python -m hack.chaos --minutes {SECONDS / 60:g} --seed {seed}", *verdict.problems))
    # What was meant to happen did.
    assert verdict.edits >= SECONDS / 2, verdict.lines
    assert verdict.faults >= 5, verdict.lines
    assert verdict.kills >= 1, verdict.lines
    assert verdict.epochs >= 1, verdict.lines
