"""One step: which blocks are offered to the tiers, what ranks are told at the end of `schedule()`, and what they then report.

A step of vLLM's scheduler takes about 10 us of CPU for each running request. Looking at every one of them added a tenth to that, and
15 of 16 have no new block. A request gets a limited number of new tokens in a step. So the first step in which its next block
can be complete is known when the last one was found (`Boundaries`). It is never late: that number is an upper bound, and whoever was
due and not scheduled stays due.

vLLM has consumed `failed_recving` by the time we hear of it, so a success cannot be turned into a failure here. One whose names
have changed meanwhile is hidden from vLLM instead, and every rank is asked to report once more, as failed.

When a load fails:

    rank       ends the copy that it is in, and answers that job alone as failed (`worker.jobs.LoadTasks.fail`)
    scheduler  hears of it when every rank has reported (`_record_loads`); vLLM computes the tokens
    request    is `LoadState.FAILED`, and steps aside once before it is scheduled again (`Admission._steps_aside_once`)
    tiers      keep what arrived (`TierState.loaded`). Failures in a row pause L2 (`LoadPause`), a block's own make it absent (`Doubts`).
               Where names have changed meanwhile, nothing is kept, doubted or counted
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from epochkv_connector.config import Save, UpTo
from epochkv_connector.engine import blocks
from epochkv_connector.naming.identity import Snapshot
from epochkv_connector.naming.root import is_session
from epochkv_connector.scheduler.requests import LoadEvent, LoadState, Request, SharedState
from epochkv_connector.scheduler.stamps import asked_of
from epochkv_connector.scheduler.weight_changes import WeightChanges
from epochkv_connector.tiers.layout import ScheduledRequestView
from epochkv_connector.tiers.manager import SavePlanner, TierManager
from epochkv_connector.wire import StepMetadata, WorkerReport

if TYPE_CHECKING:
    from epochkv_connector.worker.role import WorkerRole


class Boundaries:
    """A calendar of steps. A step is one call of `due`, in which a request may get at most `tokens_per_step` new tokens."""

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens_per_step = max(1, tokens_per_step)
        self._step = 0
        self._when: dict[str, int] = {}  # those that are not due, and their step
        self._calendar: dict[int, list[str]] = {}  # may name requests that were moved or forgotten since
        self._due: dict[str, None] = {}  # ordered set

    def __len__(self) -> int:
        return len(self._when) + len(self._due)

    def start(self, request_id: str) -> None:
        """Nothing is known of it (it begins, resumes, or names have changed): look when it is next scheduled."""
        self._when.pop(request_id, None)
        self._due[request_id] = None

    def due(self, scheduled: Container[str]) -> list[str]:
        """Begin the next step: which of the requests scheduled in it to look at. They stay due until `later` or `forget`."""
        self._step += 1
        for request_id in self._calendar.pop(self._step, ()):
            if self._when.get(request_id) == self._step:
                del self._when[request_id]
                self._due[request_id] = None
        return [request_id for request_id in self._due if request_id in scheduled] if self._due else []

    def later(self, request_id: str, num_tokens: int) -> None:
        """Look again when so many tokens more can be known, counted from those that are known or computed by now (0 or less: next step)."""
        step = self._step + max(1, -(-num_tokens // self._tokens_per_step))
        self._due.pop(request_id, None)
        self._when[request_id] = step
        self._calendar.setdefault(step, []).append(request_id)

    def forget(self, request_id: str) -> None:
        self._when.pop(request_id, None)
        self._due.pop(request_id, None)


class SaveCandidates:
    """Finds requests with blocks to offer; `Request.num_offered` says how many were, and `boundaries` when to look again."""

    def __init__(self, state: SharedState, tokens_per_step: int, save: Save) -> None:
        self._save = save
        self._state, self._pins, self._requests = state, state.pins, state.requests
        self.boundaries = Boundaries(tokens_per_step)
        self._under: Snapshot | None = None  # what held when requests were last looked at

    def of_step(self, saves: SavePlanner, scheduler_output: Any, snapshot: Snapshot) -> Iterable[ScheduledRequestView]:
        """Requests with something new to save: another complete block, or slots for what was left out before."""
        size, boundaries = self._state.hash_block_size, self.boundaries
        scheduled, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
        if snapshot is not self._under:
            self._under = snapshot
            for living in self._requests:
                if blocks.holds_blocks(living.vllm):  # the others begin when they are scheduled
                    boundaries.start(living.request_id)  # what may be saved is another matter now
        resumed = list(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        for new in scheduler_output.scheduled_new_reqs:
            boundaries.start(new.req_id)
            if getattr(self._requests.vllm(new.req_id), "num_preemptions", 0):  # so vLLM tells its second model runner
                resumed.append(new.req_id)
        # A resumed request has other blocks than before its preemption, and vLLM keeps other windows of them.
        for request_id in resumed:
            boundaries.start(request_id)
            saves.forget_request(request_id)
            if (record := self._requests.get(request_id)) is not None:
                record.num_offered = 0
        due, lacked, offered = boundaries.due(scheduled), saves.continuable(scheduled), blocks.offered_states(scheduler_output)
        if lacked or offered:
            due = list(dict.fromkeys((*due, *lacked, *(request_id for request_id in offered if request_id in scheduled))))
        for request_id in due:
            record = self._requests.get(request_id)
            if record is None:
                boundaries.forget(request_id)
                continue
            request = record.vllm
            confirmed = blocks.num_confirmed_tokens(request, scheduled[request_id], len(drafts.get(request_id, ())))
            boundaries.later(request_id, confirmed - confirmed % size + size - blocks.num_expected_tokens(request))
            again = request_id in lacked
            view = self._view(record, confirmed, again=again, states=offered.get(request_id, ()))
            if view is not None:
                yield view
            elif again:
                saves.give_up(request_id)

    def at_end(self, saves: SavePlanner, request: Any) -> ScheduledRequestView | None:
        """The request if it has blocks that are complete only now that it has ended, or that found no slots. While it has its blocks.

        With async scheduling the last token of a block is known a step after its KV was computed. But vLLM schedules no step
        after the one that gives the last token of `max_tokens`.
        """
        record, pin = self._requests.get(request.request_id), self._pins.pin_of(request)
        if record is None or record.load is not LoadState.NONE or pin is None or pin.loading or not pin.admitted:
            return None  # vLLM counts as computed what is being loaded, by whatever connector
        return self._view(record, blocks.num_final_tokens(request), again=saves.lacks(request.request_id))

    def _view(
        self, record: Request, confirmed: int, *, again: bool = False, states: Sequence[tuple[int, int, int]] = ()
    ) -> ScheduledRequestView | None:
        """The request with its complete blocks, or None if nothing is new (and not `again`) or nothing may be saved."""
        request: Any = record.vllm
        hashes = self._state.names_for_tiers(request)
        if record.max_saved is None or is_session(request):  # vLLM counts later inputs as prompt
            record.max_saved = max_saved(request, self._save)
        complete = min(min(confirmed, record.max_saved) // self._state.hash_block_size, len(hashes))
        if complete <= record.num_offered and not again and not states:
            return None
        pin = self._pins.pin_of(request)
        if pin is None or not self._pins.may_save(pin):
            return None
        record.num_offered = complete
        return ScheduledRequestView(
            request_id=record.request_id,
            num_confirmed_tokens=confirmed,
            block_hashes=hashes[:complete] if record.max_saved < confirmed else hashes,
            group_block_ids=blocks.group_block_ids(self._state.manager, record.request_id),
            states=states,
        )


def max_saved(request: Any, save: Save) -> int:
    """How many of its tokens may be saved: as the request says itself, else as this engine does."""
    asked = asked_of(request)
    if asked is not None and "save" in asked:
        with contextlib.suppress(msgspec.ValidationError):
            save = msgspec.convert({"max_tokens": asked["save"]} if type(asked["save"]) is int else asked["save"], Save)
    if isinstance(save, UpTo):
        return save.max_tokens
    return int(request.num_prompt_tokens) if save == "Prompts" else sys.maxsize


IDLE_DRAIN_SECONDS = 0.05
"""How long an in-process engine, which never steps after its last request, may wait for device-to-host copies."""


FindWorker = Callable[[], "WorkerRole | None"]


class Steps:
    """Builds the metadata of each step, and takes its results. `local_worker` finds the worker role when it lives in this process."""

    def __init__(
        self, state: SharedState, weights: WeightChanges, candidates: SaveCandidates, may_save: bool, local_worker: FindWorker
    ) -> None:
        self._state, self._pins, self._requests, self._tiers = state, state.pins, state.requests, state.tiers
        self._weights = weights
        self.candidates = candidates
        self._may_save = may_save
        self._local_worker = local_worker
        self._used_adapters: set[tuple[int, int]] = set()  # (id, number of the question) of what is saved next

    def build(self, scheduler_output: Any) -> StepMetadata:
        scheduled: dict[str, int] = scheduler_output.num_scheduled_tokens
        self._requests.schedule(scheduled)
        try:
            if self._tiers is not None and any(self._weights.adapters.number(one) != number for one, number in self._used_adapters):
                self._tiers.saves.drop_unsent()  # they were asked about again, and all saves of the step would fail with these
                self._used_adapters.clear()
            snapshot = self._state.apply()
            # In bypass, too: requests from before it may save what they make now when the lease returns, and stamps say what made a token.
            number = self._weights.watch.step_number if scheduled else -1
            if self._state.broken:
                metadata = self.emergency()
                metadata.digest_number = number
                return metadata
            if self._tiers is None:
                return StepMetadata(newest_epoch=snapshot.epoch, digest_number=number)
            if snapshot.in_use and scheduled and self._may_save:
                views = list(self.candidates.of_step(self._tiers.saves.planner, scheduler_output, snapshot))
                if views:
                    self._collect(self._tiers, views, snapshot)
            return self._told(self._tiers, snapshot, number)
        finally:
            self._pins.leave_schedule()

    def _collect(self, tiers: TierManager, views: Iterable[ScheduledRequestView], snapshot: Snapshot) -> None:
        """Save what these requests offer. Ranks compare the adapters that the names speak of before they save."""
        for view in views:
            pin = self._pins.pin_of(self._requests.vllm(view.request_id))
            if pin is not None and pin.adapter:
                self._used_adapters.add((pin.adapter, self._weights.adapters.number(pin.adapter)))
        # Events of L1 tell the tokens of a block, which are known while its request lives.
        self._state.events.offer(self._requests.vllm, tiers.saves.collect(views, snapshot))

    def _told(self, tiers: TierManager, snapshot: Snapshot, number: int) -> StepMetadata:
        """The jobs that go out with this step, and what ranks compare behind it."""
        step = tiers.end_step()
        if step.saves:
            number = self._weights.watch.step_number if number < 0 else number
        if step.loads:
            self._state.events.offer(self._requests.vllm, step.loads)
            self._requests.send(load.request_id for load in step.loads if not load.prefetch)
        if self._used_adapters:
            step.adapters, self._used_adapters = tuple(sorted(self._used_adapters)), set()
        step.newest_epoch, step.digest_number, step.invalidated = snapshot.epoch, number, tuple(self._requests.names())
        return step

    def emergency(self) -> StepMetadata:
        """The tiers have failed: answer what vLLM waits for and no rank was told of, and use the tiers no more."""
        self._state.broken = True
        metadata = StepMetadata(newest_epoch=self._state.applied.epoch)
        if self._tiers is not None:
            self._tiers.saves.drop_unsent()
            _, metadata.agreed, metadata.refused = self._tiers.saves.end_step()  # ranks, and an engine that would idle, wait for these
        self._requests.fail_unsent()
        metadata.invalidated = tuple(self._requests.names())
        return metadata

    def save_last_blocks(self, request: Any) -> None:
        """Save what is complete only now that the request has ended; its blocks are its own until we return."""
        if self._tiers is None or self._state.broken or not self._may_save:
            return
        try:
            snapshot = self._state.apply()
            view = self.candidates.at_end(self._tiers.saves.planner, request) if snapshot.in_use else None
            if view is not None:
                self._collect(self._tiers, (view,), snapshot)
        except Exception as error:
            self._state.fail("request_finished", error)

    def reset(self, clear: Callable[[], bool]) -> bool:
        """vLLM clears its own cache, which it refuses while anybody holds a block of it. Saves let go of theirs meanwhile, and so do steps
        under way, which may still write to blocks of preempted requests. Nobody takes a block before it returns."""
        pool, held = blocks.BlockPoolAdapter(self._state.pool), list[int]()
        try:
            if self._tiers is not None:
                self._tiers.saves.drop_unsent()  # of requests that have ended since the last step
                held += self._tiers.state.jobs.gpu_blocks()  # which ranks may still read
            held += self._weights.blocks_to_free()
            pool.free(held)
        except Exception as error:
            self._state.on_error("let_go", error)
            held = []
        try:
            return clear()
        finally:
            pool.touch(held)

    def take(self, output: Any) -> None:
        """Hide successes that must not be, record the other loads, count acknowledgements."""
        self._pins.enter_report()
        try:
            self._state.apply()
            self._record_loads(output)
        except Exception as error:
            self._state.fail("record_loads", error)
            self._distrust_loads(output)
        finally:
            self._pins.leave_report()
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            self._hear(report)
        self._drain_when_idle()

    def _hear(self, report: WorkerReport) -> None:
        for ack in report.acks:  # one by one: what one acknowledgement breaks must not keep the blocks of others
            try:
                if self._tiers is not None:
                    self._tiers.on_acks((ack,))
            except Exception as error:
                self._state.fail("acknowledgement", error)
        self._weights.late(report)  # at last: what was just reported cannot be taken back any more

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
                record.num_offered = 0  # its blocks are computed again
            else:
                self.doubt(record.vllm)
            self._pins.end_load(record.vllm, succeeded=request_id not in failed)

    def doubt(self, request: Any) -> None:
        """Another connector has brought KV under names that its tag vouched for. Meanwhile names may have changed, and blocks that were
        read too late were another request's by then: unless the tag is still good, the blocks get other names."""
        pin = self._pins.pin_of(request)
        if pin is None or pin.loading or pin.alone or self._pins.maker.vouches(request):
            return
        self._pins.counters["foreign_kv_requests"] += 1
        self._weights.detach(request)

    def _distrust_loads(self, output: Any) -> None:
        """The tiers have failed: take every success back, as if names had changed. All other loads end as they were reported."""
        failed = set(output.failed_recving or ())
        for request_id in tuple(output.finished_recving or ()):
            record = self._requests.get(request_id)
            if record is None or request_id in failed:
                self._requests.report(request_id, failed=request_id in failed)
            elif self._requests.on(record, LoadEvent.DISTRUST):
                self._hide(output, request_id)

    @staticmethod
    def _hide(output: Any, request_id: str) -> None:
        output.finished_recving = set(output.finished_recving) - {request_id}

    def _drain_when_idle(self) -> None:
        """An in-process engine never steps after its last request: collect device-to-host acknowledgements here, and whatever else the
        rank says, which says it once."""
        if len(self._requests) or self._tiers is None or not self._tiers.state.jobs.num_gpu_blocks:
            return
        worker = self._local_worker()
        if worker is not None:
            self._hear(worker.drain(IDLE_DRAIN_SECONDS))
