"""Host staging against a plain copy of the same bytes, in the same run: `python -m bench.staging`.

Numbers mean something only as ratios on one machine: every row repeats the plain copy next to what it measures and prints both.
`busy` rows run beside a Python thread that never lets the GIL go voluntarily, as a scheduler in the same process may.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from epochkv_connector.worker.layout import GroupSpec
from epochkv_connector.worker.staging import Pair, Staging, StagingStream


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median duration after one warm-up."""
    work()
    taken = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        taken.append(time.perf_counter() - began)
    return statistics.median(taken)


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


def rates(layers: int, block_bytes: int, blocks: int, one_storage: bool, busy: bool, repeats: int) -> dict[str, float]:
    """Bytes per nanosecond (GB/s) by kind of copy; "plain copy" is the same bytes in one piece."""
    num_blocks = 2 * blocks
    if one_storage:
        tensors = list(torch.randint(0, 255, (layers, num_blocks, block_bytes), dtype=torch.uint8))
    else:
        tensors = [torch.randint(0, 255, (num_blocks, block_bytes), dtype=torch.uint8) for _ in range(layers)]
    names = [f"l{i}" for i in range(layers)]
    staging = Staging(dict(zip(names, tensors, strict=True)), [GroupSpec(names)], blocks, num_blocks)
    pairs = [Pair(0, 2 * i, i) for i in range(blocks)]
    total = layers * block_bytes * blocks
    source, target = torch.ones(total, dtype=torch.uint8), torch.zeros(total, dtype=torch.uint8)
    gpu, host = torch.tensor([pair.gpu_block for pair in pairs]), torch.tensor([pair.slot for pair in pairs])
    flat = torch.zeros(layers, blocks, block_bytes, dtype=torch.uint8)

    def per_layer() -> None:
        for layer, tensor in enumerate(tensors):
            flat[layer].index_copy_(0, host, tensor.index_select(0, gpu))

    results: dict[str, float] = {}

    def run() -> None:
        stream = StagingStream(staging)
        with busy_interpreter(busy):
            results["plain copy"] = seconds(lambda: target.copy_(source), repeats)
            results["gather"] = seconds(lambda: stream.gather(pairs), repeats)
            results["scatter"] = seconds(lambda: stream.scatter(pairs), repeats)
            results["index per layer"] = seconds(per_layer, repeats)

    thread = threading.Thread(target=run)  # copies run on a thread of their own, as in an engine
    thread.start()
    thread.join()
    return {name: total / taken / 1e9 for name, taken in results.items()}


def measure(layers: int, block_bytes: int, blocks: int, one_storage: bool, busy: bool, repeats: int) -> None:
    """Print one row."""
    measured = rates(layers, block_bytes, blocks, one_storage, busy, repeats)
    plain = measured["plain copy"]
    shape = f"{layers} layers x {block_bytes >> 10} KiB, {blocks} blocks, {'one storage' if one_storage else 'apart'}"
    cells = "  ".join(f"{name} {rate:6.2f} ({rate / plain:4.0%})" for name, rate in measured.items())
    print(f"{shape:48}{'busy' if busy else '':5} GB/s: {cells}")


def main() -> None:
    """Run every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    repeats = parser.parse_args().repeats
    for busy in (False, True):
        for layers, block_bytes in ((16, 16 << 10), (32, 64 << 10), (16, 256 << 10)):
            for one_storage in (True, False):
                measure(layers, block_bytes, 32, one_storage, busy, repeats)


if __name__ == "__main__":
    main()
