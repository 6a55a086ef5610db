"""What happens in the simulator of names: one action at one engine, drawn by its weight."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.support.scheduler import BLOCK, RequestStatus, prompt

if TYPE_CHECKING:
    from tests.scheduler.names_simulator import Names

BLOCKS = 6


class Action(NamedTuple):
    """How often it happens beside the others, and what it does."""

    weight: float
    do: Callable[[Names, Any], None]


def _step(names: Names, rig: Any) -> None:
    names.step(rig)


def _add(names: Names, rig: Any) -> None:
    if len(rig.scheduler.requests) >= 6:
        return
    living = [request for engine in names.engines for request in engine.scheduler.requests.values()]
    names.said = [*names.said[-8:], *(list(request.all_token_ids) for request in living)]
    if names.said and names.source.random() < 0.5:  # a conversation goes on
        rig.add([*names.source.choice(names.said), 7], max_tokens=names.source.choice([1, BLOCK]))
    else:
        family = prompt(names.source.randrange(2), BLOCKS * BLOCK)
        kept = names.source.choice([BLOCK - 3, 2 * BLOCK, 4 * BLOCK + 5, BLOCKS * BLOCK])
        rig.add([*family[:kept], 5 + names.source.randrange(2)], max_tokens=names.source.choice([1, BLOCK, 3 * BLOCK]))


def _push(names: Names, rig: Any) -> None:
    rig.past = False
    rig.weights = names.next_weights()


def _return(names: Names, rig: Any) -> None:
    """Other weights for a few steps, while loads wait, and those of before again."""
    was = rig.weights
    if "|" in was:
        return
    for worker in rig.workers:
        worker.hold_loads = True
    _add(names, rig)
    names.step(rig)
    _push(names, rig)
    for _ in range(names.source.randrange(1, BLOCK)):
        names.step(rig)
    rig.past = False
    rig.weights = was
    for worker in rig.workers:
        worker.hold_loads = False
    _add(names, rig)


def _part(names: Names, rig: Any) -> None:
    """A push that reaches one rank."""
    rig.past = False
    weights, rank = names.next_weights(), names.source.randrange(names.num_ranks)
    rig.executor.on_call = lambda name: rig.write_past(weights, rank) if name == "update_weights" else None
    rig.executor.collective_rpc("update_weights")
    rig.executor.on_call = lambda name: None


def _past(names: Names, rig: Any) -> None:
    rig.past = True
    rig.write_past(names.next_weights(), names.source.choice([None, *range(names.num_ranks)]))


def _late(names: Names, rig: Any) -> None:
    """A write while a step is under way, and perhaps the old weights again."""
    _add(names, rig)
    was = rig.weights
    names.step(rig, lambda: _past(names, rig))
    if names.source.random() < 0.5 and "|" not in was:
        rig.past = False
        rig.weights = was
        names.step(rig)
        _add(names, rig)


def _fail(names: Names, rig: Any) -> None:
    rig.past = False
    rig.executor.fails = {"update_weights"}
    with pytest.raises(RuntimeError, match="has failed"):
        rig.executor.collective_rpc("update_weights", kwargs={"weights": names.next_weights()})
    rig.executor.fails = set()
    rig._weights = rig.executor.engine_weights


def _transfer(names: Names, rig: Any) -> None:
    rig.past = False
    rig.executor.collective_rpc("start_weight_update")
    for _ in range(names.source.randrange(3)):
        rig.weights = names.next_weights()
        names.step(rig)
    rig.executor.collective_rpc("finish_weight_update")


def _load(names: Names, rig: Any) -> None:
    """`load_weights` of the model in this very process."""
    held = rig.watch._ranks._held
    held.writes += 1
    rig.write_past(names.next_weights())
    held.writes += 1
    rig.past = False


def _probe(names: Names, rig: Any) -> None:
    rig.executor.collective_rpc(names.source.choice(["liveness_probe", "check_health", "execute_dummy_batch"]))


def _idle(names: Names, rig: Any) -> None:
    names.now += 1.0


def _adopt(names: Names, rig: Any) -> None:
    if names.source.random() < 0.2:
        names.target += 1
    rig.adopt(names.target)


def _reset(names: Names, rig: Any) -> None:
    rig.scheduler.reset_prefix_cache(reset_connector=True)


def _lease(names: Names, rig: Any) -> None:
    rig.lease_until = 0.0
    for _ in range(names.source.randrange(4)):
        names.step(rig)
    if names.source.random() < 0.5:
        _push(names, rig)
    rig.lease_until = float("inf")


def _abort(names: Names, rig: Any) -> None:
    living = sorted(rig.scheduler.requests)
    if living:
        rig.scheduler.finish_requests(names.source.choice(living), RequestStatus.FINISHED_ABORTED)


def _preempt(names: Names, rig: Any) -> None:
    if rig.scheduler.running:
        rig.scheduler._preempt_request(rig.scheduler.running.pop(), 0.0)


def _hold(names: Names, rig: Any) -> None:
    for worker in rig.workers:
        worker.hold_loads = names.source.random() < 0.5
        worker.hold_saves = names.source.random() < 0.3


def _silent(names: Names, rig: Any) -> None:
    """A rank cannot say what it holds, for a while."""
    silent = names.source.randrange(names.num_ranks)
    rig.executor.answers = lambda answer: {**answer, "weights": None, "note": "no"} if answer["rank"] == silent else answer
    _push(names, rig)
    for _ in range(names.source.randrange(5)):
        names.step(rig)
        assert not rig.pins.root.snapshot.shared, "W4: an engine that does not know its weights shares"
    rig.executor.answers = lambda answer: answer


def _sleep(names: Names, rig: Any) -> None:
    rig.past = False
    rig.executor.collective_rpc("sleep")
    rig.executor.is_sleeping = True
    names.now += 1.0
    rig.executor.is_sleeping = False
    rig.executor.collective_rpc("wake_up")
    if names.source.random() < 0.5:
        _push(names, rig)


def _restart(names: Names, rig: Any) -> None:
    """The engine ends with all it had but its objects in the store, and comes back with the weights of its files."""
    names.drop(rig)
    rig.close()
    names.engines[names.engines.index(rig)] = names.new()


ACTIONS = {
    "step": Action(100, _step),
    "add": Action(25, _add),
    "push": Action(4, _push),
    "return": Action(3, _return),
    "part": Action(3, _part),
    "past": Action(2, _past),
    "late": Action(2, _late),
    "fail": Action(2, _fail),
    "transfer": Action(2, _transfer),
    "load": Action(1, _load),
    "probe": Action(2, _probe),
    "idle": Action(3, _idle),
    "adopt": Action(3, _adopt),
    "reset": Action(1, _reset),
    "lease": Action(1, _lease),
    "abort": Action(2, _abort),
    "preempt": Action(3, _preempt),
    "hold": Action(4, _hold),
    "silent": Action(1, _silent),
    "sleep": Action(1, _sleep),
    "restart": Action(0.3, _restart),
}
