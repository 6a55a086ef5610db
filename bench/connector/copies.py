"""Staging copies against one plain copy of the same bytes, at 16-token blocks, as `bench.staging` measures them."""

from __future__ import annotations

import time

from bench import staging
from bench.report import Figure, Progress, Row, repeated

SHAPES = {
    "benchmark model": (12, 32 << 10, 128),
    "8 billion parameters, bfloat16": (32, 64 << 10, 32),
}
"""Layers, bytes of a 16-token block in one layer, blocks of a job: some 50 MiB, so that no cache holds both sides."""

INNER_REPEATS = 5


def row(repeats: int, progress: Progress) -> Row:
    """Ratios to the plain copy; GPU blocks in one storage, as vLLM's CPU backend allocates them."""
    figures: list[Figure] = []
    details: dict[str, object] = {}
    began, done, total = time.monotonic(), 0, len(SHAPES) * repeats
    for name, (layers, block_bytes, blocks) in SHAPES.items():
        samples: dict[str, list[float]] = {}
        for _ in range(repeats):
            rates = staging.rates(layers, block_bytes, blocks, one_storage=True, busy=False, repeats=INNER_REPEATS)
            for what, rate in rates.items():
                samples.setdefault(what, []).append(rate)
            done += 1
            progress.step(done, total, began)
        for what in ("gather", "scatter"):
            ratios = [rate / plain for rate, plain in zip(samples[what], samples["plain copy"], strict=True)]
            figures.append(repeated(f"{what}, {name} ({block_bytes >> 10} KiB a layer)", ratios, 0.8, at_least=True))
        details[name] = {"layers": layers, "blocks": blocks, "GB/s": samples}
    return Row("staging copy / plain copy of the same bytes", figures, details)
