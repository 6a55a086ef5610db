"""What the connector adds to a scheduler's step with many running requests and no hits: vLLM's real `Scheduler` with and without
it, in turns in one process. Nothing is computed: a model that answers at once, ranks that acknowledge at once.

All requests are at the same position of a block. So in 15 of 16 steps nobody has a new block, and the connector has no reason
to look at anybody; in the other one every request saves a block to L1.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

from bench.report import Figure, Progress, Row, repeated
from epochkv_connector.wire import JobAck, Phase, WorkerReport
from tests.support.scheduler import BLOCK, OwnRoot, Rig, prompt

RUNNING = (16, 64, 256)
NEVER_ENDS = 4000


def engine(folder: Path, running: int, windows: int, *, connector: bool, stamp: bool) -> Rig:
    """A scheduler with that many decoding requests, and blocks for all steps of the measurement."""
    num_blocks = running * (windows + 6) + 64
    rig = Rig(
        folder,
        num_blocks=num_blocks,
        l1_bytes=2 * num_blocks * 4096,
        max_batched_tokens=max(8192, running * 2 * BLOCK),
        max_num_seqs=running,
        connector=connector,
        extra={"stamp": stamp},
    )
    if connector:
        root: Any = rig.pins.root
        root._global = OwnRoot(root.snapshot.root)  # two engines with the connector share this process, and vLLM's global
        rig.adopt(1)
    for index in range(running):
        rig.add(prompt(index, BLOCK + 1), max_tokens=NEVER_ENDS)
    return rig


def step(rig: Rig) -> tuple[float, int]:
    """CPU seconds of the scheduler in one step, and the blocks that it saved."""
    began = time.thread_time()
    output = rig.scheduler.schedule()
    taken = time.thread_time() - began
    names = list(output.num_scheduled_tokens)
    result = ModelRunnerOutput(
        req_ids=names, req_id_to_index={name: i for i, name in enumerate(names)}, sampled_token_ids=[[7] for _ in names]
    )
    metadata: Any = output.kv_connector_metadata
    saves = () if metadata is None else metadata.saves
    if metadata is not None:
        acks = [JobAck(job.job_id, 0, Phase.COPIED) for job in saves]
        result.kv_connector_output = KVConnectorOutput(kv_connector_worker_meta=WorkerReport(acks=acks))
    began = time.thread_time()
    rig.scheduler.update_from_output(output, result)
    return taken + time.thread_time() - began, sum(len(job.moves) for job in saves)


@dataclass(frozen=True)
class Cost:
    """CPU seconds of a step by window: `without` the connector, `with` it, and `stamped`; in steps that save nothing, and in all (mean)."""

    plain: dict[str, list[float]]
    mean: dict[str, list[float]]

    def added(self, seconds: dict[str, list[float]]) -> list[float]:
        """What the connector adds to a step."""
        return [a - b for a, b in zip(seconds["with"], seconds["without"], strict=True)]


def measure(running: int, windows: int, folder: Path) -> Cost:
    """A window is one block's length of steps; engines take turns step by step."""
    rigs = {
        name: engine(folder / name, running, windows, connector=name != "without", stamp=name == "stamped")
        for name in ("without", "stamped", "with")
    }
    for _ in range(2 * BLOCK):
        for rig in rigs.values():
            step(rig)
    cost = Cost({name: [] for name in rigs}, {name: [] for name in rigs})
    order = list(rigs)
    gc.collect()
    for _ in range(windows):
        seconds: dict[str, list[float]] = {name: [] for name in rigs}
        saved: dict[str, list[int]] = {name: [] for name in rigs}
        for _ in range(BLOCK):
            for name in order:
                taken, num_saved = step(rigs[name])
                seconds[name].append(taken)
                saved[name].append(num_saved)
            order.reverse()
        if any(sorted(saved[name]) != [0] * (BLOCK - 1) + [running] for name in ("stamped", "with")):
            raise RuntimeError(f"{running} requests saved {saved} blocks in {BLOCK} steps")
        for name, taken_by_step in seconds.items():
            cost.plain[name].append(statistics.median(t for t, blocks in zip(taken_by_step, saved["with"], strict=True) if not blocks))
            cost.mean[name].append(statistics.mean(taken_by_step))
    for rig in rigs.values():
        rig.close()
    return cost


def row(arguments: argparse.Namespace, progress: Progress) -> Row:
    """Microseconds per running request and step, how they grow with the number of requests, and what does not depend on it."""
    figures: list[Figure] = []
    details: dict[str, object] = {"block tokens": BLOCK}
    added: dict[int, float] = {}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="epochkv-bench-") as folder:
        for done, running in enumerate(RUNNING):
            cost = measure(running, 3 * arguments.repeats, Path(folder) / str(running))
            per_request = 1e6 / running
            plain = [per_request * seconds for seconds in cost.added(cost.plain)]
            mean = [per_request * seconds for seconds in cost.added(cost.mean)]
            ratios = [a / b for a, b in zip(cost.mean["with"], cost.mean["without"], strict=True)]
            stamps = [a / b for a, b in zip(cost.mean["stamped"], cost.mean["with"], strict=True)]
            added[running] = statistics.median(plain) * running
            figures += [
                repeated(f"{running} running, added per request, steps without a new block", plain, 1.0, "us"),
                repeated(f"{running} running, added per request, all steps, every block saved", mean, None, "us"),
                repeated(f"{running} running, step with / without connector, the same", ratios, None),
                repeated(f"{running} running, step with / without stamps, the same", stamps, 1.01),
            ]
            details[f"{running} running"] = {"seconds without a new block": cost.plain, "seconds of all": cost.mean}
            progress.step(done + 1, len(RUNNING), began)
    few, many = RUNNING[0], RUNNING[-1]
    each = (added[many] - added[few]) / (many - few)
    figures.append(Figure(f"each further request from {few} to {many}, steps without a new block", each, 1.0, "us"))
    figures.append(Figure("fixed cost of such a step", added[few] - few * each, 15, "us"))
    return Row("steps with many running requests, no hits (CPU time)", figures, details)
