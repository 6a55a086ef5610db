"""The scheduler-facing half of the facade: vLLM's calls in, the fence and the tiers' bookkeeping (`scheduler/`) behind.

Runs on vLLM's scheduler thread only. Every rule here that looks odd is one of `fence.md` section 3, found by running
vLLM. The order inside each method is the point: *first* bring the bookkeeping to what holds now (`_apply`), then act.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from epochkv_connector.config.keys import ConnectorConfig
from epochkv_connector.engine import compat
from epochkv_connector.engine.events import HostEvents
from epochkv_connector.naming.fence import TAG_KEY, Fence, Repin
from epochkv_connector.naming.identity import Snapshot
from epochkv_connector.scheduler.core import SchedulerHalf
from epochkv_connector.scheduler.offering import Offers
from epochkv_connector.scheduler.requests import LoadEvent, LoadState, Request, Requests
from epochkv_connector.scheduler.views import Commit, RequestView, ScheduledRequestView
from epochkv_connector.weights.adapters import Adapters
from epochkv_connector.weights.watch import Watch
from epochkv_connector.wire.jobs import LoadJob, SaveJob, Source
from epochkv_connector.wire.steps import StepMetadata, WorkerReport

IDLE_DRAIN_SECONDS = 0.05
"""How long an in-process engine, which never steps after its last request, may wait for device-to-host copies."""


class LocalWorker(Protocol):
    """A worker half in this very process (`working.WorkerSide`)."""

    def drain(self, timeout: float) -> WorkerReport:
        """Wait for device-to-host copies, at most `timeout` seconds; acknowledgements that are ready."""


class SchedulerSide:
    """One per EngineCore.

    Attributes:
        watch: looks at the weights of the ranks; None: nobody does, so nothing is named.
        adapters: looks at their adapters; None: nobody does, so no request with an adapter is named.

    Args:
        half: bookkeeping of the tiers; None when no tier is configured (the fence still works).
        loads_off: why loads are never answered, or None.
        propose: asks the hub for an epoch after a local reset; None: do not ask.
        poke: has the hub told at once, of a change of weights and of a local reset.
        local_worker: finds the worker half when it lives in this process.
        tokens_per_step: new tokens that a request may get in one step, at most.
        on_error: told of errors that were dealt with here.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        fence: Fence,
        half: SchedulerHalf | None,
        *,
        loads_off: str | None = None,
        saves_off: str | None = None,
        propose: Callable[[int], None] | None = None,
        poke: Callable[[], None] = lambda: None,
        local_worker: Callable[[], LocalWorker | None] = lambda: None,
        tokens_per_step: int = 1,
        on_error: Callable[[str, Exception], None] = lambda where, error: None,
    ) -> None:
        self.watch: Watch | None = None
        self.adapters: Adapters | None = None
        self._config = config
        self.fence = fence
        self.half = half
        self._loads_off = loads_off
        self._saves_off = saves_off
        self._propose = propose
        self._poke = poke
        self._local_worker = local_worker
        self._on_error = on_error
        self._pool: Any = None
        self._manager: Any = None
        self._applied: Snapshot = fence.snapshot
        self._requests = Requests()
        self._offers = Offers(fence, self._requests, tokens_per_step)
        self._events = HostEvents(on_error)
        self._settle = False  # saves have let go of GPU blocks that ranks may still read
        self._used_adapters: set[tuple[int, int]] = set()  # (id, number of the question) of what is saved next
        self._broken = False
        self.counters: Counter[str] = Counter()

    # ------------------------------------------------------------------ life

    def bind(self, manager: Any, block_pool: Any, hash_block_size_sink: Any) -> None:
        """The cache manager exists: learn the hash block size and reach the GPU block pool."""
        self._pool, self._manager = block_pool, manager
        compat.before_reset(manager, self.let_go)
        self._offers.bind(manager, compat.hash_block_size_of(block_pool))
        hash_block_size_sink.hash_block_size = compat.hash_block_size_of(block_pool)
        if self.half is not None:
            self.half.bind_block_pool(compat.BlockPoolAdapter(block_pool))
        self._events.bind(block_pool, self.half if self._config.local is not None else None)

    def _apply(self) -> Snapshot:
        """Bring the bookkeeping to what holds now: poison what an adoption overtook. Returns what holds now."""
        snapshot = self.fence.current()
        if snapshot is self._applied:
            return snapshot
        changed_root = snapshot.root != self._applied.root
        self._rename(lambda half: half.adopt(snapshot), "adopt")
        self._applied = snapshot  # from here on an error cannot leave a load unpoisoned
        if changed_root:
            self._events.cleared(drop_pending=False)
        return snapshot

    def _rename(self, change: Callable[[SchedulerHalf], object], where: str) -> None:
        """The names changed: what is being loaded must fail, also where the bookkeeping cannot follow; then it is used no more."""
        self.counters["poisoned_loads"] += self._requests.overtake()
        if self.half is None:
            return
        try:
            change(self.half)
        except Exception as error:
            self._broken = True
            self._on_error(where, error)

    # ------------------------------------------------------------------ weights

    def hold(self, weights: bytes | None) -> None:
        """The ranks hold these weights from now on; None: unknown. Requests that hold blocks go on without names."""
        if not self.fence.hold(weights):
            self.tell()
            return
        if self.half is not None:
            self.half.drop_unsent_saves()  # of requests that have ended: no step compares what they were computed with any more
        for record in self._requests.live():
            if compat.holds_blocks(record.vllm):
                self._strand(record.vllm)
        self._apply()
        self.tell()

    def _strand(self, request: Any) -> None:
        self.fence.strand(request, compat.num_named_blocks(self._manager, request, self._pool))

    def tell(self) -> None:
        """What heartbeats say of the weights has changed."""
        if self._manager is not None:  # before that nobody listens yet
            self._poke()

    def end(self, weights: bytes) -> None:
        """Blocks under names of these weights were computed with others: they go, here at once, elsewhere with the next epoch."""
        if self.fence.end(weights):
            self._ask_for_next_epoch()
        self._apply()

    def adapters_in_use(self) -> dict[int, Any]:
        """A `LoRARequest` for each adapter of a live request; one that loads in place where there is one."""
        used = (getattr(record.vllm, "lora_request", None) for record in self._requests.live())
        adapters = sorted((one for one in used if one is not None), key=lambda one: bool(getattr(one, "load_inplace", False)))
        return {one.lora_int_id: one for one in adapters}

    def adapters_changed(self, numbers: set[int]) -> None:
        """These ids stand for other tensors from now on. Requests that hold blocks go on without names, and what is being loaded for
        them fails; the others are named anew before vLLM looks for them in its cache."""
        for record in self._requests.live():
            request, pin = record.vllm, self.fence.pin_of(record.vllm)
            if pin is None or pin.adapter not in numbers or self.fence.is_current(pin):
                continue
            if compat.holds_blocks(request):
                self._strand(request)
                self.counters["poisoned_loads"] += self._requests.on(record, LoadEvent.OVERTAKE)
            else:
                self._renamed(record, self.fence.repin(request, must=False), self._apply())

    def end_adapter(self, value: bytes) -> None:
        """Blocks under names of these tensors were computed with others. Ranks have saved none of them, so nobody else has any."""
        self.fence.end(value)

    def break_off(self) -> None:
        """A change of weights could not be followed: this engine names nothing that anybody finds, until it restarts."""
        self._broken = True
        self.fence.forbid()

    def _note_late(self, report: WorkerReport) -> None:
        """Ranks saw other weights, or adapters, behind a step than those that its blocks are named after."""
        try:
            for number in report.late:
                if self.watch is not None:
                    self.watch.late(number)
            for adapter_id, number in report.replaced:
                if self.adapters is not None:
                    self.adapters.late(adapter_id, number)
        except Exception as error:
            self._on_error("late", error)
            self.break_off()

    def _look_number(self) -> int:
        return self.watch.number if self.watch is not None and self.watch.value is not None else -1

    def _ask_for_next_epoch(self) -> None:
        epoch = self.fence.proposal()
        if self._propose is not None and epoch is not None:
            self._propose(epoch)

    # ------------------------------------------------------------------ requests

    def on_new_request(self, request: Any) -> None:
        """Pin, and begin the L2 lookup."""
        self._requests.see(request)
        adapter = getattr(request, "lora_request", None)
        if self.adapters is not None and adapter is not None:
            self.adapters.arrived(adapter)
        self.fence.pin(request)
        self._begin_lookup(request, self._apply())

    def _usable(self, request: Any, snapshot: Snapshot) -> bool:
        """Whether the tiers may serve this request now."""
        pin = self.fence.pin_of(request)
        return (
            self.half is not None
            and not self._broken
            and self._loads_off is None
            and snapshot.in_use
            and pin is not None
            and pin.saveable
            and self.fence.is_current(pin)
            and not request.skip_reading_prefix_cache
            and not (pin.session and pin.admitted)
        )

    def _begin_lookup(self, request: Any, snapshot: Snapshot) -> None:
        if self._usable(request, snapshot):
            assert self.half is not None
            self.half.begin_lookup(self._view(request, snapshot), snapshot)

    def _view(self, request: Any, snapshot: Snapshot) -> RequestView:
        # A current pin is told as the snapshot's root: pins of adapters derive from it and are as current.
        return RequestView(
            request_id=request.request_id,
            num_tokens=request.num_tokens,
            block_hashes=request.block_hashes,
            hash_block_size=compat.hash_block_size_of(self._pool),
            root=snapshot.root,
        )

    def get_num_new_matched_tokens(self, request: Any, num_local: int) -> tuple[int | None, bool]:
        """Answer the scheduler's question; `(None, False)`: drop the local hit and ask again next step."""
        self.fence.enter_schedule()
        record = self._requests.see(request)
        # When the scheduler goes on whatever is said, nothing may be deferred.
        must = bool(request.skip_reading_prefix_cache)
        outcome = Repin.CARRIED if compat.holds_blocks(request) else self.fence.repin(request, must=must)
        snapshot = self._apply()
        self._renamed(record, outcome, snapshot)
        if must or outcome is Repin.CARRIED:
            return 0, False
        stale_hit = outcome is Repin.DONE and num_local > 0
        if stale_hit or outcome is Repin.DEFERRED or self._steps_aside_once(record):
            return None, False
        if record.load is LoadState.FAILED or not self._usable(request, snapshot):
            return 0, False
        assert self.half is not None
        hit = self.half.lookup(self._view(request, snapshot), num_local, snapshot)
        if hit.num_tokens is None:
            return None, False
        return hit.num_tokens, hit.num_tokens > 0

    def _renamed(self, record: Request, outcome: Repin, snapshot: Snapshot) -> None:
        """Its blocks may have new names now."""
        if outcome is not Repin.DONE:
            return
        record.num_offered = 0
        if self.half is not None:
            self.half.abort(record.request_id)
        self._begin_lookup(record.vllm, snapshot)

    @staticmethod
    def _steps_aside_once(record: Request) -> bool:
        """After a failed load "ask again" once: it moves the request out of vLLM's queue of those that hold blocks.

        At the head of that queue it would wait for blocks that others behind it hold, and vLLM looks at none of them while it
        does not fit: with a sliding window a load holds fewer blocks than computing takes (seen: a permanent hang).
        """
        asked_first, record.steps_aside = record.steps_aside, False
        return asked_first

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external: int) -> None:
        """Commit or abort the plan. Decided on `num_external` alone: a MultiConnector loser gets real blocks and 0."""
        snapshot = self._apply()
        if num_external == 0:
            self.admit(request)
            if self.half is not None:
                self.half.abort(request.request_id)
            return
        record, outcome = self._requests.see(request), Commit.NOTHING
        if self.half is not None:
            outcome = self.half.commit(self._view(request, snapshot), blocks.get_block_ids(), num_external, snapshot)
        self.fence.begin_load(request)
        if outcome is not Commit.LOADING:
            self._requests.on(record, LoadEvent.DOOM)
        elif self._requests.on(record, LoadEvent.ACCEPT):
            host, store = self._tokens_by_tier(request.request_id, num_external)
            self.counters.update(tokens_hit_host=host, tokens_hit_store=store)

    def admit(self, request: Any) -> None:
        """vLLM computes tokens of this request from now on."""
        pin = self.fence.pin_of(request)
        if pin is not None and not pin.loading:
            self.fence.admit(request)

    def doom(self, request: Any) -> None:
        """An error of ours met an accepted hit: vLLM waits for it, so it must be reported as failed, exactly once."""
        self.fence.begin_load(request)
        record = self._requests.see(request)
        if self.half is not None and request.request_id in self.half.open_loads():
            self._requests.on(record, LoadEvent.ACCEPT)
            self._requests.on(record, LoadEvent.OVERTAKE)
        else:
            self._requests.on(record, LoadEvent.DOOM)

    def hit_sources(self, request: Any, num_external: int) -> dict[Any, int]:
        """Which tier supplies how many of the external tokens."""
        return compat.hit_sources(*self._tokens_by_tier(request.request_id, num_external))

    def _tokens_by_tier(self, request_id: str, num_external: int) -> tuple[int, int]:
        sources = self.half.hit_sources(request_id) if self.half is not None else {}
        host = min(sources.get(Source.HOST, 0), num_external)
        return host, num_external - host

    # ------------------------------------------------------------------ steps

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """End of a `schedule()`: emit saves, collect jobs, let acknowledgements go."""
        scheduled: dict[str, int] = scheduler_output.num_scheduled_tokens
        look = -1
        self._requests.schedule(scheduled)
        try:
            snapshot = self._apply()
            if snapshot.in_use and scheduled:  # also where nothing is saved: blocks are named, or begun, all the same
                look = self._look_number()
            if self._broken:
                metadata = self.emergency_meta()
                metadata.look = look
                return metadata
            if self.half is None:
                return StepMetadata(newest_epoch=snapshot.epoch, look=look)
            if snapshot.in_use and scheduled and self._saves_off is None:
                views = list(self._offers.of_step(self.half, scheduler_output, snapshot))
                if views:
                    self._note_adapters(views)
                    self.half.collect_saves(views, snapshot)
            metadata = self.half.build(snapshot.epoch)
            metadata.look = look if look >= 0 or not metadata.saves else self._look_number()
            metadata.adapters, self._used_adapters = tuple(sorted(self._used_adapters)), set()
            self.counters["tokens_saved"] += sum(save.num_blocks for save in metadata.saves) * compat.hash_block_size_of(self._pool)
            self._describe(*metadata.saves, *metadata.loads)
            self._requests.send(load.request_id for load in metadata.loads)
            return self._with_names(metadata)
        finally:
            self.fence.leave_schedule()

    def _describe(self, *jobs: SaveJob | LoadJob) -> None:
        """Events of L1 tell the tokens of a block, which are known while its request lives."""
        if jobs:
            records = {job.request_id: self._requests.get(job.request_id) for job in jobs}
            self._events.offer({name: record.vllm for name, record in records.items() if record is not None}, jobs)

    def _note_adapters(self, views: Iterable[ScheduledRequestView]) -> None:
        """Which adapters the names of what is saved speak of: ranks compare before they save it."""
        if self.adapters is None:
            return
        for view in views:
            record = self._requests.get(view.request_id)
            pin = self.fence.pin_of(record.vllm) if record is not None else None
            if pin is not None and pin.adapter:
                self._used_adapters.add((pin.adapter, self.adapters.number(pin.adapter)))

    def _with_names(self, metadata: StepMetadata) -> StepMetadata:
        metadata.settle, self._settle = self._settle, False
        metadata.poisoned = tuple(dict.fromkeys((*metadata.poisoned, *self._requests.names())))
        return metadata

    def emergency_meta(self) -> StepMetadata:
        """The bookkeeping has failed: answer what vLLM waits for and no rank was told of, and use the tiers no more."""
        self._broken = True
        if self.half is not None:
            self.half.drop_unsent_saves()
        self._requests.doom_unsent()
        return self._with_names(StepMetadata(newest_epoch=self._applied.epoch))

    def _save_last_blocks(self, half: SchedulerHalf, request: Any) -> None:
        """Save what is complete only now that the request has ended; its blocks are its own until we return."""
        if self._broken or self._saves_off is not None:
            return
        try:
            snapshot = self._apply()
            view = self._offers.at_end(request, snapshot) if snapshot.in_use else None
            if view is not None:
                self._note_adapters((view,))
                self._describe(*half.collect_saves((view,), snapshot))
        except Exception as error:
            self._broken = True
            self._on_error("request_finished", error)

    def update_connector_output(self, output: Any) -> None:
        """Results of a step: hold back the success of poisoned loads, record the others, count acknowledgements."""
        self.fence.enter_report()
        try:
            self._apply()
            self._record_loads(output)
        except Exception as error:
            self._on_error("record_loads", error)
            self._distrust_loads(output)
        finally:
            self.fence.leave_report()
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            if self.half is not None:
                self._count_acks(self.half, report)
            self._note_late(report)  # at last: a load that has just been reported cannot be taken back any more
        self._drain_when_idle()

    def _distrust_loads(self, output: Any) -> None:
        """The bookkeeping has failed: take every success back, as if it was poisoned, and use the tiers no more."""
        self._broken = True
        for request_id in set(output.finished_recving or ()) - set(output.failed_recving or ()):
            record = self._requests.get(request_id)
            if record is not None and self._requests.on(record, LoadEvent.DISTRUST):
                self._hide(output, request_id)

    @staticmethod
    def _hide(output: Any, request_id: str) -> None:
        """vLLM has consumed `failed_recving` already, so a success cannot be turned into a failure here: hide it. Every rank reports
        once more, finished and failed."""
        output.finished_recving = set(output.finished_recving) - {request_id}

    def _count_acks(self, half: SchedulerHalf, report: WorkerReport) -> None:
        """One by one: what one acknowledgement breaks must not keep the blocks of others."""
        for ack in report.acks:
            try:
                half.on_acks((ack,))
            except Exception as error:
                self._broken = True
                self._on_error("acknowledgement", error)

    def _record_loads(self, output: Any) -> None:
        failed = set(output.failed_recving or ())
        for request_id in tuple(output.finished_recving or ()):
            record = self._requests.report(request_id, failed=request_id in failed)
            if record is None:
                continue
            if record.load is LoadState.REPEATED:
                self._hide(output, request_id)
                continue
            if request_id in failed:
                record.num_offered = 0  # they are computed again
            self.fence.end_load(record.vllm, succeeded=request_id not in failed)

    def _drain_when_idle(self) -> None:
        """An in-process engine never steps after its last request: collect device-to-host acknowledgements here."""
        if self._requests or self.half is None or not self.half.holds_gpu_blocks():
            return
        worker = self._local_worker()
        if worker is None:
            return
        self._count_acks(self.half, worker.drain(IDLE_DRAIN_SECONDS))

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; GPU pins protect its saves, so frees are never delayed."""
        request_id = request.request_id
        tag = self.fence.tag(getattr(request, "lora_request", None)) if self._may_hand_off(request) else None
        if self.half is not None:
            self._save_last_blocks(self.half, request)
        self.fence.release(request)
        self._requests.finish(request_id)
        self._offers.forget(request_id)
        if self.half is not None:
            self.half.finish(request_id)
        return False, ({TAG_KEY: tag} if tag is not None else None)

    def _may_hand_off(self, request: Any) -> bool:
        """A P/D producer's request under a current, shareable pin: its KV may be named by our tag."""
        params = request.kv_transfer_params
        pin = self.fence.pin_of(request)
        return bool(params and params.get("do_remote_decode") and pin is not None and pin.saveable and self.fence.is_current(pin))

    @property
    def broken(self) -> bool:
        """Whether an error left the books in doubt: the tiers stay off until this engine restarts."""
        return self._broken

    @property
    def has_pending_work(self) -> bool:
        """Keep a multiprocess engine stepping: a save holds GPU blocks, ranks wait for word, or a poisoned load is not finally
        reported. All have deadlines."""
        if self._requests.must_fail:
            return True
        return self.half is not None and (self.half.holds_gpu_blocks() or self.half.owes_word())

    # ------------------------------------------------------------------ reset

    def let_go(self) -> None:
        """vLLM is about to clear its own cache, which it refuses while anybody holds a block of it."""
        try:
            if self.half is not None:
                self.half.drop_unsent_saves()  # of requests that have ended since the last step
                self._settle = self.half.let_go() or self._settle
        except Exception as error:
            self._settle = True
            self._on_error("let_go", error)

    def reset_cache(self) -> bool:
        """vLLM's own reset: clear on every tier. Always True: the names make it true."""
        rotated = self.fence.reset()
        self._apply()
        self._rename(lambda half: half.reset(), "reset")
        self._events.cleared(drop_pending=True)
        self.counters["local_resets"] += 1
        if rotated:
            self._ask_for_next_epoch()
            self._poke()
        return True

    # ------------------------------------------------------------------ errors

    def isolate(self, request: Any) -> bool:
        """An error of ours met this request: whatever it computes must be invisible to everybody.

        Returns:
            Whether it has new names now, so that a local hit found before must be dropped. A request that is alone under a
            current root already keeps its names.
        """
        self._requests.see(request)
        pin = self.fence.pin_of(request)
        if (pin is not None and pin.alone and self.fence.is_current(pin)) or compat.holds_blocks(request):
            return False
        self.fence.isolate(request)
        return True

    def leak_report(self) -> dict[str, int]:
        """What is still open; all zero when the engine is idle and every acknowledgement arrived."""
        report = {
            **self._requests.leak_report(),
            **self._offers.leak_report(),
            "carried": self.fence.carried() + self.fence.carried_sessions(),
        }
        if self.half is not None:
            report.update({f"half.{name}": count for name, count in self.half.leak_report().items()})
        return report
