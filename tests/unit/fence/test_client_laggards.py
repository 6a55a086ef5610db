"""Who did not acknowledge, by name, also when the hub does not list it any more."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from epochkv_fence.client import ResetTimeout
from hack.waiting import eventually
from tests.support.hub import HubWorld, Switch, hub_world, using

LEASE = 4.0


@contextmanager
def cut_off(tmp_path: Path) -> Iterator[HubWorld]:
    """Two engines that share; the way of one of them to the hub is cut, and a reset has to wait for its lease."""
    with hub_world(tmp_path / "state", lease_seconds=LEASE) as world:
        with closing(Switch(world.port)) as switch:
            agents = [world.agents.start("here")[0], world.agents.start("cut-off", endpoint=switch.endpoint)[0]]
            eventually(lambda: all(using(agent, 0) for agent in agents))
            switch.turn(None)
            yield world


def test_an_engine_that_fell_silent_is_named_when_its_lease_has_fenced_it(tmp_path: Path) -> None:
    with cut_off(tmp_path) as world:
        done = world.connect().reset(timeout_s=30)
        assert (done.epoch, done.published) == (1, True)
        assert [view.pod or view.engine for view in world.snapshot().engines if view.alive] == ["here"]  # the hub's list has lost it
        assert done.laggards == ("cut-off",)


def test_waiting_names_it_too(tmp_path: Path) -> None:
    with cut_off(tmp_path) as world:
        pool = world.connect()
        assert pool.reset(wait=False).epoch == 1
        done = pool.wait(1, timeout_s=30)
        assert (done.published, done.laggards, done.noop) == (True, ("cut-off",), False)
        again = pool.wait(1, timeout_s=30)
        assert (again.published, again.laggards, again.noop) == (True, (), True)


def test_of_an_epoch_that_nobody_asked_for_nobody_is_late(tmp_path: Path) -> None:
    with hub_world(tmp_path / "state") as world:
        world.serving(2)
        with pytest.raises(ResetTimeout, match="nobody has asked for it") as caught:
            world.connect().wait(7, timeout_s=1.0)
        assert (caught.value.reset.engines, caught.value.reset.published, caught.value.reset.laggards) == (2, False, ())
