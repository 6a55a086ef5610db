"""What the tests of pushes share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from epochkv_fence.client import Pool, WeightsDiverged, WeightsReport
from hack.waiting import eventually
from tests.support.fence import OLD, Running, engine_with
from tests.support.hub import HubWorld

EVERYBODY = ("engine-0", "engine-1", "engine-2")


def holding(world: HubWorld, weights: bytes = OLD, num_engines: int = 3) -> list[Running]:
    """Engines whose weights the hub has heard of."""
    engines = [world.agents.start(engine=engine_with(weights)) for _ in range(num_engines)]
    eventually(lambda: [view.weights for view in world.snapshot().engines] == [weights] * num_engines, "all are heard")
    return engines


def groups(report: WeightsReport | None) -> list[tuple[str, str, tuple[str, ...]]]:
    assert report is not None
    return [(group.id, group.label, group.engines) for group in report.groups]


def diverged(wait: Callable[[], object]) -> WeightsDiverged:
    with pytest.raises(WeightsDiverged) as caught:
        wait()
    return caught.value


def missed(pool: Pool, pushes: Callable[[], object], timeout_s: float = 1.0, **keys: Any) -> WeightsDiverged:
    """What an update raises whose push does this."""
    with pytest.raises(WeightsDiverged) as caught, pool.weight_update("step-1", timeout_s=timeout_s, **keys):
        pushes()
    return caught.value
