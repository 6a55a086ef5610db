"""What a look at an unchanged engine costs, by how many objects the store holds."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any

from bench.report import Figure, Progress, Row
from epochkv_operator.api import parse_engine, parse_pool
from epochkv_operator.api.base import ENGINE_LABEL
from epochkv_operator.api.resources import DEPLOYMENTS, ENGINES, PODS, POOLS
from epochkv_operator.control.reconcile import now, observe
from epochkv_operator.kube.store import Store, indexed
from epochkv_operator.planning.context import Context, Observed
from epochkv_operator.planning.plan import plan_engine
from epochkv_operator.planning.status import engine_status
from epochkv_operator.settings import Settings

SIZES = (10, 100, 1_000, 10_000)
"""Objects in the store: six for each engine."""
PER_ENGINE = 6
LOOKS = 200
AIM_MS = 1.5
AIM_GROWTH = 1.5


def filled(num_objects: int) -> tuple[Store, Any, Any]:
    """A store with engines of one pool, their children as planned and five pods each; the pool and the first engine."""
    store, context = Store(indexed), Context(Settings("epochkv-system"))
    pool = {
        "apiVersion": POOLS.api_version,
        "kind": POOLS.kind,
        "metadata": {"name": "pool", "namespace": "fleet", "uid": "pool", "generation": 1, "resourceVersion": "1"},
        "spec": {"local": {"capacity": "1Gi"}},
    }
    store.upsert(POOLS.kind, pool)
    first: Any = None
    for number in range(max(1, num_objects // PER_ENGINE)):
        name = f"engine-{number}"
        engine = {
            "apiVersion": ENGINES.api_version,
            "kind": ENGINES.kind,
            "metadata": {"name": name, "namespace": "fleet", "uid": name, "generation": 1, "resourceVersion": "1"},
            "spec": {"poolRef": {"name": "pool"}, "model": {"name": "m"}, "replicas": 5},
        }
        first = first or engine
        store.upsert(ENGINES.kind, engine)
        for child in plan_engine(parse_engine(engine), parse_pool(pool), Observed(()), context).apply:
            live = copy.deepcopy(child)
            live["metadata"] |= {"uid": f"{name}-{child['kind']}", "resourceVersion": "1"}
            store.upsert(child["kind"], live)
        for replica in range(5):
            metadata = {"name": f"{name}-{replica}", "uid": f"{name}-{replica}", "namespace": "fleet", "resourceVersion": "1"}
            labels = {ENGINE_LABEL: name}
            store.upsert(PODS.kind, {"kind": PODS.kind, "metadata": {**metadata, "labels": labels}, "status": {"phase": "Running"}})
    return store, pool, first


def look(store: Store, pool: Any, engine: Any) -> Callable[[], None]:
    """All that a reconcile of an unchanged engine computes."""
    context = Context(Settings("epochkv-system"))

    def once() -> None:
        parsed, parsed_pool = parse_engine(engine), parse_pool(pool)
        seen = observe(store, "fleet", ENGINE_LABEL, engine["metadata"]["name"])
        plan = plan_engine(parsed, parsed_pool, seen, context)
        assert not plan.apply, plan.details
        engine_status(parsed, parsed_pool, observe(store, "fleet", ENGINE_LABEL, engine["metadata"]["name"]), {}, now())

    return once


def row(progress: Progress) -> Row:
    """CPU time of one look, by size of the store."""
    milliseconds: dict[int, float] = {}
    began = time.monotonic()
    for index, size in enumerate(SIZES):
        once = look(*filled(size))
        once()
        started = time.process_time()
        for _ in range(LOOKS):
            once()
        milliseconds[size] = (time.process_time() - started) / LOOKS * 1e3
        progress.step(index + 1, len(SIZES), began)
    figures = [Figure(f"among {size:,} objects", value, AIM_MS) for size, value in milliseconds.items()]
    growth = milliseconds[SIZES[-1]] / milliseconds[SIZES[0]]
    figures.append(Figure(f"among {SIZES[-1]:,} / among {SIZES[0]}", growth, AIM_GROWTH, ""))
    return Row("a look at an engine that needs nothing", figures, {"kind of the child": DEPLOYMENTS.kind})
