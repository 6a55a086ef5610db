"""The trainer's client against real hubs and agents: what a reset means, and that no fault makes it mean less."""

import os
import threading
import time
from pathlib import Path

import pytest

from epochkv_fence.client import ArgumentError, Pool, PoolClosed, ResetTimeout
from hack.waiting import eventually
from tests.support.cli import inside
from tests.support.hub import HubWorld, hub_world, together, using


def client_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "epochkv-client"]


# ---------------------------------------------------------------------------------------------------------------- resets
def test_a_reset_returns_when_every_engine_has_moved(world: HubWorld) -> None:
    agents = world.serving(2)
    agents[0][1].num_old_epoch = 3
    pool = world.connect()
    reset = pool.reset()
    assert (reset.epoch, reset.published, reset.engines, reset.laggards) == (1, True, 2, ())
    assert (reset.noop, reset.old_epoch_requests) == (False, 3)
    assert all(agent.view.epoch == 1 for agent, _ in agents)
    snapshot = world.snapshot()
    assert (snapshot.target, snapshot.published) == (1, 1)
    assert snapshot.origin is not None
    assert snapshot.origin.value == "Trainer"
    eventually(lambda: all(using(agent, 1) for agent, _ in agents), "everyone shares again")


def test_the_next_epoch_and_a_named_one(world: HubWorld) -> None:
    world.serving(1)
    pool = world.connect()
    assert [pool.reset().epoch for _ in range(3)] == [1, 2, 3]
    skipped = pool.reset(epoch=10)
    assert (skipped.epoch, skipped.published, skipped.noop) == (10, True, False)
    again = pool.reset(epoch=10)
    assert (again.epoch, again.published, again.noop) == (10, True, True)
    lower = pool.reset(epoch=4)
    assert (lower.epoch, lower.published, lower.noop) == (4, True, True)
    assert world.snapshot().target == 10
    assert pool.reset().epoch == 11


def test_without_waiting_it_returns_when_it_is_recorded(world: HubWorld) -> None:
    ((_, engine),) = world.serving(1)
    engine.is_busy = True
    pool = world.connect()
    reset = pool.reset(wait=False)
    assert (reset.epoch, reset.published, reset.laggards) == (1, False, ("engine-0",))
    assert world.snapshot().target == 1
    engine.is_busy = False
    done = pool.wait(1, timeout_s=20)
    assert (done.epoch, done.published, done.laggards) == (1, True, ())


def test_an_engine_that_never_acknowledges_is_named_and_fenced_by_its_lease(tmp_path: Path) -> None:
    with hub_world(tmp_path / "state", lease_seconds=2.0) as world:
        agents = world.serving(2)
        agents[0][1].is_busy = True
        pool = world.connect()
        reset = pool.reset(timeout_s=0.5)
        assert (reset.epoch, reset.published, reset.laggards) == (1, False, ("engine-0",))
        with pytest.raises(ResetTimeout, match=r"epoch 1 is recorded and not published .* not yet acknowledged by: engine-0") as caught:
            pool.reset(epoch=1, timeout_s=0.3, on_failure="crash")
        assert caught.value.reset.laggards == ("engine-0",)
        done = pool.reset(epoch=1, timeout_s=30)
        assert done.published
        assert done.laggards == ("engine-0",)  # it still has not: its lease was waited for
        assert time.monotonic() >= agents[0][0].view.lease_until or agents[0][0].view.epoch == 1


# ---------------------------------------------------------------------------------------------------------- many at once
def test_resets_of_many_threads_are_all_newer_than_their_calls(world: HubWorld) -> None:
    """Several that call at once may share an epoch: none of them has KV of before its call."""
    world.serving(2)
    pools = [world.connect() for _ in range(3)]

    def above(pool: Pool) -> bool:
        before = world.snapshot().target
        reset = pool.reset()
        return reset.published and not reset.noop and reset.epoch > before

    assert all(together([lambda number=number: above(pools[number % 3]) for number in range(9)]))
    snapshot = world.snapshot()
    assert 1 <= snapshot.target == snapshot.published <= 9


def test_an_epoch_that_the_owner_took_first_is_exceeded(world: HubWorld) -> None:
    ((_, engine),) = world.serving(1)
    pool = world.connect()
    engine.is_busy = True
    world.ask(1)
    eventually(lambda: world.snapshot().target == 1)
    engine.is_busy = False
    assert pool.reset().epoch == 2


# ------------------------------------------------------------------------------------------------------------- processes
def test_a_fork_is_refused_cleanly_and_connects_anew(world: HubWorld) -> None:
    pool = world.connect()
    assert pool.reset().epoch == 1
    child = os.fork()
    if child == 0:
        status = 1
        try:
            try:
                pool.reset()
            except PoolClosed:
                pool.close()
                with Pool.connect(world.folder) as own:
                    status = 0 if own.reset().published else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.reset().epoch == 3  # the parent's own connection is untouched


def test_close_ends_the_thread_and_later_calls_say_so(world: HubWorld) -> None:
    before = len(client_threads())
    pool = Pool.connect(world.folder)
    assert len(client_threads()) == before + 1
    pool.close()
    pool.close()
    assert len(client_threads()) == before
    with pytest.raises(PoolClosed, match="connect again"):
        pool.reset()
    forgotten = Pool.connect(world.folder)
    assert len(client_threads()) == before + 1
    del forgotten
    eventually(lambda: len(client_threads()) == before, "a pool that is dropped ends its thread")


def test_close_while_others_wait_ends_them(world: HubWorld) -> None:
    ((_, engine),) = world.serving(1)
    engine.is_busy = True
    pool = Pool.connect(world.folder)
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            pool.reset(timeout_s=60)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    eventually(lambda: world.snapshot().target == 1)
    pool.close()
    thread.join(20)
    assert not thread.is_alive()
    assert [type(error) for error in errors] == [PoolClosed]


def test_an_epoch_that_can_only_be_a_slip_is_refused_unless_forced(world: HubWorld, capsys: pytest.CaptureFixture[str]) -> None:
    pool = world.connect()
    assert pool.reset(epoch=1_000_000).published
    with pytest.raises(ArgumentError, match=r"epoch is 2000001, and the pool's target is 1000000; a target never goes down again"):
        pool.reset(epoch=2_000_001)
    config = ("--config", str(world.folder))
    code, _, errors = inside(capsys, "reset", *config, "--epoch", "999999999999")
    assert (code, errors.startswith("epochkv: --epoch is 999999999999, and the pool's target is 1000000")) == (2, True)
    assert "force" in errors
    assert world.snapshot().target == 1_000_000
    assert pool.reset(epoch=2_000_000).epoch == 2_000_000
    assert pool.reset(epoch=5).noop  # below the target, however far
    assert inside(capsys, "reset", *config, "--epoch", "4000000", "--force")[0] == 0
    assert pool.reset(epoch=9_000_000, force=True).epoch == 9_000_000
