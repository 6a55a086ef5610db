"""A hub that leads, for clients that say what they like."""

from __future__ import annotations

import pytest

from epochkv_fence.net import HubServer
from tests.support.fence import FenceWorld


@pytest.fixture
def hub(world: FenceWorld) -> HubServer:
    made = world.hub()
    world.lead(made)
    return made
