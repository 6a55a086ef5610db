"""Asking L2 what it holds, and fetching it early for requests that wait. A dead store holds up nobody, and is not asked while loads fail.

A query begins as early as possible (when the request arrives) on the client's own thread. All queries of one scheduler
step share one short wait, a tenth of the last step at most, because answering "ask again" costs the request a whole model step.
After a query's deadline the answer is what L1 has. Errors are "not there".

The master may answer every existence query while no byte arrives (a hung or unreachable store node, foreign objects, a
client that cannot read). Only the end of a load shows that, and a path that fails for ever would cost every hit a failed load. So
after a few failures in a row L2 is not asked for a while, then one load goes ahead as a trial, and the pause doubles until one
succeeds. Saves go on. A block that fails again and again counts as absent instead (`tiers.state.Doubts`).

Blocks of a request that waits for its turn come from L2 into L1, so that the wire works meanwhile. A request whose query is
answered, and that vLLM has not asked about by the end of a step, waits behind others; one whose hit vLLM has left waits for GPU blocks.
A *prefetch* is a load job without GPU blocks: what it brings is in L1 when vLLM asks. Until then vLLM is told to ask again.

    prefetches under way <= 1, so one of the store client's threads is left to loads
    slots prefetched for requests that have not taken their hit <= num_slots / PREFETCH_SHARE

Blocks that have arrived are ordinary ones of L1, and go when others need their slots. A prefetch is cancelled with its request, and
when names change; what it still brings then is not indexed.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epochkv_connector.tiers.layout import KeysOf, RequestView
from epochkv_connector.tiers.state import Key, Loaded, TierState, block_keys
from epochkv_connector.wire import BlockMove, LoadJob, Tier

if TYPE_CHECKING:
    from epochkv_connector.store.client import StoreClient

READ_LEASE_SECONDS = 5.0
"""How long an existence answer is believed. The store's own read lease is 10 s by default, 5 s in older builds
(Mooncake `types.h`, `default_kv_lease_ttl`)."""

WAIT_SHARE = 0.1
"""Of a step: how much longer the requests that run may have to wait for those that arrive."""


@dataclass(slots=True)
class Query:
    """One request's question: which of these blocks does every shard hold?"""

    namespace: str
    root: bytes
    begun_at: float
    blocks: list[Key]
    shards: list[int]  # keys per block
    answer: Future[Sequence[bool]]
    request: RequestView
    deadline: float
    asked: bool = False  # vLLM has considered the request since
    fetched: bool = False  # nothing of it was left to fetch
    found: frozenset[Key] | None = None
    late: bool = False  # past its deadline: go on without L2
    failed: bool = False  # L2 said nothing, so nothing is `found`


