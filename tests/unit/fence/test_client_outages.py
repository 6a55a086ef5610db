"""Resets while hubs are gone, refuse, restart, are killed or frozen, or cannot be reached."""

import signal
import threading
import time
from pathlib import Path

import pytest

from epochkv_fence.client import HubUnreachable, KeyRefused, Pool, ResetNotRecorded
from hack.waiting import eventually
from tests.support.hub import HubProcess, HubWorld, hub_world


def client_threads() -> int:
    return sum(thread.name == "epochkv-client" for thread in threading.enumerate())


def test_a_key_that_is_refused_and_a_hub_that_is_another(world: HubWorld, tmp_path: Path) -> None:
    with hub_world(tmp_path / "other") as other:
        mixed = tmp_path / "mixed"

        def take(**files: Path) -> Path:
            mixed.mkdir(exist_ok=True)
            for name in ("connection.json", "hub.pub", "client.pub", "client.key"):
                folder = files.get(name.split(".")[0], world.folder)
                (mixed / name).write_bytes((folder / name).read_bytes())
            return mixed

        started, before = time.monotonic(), client_threads()
        with pytest.raises(
            KeyRefused, match=r"it refuses our key, which is of no pool that this hub serves, or was retired: take the files of"
        ):
            Pool.connect(take(client=other.folder), timeout_s=60)
        assert time.monotonic() - started < 30  # a wrong key is not waited for
        with pytest.raises(KeyRefused, match=r"hub\.pub is not the key of that hub, what listens there is no hub, or it hangs$"):
            Pool.connect(take(hub=other.folder), timeout_s=60)
        eventually(lambda: client_threads() == before, "their threads end")


def test_without_a_hub_a_reset_raises_whatever_on_failure_says_and_works_when_it_is_back(tmp_path: Path) -> None:
    with hub_world(tmp_path / "state", lease_seconds=2.0) as world:
        ((agent, _),) = world.serving(1)
        pool = world.connect()
        world.stop_hub()
        for epoch in (None, 7):
            with pytest.raises(ResetNotRecorded, match="engines go on with the KV they have: ask again") as caught:
                pool.reset(epoch, timeout_s=0.5, on_failure="bypass")
            assert caught.value.epoch == epoch
        with pytest.raises(HubUnreachable):
            pool.status(timeout_s=0.3)
        world.start_hub()
        reset = pool.reset(timeout_s=60)
        assert (reset.epoch, reset.published) == (1, True)
        eventually(lambda: agent.view.epoch == 1)


def test_kill_9_of_the_hub_again_and_again_costs_time_and_no_epoch(tmp_path: Path) -> None:
    process = HubProcess(tmp_path / "state", "--lease-seconds", "1").start()
    done, stop, failures = [], threading.Event(), []
    with Pool.connect(process.folder) as pool:

        def train() -> None:
            while not stop.is_set():
                try:
                    done.append(pool.reset(timeout_s=60))
                except BaseException as error:
                    failures.append(error)
                    return

        thread = threading.Thread(target=train)
        thread.start()
        try:
            for kill in range(4):
                seen = len(done)
                eventually(lambda seen=seen: len(done) >= seen + 3 or failures, "resets go on", 60)  # type: ignore[misc]
                time.sleep(0.003 * kill)
                process.kill()
                process.start()
            seen = len(done)
            eventually(lambda: len(done) >= seen + 2 or failures, "resets go on after the last kill", 60)
        finally:
            stop.set()
            thread.join(90)
        assert failures == []
        assert all(reset.published for reset in done)
        epochs = [reset.epoch for reset in done]
        assert epochs == sorted(set(epochs))  # each one's own, never an older one
        assert pool.status().published == epochs[-1]
    assert process.end() == 0


def test_a_frozen_hub_is_waited_for(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "state") as process, Pool.connect(process.folder) as pool:
        process.send(signal.SIGSTOP)
        with pytest.raises(ResetNotRecorded):
            pool.reset(timeout_s=0.5)
        threading.Timer(0.5, lambda: process.send(signal.SIGCONT)).start()
        assert pool.reset(timeout_s=60).published
