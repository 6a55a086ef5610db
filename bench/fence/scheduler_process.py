"""What the fence costs on vLLM's scheduler thread: the connector's own calls on real `Request` objects, in the engine's
environment. Prints one line of JSON with microseconds.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.scheduler import Rig

TOKENS = 512
REQUESTS = 100  # at a time, just made, as they are when they reach the scheduler
ROUNDS = 31
STEPS = 20_000


def microseconds(work: Callable[[], None], times: int, prepare: Callable[[], None] = lambda: None) -> float:
    """CPU time of one of `times`, median over rounds: other processes of the machine are not to count."""
    taken = []
    for _ in range(ROUNDS):
        prepare()
        began = time.thread_time()
        work()
        taken.append((time.thread_time() - began) / times * 1e6)
    return statistics.median(taken)


def per_request(rig: Rig) -> float:
    """Everything the connector asks the fence on the way of a request that nothing overtakes.

    The request is pinned when it arrives, looked at when the scheduler asks for its hit, admitted when blocks are allocated, and
    released. What holds now is read three times.
    """
    pins = rig.pins
    fresh: list[Any] = []

    def prepare() -> None:
        fresh[:] = [rig.request([(7 * n + i) % 500 + 3 for i in range(TOKENS)]) for n in range(REQUESTS)]

    def work() -> None:
        for request in fresh:
            pins.pin(request)
            pins.root.refresh()
            pins.enter_schedule()
            pins.repin(request, must=False)
            pins.root.refresh()
            pins.root.refresh()
            pins.admit(request)
            pins.release(request)

    cost = microseconds(work, REQUESTS, prepare)
    assert pins.old_epoch_requests() == 0
    return cost


def per_step(rig: Rig, running: int) -> float:
    """What a step costs with so many requests running, none of them new."""
    pins = rig.pins
    requests = [rig.request([5] * TOKENS, request_id=f"s{running}-{n}") for n in range(running)]
    for request in requests:
        pins.pin(request)
        pins.admit(request)

    def work() -> None:
        for _ in range(STEPS):
            pins.root.refresh()
            pins.leave_schedule()

    cost = microseconds(work, STEPS)
    for request in requests:
        pins.release(request)
    return cost


def main() -> None:
    sys.stdin.readline()
    with tempfile.TemporaryDirectory(prefix="epochkv-bench-") as folder:
        rig = Rig(Path(folder) / "rig", l1_bytes=None)
        rig.adopt(1)
        assert rig.pins.root.snapshot.shared, "the engine is not in use of its epoch"
        figures = {"request": per_request(rig), "step": per_step(rig, 0), "step_256": per_step(rig, 256)}
        assert rig.pins.root.snapshot.shared
        print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
