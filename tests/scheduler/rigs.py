"""Engines in the states that many tests of the scheduler layer begin with."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.scheduler import BLOCK, RequestStatus, SharedStore, prompt
from tests.support.scheduler_config import STATE

MakeRig = Callable[..., Any]
Patch = pytest.MonkeyPatch
LENGTH = 8 * BLOCK + 3
TOKENS = prompt(1, LENGTH)
WHOLE = 8 * BLOCK
SLOT_BYTES = 2304  # one block of the rig's layer: 16 tokens x 2 x 16 x 4 bytes, with header and trailer, aligned


def on_layouts(*layouts: tuple[str, ...]) -> pytest.MarkDecorator:
    """Run a test with engines of each of these (`EngineOptions.groups`); GPU blocks are given for one group."""
    return pytest.mark.parametrize("layout", layouts, ids="+".join)


every_layout = on_layouts(("full",), ("full", STATE), ("48", "full"), ("full", "chunk48"))
"""One for each way in which a group resumes."""


def num_saved(layout: tuple[str, ...]) -> int:
    """Blocks of `TOKENS` that are saved: each of attention, and the one state at the end of the prompt's last whole block."""
    return sum(1 if kind == STATE else WHOLE // BLOCK for kind in layout)


def push_out(rig: Any) -> None:
    """Evict everything idle from a GPU cache of 12 blocks."""
    for seed in range(100, 104):
        rig.serve(prompt(seed, LENGTH))


def filled(make_rig: MakeRig, **kwargs: Any) -> tuple[Any, list[int]]:
    """An engine whose L1 (or L2) holds a prompt that its GPU has lost."""
    rig = make_rig(**{"num_blocks": 12, **kwargs})
    rig.adopt(0)
    rig.serve(TOKENS)
    push_out(rig)
    return rig, TOKENS


def begin_load(rig: Any, tokens: list[int], **kwargs: Any) -> Any:
    """A request whose load is held by the workers."""
    for worker in rig.workers:
        worker.hold_loads = True
    request = rig.add(tokens, **kwargs)
    rig.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    return request


def release(rig: Any) -> None:
    """Let the workers run what they hold."""
    for worker in rig.workers:
        worker.hold_loads = worker.hold_saves = False
        worker.work()


def abort_one(rig: Any, source: random.Random) -> None:
    if living := sorted(rig.scheduler.requests):
        rig.scheduler.finish_requests(source.choice(living), RequestStatus.FINISHED_ABORTED)


def preempt_last(rig: Any) -> None:
    if rig.scheduler.running:
        rig.scheduler._preempt_request(rig.scheduler.running.pop(), 0.0)


def work_some(rig: Any, source: random.Random) -> None:
    """Each worker does what is not held, or does not get to it."""
    for worker in rig.workers:
        if source.random() < 0.5:
            worker.work()


def hold_some(rig: Any, source: random.Random, loads: float = 0.5, saves: float = 0.3) -> None:
    for worker in rig.workers:
        worker.hold_loads, worker.hold_saves = source.random() < loads, source.random() < saves


def found(rig: Any, tokens: list[int] = TOKENS) -> int:
    """Tokens that a new request with this prompt finds computed."""
    return int(rig.cached[rig.serve(tokens)])


def names(store: SharedStore, weights: bytes) -> list[str]:
    """What is stored under names of these weights."""
    return [key for key in store.objects if f"/w{weights.hex()[:16]}/" in key]


def alter(answer: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**answer, **changes}


class FailsOnce:
    """In the place of a function: raises once (before, or after the function has run), then is the function."""

    def __init__(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch, *, after: bool = False) -> None:
        self.function, self.after, self.raised = getattr(owner, name), after, False
        monkeypatch.setattr(owner, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.raised:
            return self.function(*args, **kwargs)
        self.raised = True
        if self.after:
            self.function(*args, **kwargs)
        raise RuntimeError("an error of ours")
