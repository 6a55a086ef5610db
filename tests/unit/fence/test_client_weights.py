"""Weight updates against real hubs and agents: who shares the new epoch, and what every way of failing leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from epochkv_fence.client import (
    AsyncPool,
    HubUnreachable,
    Pool,
    PoolClosed,
    Reset,
    ResetNotRecorded,
    ResetTimeout,
    Standing,
    UpdateInProgress,
)
from epochkv_fence.client.calls import Ask, Calls
from epochkv_fence.transport import AgentThread
from tests.helpers_fence import FakeEngine, eventually
from tests.helpers_hub import HubWorld, bypassing, hub_world, together, using


@pytest.fixture
def world(tmp_path: Path) -> Iterator[HubWorld]:
    """Nobody joins by age: whoever shares an epoch above 0 was named."""
    with hub_world(tmp_path / "state", join_after_seconds=3600.0) as made:
        yield made


def all_using(agents: list[tuple[AgentThread, FakeEngine]], epoch: int) -> None:
    eventually(lambda: all(using(agent, epoch) for agent, _ in agents), what=f"everyone shares epoch {epoch}")


def all_bypassing(agents: list[tuple[AgentThread, FakeEngine]], epoch: int) -> None:
    eventually(lambda: all(bypassing(agent, epoch) for agent, _ in agents), what=f"everyone is in bypass at epoch {epoch}")


# --------------------------------------------------------------------------------------------------------- the two orders


def test_push_under_pause_names_exactly_those_that_were_there(world: HubWorld) -> None:
    agents = world.serving(2)
    pool = world.connect()
    with pool.weight_update("step-1") as update:
        assert (update.epoch, update.order, len(update.boots)) == (None, "push_under_pause", 2)
        assert [engine.name for engine in update.engines] == ["engine-0", "engine-1"]
        late, _ = world.agents.start("late")
        eventually(lambda: using(late, 0), what="the newcomer shares the old epoch")
        assert all(using(agent, 0) for agent, _ in agents)  # nothing is told before the push is over
    assert update.reset is not None
    assert (update.reset.epoch, update.reset.published, update.reset.weights_version) == (1, True, "step-1")
    assert all(using(agent, 1) for agent, _ in agents)  # it returns when those that have the weights share
    eventually(lambda: bypassing(late, 1), what="the newcomer is in bypass")
    assert pool.status().weights_version == "step-1"
    states = {engine.name: engine.state for engine in pool.engines()}
    assert states == {"engine-0": "use", "engine-1": "use", "late": "bypass"}
    with pool.weight_update("step-2"):
        pass
    all_using([*agents, (late, FakeEngine())], 2)


def test_fence_first_takes_everybody_off_before_the_push(world: HubWorld) -> None:
    agents = world.serving(2)
    pool = world.connect()
    with pool.weight_update("step-1", order="fence_first") as update:
        assert update.epoch == 1
        assert world.snapshot().published == 1
        assert all(bypassing(agent, 1) for agent, _ in agents)
        late, _ = world.agents.start("late")
        eventually(lambda: bypassing(late, 1))
    assert update.reset is not None
    assert (update.reset.epoch, update.reset.published) == (1, True)
    assert world.snapshot().target == 1  # one epoch for both steps
    assert all(using(agent, 1) for agent, _ in agents)
    assert bypassing(late, 1)


def test_an_engine_that_restarts_during_the_push_does_not_share(tmp_path: Path) -> None:
    with hub_world(tmp_path / "state", lease_seconds=2.0, join_after_seconds=3600.0) as world:
        agents = world.serving(2)
        pool = world.connect()
        with pool.weight_update("step-1") as update:
            agents[0][0].stop()
            again, _ = world.agents.start("engine-0")
            eventually(lambda: using(again, 0))
        assert update.reset is not None
        assert update.reset.published
        assert using(agents[1][0], 1)
        eventually(lambda: bypassing(again, 1), what="same name, another boot: base weights")


def test_an_engine_that_dies_during_the_push_is_not_waited_for(tmp_path: Path) -> None:
    with hub_world(tmp_path / "state", lease_seconds=2.0, join_after_seconds=3600.0) as world:
        agents = world.serving(2)
        pool = world.connect()
        with pool.weight_update("step-1", timeout_s=60) as update:
            agents[0][0].stop()
        assert update.reset is not None
        assert update.reset.published
        assert using(agents[1][0], 1)


def test_an_engine_that_hangs_is_named(tmp_path: Path) -> None:
    with hub_world(tmp_path / "state", join_after_seconds=3600.0) as world:
        agents = world.serving(2)
        agents[1][1].is_busy = True
        pool = world.connect()
        with pool.weight_update("step-1", timeout_s=1.0) as update:
            pass
        assert update.reset is not None
        assert (update.reset.published, update.reset.laggards) == (False, ("engine-1",))
        with pytest.raises(ResetTimeout, match="engine-1") as caught:
            with pool.weight_update("step-2", timeout_s=1.0, on_failure="crash"):
                pass
        assert caught.value.__notes__ == [
            "EpochKV: epoch 2 is recorded: engines leave the older ones now, those that do not answer with their leases"
        ]
        with pytest.raises(ResetTimeout, match="engine-1"):
            with pool.weight_update("step-3", order="fence_first", timeout_s=1.0):
                raise AssertionError("the block must not begin before the old epoch is fenced")


def test_a_plain_reset_leaves_young_engines_in_bypass_and_an_update_brings_them_back(world: HubWorld) -> None:
    agents = world.serving(2)
    pool = world.connect()
    assert pool.reset().bypassed == 2
    all_bypassing(agents, 1)
    with pool.weight_update("step-1"):
        pass
    all_using(agents, 2)


# ------------------------------------------------------------------------------------------------------------- failures


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_inside_leaves_nobody_sharing(world: HubWorld, kind: type[BaseException]) -> None:
    agents = world.serving(2)
    pool = world.connect()
    with pytest.raises(kind) as caught:
        with pool.weight_update("step-1"):
            raise kind("the push failed")
    assert caught.value.__notes__ == ["EpochKV: epoch 1: engines serve without reuse until the next weight update"]
    all_bypassing(agents, 1)
    assert re.fullmatch(r"failed: step-1 [0-9a-f]{8}", pool.status().weights_version)
    with pool.weight_update("step-1"):
        pass
    all_using(agents, 2)


def test_an_exception_inside_fence_first_is_told_in_an_epoch_of_its_own(world: HubWorld) -> None:
    agents = world.serving(1)
    pool = world.connect()
    with pytest.raises(RuntimeError):
        with pool.weight_update("step-1", order="fence_first"):
            raise RuntimeError("the push failed")
    all_bypassing(agents, 2)
    assert re.fullmatch(r"failed: step-1 [0-9a-f]{8}", pool.status().weights_version)
    pool.reset()
    all_bypassing(agents, 3)


def test_the_owner_raises_the_pool_in_the_middle_of_fence_first(world: HubWorld) -> None:
    agents = world.serving(2)
    pool = world.connect()
    with pool.weight_update("step-1", order="fence_first") as update:
        world.ask(2)
        eventually(lambda: world.snapshot().published == 2)
    assert update.reset is not None
    assert (update.reset.epoch, update.reset.published) == (3, True)  # marks of epoch 1 would mean nothing any more
    all_using(agents, 3)

    def fail() -> None:
        with pool.weight_update("step-2", order="fence_first"):
            world.ask(5)
            eventually(lambda: world.snapshot().published == 5)
            raise RuntimeError("the push failed")

    with pytest.raises(RuntimeError):
        fail()
    all_bypassing(agents, 6)


def test_a_hub_that_is_gone_when_the_push_fails_is_said_on_the_exception(world: HubWorld) -> None:
    agents = world.serving(1)
    pool = world.connect()

    def fail() -> None:
        with pool.weight_update("step-1", timeout_s=1.0):
            world.stop_hub()
            raise RuntimeError("the push failed")

    with pytest.raises(RuntimeError) as caught:
        fail()
    (note,) = caught.value.__notes__
    assert "the pool could not be told, so engines keep the old epoch; keep them paused until the next update" in note
    assert agents[0][0].view.epoch == 0


def test_a_hub_that_is_gone_when_the_push_is_done_raises(world: HubWorld) -> None:
    world.serving(1)
    pool = world.connect()
    with pytest.raises(ResetNotRecorded) as caught:
        with pool.weight_update("step-1", timeout_s=1.0):
            world.stop_hub()
    assert caught.value.__notes__ == ["EpochKV: engines have step-1 and may go on with older KV: keep them paused and update again"]


def test_a_hub_that_is_gone_when_a_push_behind_the_fence_is_done_is_said_with_the_epoch(world: HubWorld) -> None:
    agents = world.serving(1)
    pool = world.connect()
    with pytest.raises(HubUnreachable, match="epoch 1 is published and engines serve in bypass there") as caught:
        with pool.weight_update("step-1", order="fence_first", timeout_s=1.0):
            world.stop_hub()
    (note,) = caught.value.__notes__
    assert note == "EpochKV: engines are at epoch 1, in bypass (without reuse) until a hub is told that they have step-1"
    all_bypassing(agents, 1)


def test_a_failed_push_does_not_take_somebody_elses_epoch_for_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plain reset takes the number between the client's question and its ask. It lets nobody share, as the push is not over."""
    with hub_world(tmp_path / "state", join_after_seconds=0.0) as world:
        agents = world.serving(1)
        pool = world.connect()
        pursue = Calls._pursue

        async def late(self: Calls, ask: Ask, *rest: Any) -> None:
            def overtake() -> None:
                world.ask(1)
                all_bypassing(agents, 1)

            await asyncio.to_thread(overtake)
            await pursue(self, ask, *rest)

        monkeypatch.setattr(Calls, "_pursue", late)
        with pytest.raises(RuntimeError) as caught:
            with pool.weight_update("step-1"):
                raise RuntimeError("the push failed")
        assert caught.value.__notes__ == ["EpochKV: epoch 2: engines serve without reuse until the next weight update"]
        all_bypassing(agents, 2)


