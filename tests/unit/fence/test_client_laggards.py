"""Who did not acknowledge, by name, also when the hub does not list it any more; and that one that only left is not named."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from epochkv_fence.client import ResetTimeout
from epochkv_fence.client.resets import Laggards
from epochkv_fence.protocol.messages import EngineStatus, Status
from hack.waiting import eventually
from tests.support.hub import HubWorld, Switch, hub_world, using

LEASE = 4.0


@contextmanager
def cut_off(tmp_path: Path) -> Iterator[HubWorld]:
    """Two engines that share; the way of one of them to the hub is cut, and a reset has to wait for its lease."""
    with hub_world(tmp_path / "state", lease_seconds=LEASE) as world:
        assert world.hub is not None
        switch = Switch(int(world.hub.server.endpoint.rpartition(":")[2]))
        try:
            agents = [world.agents.start("here")[0], world.agents.start("cut-off", endpoint=switch.endpoint)[0]]
            eventually(lambda: all(using(agent, 0) for agent in agents))
            switch.turn(None)
            yield world
        finally:
            switch.close()


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


def test_an_engine_that_says_goodbye_while_it_is_waited_for_was_not_fenced(tmp_path: Path) -> None:
    with hub_world(tmp_path / "state", lease_seconds=30.0) as world:
        (agent, engine), _ = world.serving(2)
        engine.is_busy = True
        pool = world.connect()
        named, results = threading.Event(), []
        thread = threading.Thread(
            target=lambda: results.append(pool.reset(timeout_s=25, progress=lambda standing: named.set() if standing.names else None))
        )
        thread.start()
        assert named.wait(20)
        threading.Timer(0.2, lambda: setattr(engine, "is_busy", False)).start()  # it has begun to leave, and acknowledges nothing more
        agent.stop()
        thread.join(30)
        assert (results[0].published, results[0].laggards) == (True, ())


def page(*engines: EngineStatus, published: int = 0, settling: float = 0.0) -> tuple[Status, list[EngineStatus]]:
    status = Status(1, 1, published, lease_seconds=10.0, settling_seconds=settling, engines=list(engines), total=len(engines))
    return status, list(engines)


def engine(number: int, epoch: int | None, silent_seconds: float = 0.1) -> EngineStatus:
    return EngineStatus(bytes([number]) * 16, epoch, engine=f"e{number}", silent_seconds=silent_seconds)


def test_whom_a_new_hub_has_not_heard_has_not_left() -> None:
    late = Laggards()
    assert late.take(*page(engine(1, 0), engine(2, 0), engine(3, 0)), 1) == ("e1", "e2", "e3")
    assert late.take(*page(engine(1, 0), engine(2, 0)), 1) == ("e1", "e2")
    assert late.names == ("e1", "e2")  # e3 was heard within its lease: it left
    assert late.take(*page(settling=11.0), 1) == ()
    assert late.names == ("e1", "e2")
    late.take(*page(engine(2, 1), published=1, settling=1.0), 1)
    assert late.names == ("e1",)


def test_who_joins_when_it_is_published_is_not_late() -> None:
    late = Laggards()
    late.take(*page(engine(1, None), engine(2, 0, silent_seconds=9.5)), 1)
    late.take(*page(engine(1, None), engine(3, None), published=1), 1)
    assert late.names == ("e1", "e2")
