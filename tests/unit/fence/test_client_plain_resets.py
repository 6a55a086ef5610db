"""Plain resets beside weight updates, over real sockets: no update is lost to one, and nobody joins by one."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers_fence import eventually
from tests.helpers_hub import bypassing, hub_world, using


@pytest.mark.parametrize("milliseconds", [0, 1, 2, 4, 8, 16])
def test_one_that_comes_while_fence_first_ends_takes_nothing_from_the_update(tmp_path: Path, milliseconds: int) -> None:
    with hub_world(tmp_path / "state", join_after_seconds=3600.0) as world, ThreadPoolExecutor(1) as threads:
        agents = world.serving(2)
        pool, other = world.connect(), world.connect()

        def reset() -> int:
            time.sleep(milliseconds / 1e3)
            return other.reset().epoch

        for step in range(5):
            with pool.weight_update(f"step-{step}", order="fence_first") as update:
                meanwhile = threads.submit(reset)
            assert update.reset is not None
            newest = max(update.reset.epoch, meanwhile.result())
            eventually(lambda: all(using(agent, newest) for agent, _ in agents), what=f"both share epoch {newest}")  # noqa: B023


def test_naming_the_present_weights_again_is_one_reset_and_lets_nobody_in(tmp_path: Path) -> None:
    with hub_world(tmp_path / "state", join_after_seconds=0.0) as world:
        (agent, _), *_ = world.serving(1)
        pool = world.connect()
        with pool.weight_update("step-1"):
            late, _ = world.agents.start("late")
            eventually(lambda: using(late, 0))
        for epoch, version in ((2, "step-1"), (3, None), (4, "step-1")):
            reset = pool.reset(weights_version=version)
            assert (reset.epoch, reset.published, reset.weights_version) == (epoch, True, "step-1")
            eventually(lambda: using(agent, epoch) and bypassing(late, epoch), what="the list decides")  # noqa: B023
        with pool.weight_update("step-1") as update:  # the same name, and a list of its own
            pass
        assert update.reset is not None
        assert update.reset.epoch == 5
        eventually(lambda: using(agent, 5) and using(late, 5))


def test_an_engine_that_an_update_keeps_out_does_not_join_by_its_age_whichever_hub_leads(tmp_path: Path) -> None:
    with hub_world(tmp_path / "state", join_after_seconds=0.0, lease_seconds=1.0) as world:
        (agent, _), *_ = world.serving(1)
        pool = world.connect()
        with pool.weight_update("step-1"):
            late, _ = world.agents.start("late")
            eventually(lambda: using(late, 0))
        for _ in range(2):
            for _ in range(2):
                epoch = pool.reset().epoch
                eventually(lambda: using(agent, epoch) and bypassing(late, epoch), what="the list decides")  # noqa: B023
            world.stop_hub()
            world.start_hub()
        assert pool.reset(weights_version="step-2").bypassed == 0, "both have been pushed to, says who names new weights"
        eventually(lambda: using(late, pool.status().target))
