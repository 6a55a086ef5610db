"""What a hit costs the scheduler thread: the production `TierManager` with a full L1, no engine and no store.

A request's way is measured in three parts. Lookup is the walk over its block hashes; plan, commit and making the load job
hold and accept the hit. With its first step it is looked at for what to save, and L1 has all of it.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench.report import Progress, Row, repeated
from epochkv_connector.config import ConnectorConfig
from epochkv_connector.tiers import layout as hits
from epochkv_connector.tiers.layout import CacheLayout, GroupKind, GroupLayout, RequestView, ScheduledRequestView
from epochkv_connector.tiers.manager import TierManager
from epochkv_connector.wire import JobAck, Phase, StepMetadata

BLOCK_TOKENS = 16
PROMPT_TOKENS = 4096
SHORT_TOKENS = 256
NUM_PROMPTS = 64
BATCH = 20
ROOT = b"root"
LAYOUT = CacheLayout((GroupLayout(GroupKind.FULL, BLOCK_TOKENS),), BLOCK_TOKENS)


@dataclass(frozen=True)
class Names:
    """A private root: no store is asked."""

    root: bytes = ROOT
    epoch: int = 1
    namespace: str | None = None
    shared: bool = False


class Blocks:
    """The engine's block pool as far as saves need it; nothing is ever short."""

    null_block_id = 0

    def num_references(self, block_id: int) -> int:
        return 2

    def holds(self, group: int, name: bytes) -> bool:
        return False

    def touch(self, block_ids: Sequence[int]) -> None:
        """Nothing is counted."""

    def free(self, block_ids: Sequence[int]) -> None:
        """Nothing is counted."""


def chain(text: str, num_blocks: int) -> list[bytes]:
    """As many block hashes of 32 bytes, as vLLM's sha256 makes them."""
    return [hashlib.sha256(f"{text} {index}".encode()).digest() for index in range(num_blocks)]


def acknowledge(tiers: TierManager, jobs: StepMetadata) -> None:
    """One rank that does everything at once."""
    for save in jobs.saves:
        tiers.on_acks([JobAck(save.job_id, 0, Phase.COPIED)])
    for load in jobs.loads:
        tiers.on_acks([JobAck(load.job_id, 0, Phase.LOADED)])


def filled_books(prompts: Sequence[Sequence[bytes]], names: Names) -> TierManager:
    """An L1 twice as large as the prompts, which are saved in it."""
    num_slots = 2 * sum(len(hashes) for hashes in prompts)
    config = ConnectorConfig.parse({"pool": {"name": "p", "namespace": "n", "uid": "u"}, "local": {"capacity_bytes": num_slots}}, {})
    ids, clock = itertools.count(), time.monotonic
    tiers = TierManager(config, LAYOUT, num_ranks=1, num_slots=num_slots, store=None, ids=ids, clock=clock, keys_of=lambda *_: ())
    tiers.bind_block_pool(Blocks(), BLOCK_TOKENS)
    tiers.adopt(names)
    for index, hashes in enumerate(prompts):
        blocks = [list(range(1, len(hashes) + 1))]
        tiers.saves.collect([ScheduledRequestView(f"s{index}", len(hashes) * BLOCK_TOKENS, hashes, blocks)], names)
        acknowledge(tiers, tiers.end_step())
        tiers.finish(f"s{index}")
    return tiers


@dataclass(frozen=True)
class Cost:
    """CPU seconds of the calling thread for each part of a request, means of batches."""

    walk: list[float]
    lookup: list[float]
    commit: list[float]
    step: list[float]
    look: list[float]


def measure(num_tokens: int, repeats: int) -> Cost:
    """Requests that find their whole prompt in L1 (less the last block, which vLLM computes)."""
    num_blocks = num_tokens // BLOCK_TOKENS
    prompts = [chain(f"prompt {index}", num_blocks) for index in range(NUM_PROMPTS)]
    names = Names()
    tiers = filled_books(prompts, names)
    group_blocks = [list(range(1, num_blocks + 1))]
    cost = Cost([], [], [], [], [])
    serial = itertools.count()
    clock = time.thread_time  # CPU: another process on the core is not our cost
    for _ in range(repeats):
        walk = lookup = commit = step = look = 0.0
        for _ in range(BATCH):
            number = next(serial)
            hashes = prompts[number % NUM_PROMPTS]
            view = RequestView(f"r{number}", num_tokens, hashes)
            began = clock()
            found = tiers.hits.find(view)
            walked = hits.longest_hit(LAYOUT, 0, num_tokens - BLOCK_TOKENS, found.present, found.first_absent)
            a = clock()
            hit = tiers.hits.answer(view, 0, names)
            b = clock()
            tiers.loads.commit(view, group_blocks, hit or 0, names)
            c = clock()
            jobs = tiers.end_step()
            d = clock()
            acknowledge(tiers, jobs)
            first = ScheduledRequestView(view.request_id, num_tokens, hashes, group_blocks)
            e = clock()
            saves = tiers.saves.collect([first], names)
            f = clock()
            tiers.finish(view.request_id)
            if hit != walked or walked != num_tokens - BLOCK_TOKENS or len(jobs.loads) != 1 or saves:
                raise RuntimeError(f"a prompt in L1 was answered with {hit} of {num_tokens} tokens")
            walk, lookup, commit, step, look = walk + a - began, lookup + b - a, commit + c - b, step + d - c, look + f - e
        for total, into in ((walk, cost.walk), (lookup, cost.lookup), (commit, cost.commit), (step, cost.step), (look, cost.look)):
            into.append(total / BATCH)
    return cost


def row(arguments: argparse.Namespace, progress: Progress) -> Row:
    """The walk per block; plan, commit and load job per request, for a short prompt and a long one."""
    figures = []
    details: dict[str, object] = {"block tokens": BLOCK_TOKENS, "requests in a batch": BATCH}
    began = time.monotonic()
    for done, num_tokens in enumerate((SHORT_TOKENS, PROMPT_TOKENS)):
        cost = measure(num_tokens, 3 * arguments.repeats)
        num_blocks = num_tokens // BLOCK_TOKENS - 1
        walk = [seconds * 1e6 / num_blocks for seconds in cost.walk]
        rest = [1e6 * (a - w + b + c) for w, a, b, c in zip(cost.walk, cost.lookup, cost.commit, cost.step, strict=True)]
        figures.append(repeated(f"lookup in L1, {num_tokens} tokens, per block", walk, 0.5, "us"))
        figures.append(repeated(f"plan + commit, {num_tokens} tokens ({num_blocks} blocks), per request", rest, 40, "us"))
        looks = [1e6 * seconds for seconds in cost.look]
        figures.append(repeated(f"first look for what to save, {num_tokens} tokens, per request", looks, 40, "us"))
        details[f"{num_tokens} tokens"] = {"seconds": vars(cost)}
        progress.step(done + 1, 2, began)
    return Row("a hit on the scheduler thread", figures, details)
