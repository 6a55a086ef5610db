"""What an engine's hooks say reaches the hub over real sockets, cut to what a message can carry; one that raises costs no lease."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hack.waiting import eventually
from tests.support.fence import POOL, FakeEngine, FenceWorld
from tests.support.hub import using


@pytest.fixture
def world() -> Iterator[FenceWorld]:
    made = FenceWorld()
    yield made
    made.close()


def test_why_an_engine_lacks_tiers_reaches_the_hub_in_one_line_of_its_length(world: FenceWorld) -> None:
    class Broken(FakeEngine):
        def tiers(self) -> tuple[str, str]:
            raise RuntimeError("nothing to say")

    limited, broken = FakeEngine(), Broken()
    limited.lacks = ("LayoutUnsupported\n" + "x" * 300, "no tier\x1b[31m is used:\n" + "y" * 2000)
    hub = world.hub()
    world.lead(hub)
    agents = [world.agent(hub.endpoint, engine=engine)[0] for engine in (limited, broken)]
    eventually(lambda: all(using(agent, 0) for agent in agents))
    told = {view.pod: (view.tiers_off, view.tiers_note) for view in world.thread.call(lambda: hub.snapshot(POOL)).engines}
    reason, note = told["rollout-0"]
    assert reason == "LayoutUnsupported " + "x" * 235
    assert note == ("no tier [31m is used: " + "y" * 2000)[:1024]
    assert told["rollout-1"] == ("", ""), "it keeps its lease"


@pytest.mark.parametrize("broken", ["raises", "short"])
def test_an_engine_whose_digest_is_none_keeps_its_lease(world: FenceWorld, broken: str) -> None:
    class Broken(FakeEngine):
        def weights(self) -> tuple[bytes | None, str]:
            if broken == "raises":
                raise RuntimeError("no digest here")
            return b"short", ""

    hub = world.hub()
    world.lead(hub)
    agent, _ = world.agent(hub.endpoint, engine=Broken())
    eventually(lambda: using(agent, 0))
    # the hub hears of the adoption by the next heartbeat
    view = eventually(lambda: next((e for e in world.thread.call(lambda: hub.snapshot(POOL)).engines if e.state != "behind"), None))
    assert (view.weights, view.state) == (None, "unknown")
    assert view.weights_note == ("the engine cannot say what it holds" if broken == "raises" else "a digest of 5 bytes, not 16")
