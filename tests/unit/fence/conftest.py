"""Fixtures of the fence's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fence import FenceWorld
from tests.support.hub import Agents, HubProcess, HubWorld, hub_world
from tests.unit.fence.helpers import Driver, leading


@pytest.fixture
def world(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[HubWorld]:
    """A file hub, its agents and clients; with the HUB_OPTIONS of the test's module."""
    with hub_world(tmp_path / "state", **getattr(request.module, "HUB_OPTIONS", {})) as made:
        yield made


@pytest.fixture
def fence(request: pytest.FixtureRequest) -> Iterator[FenceWorld]:
    """Hubs and agents with an authority in memory; with the FENCE_OPTIONS of the test's module."""
    made = FenceWorld(**getattr(request.module, "FENCE_OPTIONS", {}))
    yield made
    made.close()


@pytest.fixture
def hub() -> Driver:
    """A hub that leads from now on."""
    return leading()


@pytest.fixture
def agents(hub: HubProcess) -> Iterator[Agents]:
    """Of the hub process that the test's module has as `hub`."""
    with Agents(hub.folder) as made:
        yield made