class Lookups:
    """Open queries, one per request.

    Args:
        client: asked for requests that have a namespace; None: none ever has.
    """

    def __init__(self, state: TierState, client: StoreClient | None, keys_of: KeysOf) -> None:
        self._client, self._keys_of = client, keys_of
        self._clock, self._counts = state.clock, state.counts
        self._wait_seconds = state.config.lookup_wait_ms / 1e3  # shared by all queries between two calls of `new_step`
        self._deadline_seconds = state.config.lookup_deadline_ms / 1e3  # of one query, from its begin
        self._patience_seconds = state.config.job_deadline_seconds  # the same, where the sender waits until L2 holds its prompt
        self._budget, self._stepped_at = self._wait_seconds, self._clock()
        self._queries: dict[str, Query] = {}

    def __len__(self) -> int:
        return len(self._queries)

    def new_step(self) -> None:
        """A scheduler step is over: the next one has its own wait."""
        before, self._stepped_at = self._stepped_at, self._clock()
        self._budget = min(self._wait_seconds, WAIT_SHARE * (self._stepped_at - before))

    def get(self, request_id: str, namespace: str, root: bytes) -> Query | None:
        """The request's query if it is this question, else None (another one is dropped). Its answer may be too old (`is_stale`)."""
        query = self._queries.get(request_id)
        if query is None:
            return None
        if query.namespace == namespace and query.root == root:
            return query
        self.drop(request_id)
        return None

    def is_stale(self, query: Query) -> bool:
        return query.answer.done() and self._clock() >= query.begun_at + READ_LEASE_SECONDS

    def begin(self, request: RequestView, namespace: str, root: bytes, blocks: Sequence[Key]) -> Query:
        """Ask for `blocks`; returns at once. Replaces an earlier query of the request, whose deadline stays where its answer came too late
        for vLLM: in long steps, that might be asked again for ever."""
        before = self._queries.get(request.request_id)
        self.drop(request.request_id)
        keys: list[str] = []
        shards: list[int] = []
        for group, block_hash in blocks:
            of_block = self._keys_of(namespace, group, block_hash)
            shards.append(len(of_block))
            keys.extend(of_block)
        assert self._client is not None, "without a store there are no namespaces"
        # Who waits for L2 has no use for an answer without it.
        seconds = self._deadline_seconds if request.hear_of_l2 is None else self._patience_seconds
        answer = self._client.exists(keys, seconds)
        now = self._clock()
        deadline = before.deadline if before is not None and before.asked and before.found is None else now + seconds
        query = Query(namespace, root, now, list(blocks), shards, answer, request, deadline)
        self._queries[request.request_id] = query
        self._counts["queries_begun"] += 1
        return query

    def unasked(self, request_id: str) -> Query | None:
        """The request's answered query, with `found`, if vLLM has not considered the request since."""
        query = self._queries.get(request_id)
        if query is None or query.asked or query.late or not query.answer.done():
            return None
        if query.found is None:
            query.found = self._collect(query)
        return query

    def is_left(self, request_id: str) -> bool:
        """Whether L2 may have some of it left to fetch. vLLM has considered the request, and left it: it counts as not asked again."""
        query = self._queries.get(request_id)
        if query is None or query.found is None or query.fetched:
            return False
        query.asked = False
        return True

    def give_up(self, request_id: str) -> None:
        """The request goes on without L2, if it has an open query."""
        query = self._queries.get(request_id)
        if query is not None:
            query.late, query.found, query.begun_at = True, None, self._clock()  # as for an answer that is late

    def is_pending(self, query: Query) -> bool:
        """Whether to ask again, after waiting at most what is left of the step's wait; if not, `found` is set unless it is too late."""
        query.asked = True
        if query.found is not None or query.late:
            return False
        if not query.answer.done() and self._budget > 0:
            before = self._clock()
            wait([query.answer], timeout=self._budget)
            self._budget = max(0.0, self._budget - (self._clock() - before)) if query.answer.done() else 0.0
        if query.answer.done():
            query.found = self._collect(query)
            return False
        if self._clock() < query.deadline:
            return True
        query.late, query.begun_at = True, self._clock()  # no answer is one, for as long
        self._counts["queries_late"] += 1
        query.answer.cancel()
        return False

    def _collect(self, query: Query) -> frozenset[Key]:
        try:
            answers = query.answer.result(timeout=0)
        except BaseException:  # the client's business; CancelledError is not an Exception
            answers = ()
        if len(answers) != sum(query.shards):
            query.failed = True
            self._counts["queries_failed"] += 1
            answers = (False,) * sum(query.shards)
        found, position = set(), 0
        for block, shards in zip(query.blocks, query.shards, strict=True):
            if shards and all(answers[position : position + shards]):
                found.add(block)
            position += shards
        return frozenset(found)

    def drop(self, request_id: str) -> None:
        query = self._queries.pop(request_id, None)
        if query is not None:
            query.answer.cancel()

    def drop_all(self) -> None:
        for request_id in list(self._queries):
            self.drop(request_id)


logger = logging.getLogger(__name__)

MAX_FAILURES = 3
FIRST_PAUSE_SECONDS, LAST_PAUSE_SECONDS = 1.0, 30.0


class LoadPause:
    """Decides whether L2 may be asked. Scheduler thread only, but `paused` may be read anywhere.

    Args:
        trial_seconds: a trial that was not heard of for so long does not count any more.
        clock: monotonic seconds.

    Attributes:
        num_pauses: how often loads were paused, or went on being paused after a failed trial.
    """

    def __init__(self, trial_seconds: float, clock: Callable[[], float]) -> None:
        self._trial_seconds = trial_seconds
        self._clock = clock
        self._failures = 0  # in a row
        self._pause = FIRST_PAUSE_SECONDS
        self._until = 0.0
        self._trial: str | None = None
        self._trial_until = 0.0
        self.num_pauses = 0

    @property
    def paused(self) -> bool:
        """Whether the last loads failed and none has succeeded since."""
        return self._failures >= MAX_FAILURES

    def allows(self) -> bool:
        """Whether a lookup may ask L2 now."""
        if not self.paused:
            return True
        now = self._clock()
        return now >= self._until and (self._trial is None or now >= self._trial_until)

    def begin(self, request_id: str) -> None:
        """A load from L2 was accepted; the first one after a pause is the trial, and nobody else asks until it has ended."""
        if self.paused and self.allows():
            self._trial, self._trial_until = request_id, self._clock() + self._trial_seconds

    def end(self, request_id: str, arrived: bool | None) -> None:
        """A load from L2 has ended on all ranks; `arrived` is None when its end says nothing about the path (names have changed)."""
        was_trial = self._trial == request_id
        if was_trial:
            self._trial = None
        if arrived:
            if self.paused:
                logger.info("loads from the L2 store succeed again")
            self._failures, self._pause = 0, FIRST_PAUSE_SECONDS
        elif arrived is not None:
            self._fail(was_trial)

    def _fail(self, was_trial: bool) -> None:
        self._failures += 1
        if not was_trial and self._failures != MAX_FAILURES:
            return
        if not was_trial:
            logger.warning(
                "%d loads from the L2 store have failed in a row: not asking it for %.0f s, then one load at a time until one "
                "succeeds (pauses grow to %.0f s)",
                *(self._failures, self._pause, LAST_PAUSE_SECONDS),
            )
        self._until = self._clock() + self._pause
        self._pause = min(2 * self._pause, LAST_PAUSE_SECONDS)
        self.num_pauses += 1


