"""Real verl: rollouts share KV, a push of weights ends all that was shared before, and a push that breaks off harms nothing.

The tests share two rollouts, which take minutes to start, and run in order.
"""

import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import ray

from hack.waiting import eventually
from tests.trainers.verl.actors import HELD, SENT
from tests.trainers.verl.lab import World

PUSH_SECONDS = 240
pytestmark = pytest.mark.timeout(1200)  # with the start of three engines; on a machine with other work


@pytest.fixture(scope="module")
def driver(world: World) -> Iterator[Any]:
    """A process with verl's manager, for the tests that do not kill it."""
    driver = world.verl.driver()
    yield driver
    ray.kill(driver)


def push(world: World, driver: Any, name: str, step: int) -> None:
    world.verl.trainer.train(str(world.weights[name]))
    ray.get(driver.update_weights.remote(step), timeout=PUSH_SECONDS)


def test_a_rollout_takes_what_the_other_has_computed(world: World, driver: Any) -> None:
    push(world, driver, "base", 1)
    world.first_answers("base")
    world.shares("base", 2)


def test_after_a_push_nothing_old_is_found_and_sharing_goes_on(world: World, driver: Any) -> None:
    push(world, driver, "new", 2)
    world.first_answers("new")
    world.shares("new", 2)


def test_the_manager_killed_in_the_middle_of_a_push(world: World, driver: Any) -> None:
    verl, held = world.verl, world.folder / HELD
    (world.folder / SENT).unlink()
    doomed = verl.driver()
    pid = ray.get(doomed.pid.remote(), timeout=120)
    verl.trainer.train(str(world.weights["third"]), hold_at=32)  # of 47: two buckets of three have left
    running = doomed.update_weights.remote(3)
    eventually(held.exists, "the trainer waits in the middle of its push", PUSH_SECONDS)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(running, timeout=60)
    assert held.exists()
    assert not (world.folder / SENT).exists()

    # Nobody ends the pause of the rollouts but a person. Requests wait in them while their weights are half old and half new.
    waiting = [replica.server_handle.resume_generation.remote() for replica in verl.replicas]
    asked = [verl.generate(replica, world.prompts[replica]) for replica in range(2)]
    held.unlink()
    eventually((world.folder / SENT).exists, "the trainer has sent the rest", PUSH_SECONDS)
    ray.get(waiting, timeout=120)
    for replica, output in enumerate(asked):
        answer = verl.answer(output)
        assert answer.tokens == world.expected["third"][replica], "a wrong answer"
        assert answer.cached == 0, "a wrong answer: from blocks that are not to be found"

    push(world, driver, "new", 4)
    world.shares("new", 3)
