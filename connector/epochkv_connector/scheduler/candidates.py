"""Which blocks of which requests are offered to the tiers, and when: each once, as soon as its KV cannot be taken back.

A step of vLLM's scheduler takes about 10 us of CPU for each running request. Looking at every one of them added a tenth to that, and
15 of 16 have no new block. A request gets a limited number of new tokens in a step. So the first step in which its next block
can be complete is known when the last one was found (`Boundaries`). It is never late: that number is an upper bound, and whoever was
due and not scheduled stays due.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import Any

from epochkv_connector.engine import blocks
from epochkv_connector.naming.identity import Snapshot
from epochkv_connector.scheduler.requests import LoadState, Request
from epochkv_connector.scheduler.state import SharedState
from epochkv_connector.scheduler.tiers.saves import SavePlanner
from epochkv_connector.scheduler.tiers.views import ScheduledRequestView


class Boundaries:
    """A calendar of steps. A step is one call of `due`.

    Args:
        tokens_per_step: new tokens that one request may get in one step, at most (more than one with speculative decoding).
    """

    def __init__(self, tokens_per_step: int) -> None:
        self._tokens_per_step = max(1, tokens_per_step)
        self._step = 0
        self._when: dict[str, int] = {}  # those that are not due, and their step
        self._calendar: dict[int, list[str]] = {}  # may name requests that were moved or forgotten since
        self._due: dict[str, None] = {}  # ordered set

    def __len__(self) -> int:
        return len(self._when) + len(self._due)

    def start(self, request_ids: Iterable[str]) -> None:
        """Nothing is known of these (they begin, resume, or names have changed): look when they are next scheduled."""
        for request_id in request_ids:
            self._when.pop(request_id, None)
            self._due[request_id] = None

    def due(self, scheduled: Container[str]) -> list[str]:
        """Begin the next step: which of the requests scheduled in it to look at. They stay due until `later` or `forget`."""
        self._step += 1
        for request_id in self._calendar.pop(self._step, ()):
            if self._when.get(request_id) == self._step:
                del self._when[request_id]
                self._due[request_id] = None
        return [request_id for request_id in self._due if request_id in scheduled]

    def later(self, request_id: str, num_tokens: int) -> None:
        """Look again when so many tokens more can be known, counted from those that are known or computed by now.

        0 or less: in the next step.
        """
        step = self._step + max(1, -(-num_tokens // self._tokens_per_step))
        self._due.pop(request_id, None)
        self._when[request_id] = step
        self._calendar.setdefault(step, []).append(request_id)

    def forget(self, request_id: str) -> None:
        self._when.pop(request_id, None)
        self._due.pop(request_id, None)


class SaveCandidates:
    """Finds requests with blocks to offer; `Request.num_offered` says how many were."""

    def __init__(self, state: SharedState, tokens_per_step: int) -> None:
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
        resumed = scheduler_output.scheduled_cached_reqs.resumed_req_ids
        boundaries.start(resumed)
        for request_id in resumed:
            self._start_anew(request_id, saves)
        lacked, offered = saves.continuable(scheduled), blocks.offered_states(scheduler_output)
        with_states = [request_id for request_id in offered if request_id in scheduled]
        for request_id in dict.fromkeys((*boundaries.due(scheduled), *lacked, *with_states)):
            record = self._requests.get(request_id)
            if record is None:
                boundaries.forget(request_id)
                continue
            request = record.vllm
            confirmed = blocks.num_confirmed_tokens(request, scheduled[request_id], len(drafts.get(request_id, ())))
            boundaries.later(request_id, confirmed - confirmed % size + size - blocks.num_expected_tokens(request))
            again = request_id in lacked
            view = self._view(record, confirmed, snapshot, again=again, states=offered.get(request_id, ()))
            if view is not None:
                yield view
            elif again:
                saves.give_up(request_id)

    def _start_anew(self, request_id: str, saves: SavePlanner) -> None:
        """A preempted request has other blocks when it resumes, and vLLM keeps other windows of them."""
        record = self._requests.get(request_id)
        if record is not None:
            record.num_offered = 0
        saves.forget_request(request_id)

    def at_end(self, request: Any, snapshot: Snapshot) -> ScheduledRequestView | None:
        """The request if it has blocks that are complete only now that it has ended. While it has its blocks.

        With async scheduling the last token of a block is known a step after its KV was computed. But vLLM schedules no step
        after the one that gives the last token of `max_tokens`.
        """
        record, pin = self._requests.get(request.request_id), self._pins.pin_of(request)
        if record is None or record.load is not LoadState.NONE or pin is None or pin.loading or not pin.admitted:
            return None  # vLLM counts as computed what is being loaded, by whatever connector
        return self._view(record, blocks.num_final_tokens(request), snapshot)

    def _view(
        self, record: Request, confirmed: int, snapshot: Snapshot, *, again: bool = False, states: Sequence[tuple[int, int, int]] = ()
    ) -> ScheduledRequestView | None:
        """The request with its complete blocks, or None if nothing is new (and not `again`) or nothing may be saved."""
        request: Any = record.vllm
        complete = min(confirmed // self._state.hash_block_size, len(request.block_hashes))
        if complete <= record.num_offered and not again and not states:
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
            states=states,
        )

    def forget(self, request_id: str) -> None:
        self._boundaries.forget(request_id)

    def leak_report(self) -> dict[str, int]:
        return {"boundaries": len(self._boundaries)}
