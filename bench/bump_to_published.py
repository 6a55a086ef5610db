"""How long a reset takes as a user sees it: from sending the patch of `spec.resetEpoch` until `status.epoch` arrives
in a watch.

    python bench/bump_to_published.py --namespace default --pool policy --bumps 20 --json result.json

Works against any cluster (KUBECONFIG, or the pod's service account); needs `get`, `list`, `patch` and `watch` on pools. It
really resets the pool: every bump makes its cache cold. Besides the end-to-end time it shows the hub's own measurement
(recorded to published) and how many engines took part.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from kubernetes.aio.config import ConfigException
from rich.console import Console
from rich.table import Table

from epochkv_operator.api.resources import POOLS
from epochkv_operator.kube.client import MERGE_PATCH, ApiError, KubeClient


@dataclass(frozen=True)
class Bump:
    """One reset. `patch_milliseconds` is the part until the API server had answered the patch."""

    epoch: int
    milliseconds: float
    patch_milliseconds: float
    engines: int


class Watcher:
    """Remembers when each epoch of one pool was first seen published."""

    def __init__(self, client: KubeClient, namespace: str, pool: str) -> None:
        self._client = client
        self._namespace = namespace
        self._pool = pool
        self._seen: dict[int, float] = {}
        self._news = asyncio.Event()
        self.status: dict[str, Any] = {}

    async def run(self, version: str) -> None:
        while True:
            async for event in self._client.watch(POOLS, self._namespace, version):
                obj = event["object"]
                if event["type"] == "ERROR":
                    raise RuntimeError(f"watch of KVCachePools in {self._namespace}: {obj.get('message', obj)}")
                version = obj["metadata"]["resourceVersion"]
                if obj["metadata"].get("name") != self._pool:  # a bookmark has none
                    continue
                self.status = obj.get("status") or {}
                self._seen.setdefault(self.status.get("epoch") or 0, time.perf_counter())
                self._news.set()

    async def published(self, epoch: int, deadline_seconds: float) -> float:
        """When `epoch` (or a higher one) was first seen; `time.perf_counter` seconds."""
        async with asyncio.timeout(deadline_seconds):
            while not any(seen >= epoch for seen in self._seen):
                self._news.clear()
                await self._news.wait()
        return min(at for seen, at in self._seen.items() if seen >= epoch)


async def measure(
    namespace: str, pool: str, bumps: int, pause_seconds: float, deadline_seconds: float, done: Callable[[int], None] = lambda number: None
) -> list[Bump]:
    """Bump `bumps` times, one after the other; `done` is told how many there were.

    Raises:
        TimeoutError: one is not published in time.
    """
    client = await KubeClient.connect()
    path = POOLS.path(namespace, pool)
    current = await client.get(POOLS, namespace, pool)
    _, version = await client.list(POOLS, namespace)  # the pool's own version may be older than etcd remembers
    watcher = Watcher(client, namespace, pool)
    task = asyncio.create_task(watcher.run(str(version)))
    results: list[Bump] = []
    try:
        epoch = max(int(current["spec"].get("resetEpoch") or 0), int((current.get("status") or {}).get("targetEpoch") or 0))
        for _ in range(bumps):
            await asyncio.sleep(pause_seconds)
            epoch += 1
            started = time.perf_counter()
            await client.request("PATCH", path, body={"spec": {"resetEpoch": epoch}}, content_type=MERGE_PATCH)
            patched = time.perf_counter()
            arrival = asyncio.create_task(watcher.published(epoch, deadline_seconds))
            await asyncio.wait((arrival, task), return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                task.result()
            at = await arrival
            engines = int((watcher.status.get("engines") or {}).get("total") or 0)
            results.append(Bump(epoch, (at - started) * 1e3, (patched - started) * 1e3, engines))
            done(len(results))
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await client.close()
    return results


def main(
    pool: Annotated[str, typer.Option(help="Name of the KVCachePool.")] = "policy",
    namespace: Annotated[str, typer.Option(help="Its namespace.")] = "default",
    bumps: Annotated[int, typer.Option(min=1)] = 20,
    pause_seconds: Annotated[float, typer.Option(help="Pause before each bump.")] = 0.3,
    deadline_seconds: Annotated[float, typer.Option(help="Give up on a bump after this.")] = 90.0,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the result here, too.")] = None,
) -> None:
    """Median and maximum of the time from `kubectl patch` to `status.epoch`."""
    try:
        results = asyncio.run(measure(namespace, pool, bumps, pause_seconds, deadline_seconds))
    except (ConfigException, ApiError, TimeoutError) as error:
        sys.exit(f"error: {error or 'no publication in time'}; `make demo` leaves a cluster up with the pool epochkv-demo/policy")
    values = sorted(bump.milliseconds for bump in results)
    summary = {
        "benchmark": "bump_to_published",
        "pool": f"{namespace}/{pool}",
        "engines": results[-1].engines,
        "bumps": len(results),
        "median_milliseconds": round(statistics.median(values), 1),
        "max_milliseconds": round(values[-1], 1),
        "min_milliseconds": round(values[0], 1),
        "samples": [asdict(bump) for bump in results],
    }
    table = Table(title=f"patch to status.epoch, {summary['pool']}, {summary['engines']} engines")
    for column in ("bumps", "median ms", "max ms", "min ms", "of which patch (median ms)"):
        table.add_column(column, justify="right")
    patch = statistics.median(bump.patch_milliseconds for bump in results)
    table.add_row(str(len(results)), f"{statistics.median(values):.1f}", f"{values[-1]:.1f}", f"{values[0]:.1f}", f"{patch:.1f}")
    Console().print(table)
    text = json.dumps(summary, indent=2)
    if json_file is not None:
        json_file.write_text(text + "\n", encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    typer.run(main)
