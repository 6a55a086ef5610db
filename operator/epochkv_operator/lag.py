"""How late an event loop is: what each loop of the process measures of itself."""

from __future__ import annotations

import asyncio
import time

from epochkv_operator import metrics

PERIOD_SECONDS = 0.25


async def watch_lag(loop: str) -> None:
    """Measure the loop that this runs on, for ever: by how much a sleep was too long (seconds), for `/metrics`."""
    histogram = metrics.LOOP_LAG.labels(loop=loop)
    while True:
        due = time.monotonic() + PERIOD_SECONDS
        await asyncio.sleep(PERIOD_SECONDS)
        histogram.observe(max(0.0, time.monotonic() - due))