def test_the_longest_version_can_fail(world: HubWorld) -> None:
    agents = world.serving(1)
    pool = world.connect()
    with pytest.raises(RuntimeError):
        with pool.weight_update("\U0001f40c" * 253):
            raise RuntimeError("the push failed")
    all_bypassing(agents, 1)
    shown = pool.status().weights_version
    assert shown.startswith("failed: \U0001f40c")
    assert len(shown) == 253


@pytest.mark.parametrize("kind", [BrokenPipeError, SystemExit])
def test_a_progress_callback_that_raises_changes_nothing(
    world: HubWorld, kind: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    agents = world.serving(1)
    pool = world.connect()
    told: list[Standing] = []

    def broken(standing: Standing) -> None:
        told.append(standing)
        raise kind("the terminal is gone")

    with pool.weight_update("step-1", progress=broken) as update:
        pass
    assert update.reset is not None
    assert update.reset.published
    all_using(agents, 1)
    agents[0][1].is_busy = True
    assert not pool.reset(timeout_s=3.0, progress=broken).published
    agents[0][1].is_busy = False
    assert pool.wait(2, progress=broken).published
    assert len(told) >= 4
    assert sum("the progress callback failed" in record.message for record in caplog.records) == 3  # once each


@pytest.mark.parametrize("order", ["push_under_pause", "fence_first"])
def test_a_hub_that_restarts_during_the_push_learns_the_list_from_the_client(tmp_path: Path, order: str) -> None:
    with hub_world(tmp_path / "state", lease_seconds=2.0, join_after_seconds=3600.0) as world:
        agents = world.serving(2)
        pool = world.connect()
        with pool.weight_update("step-1", order=order, timeout_s=60) as update:  # type: ignore[arg-type]
            world.stop_hub()
            world.start_hub()
        assert update.reset is not None
        assert update.reset.published
        all_using(agents, update.reset.epoch)


TRAINER = """
import sys, time
from epochkv_fence.client import Pool
pool = Pool.connect(sys.argv[1])
with pool.weight_update("step-1", order=sys.argv[2]):
    print("pushing", flush=True)
    sys.stdin.readline()
print("done", pool.status().target, flush=True)
"""


@pytest.fixture
def brief(tmp_path: Path) -> Iterator[HubWorld]:
    """Short leases, for trainers that die."""
    with hub_world(tmp_path / "brief", lease_seconds=2.0, join_after_seconds=3600.0) as made:
        yield made


@contextlib.contextmanager
def pushing(world: HubWorld, order: str = "push_under_pause") -> Iterator[subprocess.Popen[str]]:
    """A trainer in a process of its own, in the middle of its update; it ends that when it is told to."""
    command = [sys.executable, "-c", TRAINER, str(world.folder), order]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as trainer:
        assert trainer.stdout is not None
        try:
            assert trainer.stdout.readline() == "pushing\n"
            yield trainer
        finally:
            trainer.kill()


def updated(pool: Pool, version: str, push: Callable[[], None] = lambda: None) -> Reset:
    """An update as soon as nobody else has one open."""
    deadline = time.monotonic() + 60
    while True:
        try:
            with pool.weight_update(version) as update:
                push()
        except UpdateInProgress as error:
            if error.open is None or time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            assert update.reset is not None
            return update.reset


@pytest.mark.parametrize("order", ["push_under_pause", "fence_first"])
def test_a_trainer_that_is_killed_in_the_middle(brief: HubWorld, order: str) -> None:
    """What it had pushed nobody knows: a lease and its margin later the hub says so in an epoch that nobody shares, nor does
    anybody after a plain reset, before that or after it. The next update heals it."""
    agents = brief.serving(2)
    with pushing(brief, order) as trainer:
        trainer.kill()
        assert trainer.wait(30) == -signal.SIGKILL
    target = brief.snapshot().target
    if order == "push_under_pause":
        assert target == 0
        assert all(using(agent, 0) for agent, _ in agents)
    else:
        assert target == 1
        all_bypassing(agents, 1)
    pool = brief.connect()
    assert pool.reset().bypassed == 2, "age proves nothing while it may still be pushing"
    eventually(lambda: brief.snapshot().weights_version.startswith("failed: step-1 "), 30)
    assert brief.snapshot().target == target + 2
    all_bypassing(agents, target + 2)
    assert pool.reset().bypassed == 2
    assert updated(pool, "step-2").epoch == target + 4
    all_using(agents, target + 4)


@pytest.mark.parametrize("order", ["push_under_pause", "fence_first"])
def test_a_second_trainer_is_refused_with_the_name_of_the_first(world: HubWorld, order: str) -> None:
    agents = world.serving(2)
    pool = world.connect()
    with pushing(world, order) as trainer:
        target = world.snapshot().target
        begun = time.time()
        with pytest.raises(UpdateInProgress) as caught:
            with pool.weight_update("step-2"):
                raise AssertionError("must not begin")
        assert re.search(
            rf"'process {trainer.pid} on .+' has had an update to 'step-1' open since (\d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d) UTC",
            str(caught.value),
        )
        assert caught.value.open is not None
        assert 0 < caught.value.open.left_seconds <= 33.0
        assert 0 <= caught.value.open.since_seconds < time.time() - begun + 30
        assert world.snapshot().target == target, "nothing was asked of the pool"
        pool.reset()  # a reset is nobody's update
        assert trainer.stdin is not None
        trainer.stdin.write("go on\n")
        trainer.stdin.flush()
        assert trainer.stdout is not None
        assert trainer.stdout.readline().startswith("done ")
    with pool.weight_update("step-2") as update:
        pass
    assert update.reset is not None
    all_using(agents, update.reset.epoch)


def test_one_process_cannot_open_two(world: HubWorld) -> None:
    world.serving(1)
    pool = world.connect()
    with pool.weight_update("step-1"):
        with pytest.raises(UpdateInProgress, match=rf"'process {os.getpid()} on .+' has had an update to 'step-1' open"):
            with pool.weight_update("step-2"):
                raise AssertionError("must not begin")
    with pytest.raises(RuntimeError), pool.weight_update("step-3"):
        raise RuntimeError("the push failed")
    with pool.weight_update("step-4"):  # neither an end nor a failure keeps anybody waiting
        pass


def test_a_push_that_takes_longer_than_a_lease_is_kept_open_also_over_a_change_of_hub(brief: HubWorld) -> None:
    agents = brief.serving(2)
    pool, other = brief.connect(), brief.connect()
    with pool.weight_update("step-1") as update:
        for _ in range(2):
            time.sleep(4.0)  # more than lease and margin
            with pytest.raises(UpdateInProgress):
                with other.weight_update("step-2", timeout_s=30):
                    raise AssertionError("must not begin")
            brief.stop_hub()
            brief.start_hub()
    assert update.reset is not None
    all_using(agents, update.reset.epoch)


def test_a_trainer_that_froze_and_goes_on_while_another_one_pushes_spoils_both(brief: HubWorld) -> None:
    """Engines may hold some weights of both, so nobody shares under either name, and both are told."""
    agents = brief.serving(2)
    pool = brief.connect()
    output: list[str] = []
    with pushing(brief) as trainer:

        def wakes() -> None:
            os.kill(trainer.pid, signal.SIGCONT)
            output.append(trainer.communicate("go on\n", timeout=60)[0])

        os.kill(trainer.pid, signal.SIGSTOP)
        with pytest.raises(UpdateInProgress, match="may hold some weights of both") as caught:
            updated(pool, "step-2", push=wakes)
        assert "UpdateInProgress: the update of pool policy to 'step-1' was not kept open" in output[0]
        assert re.search(r"EpochKV: epoch \d+: engines serve without reuse", output[0])
        assert caught.value.pushed
        assert any(re.match(r"EpochKV: epoch \d+: engines serve without reuse", note) for note in caught.value.__notes__)
    all_bypassing(agents, brief.snapshot().target)
    assert brief.snapshot().target == 4, "the first one was taken for dead, then both for mixed, and each said so at its end"
    assert updated(pool, "step-3").epoch == 5
    all_using(agents, 5)


def test_updates_that_race_follow_one_another(world: HubWorld) -> None:
    agents = world.serving(2)
    pools = [world.connect() for _ in range(3)]
    epochs = together([lambda number=number: updated(pools[number], f"v{number}").epoch for number in range(3)])
    assert len(set(epochs)) == 3
    all_using(agents, max(epochs))


def test_arguments_of_an_update(world: HubWorld) -> None:
    pool = world.connect()
    for arguments, match in (
        ({"version": ""}, "has 0 characters"),
        ({"version": "step-\udcff"}, "no Unicode text"),
        ({"version": "step-42\n"}, r"version is 'step-42\\n'; give one line without control characters"),
        ({"version": "step-\u202842"}, "one line"),
        ({"version": "v", "order": "push_while_serving"}, "use 'push_under_pause' or 'fence_first'"),
        ({"version": "v", "timeout_s": -1}, "timeout_s is -1"),
        ({"version": "v", "on_failure": "x"}, "use 'bypass' or 'crash'"),
    ):
        with pytest.raises(ValueError, match=match):
            with pool.weight_update(**arguments):  # type: ignore[arg-type]
                raise AssertionError("must not begin")
    assert world.snapshot().target == 0


# -------------------------------------------------------------------------------------------------------------- asyncio


def test_asyncio_does_all_of_it(world: HubWorld) -> None:
    agents = world.serving(2)

    async def body() -> None:
        async with await AsyncPool.connect(world.folder) as pool:
            assert (pool.name, pool.uid) == ("policy", world.snapshot().uid)
            resets = await asyncio.gather(*(pool.reset(weights_version=f"v{number}") for number in range(4)))
            assert len({reset.epoch for reset in resets}) == 4
            top = max(reset.epoch for reset in resets)
            assert (await pool.wait(top, timeout_s=20)).published
            async with pool.weight_update("step-9", order="fence_first") as update:
                assert update.epoch == top + 1
                await asyncio.sleep(0)
            assert update.reset is not None
            assert update.reset.published
            assert [engine.state for engine in await pool.engines()] == ["use", "use"]
            assert (await pool.status()).target == top + 1

    asyncio.run(body())
    assert all(agent.view.epoch is not None for agent, _ in agents)


def test_asyncio_a_cancelled_push_leaves_nobody_sharing(world: HubWorld) -> None:
    agents = world.serving(1)

    async def push(pool: AsyncPool, began: asyncio.Event) -> None:
        async with pool.weight_update("step-1"):
            began.set()
            await asyncio.sleep(60)

    async def body() -> None:
        async with await AsyncPool.connect(world.folder) as pool:
            began = asyncio.Event()
            task = asyncio.create_task(push(pool, began))
            await began.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            agents[0][1].is_busy = True
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pool.reset(), 0.3)
            agents[0][1].is_busy = False
            assert (await pool.status()).target >= 1

    asyncio.run(body())
    eventually(lambda: agents[0][0].view.mode.value == "Bypass")


