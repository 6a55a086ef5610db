"""The connector that vLLM loads: `kv_connector_module_path="epochkv_connector.connector"`.

Thin on purpose: every entry point is one guarded call into `scheduler.role` or `worker.role`. An exception of
ours becomes a miss, is counted and logged once per kind; it never reaches vLLM. Only where copies run under memory that is about to be
unmapped, sleep is refused with one. Loads are always asynchronous, so
`start_load_kv` never delays a forward pass and the layer hooks do nothing.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

from epochkv_connector.engine import blocks, describe, entry, interface, limits, patches, plugin
from epochkv_connector.engine.interface import KVConnectorBase_V1, KVConnectorRole, KVConnectorTransferResults, SupportsHMA
from epochkv_connector.guard import Guard
from epochkv_connector.scheduler.role import SchedulerRole
from epochkv_connector.stats import EpochKVPromMetrics, EpochKVStats, Reporter
from epochkv_connector.weights.rank import check_settled, forget, held_by
from epochkv_connector.wire import RankLayout, StepMetadata, WorkerReport
from epochkv_connector.worker.role import JobRunner, WorkerRole, build_runner
from epochkv_fence.connection import ConfigurationError

logger = logging.getLogger("vllm.epochkv")

_local_workers: weakref.WeakValueDictionary[str, EpochKVConnector] = weakref.WeakValueDictionary()
"""Worker objects of this process by vLLM's engine id: an in-process scheduler object finds its worker here."""


