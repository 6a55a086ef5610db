"""The chat trace on simulated engines: production bookkeeping (`TierManager`), no model.

Each engine has a scheduler role of its own; copies and puts succeed at once, and the shared L2 is a set of names that
answers existence queries as the store client does. Requests go to the engines in turn, one at a time. The GPU holds
nothing, so every hit is one of our tiers.

The published answers count every block of a prompt, the partly filled last one too. So each id is taken as a whole block,
with one token behind the prompt for the engine to compute.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from bench.connector import trace as traces
from bench.connector.bookkeeping import Blocks
from bench.connector.trace import BLOCK_TOKENS, Trace
from bench.report import Figure, Progress, Row
from epochkv_connector.config import MIN_BYTES, ConnectorConfig
from epochkv_connector.naming.identity import object_key
from epochkv_connector.tiers.layout import CacheLayout, GroupKind, GroupLayout, RequestView, ScheduledRequestView
from epochkv_connector.tiers.manager import TierManager
from epochkv_connector.wire import JobAck, Phase, StepMetadata, Tier

LAYOUT = CacheLayout((GroupLayout(GroupKind.FULL, BLOCK_TOKENS),), BLOCK_TOKENS)
ROOT, NAMESPACE = b"root", "bench/0123456789abcdef/e1"
SMALL_L1_BLOCKS = 2_000
ENGINES = (4, 8, 16)
POINT = 0.01

KNOWN_LOCAL = {4: 0.192, 8: 0.136, 16: 0.099}
"""Engines in turn -> block hit rate with infinite local caches and nothing shared."""

KNOWN_LRU = {10_000: 0.211, 30_000: 0.326, 50_000: 0.355}
"""Blocks of one LRU cache -> block hit rate."""

KNOWN_SHARED = 0.366
"""Block hit rate with one infinite shared cache."""


@dataclass(frozen=True)
class Names:
    """One shared root for all engines."""

    root: bytes = ROOT
    epoch: int = 1
    namespace: str | None = NAMESPACE
    shared: bool = True


def keys_of(namespace: str, group: int, block_hash: bytes) -> list[str]:
    """One shard, named as in life."""
    return [object_key(namespace, group, 0, block_hash)]


class SharedStore:
    """The names that L2 holds: existence queries are answered at once."""

    def __init__(self) -> None:
        self.keys: set[str] = set()

    def exists(self, keys: Sequence[str], timeout: float) -> Future[Sequence[bool]]:
        """As `StoreClient.exists`."""
        answer: Future[Sequence[bool]] = Future()
        answer.set_result([key in self.keys for key in keys])
        return answer


class Engine:
    """One scheduler role and a rank that does everything at once."""

    def __init__(self, num_slots: int, store: SharedStore | None, ids: itertools.count[int]) -> None:
        extra: dict[str, object] = {
            "pool": {"name": "p", "namespace": "n", "uid": "u"},
            "local": {"capacity_bytes": num_slots * MIN_BYTES},
        }
        if store is not None:
            extra["distributed"] = {"master_address": "none:1"}
        self._store, self._names = store, Names()
        self._tiers = TierManager(
            ConnectorConfig.parse(extra, {}),
            LAYOUT,
            num_ranks=1,
            num_slots=num_slots,
            store=store,
            ids=ids,
            clock=time.monotonic,
            keys_of=keys_of,
        )
        self._tiers.bind_block_pool(Blocks(), BLOCK_TOKENS)
        self._tiers.adopt(self._names)

    def serve(self, request_id: str, hashes: Sequence[bytes]) -> int:
        """Look the prompt up, load what was found, save the rest; blocks that were found."""
        names, tiers = self._names, self._tiers
        view = RequestView(request_id, len(hashes) * BLOCK_TOKENS + 1, hashes)
        gpu_blocks = [list(range(1, len(hashes) + 1))]
        tiers.hits.begin(view, names)
        hit = tiers.hits.answer(view, 0, names) or 0
        if hit and not tiers.loads.commit(view, gpu_blocks, hit, names):
            raise RuntimeError(f"{request_id}: a hit of {hit} tokens was not kept")
        self._work(tiers.end_step())
        tiers.saves.collect([ScheduledRequestView(request_id, view.num_tokens, hashes, gpu_blocks)], names)
        self._work(tiers.end_step())
        tiers.finish(request_id)
        return hit // BLOCK_TOKENS

    def leaks(self) -> dict[str, int]:
        """What is still held; must be empty when no request lives."""
        return {name: count for name, count in self._tiers.leak_report().items() if count}

    def _work(self, jobs: StepMetadata) -> None:
        for load in jobs.loads:
            filled = tuple(move.slot for move in load.moves if move.source is Tier.STORE)
            self._tiers.on_acks([JobAck(load.job_id, 0, Phase.LOADED, filled_slots=filled)])
        for save in jobs.saves:
            self._tiers.on_acks([JobAck(save.job_id, 0, Phase.COPIED)])
            if save.namespace is not None and self._store is not None:
                for move in save.moves:
                    if move.put:
                        self._store.keys.update(keys_of(save.namespace, move.group, move.block_hash))
                self._tiers.on_acks([JobAck(save.job_id, 0, Phase.STORED)])


def hit_rate(trace: Trace, num_engines: int, num_slots: int, shared: bool) -> float:
    """Share of the trace's blocks that were found.

    Args:
        num_slots: L1 of each engine, in blocks.
        shared: with an L2 of no limit behind them.
    """
    store = SharedStore() if shared else None
    ids = itertools.count()
    engines = [Engine(num_slots, store, ids) for _ in range(num_engines)]
    found = 0
    for number, request in enumerate(trace.requests):
        hashes = [block.to_bytes(8, "big") for block in request.blocks]
        found += engines[number % num_engines].serve(str(number), hashes)
    if held := [engine.leaks() for engine in engines if engine.leaks()]:
        raise RuntimeError(f"engines without a request still hold {held}")
    return found / trace.num_blocks


def reference(trace: Trace, num_engines: int, num_slots: int, shared: bool) -> float:
    """The same by a dozen lines of textbook LRU, for traces whose answers nobody has published."""
    everything: set[int] = set()
    caches: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(num_engines)]
    found = 0
    for number, request in enumerate(trace.requests):
        cache = caches[number % num_engines]
        held = everything if shared else cache
        found += sum(1 for _ in itertools.takewhile(held.__contains__, request.blocks))
        everything.update(request.blocks)
        for block in request.blocks:
            cache[block] = None
            cache.move_to_end(block)
        while len(cache) > num_slots:
            cache.popitem(last=False)
    return found / trace.num_blocks


def cases(trace: Trace) -> Iterable[tuple[str, int, int, bool, float | None]]:
    """(name, engines, L1 blocks, with L2, published answer)."""
    unlimited = trace.num_blocks
    for count in ENGINES:
        yield f"{count} engines, unlimited L1", count, unlimited, False, KNOWN_LOCAL[count]
        yield f"{count} engines, L1 of {SMALL_L1_BLOCKS} blocks, shared L2", count, SMALL_L1_BLOCKS, True, KNOWN_SHARED
    for size, known in KNOWN_LRU.items():
        yield f"1 engine, L1 of {size} blocks", 1, size, False, known


def row(arguments: argparse.Namespace, progress: Progress) -> Row:
    """Distance of each hit rate from the known answer, in points."""
    trace = traces.load(arguments.trace, arguments.requests)
    figures: list[Figure] = []
    details: dict[str, object] = {"trace": trace.source, "requests": len(trace.requests), "blocks": trace.num_blocks}
    began, every = time.monotonic(), list(cases(trace))
    for done, (name, engines, slots, shared, published) in enumerate(every):
        rate = hit_rate(trace, engines, slots, shared)
        known = published if trace.real and published is not None else reference(trace, engines, slots, shared)
        figures.append(Figure(f"{name}: {rate:.1%}, known {known:.1%}", abs(rate - known) / POINT, 1.0, "points"))
        details[name] = {"rate": rate, "known": known, "published": trace.real}
        progress.step(done + 1, len(every), began)
    return Row(f"hit rates on the chat trace ({trace.source})", figures, details)
