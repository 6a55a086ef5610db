"""Host staging against the best plain copy of the same bytes, in the same run: `make bench-staging`.

Numbers mean something only as ratios on one machine, so every repeat measures the plain copy next to what it measures. Both
walk through `--span` bytes, far more than any cache: in an engine neither a block nor a slot was touched a moment ago. A row
is one job of 16-token blocks; `apart` is one tensor for each layer, as vLLM allocates them, `uneven` the same at unequal
distances, `together` all layers in one tensor. `busy` rows run beside a Python thread that never lets the GIL go voluntarily.
On CUDA the plain copy is one asynchronous copy between page-locked and device memory in the direction of the row, and the
last lines show that copies overlap compute.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from epochkv_connector.wire import BlockMove
from epochkv_connector.worker.layout import GroupSpec
from epochkv_connector.worker.staging import Staging, StagingStream, compute_event

SHAPES = ((16, 16 << 10), (32, 64 << 10), (16, 256 << 10))
"""(layers, bytes of one layer in one block): a small shard, an 8B model, a large shard."""
AIM = {"cpu": 0.8, "cuda": 0.9}


def seconds(works: dict[str, Callable[[], object]], repeats: int, clock: Callable[[], float]) -> dict[str, float]:
    """Median duration of each after one warm-up, in turns."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(repeats + 1):
        for name, work in works.items():
            began = clock()
            work()
            if turn:
                taken[name].append(clock() - began)
    return {name: statistics.median(durations) for name, durations in taken.items()}


