"""The simulator of names over many schedules.

EPOCHKV_SEEDS=500 runs more schedules, EPOCHKV_SEED=7 one of them.
"""

from __future__ import annotations

import os
import random

import pytest

from tests.scheduler.names_simulator import Names, reached
from tests.scheduler.rigs import MakeRig

DRAWN = int(os.environ.get("EPOCHKV_SEED", random.SystemRandom().randrange(10**6)))
SEEDS = [*map(str, range(int(os.environ.get("EPOCHKV_SEEDS", "24")))), "drawn"]


@pytest.mark.parametrize(
    ("layout", "seed"),
    [
        *(pytest.param(("full",), seed, id=seed) for seed in SEEDS),
        *(pytest.param(("full", "state"), seed, id=f"full+state-{seed}") for seed in SEEDS[::3]),
    ],
)
def test_names_in_random_schedules(make_rig: MakeRig, seed: str) -> None:
    number = DRAWN if seed == "drawn" else int(seed)
    print(f"EPOCHKV_SEED={number}")
    Names(make_rig, random.Random(f"names{number}")).run()
    reached["schedules"] += 1


def test_the_schedules_reached_what_they_are_for() -> None:
    """Runs after them: a schedule without loads, roll-backs or late changes proves nothing."""
    if reached["schedules"] < len(SEEDS) + len(SEEDS[::3]):
        pytest.skip("this process has not run all of the random schedules")
    for name in ("loads_done", "blocks_stored", "watch_late", "watch_unseen", "watch_unknown", "watch_changes", "invalidated", "restart"):
        assert reached[name] > 0, (name, reached)
