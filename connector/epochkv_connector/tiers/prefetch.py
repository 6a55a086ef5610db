"""Fetching while queued: blocks of a request that waits for its turn come from L2 into L1, so that the wire works meanwhile.

A request whose L2 query is answered, and that vLLM has not asked about by the end of a step, waits behind others. A *prefetch* is a load
job without GPU blocks: what it brings is in L1 when vLLM asks. Until then vLLM is told to ask again.

    prefetches under way <= 1, so one of the store client's threads is left to loads
    slots prefetched for requests that have not taken their hit <= num_slots / SHARE

Blocks that have arrived are ordinary ones of L1, and go when others need their slots. A prefetch is cancelled with its request, and
when names change; what it still brings then is not indexed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from epochkv_connector.tiers.lookup import LoadPause, Lookups, Query
from epochkv_connector.tiers.state import Loaded, TierState
from epochkv_connector.wire import BlockMove, LoadJob, Tier

SHARE = 4
MOST_BLOCKS = 1024
"""Of one prefetch: making it is work of one step."""

NO_GPU_BLOCK = -1

Missing = Callable[[Query], Sequence[tuple[int, int, bytes]]]
"""(group, block, name) of what a hit needs, L2 holds, and neither L1 nor the GPU does, in chain order."""


class Prefetches:
    def __init__(self, state: TierState, lookups: Lookups, pause: LoadPause, missing: Missing) -> None:
        self._state, self._lookups, self._pause, self._missing = state, lookups, pause, missing
        self._index = state.index
        self._answered: deque[str] = deque()  # requests whose query is answered; threads of the store append to it
        self._under_way: dict[int, str | None] = {}  # job -> request; None: cancelled
        self._cancelled: list[int] = []
        self._slots: dict[str, int] = {}  # how many were prefetched, by request, until it takes its hit
        self._num_slots = 0

    def leak_report(self) -> dict[str, int]:
        return {"prefetches": len(self._under_way), "prefetch_slots": self._num_slots}

    def watch(self, request_id: str, query: Query) -> None:
        """The request may have to wait: look at it when its query is answered."""
        if self._index.indexed:
            query.answer.add_done_callback(lambda _: self._answered.append(request_id))

    def is_open(self, request_id: str) -> bool:
        return request_id in self._under_way.values()

    def release(self, request_id: str) -> None:
        """The request takes its hit, is over, or has other names: begin no further store call for it."""
        self._num_slots -= self._slots.pop(request_id, 0)
        for job_id, owner in self._under_way.items():
            if owner == request_id:
                self._under_way[job_id] = None
                self._cancelled.append(job_id)

    def release_all(self) -> None:
        for request_id in list(self._slots):
            self.release(request_id)

    def end_step(self) -> tuple[tuple[LoadJob, ...], tuple[int, ...]]:
        """The prefetch that begins with the next step, if any, and the job ids of those that are cancelled."""
        for job_id, request_id in list(self._under_way.items()):
            if self._state.jobs.is_overdue(job_id, self._state.clock()):
                if request_id is not None:
                    self.release(request_id)
                del self._under_way[job_id]
        cancelled, self._cancelled = tuple(self._cancelled), []
        if self._pause.paused:
            self._answered.clear()
        while self._answered and not self._under_way:
            query = self._lookups.unasked(self._answered[0])
            room = min(self._index.num_slots // SHARE - self._num_slots, self._index.num_available, MOST_BLOCKS)
            if query is not None and room <= 0:
                break
            self._answered.popleft()
            if query is not None:
                missing = self._missing(query)
                if missing:
                    return (self._begin(query, missing[:room]),), cancelled
                break  # that was a walk along a whole prompt: one for each step
        return (), cancelled

    def _begin(self, query: Query, missing: Sequence[tuple[int, int, bytes]]) -> LoadJob:
        slots = self._index.allocate(len(missing), prefetched=True)
        moves = tuple(
            BlockMove(group, block, NO_GPU_BLOCK, slot, name, Tier.STORE) for (group, block, name), slot in zip(missing, slots, strict=True)
        )
        request_id, deadline = query.request.request_id, self._state.config.job_deadline_seconds
        job = LoadJob(next(self._state.ids), request_id, query.namespace, moves, deadline, prefetch=True)
        self._state.jobs.open_load(job, self._state.clock(), reads=True)
        self._under_way[job.job_id] = request_id
        self._slots[request_id] = self._slots.get(request_id, 0) + len(slots)
        self._num_slots += len(slots)
        self._state.counts["blocks_prefetched"] += len(slots)
        return job

    def ended(self, done: Loaded) -> None:
        """Every rank has reported one. After a failure its request is not told of L2 any more."""
        request_id = self._under_way.pop(done.job.job_id, None)
        if request_id is None:
            return
        if done.failed:
            self.release(request_id)
            self._lookups.give_up(request_id)
        else:
            self._pause.end(request_id, True)
            self._answered.appendleft(request_id)  # there may be more of it
