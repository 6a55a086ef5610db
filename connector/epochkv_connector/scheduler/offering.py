"""Which blocks of which requests are offered to the tiers, and when: each once, as soon as its KV cannot be taken back.

Runs on vLLM's scheduler thread, in every step: hundreds of requests run and few of them have a new block, so only those are
looked at that can have (`scheduler.boundaries`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from epochkv_connector.engine import blocks
from epochkv_connector.naming.identity import Snapshot
from epochkv_connector.scheduler.boundaries import Boundaries
from epochkv_connector.scheduler.requests import Request
from epochkv_connector.scheduler.state import State
from epochkv_connector.scheduler.tiers.saves import SavePlanner
from epochkv_connector.scheduler.tiers.views import ScheduledRequestView


class Offers:
    """Finds requests with blocks to offer; `Request.num_offered` says how many were.

    Args:
        tokens_per_step: new tokens that a request may get in one step, at most.
    """

    def __init__(self, state: State, tokens_per_step: int) -> None:
        self._state, self._pins, self._requests = state, state.pins, state.requests
        self._boundaries = Boundaries(tokens_per_step)
        self._under: Snapshot | None = None  # what held when requests were last looked at

    def of_step(self, saves: SavePlanner, scheduler_output: Any, snapshot: Snapshot) -> Iterable[ScheduledRequestView]:
        """Requests with something new to save: another complete block, or slots for what was left out before."""
        size, boundaries = self._state.hash_block_size, self._boundaries
        scheduled, drafts = scheduler_output.num_scheduled_tokens, scheduler_output.scheduled_spec_decode_tokens
        if snapshot is not self._under:
            self._under = snapshot
            boundaries.start(record.request_id for record in self._requests)  # what may be saved is another matter now
        boundaries.start(new.req_id for new in scheduler_output.scheduled_new_reqs)
        boundaries.start(scheduler_output.scheduled_cached_reqs.resumed_req_ids)
        lacked = saves.continuable(scheduled)
        for request_id in dict.fromkeys((*boundaries.due(scheduled), *lacked)):
            record = self._requests.get(request_id)
            if record is None:
                boundaries.forget(request_id)
                continue
            request = record.vllm
            confirmed = blocks.num_confirmed_tokens(request, scheduled[request_id], len(drafts.get(request_id, ())))
            boundaries.later(request_id, confirmed - confirmed % size + size - blocks.num_expected_tokens(request))
            again = request_id in lacked
            view = self._view(record, confirmed, snapshot, again=again)
            if view is not None:
                yield view
            elif again:
                saves.give_up(request_id)

    def at_end(self, request: Any, snapshot: Snapshot) -> ScheduledRequestView | None:
        """The request if it has blocks that are complete only now that it has ended. While it has its blocks.

        With async scheduling the last token of a block is known a step after its KV was computed. But vLLM schedules no step
        after the one that gives the last token of `max_tokens`.
        """
        record, pin = self._requests.get(request.request_id), self._pins.pin_of(request)
        if record is None or pin is None or pin.loading or not pin.admitted:
            return None  # vLLM counts as computed what is being loaded
        return self._view(record, blocks.num_final_tokens(request), snapshot)

    def _view(self, record: Request, confirmed: int, snapshot: Snapshot, *, again: bool = False) -> ScheduledRequestView | None:
        """The request with its complete blocks, or None if none is new (and not `again`) or none may be saved."""
        request: Any = record.vllm
        complete = min(confirmed // self._state.hash_block_size, len(request.block_hashes))
        if complete <= record.num_offered and not again:
            return None
        pin = self._pins.pin_of(request)
        if pin is None or not self._pins.may_save(pin):
            return None
        record.num_offered = complete
        return ScheduledRequestView(
            request_id=record.request_id,
            num_confirmed_tokens=confirmed,
            block_hashes=request.block_hashes,
            hash_block_size=self._state.hash_block_size,
            root=snapshot.root,
            group_block_ids=blocks.group_block_ids(self._state.manager, record.request_id),
        )

    def forget(self, request_id: str) -> None:
        """The request is finished."""
        self._boundaries.forget(request_id)

    def leak_report(self) -> dict[str, int]:
        """All zero when no request lives."""
        return {"boundaries": len(self._boundaries)}
