"""The end of each `schedule()`: what ranks are told, in one piece of metadata.

Also what is saved between steps: a request's last block is known to be complete only when the request has ended.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from epochkv_connector.naming.identity import Snapshot
from epochkv_connector.scheduler.bookkeeping import Bookkeeping
from epochkv_connector.scheduler.offering import Offers
from epochkv_connector.scheduler.state import State
from epochkv_connector.scheduler.views import ScheduledRequestView
from epochkv_connector.scheduler.weight_changes import WeightChanges
from epochkv_connector.wire.jobs import LoadJob, SaveJob
from epochkv_connector.wire.steps import StepMetadata


class Steps:
    """Builds the metadata of each step.

    Args:
        offers: which blocks are offered to the tiers.
        saves_off: why nothing is saved, or None.
    """

    def __init__(self, state: State, weights: WeightChanges, offers: Offers, saves_off: str | None) -> None:
        self._state, self._fence, self._requests, self._books = state, state.fence, state.requests, state.books
        self._weights = weights
        self.offers = offers
        self._saves_off = saves_off
        self._settle = False  # saves have let go of GPU blocks that ranks may still read
        self._used_adapters: set[tuple[int, int]] = set()  # (id, number of the question) of what is saved next

    def build(self, scheduler_output: Any) -> StepMetadata:
        """Emit saves, collect jobs, let acknowledgements go."""
        scheduled: dict[str, int] = scheduler_output.num_scheduled_tokens
        look = -1
        self._requests.schedule(scheduled)
        try:
            snapshot = self._state.apply()
            if snapshot.in_use and scheduled:  # also where nothing is saved: blocks are named, or begun, all the same
                look = self._weights.look_number()
            if self._state.broken:
                metadata = self.emergency()
                metadata.look = look
                return metadata
            if self._books is None:
                return StepMetadata(newest_epoch=snapshot.epoch, look=look)
            if snapshot.in_use and scheduled and self._saves_off is None:
                views = list(self.offers.of_step(self._books.saves.planner, scheduler_output, snapshot))
                if views:
                    self._collect(self._books, views, snapshot)
            return self._told(self._books, snapshot, look)
        finally:
            self._fence.leave_schedule()

    def _collect(self, books: Bookkeeping, views: Iterable[ScheduledRequestView], snapshot: Snapshot) -> None:
        """Save what these requests offer. Ranks compare the adapters that the names speak of before they save."""
        for view in views:
            record = self._requests.get(view.request_id)
            pin = self._fence.pin_of(record.vllm) if record is not None else None
            if pin is not None and pin.adapter and self._weights.adapters is not None:
                self._used_adapters.add((pin.adapter, self._weights.adapters.number(pin.adapter)))
        self._describe(books.saves.collect(views, snapshot))

    def _describe(self, jobs: Iterable[SaveJob | LoadJob]) -> None:
        """Events of L1 tell the tokens of a block, which are known while its request lives."""
        for job in jobs:
            record = self._requests.get(job.request_id)
            if record is not None:
                self._state.events.offer({job.request_id: record.vllm}, (job,))

    def _told(self, books: Bookkeeping, snapshot: Snapshot, look: int) -> StepMetadata:
        jobs = books.end_step()
        if look < 0 and jobs.saves:
            look = self._weights.look_number()
        adapters, self._used_adapters = tuple(sorted(self._used_adapters)), set()
        self._state.counters["tokens_saved"] += sum(save.num_blocks for save in jobs.saves) * self.offers.hash_block_size
        self._describe(jobs.loads)
        self._requests.send(load.request_id for load in jobs.loads)
        return self._with_names(
            StepMetadata(
                loads=jobs.loads,
                saves=jobs.saves,
                newest_epoch=snapshot.epoch,
                look=look,
                adapters=adapters,
                agreed=jobs.agreed,
                refused=jobs.refused,
            )
        )

    def _with_names(self, metadata: StepMetadata) -> StepMetadata:
        metadata.settle, self._settle = self._settle, False
        metadata.poisoned = tuple(self._requests.names())
        return metadata

    def emergency(self) -> StepMetadata:
        """The bookkeeping has failed: answer what vLLM waits for and no rank was told of, and use the tiers no more."""
        self._state.broken = True
        if self._books is not None:
            self._books.saves.drop_unsent()
        self._requests.doom_unsent()
        return self._with_names(StepMetadata(newest_epoch=self._state.applied.epoch))

    def save_last_blocks(self, request: Any) -> None:
        """Save what is complete only now that the request has ended; its blocks are its own until we return."""
        if self._books is None or self._state.broken or self._saves_off is not None:
            return
        try:
            snapshot = self._state.apply()
            view = self.offers.at_end(request, snapshot) if snapshot.in_use else None
            if view is not None:
                self._collect(self._books, (view,), snapshot)
        except Exception as error:
            self._state.fail("request_finished", error)

    def let_go(self) -> None:
        """vLLM is about to clear its own cache, which it refuses while anybody holds a block of it."""
        try:
            if self._books is not None:
                self._books.saves.drop_unsent()  # of requests that have ended since the last step
                self._settle = self._books.saves.let_go() or self._settle
        except Exception as error:
            self._settle = True
            self._state.on_error("let_go", error)
