"""Staging copies against one plain copy of the same bytes, at 16-token blocks, as `bench.staging` measures them (CPU)."""

from __future__ import annotations

import argparse
import time

from bench import staging
from bench.report import Figure, Progress, Row, repeated

SHAPES = {"the benchmark's model": (12, 32 << 10), "8 billion parameters, bfloat16": (32, 64 << 10)}
"""Layers, and bytes of a 16-token block in one layer."""

LAYOUT = "apart"
BLOCKS = 32
SPAN = 256 << 20
INNER_REPEATS = 5
PLAIN = {"gather": "plain out", "scatter": "plain in"}


def row(arguments: argparse.Namespace, progress: Progress) -> Row:
    """Ratios to the plain copy; one tensor for each layer, as vLLM allocates them."""
    repeats = arguments.repeats
    figures: list[Figure] = []
    details: dict[str, object] = {}
    began, done, total = time.monotonic(), 0, len(SHAPES) * repeats
    for name, (layers, block_bytes) in SHAPES.items():
        samples: dict[str, list[float]] = {}
        job = staging.Row(LAYOUT, layers, block_bytes, BLOCKS, SPAN, "cpu")
        for _ in range(repeats):
            for what, rate in job.measure(INNER_REPEATS, busy=False).items():
                samples.setdefault(what, []).append(rate)
            done += 1
            progress.step(done, total, began)
        for what, plain in PLAIN.items():
            ratios = [rate / best for rate, best in zip(samples[what], samples[plain], strict=True)]
            figures.append(repeated(f"{what}, {name} ({block_bytes >> 10} KiB a layer)", ratios, staging.AIM["cpu"], at_least=True))
        details[name] = {"layers": layers, "blocks": BLOCKS, "layout": LAYOUT, "bytes per second": samples}
    return Row("staging copy / plain copy of the same bytes", figures, details)
