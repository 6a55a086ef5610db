"""A hub that leads, for clients that say what they like."""

from collections.abc import Iterator

import pytest

from epochkv_fence.net.server import HubServer
from tests.support.fence import FenceWorld


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[FenceWorld]:
    """With the LEASE of the test's module."""
    made = FenceWorld(lease_seconds=getattr(request.module, "LEASE", 30.0))
    yield made
    made.close()


@pytest.fixture
def hub(world: FenceWorld) -> HubServer:
    return world.hub()