class EpochKVConnector(KVConnectorBase_V1, SupportsHMA):
    """Host-memory and Mooncake tiers behind vLLM's prefix cache, fenced by weights and epochs."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        """Raises:
        ConfigurationError, interface.UnsupportedEngine: the engine must not start like this; the message says what to change.
        """
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        patches.share_log_handlers()
        entry.prefer_bundle()
        self._guard = Guard()
        try:
            extra = self._kv_transfer_config.kv_connector_extra_config
            siblings = limits.children_of(patches.parent_config())
            here = role is KVConnectorRole.WORKER or describe.has_ranks_here(vllm_config)
            self._epochkv_config = limits.check_start(vllm_config, extra, siblings, here=here)
        except (ConfigurationError, interface.UnsupportedEngine) as error:
            logger.error("EpochKV cannot start: %s", error)  # vLLM's traces follow, one for each process
            raise
        self._reporter = Reporter(self._guard.errors)
        self._scheduler: SchedulerRole | None = None
        self._worker: WorkerRole | None = None
        self._ends_no_step = False
        self._engine_id = str(self._kv_transfer_config.engine_id)
        if role is KVConnectorRole.SCHEDULER:
            self._scheduler = SchedulerRole(
                *(self._epochkv_config, self._vllm_config, self._kv_cache_config), *(self._guard, self._reporter, self._find_local_worker)
            )
        else:
            _local_workers[self._engine_id] = self

    def _find_local_worker(self) -> WorkerRole | None:
        connector = _local_workers.get(self._engine_id)
        return connector._worker if connector is not None else None

    @property
    def requires_kv_delivery(self) -> bool:
        """A dropped save is a future miss, nothing more."""
        return False

    @property
    def scheduler(self) -> SchedulerRole:
        """What answers vLLM's scheduler (scheduler role only)."""
        assert self._scheduler is not None, "this is the worker role"
        return self._scheduler

    # ------------------------------------------------------------------ scheduler role

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        """The cache manager exists, and with it the GPU's block pool."""
        self.scheduler.bind(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        self._guard.run("on_new_request", lambda: self.scheduler.on_new_request(request), lambda: self._isolate(request))

    def _isolate(self, request: Any) -> bool:
        """See `Admission.isolate`; True also when that fails."""
        return self._guard.run("isolate", lambda: self.scheduler.admission.isolate(request), lambda: True)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        before = request.block_hashes

        def miss() -> tuple[int | None, bool]:
            # vLLM looked into its own cache before it asked: under names that may be old. It drops that hit on None only.
            renamed = self._isolate(request) or request.block_hashes is not before
            return (None if renamed and not request.skip_reading_prefix_cache else 0), False

        return self._guard.run("get_num_new_matched_tokens", lambda: self.scheduler.admission.answer(request, num_computed_tokens), miss)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._guard.run(
            "update_state_after_alloc",
            lambda: self.scheduler.admission.allocate(request, blocks, num_external_tokens),
            lambda: self.scheduler.admission.fail_unsent(request) if num_external_tokens else self.scheduler.admission.admit(request),
        )

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> dict[Any, int]:
        """Tokens by tier; counts sum to `num_external_tokens`."""
        return self._guard.run(
            "hit_sources",
            lambda: self.scheduler.admission.hit_sources(request, num_external_tokens),
            lambda: blocks.hit_sources(0, num_external_tokens),
        )

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        return self._guard.run(
            "build_connector_meta",
            lambda: self.scheduler.steps.build(scheduler_output),
            lambda: self._guard.run("emergency", self.scheduler.steps.emergency, StepMetadata),
        )

    def update_connector_output(self, connector_output: Any) -> None:
        self._guard.run("update_connector_output", lambda: self.scheduler.steps.take(connector_output), lambda: None)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, dict[str, Any] | None]:
        """Frees are never delayed: saves hold their own references."""
        return self._guard.run("request_finished", lambda: self.scheduler.request_finished(request), lambda: (False, None))

    def has_pending_push_work(self) -> bool:
        """Keep stepping while a save holds GPU blocks or an invalidated load is open; both have deadlines."""
        return self._guard.run("has_pending_push_work", lambda: self.scheduler.has_pending_work, lambda: False)

    def has_pending_block_frees(self) -> bool:
        """Whether waiting for a save would release blocks instead of a preemption."""
        return self._guard.run(
            "has_pending_block_frees",
            lambda: self.scheduler.tiers is not None and self.scheduler.tiers.saves.would_free_gpu_blocks(),
            lambda: False,
        )

    def reset_cache(self) -> bool:
        """Clear on every tier. True: the names make it true. False only in the worker role, or if they could not be changed."""
        return self._scheduler is not None and self._guard.run("reset_cache", self._scheduler.reset_cache, lambda: False)

    def set_xfer_handshake_metadata_pp_aware(self, metadata: Any) -> None:
        """Nothing: a MultiConnector tells each child what the others' ranks say of themselves."""

    # ------------------------------------------------------------------ worker role

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Lay out the host region over the KV tensors; an engine that cannot be staged refuses every job.

        Other tensors than before, as after a sleep: it is laid out anew, and what it held is a miss.
        """
        rank, before = describe.worker_rank(self._vllm_config), self._worker
        self._ends_no_step = describe.ends_no_step(self._vllm_config)
        if before is not None:
            self._guard.run("worker.shutdown", before.retire, lambda: None)
        held = held_by(self._engine_id)
        runner: JobRunner | None = None
        if self._epochkv_config.has_tiers:
            parts = self._epochkv_config, self._vllm_config, self._kv_cache_config, kv_caches
            runner = self._guard.run("register_kv_caches", lambda: build_runner(*parts), lambda: None, may_end_start=True)
        if runner is not None:
            held.runners.add(runner)
        held.layout = runner.layout if runner is not None else RankLayout(refusal=self._guard.first.get("register_kv_caches", ""))
        if before is not None:
            before.runner = runner
        else:
            self._worker = WorkerRole(rank, runner, self._guard.note, compare=held.compare, begin=held.begin, adapters=held.adapters)

    def unregister_kv_caches(self) -> None:
        """The memory of KV is about to be unmapped (vLLM 0.33). Whoever does not come by the executor has not ended our copies yet.

        Raises:
            RuntimeError: copies still run.
        """
        check_settled(held_by(self._engine_id).settle_for_sleep())

    def restore_kv_caches(self) -> None:
        """It is mapped again, at the same addresses."""
        held_by(self._engine_id).woken()

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._worker is None:  # the runner never registered: answer all the same
            rank = describe.worker_rank(self._vllm_config)
            self._worker = WorkerRole(rank, None, self._guard.note, adapters=held_by(self._engine_id).adapters)
        self._worker.new_step()
        if describe.on_cpu():  # vLLM 0.32 calls `start_load_kv` behind the forward pass, which is no work of another device here
            self._step("start_step", lambda worker, metadata: worker.take(metadata))

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads begin. vLLM's second model runner calls this outside of the forward pass's context, and tells the number of tokens."""
        idle = "num_tokens" not in kwargs and getattr(forward_context, "attn_metadata", None) is None
        self._step("start_step", lambda worker, metadata: worker.start(metadata, idle=idle))

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: loads are asynchronous."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: saves are taken block by block after the forward pass."""

    def wait_for_save(self) -> None:
        """The forward pass was issued: saves begin behind it. Returns at once (blocks stay referenced until acknowledged)."""
        self._step("finish_step", lambda worker, metadata: worker.finish(metadata))

    def _step(self, where: str, work: Callable[[WorkerRole, StepMetadata], None]) -> None:
        worker = self._worker
        if worker is None or not self.has_connector_metadata():
            return
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        self._guard.run(where, lambda: work(worker, metadata), lambda: worker.refuse(metadata))

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that ended on this rank since the last call, each exactly once."""
        worker = self._worker
        if worker is None:
            return KVConnectorTransferResults()
        if self._ends_no_step:  # an early pipeline stage with drafts, whose `wait_for_save` vLLM never calls
            self.wait_for_save()
        finished, failed = self._guard.run("results", worker.results, lambda: (set(), set()))
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def build_connector_worker_meta(self) -> WorkerReport:
        """Acknowledgements; never None and never falsy, since vLLM's aggregator skips those."""
        return self._guard.run("acks", self._worker.acks, WorkerReport) if self._worker is not None else WorkerReport()

    # ------------------------------------------------------------------ both roles

    def get_kv_connector_stats(self) -> EpochKVStats | None:
        """Counters since the last report, and what holds now: once a second, and when the engine is about to idle."""
        return self._guard.run("stats", self._collect_stats, lambda: None)

    def _collect_stats(self) -> EpochKVStats | None:
        if not self._reporter.due() and (self._scheduler is None or not self._scheduler.is_idle):
            return None
        if self._scheduler is not None:
            return self._scheduler.stats()
        if self._worker is None:
            return None
        refusing = self._epochkv_config.has_tiers and self._worker.runner is None
        stats = self._reporter.worker_stats(self._worker.stats(), self._worker.rank, refusing=refusing)
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> EpochKVStats:
        """Rebuild stats in the API process."""
        return EpochKVStats(data) if data else EpochKVStats()

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: dict[Any, Any], labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> EpochKVPromMetrics:
        plugin.join_front_end()  # no plugin ran here where another process made the configuration, as Ray Serve has it on GPUs
        return EpochKVPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Stop everything, each within its own deadline."""
        if self._scheduler is not None:
            self._scheduler.stop()
        worker, self._worker = self._worker, None
        if worker is not None:
            self._guard.run("worker.shutdown", worker.shutdown, lambda: None)
        forget(self._engine_id)
