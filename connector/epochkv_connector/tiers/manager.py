"""The tier manager: hits, loads and saves over one index of blocks and one table of jobs in flight.

It decides and never moves bytes. It loads every hit that it answered, or refuses it at once. What it holds (host slots, GPU
references, plans, queries) it gives back on every way a request can take.

Order within one step: `hits.answer`, then `loads.commit`, for each waiting request; then `saves.collect`; then `end_step`.
`on_acks`, `finish`, `adopt` and `reset` come at any other time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from epochkv_connector.config import ConnectorConfig
from epochkv_connector.naming.identity import Snapshot
from epochkv_connector.tiers.hits import HitPlanner, LoadJobs
from epochkv_connector.tiers.layout import CacheLayout, KeysOf, longest_hit
from epochkv_connector.tiers.lookup import Lookups
from epochkv_connector.tiers.saves import SaveJobs
from epochkv_connector.tiers.state import Loaded, TierState
from epochkv_connector.wire import JobAck, StepMetadata

if TYPE_CHECKING:
    from epochkv_connector.engine.blocks import BlockPoolAdapter
    from epochkv_connector.store.client import StoreClient

COUNTERS = (
    *("lookups", "lookups_deferred", "lookups_missed", "lookups_paused", "hits_shrunk"),
    *("plans_opened", "plans_committed", "plans_aborted", "plans_expired", "plans_over_cap", "plans_dropped"),
    *("loads_failed_before_send", "loads_done", "loads_failed", "blocks_loaded", "blocks_prefetched"),
    *("saves_emitted", "blocks_saved", "blocks_stored"),
    *("queries_begun", "queries_late", "queries_failed", "blocks_absent"),
)
"""Counters in `stats()`, always present."""


class TierManager:
    """See the module's docstring.

    Args:
        layout: KV cache groups; a layout with a `problem()` gets no hits and no saves.
        num_ranks: worker ranks that acknowledge every job (vLLM's world size).
        num_slots: host slots that every rank has; 0: some rank has none, so there are no hits and no saves.
        store: existence queries; None: lookups end at L1.
        ids: job ids, never repeating.
        clock: monotonic seconds.
        keys_of: names a block's L2 keys; required with `store`.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        layout: CacheLayout,
        *,
        num_ranks: int,
        num_slots: int,
        store: StoreClient | None,
        ids: Iterator[int],
        clock: Callable[[], float],
        keys_of: KeysOf | None = None,
    ) -> None:
        self.state = TierState(config, layout, num_ranks, num_slots, ids, clock)
        lookups: Lookups | None = None
        if store is not None:
            assert keys_of is not None
            seconds = config.lookup_wait_ms / 1e3, config.lookup_deadline_ms / 1e3
            lookups = Lookups(store, keys_of, *seconds, clock, self.state.counts)
        self.hits = HitPlanner(self.state, lookups)
        self.loads = LoadJobs(self.state, self.hits)
        self.saves = SaveJobs(self.state)

    def bind_block_pool(self, pool: BlockPoolAdapter, hash_block_size: int) -> None:
        """Give access to vLLM's GPU blocks, and tell how many tokens a block hash is of; before the first request."""
        self.hits.is_on_gpu = pool.holds
        self.saves.pool, self.loads.null_block = pool, pool.null_block_id
        self.state.hash_block_size = hash_block_size
        self.state.scales = [group.block_size // hash_block_size for group in self.state.layout.groups]

    def stored(self, names: Sequence[bytes]) -> tuple[int, int]:
        """Tokens of the longest prefix of these blocks that L2 is known to hold, and of the longest that it can."""
        layout, known, scales = self.state.layout, self.state.known, self.state.scales

        def present(group: int, block: int) -> bool:
            position = (block + 1) * scales[group] - 1
            return position < len(names) and (group, bytes(names[position])) in known

        def first_absent(group: int, first: int, end: int) -> int:
            return next((block for block in range(first, end) if not present(group, block)), end)

        most = len(names) * self.state.hash_block_size
        return (
            longest_hit(layout, 0, most, present, first_absent),
            longest_hit(layout, 0, most, lambda group, block: (block + 1) * scales[group] <= len(names), lambda group, first, end: end),
        )

    def finish(self, request_id: str) -> None:
        """The request is over. A load under way stays until every rank reports it; saves stay until acknowledged."""
        self.hits.forget_request(request_id)
        self.saves.planner.forget_request(request_id)

    def end_step(self) -> StepMetadata:
        """End the step: allocate the slots of accepted hits, age the plans. Returns the jobs, and nothing else that ranks are told."""
        step = StepMetadata(self.loads.end_step())
        self.hits.end_step()
        if self.hits.prefetches is not None:
            prefetches, step.cancelled = self.hits.prefetches.end_step()
            step.loads += prefetches
        step.saves, step.agreed, step.refused = self.saves.end_step()
        return step

    def on_acks(self, acks: Iterable[JobAck]) -> None:
        for ack in acks:
            for outcome in self.state.jobs.acknowledge(ack):
                if isinstance(outcome, Loaded):
                    self.loads.loaded(outcome)
                else:
                    self.saves.apply(outcome)

    def adopt(self, snap: Snapshot) -> None:
        """New names hold. Plans, queries and remembered answers go; L1 of another root is first to be evicted."""
        if self.state.rename(snap.root):
            self._end_plans()
        self.hits.forget_all()

    def reset(self) -> None:
        """As `adopt`, and L1 is empty at once."""
        self.state.clear()
        self._end_plans()
        self.hits.forget_all()

    def _end_plans(self) -> None:
        """Forget how far each request was saved. Accepted hits still go out, and what they bring is not indexed."""
        self.saves.planner.clear()
        self.loads.abandon()

    def leak_report(self) -> dict[str, int]:
        """Everything that must be 0 when no request lives and every job is acknowledged."""
        return {
            "held_slots": self.state.index.num_held,
            "reserved_slots": self.state.index.num_reserved,
            "busy_slots": self.state.jobs.num_busy_slots,
            "jobs": len(self.state.jobs),
            "loads": self.state.jobs.num_loads,
            "gpu_blocks": self.state.jobs.num_gpu_blocks,
            **self.hits.leak_report(),
            **self.loads.leak_report(),
            **self.saves.leak_report(),
        }

    def stats(self) -> dict[str, float]:
        """Counters since the start, and gauges of now. The one method that may be called on another thread."""
        index, jobs, pause = self.state.index, self.state.jobs, self.hits.pause
        values: dict[str, float] = {name: self.state.counts.get(name, 0) for name in COUNTERS}
        values |= {
            "slots": index.num_slots,
            "slots_indexed": index.num_indexed,
            "slots_other_roots": index.num_dead,
            "slots_held": index.num_held,
            "slots_reserved": index.num_reserved,
            "slots_busy": jobs.num_busy_slots,
            "evictions": index.evictions,
            "evictions_unread": index.evictions_unread,
            "evictions_unused": index.evictions_unused,
            "saves_deferred": self.saves.planner.num_deferred,
            "states_lost": self.saves.planner.num_states_lost,
            "jobs_open": len(jobs),
            "reads_open": jobs.num_reads,
            "jobs_overdue": jobs.num_overdue(self.state.clock()),
            "acks_ignored": jobs.ignored_acks,
            "plans_open": len(self.hits.plans),
            "known_in_store": len(self.state.known),
            "loads_paused": pause.paused,
            "load_pauses": pause.num_pauses,
        }
        return {name: float(value) for name, value in values.items()}