@contextmanager
def busy_interpreter(active: bool) -> Iterator[None]:
    """A thread that computes in Python for as long as the block runs."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    if active:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        if active:
            thread.join()


def kv_tensors(layout: str, layers: int, num_blocks: int, block_bytes: int, device: str) -> list[Tensor]:
    """One tensor for each layer, `(num_blocks, block_bytes)`."""
    shape = (num_blocks, block_bytes)
    if layout == "together":
        return list(torch.ones((layers, *shape), dtype=torch.uint8, device=device))
    made: list[Tensor] = []
    for layer in range(layers):
        extra = layer * layer % 7 * 4096 if layout == "uneven" else 0
        made.append(torch.ones(num_blocks * block_bytes + extra, dtype=torch.uint8, device=device)[extra:].view(shape))
    return made


class Row:
    """One line of the table: a pool of KV blocks, a region, and jobs that walk through both."""

    def __init__(self, layout: str, layers: int, block_bytes: int, blocks: int, span: int, device: str) -> None:
        self.name = f"{layers} layers x {block_bytes >> 10} KiB, {blocks} blocks, {layout}"
        self.num_bytes = layers * block_bytes * blocks
        self.device = device
        num_jobs = max(2, span // self.num_bytes)
        names = [f"l{i}" for i in range(layers)]
        tensors = kv_tensors(layout, layers, num_jobs * blocks, block_bytes, device)
        self.staging = Staging(dict(zip(names, tensors, strict=True)), {0: GroupSpec(names)}, num_jobs * blocks, num_jobs * blocks)
        order = torch.randperm(num_jobs * blocks, generator=torch.Generator().manual_seed(1)).tolist()
        jobs = [[BlockMove(0, i, order[job * blocks + i], job * blocks + i, b"") for i in range(blocks)] for job in range(num_jobs)]
        self.jobs = itertools.cycle(jobs)
        self._near = torch.ones((num_jobs, self.num_bytes), dtype=torch.uint8, device=device)
        self._far = torch.ones((num_jobs, self.num_bytes), dtype=torch.uint8, pin_memory=device == "cuda")
        self._plain = itertools.cycle(range(num_jobs))

    def plain(self, to_host: bool) -> None:
        """The same number of bytes in one piece."""
        place = next(self._plain)
        to, source = (self._far, self._near) if to_host else (self._near, self._far)
        to[place].copy_(source[place], non_blocking=True)
        if self.device == "cuda":
            torch.cuda.current_stream().synchronize()

    def measure(self, repeats: int, busy: bool) -> dict[str, float]:
        """Bytes per second by name, on a thread of its own, as in an engine."""
        found: dict[str, float] = {}
        # Copies on CPU stay on their thread: its CPU time leaves out what other processes do. Waits for the GIL must count.
        clock = time.thread_time if self.device == "cpu" and not busy else time.perf_counter

        def run() -> None:
            stream = StagingStream(self.staging)
            works: dict[str, Callable[[], object]] = {
                "plain out": lambda: self.plain(True),
                "gather": lambda: stream.gather(next(self.jobs)),
                "plain in": lambda: self.plain(False),
                "scatter": lambda: stream.scatter(next(self.jobs)),
            }
            with busy_interpreter(busy):
                found.update({name: self.num_bytes / taken for name, taken in seconds(works, repeats, clock).items()})

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        return found


def overlap(row: Row) -> dict[str, Any]:
    """Whether a job's copies end while the compute stream is still at work, and what they cost it."""
    left = torch.ones((8192, 8192), dtype=torch.bfloat16, device="cuda")
    product = torch.empty_like(left)
    stream = StagingStream(row.staging)

    def compute(copies: bool) -> tuple[float, bool]:
        begun, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        after = compute_event(row.staging.device)  # recorded before the work, as a load's is
        begun.record()
        for _ in range(60):
            torch.mm(left, left, out=product)
        ended.record()
        if copies:
            stream.gather(next(row.jobs), after)
        inside = not ended.query()
        ended.synchronize()
        return begun.elapsed_time(ended), inside

    compute(True)
    alone = statistics.median(compute(False)[0] for _ in range(5))
    beside = [compute(True) for _ in range(5)]
    slowed = statistics.median(duration for duration, _ in beside) / alone
    return {"copies_ended_during_compute": all(inside for _, inside in beside), "compute_ms": alone, "compute_slowed": slowed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    found = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cpu", "cuda"), default=found, help="default: the GPU where there is one")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--span", type=int, default=256 << 20, help="bytes that a row walks through (default: 256 MiB)")
    parser.add_argument("--blocks", type=int, default=32, help="blocks in a job")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no CUDA device here")
    print(f"{torch.cuda.get_device_name() if args.device == 'cuda' else 'CPU'}, torch {torch.__version__}", flush=True)
    rows: list[dict[str, Any]] = []
    for busy, (layers, block_bytes), layout in itertools.product((False, True), SHAPES, ("apart", "uneven", "together")):
        row = Row(layout, layers, block_bytes, args.blocks, args.span, args.device)
        rates = row.measure(args.repeats, busy)
        ratios = {"gather": rates["gather"] / rates["plain out"], "scatter": rates["scatter"] / rates["plain in"]}
        rows.append({"row": row.name, "busy": busy, "bytes_per_second": rates, "ratio": ratios})
        cells = "  ".join(f"{name} {rates[name] / 1e9:6.2f}" + (f" ({ratios[name]:4.0%})" if name in ratios else "") for name in rates)
        print(f"{row.name:44}{'busy' if busy else '':5} GB/s: {cells}", flush=True)
    quiet = [ratio for row in rows if not row["busy"] for ratio in row["ratio"].values()]
    result: dict[str, Any] = {"device": args.device, "rows": rows, "aim": AIM[args.device], "worst": min(quiet)}
    print(f"aim {AIM[args.device]:.0%} of a plain copy; median {statistics.median(quiet):.0%}, worst {min(quiet):.0%} (rows without busy)")
    if args.device == "cuda":
        result["overlap"] = overlap(Row("apart", 32, 64 << 10, args.blocks, args.span, "cuda"))
        print("overlap with compute: " + ", ".join(f"{name} {value}" for name, value in result["overlap"].items()))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