PREFETCH_SHARE = 4
MOST_PREFETCHED = 1024
"""Of one prefetch: making it is work of one step."""

NO_GPU_BLOCK = -1

Missing = Callable[[Query], Sequence[tuple[int, int, bytes]]]
"""(group, block, name) of what a hit needs, L2 holds, and neither L1 nor the GPU does, in chain order. Of an answer that is too old: none,
and L2 is asked again."""


class Prefetches:
    """One prefetch at a time, for requests whose query is answered."""

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

    def watch(self, request_id: str, query: Query, *, again: bool = False) -> None:
        """The request may have to wait: look at it when its query is answered, before others if L2 was asked `again` at its turn."""
        if self._index.indexed:
            query.answer.add_done_callback(lambda _: (self._answered.appendleft if again else self._answered.append)(request_id))

    def offer(self, request_id: str) -> bool:
        """vLLM has left the request's hit until it has GPU blocks for it. Whether the hit comes from L2 meanwhile."""
        if self._index.indexed and not self._under_way and self._room() > 0 and self._lookups.is_left(request_id):
            self._answered.appendleft(request_id)
            return True
        return False

    def _room(self) -> int:
        room = min(self._index.num_slots // PREFETCH_SHARE - self._num_slots, self._index.num_available, MOST_PREFETCHED)
        return 0 if self._pause.paused else room

    def is_open(self, request_id: str) -> bool:
        return request_id in self._under_way.values()

    def is_wanted(self, job_id: int) -> bool:
        return self._under_way.get(job_id) is not None

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
        while self._answered and not self._under_way:
            first = self._answered.popleft()  # whoever is put in front of it meanwhile stays
            query, room = self._lookups.unasked(first), self._room()
            if query is not None and room <= 0:
                self._answered.appendleft(first)
                break
            if query is not None:
                missing = self._missing(query)
                if missing:
                    return (self._begin(query, missing[:room]),), cancelled
                query.fetched = True
                break  # that was a walk along a whole prompt: one for each step
        return (), cancelled

    def _begin(self, query: Query, missing: Sequence[tuple[int, int, bytes]]) -> LoadJob:
        slots = self._index.allocate(len(missing), prefetched=True)
        moves = tuple(
            BlockMove(group, block, NO_GPU_BLOCK, slot, name, Tier.STORE) for (group, block, name), slot in zip(missing, slots, strict=True)
        )
        request_id, deadline = query.request.request_id, self._state.config.job_deadline_seconds
        job = LoadJob(next(self._state.ids), request_id, query.namespace, moves, deadline, prefetch=True)
        self._state.jobs.open_load(job, self._state.clock())
        self._state.begin_load(request_id, moves[-1])
        self._under_way[job.job_id] = request_id
        self._slots[request_id] = self._slots.get(request_id, 0) + len(slots)
        self._num_slots += len(slots)
        return job

    def ended(self, done: Loaded) -> None:
        """Every rank has reported one. After a failure its request is not told of L2 any more. One that was cancelled says nothing."""
        request_id = self._under_way.pop(done.job.job_id, None)
        self._state.counts["blocks_prefetched"] += len(done.filled)
        if request_id is None:
            return
        self._pause.end(request_id, not done.failed)
        if done.failed:
            self._state.doubts.add(block_keys(done.doubted))
            self.release(request_id)
            self._lookups.give_up(request_id)
        else:
            self._answered.appendleft(request_id)  # there may be more of it