def test_asyncio_a_pool_that_is_closed_ends_what_waits(world: HubWorld) -> None:
    ((_, engine),) = world.serving(1)
    engine.is_busy = True

    async def body() -> None:
        pool = await AsyncPool.connect(world.folder)
        task = asyncio.create_task(pool.reset())
        await asyncio.to_thread(eventually, lambda: world.snapshot().target == 1)
        await pool.close()
        with pytest.raises(PoolClosed):
            await task
        with pytest.raises(PoolClosed):
            await pool.status()
        pool = await AsyncPool.connect(world.folder)
        with pytest.raises(PoolClosed) as caught:
            async with pool.weight_update("step-1"):
                await pool.close()
        (note,) = caught.value.__notes__
        assert note == "EpochKV: engines have step-1, and whether its epoch is recorded is not known: keep them paused and update again"

    asyncio.run(body())


def test_the_environment_alone_connects(world: HubWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    content = json.loads((world.folder / "connection.json").read_text())
    del content["hub"]["credentials_dir"]
    monkeypatch.setenv("EPOCHKV_CONFIG", json.dumps(content))
    for name, file in (("HUB_PUBLIC", "hub.pub"), ("CLIENT_PUBLIC", "client.pub"), ("CLIENT_SECRET", "client.key")):
        monkeypatch.setenv(f"EPOCHKV_{name}_KEY", (world.folder / file).read_text())
    with Pool.connect() as pool:
        assert pool.reset().published
    assert os.environ["EPOCHKV_CONFIG"].startswith("{")
