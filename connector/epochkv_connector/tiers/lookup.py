"""Asking L2 what it holds: never waiting for a dead store, and not at all while loads from it fail.

A query begins as early as possible (when the request arrives) on the client's own thread. All queries of one scheduler
step share one short wait, because answering "ask again" costs the request a whole model step; after a query's deadline
the answer is what L1 has. Errors are "not there".

The master may answer every existence query while no byte arrives (a hung or unreachable store node, foreign objects, a
client that cannot read). Only the end of a load shows that, and a path that fails for ever would cost every hit a failed load. So
after a few failures in a row L2 is not asked for a while, then one load goes ahead as a trial, and the pause doubles until one
succeeds. Saves go on.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epochkv_connector.tiers.layout import KeysOf, RequestView
from epochkv_connector.tiers.state import Key

if TYPE_CHECKING:
    from epochkv_connector.store.client import StoreClient

READ_LEASE_SECONDS = 5.0
"""How long an existence answer is believed. The store's own read lease is 10 s by default, 5 s in older builds
(Mooncake `types.h`, `default_kv_lease_ttl`)."""


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
    asked: bool = False  # vLLM has considered the request since
    found: frozenset[Key] | None = None
    late: bool = False  # past its deadline: go on without L2


class Lookups:
    """Open queries, one per request.

    Args:
        wait_seconds: shared by all queries between two calls of `new_step`.
        deadline_seconds: of one query, from its begin.
        clock: monotonic seconds.
        counts: `queries_begun`, `queries_late`, `queries_failed` and `blocks_absent` are counted in it.
    """

    def __init__(
        self,
        client: StoreClient,
        keys_of: KeysOf,
        wait_seconds: float,
        deadline_seconds: float,
        clock: Callable[[], float],
        counts: Counter[str],
    ) -> None:
        self._client = client
        self._keys_of = keys_of
        self._wait_seconds = wait_seconds
        self._deadline_seconds = deadline_seconds
        self._clock = clock
        self._budget = wait_seconds
        self._queries: dict[str, Query] = {}
        self._counts = counts

    def __len__(self) -> int:
        return len(self._queries)

    def new_step(self) -> None:
        """A scheduler step is over: the next one has its own wait."""
        self._budget = self._wait_seconds

    def get(self, request_id: str, namespace: str, root: bytes) -> Query | None:
        """The request's query if it still answers this question, else None (an outdated one is dropped)."""
        query = self._queries.get(request_id)
        if query is None:
            return None
        fresh = self._clock() < query.begun_at + READ_LEASE_SECONDS
        if query.namespace == namespace and query.root == root and fresh:
            return query
        self.drop(request_id)
        return None

    def begin(self, request: RequestView, namespace: str, root: bytes, blocks: Sequence[Key]) -> Query:
        """Ask for `blocks`; returns at once. Replaces an earlier query of the request."""
        self.drop(request.request_id)
        keys: list[str] = []
        shards: list[int] = []
        for group, block_hash in blocks:
            of_block = self._keys_of(namespace, group, block_hash)
            shards.append(len(of_block))
            keys.extend(of_block)
        answer = self._client.exists(keys, self._deadline_seconds)
        query = Query(namespace, root, self._clock(), list(blocks), shards, answer, request)
        self._queries[request.request_id] = query
        self._counts["queries_begun"] += 1
        return query

    def unasked(self, request_id: str) -> Query | None:
        """The request's answered query, with `found`, if vLLM has not considered the request since and the answer is believed."""
        query = self._queries.get(request_id)
        if query is None or query.asked or query.late or not query.answer.done() or self._clock() >= query.begun_at + READ_LEASE_SECONDS:
            return None
        if query.found is None:
            query.found = self._collect(query)
        return query

    def give_up(self, request_id: str) -> None:
        """The request goes on without L2, if it has an open query."""
        query = self._queries.get(request_id)
        if query is not None:
            query.late, query.found = True, None

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
        if self._clock() < query.begun_at + self._deadline_seconds:
            return True
        query.late = True
        self._counts["queries_late"] += 1
        query.answer.cancel()
        return False

    def _collect(self, query: Query) -> frozenset[Key]:
        try:
            answers = query.answer.result(timeout=0)
        except BaseException:  # the client's business; CancelledError is not an Exception
            answers = ()
        if len(answers) != sum(query.shards):
            self._counts["queries_failed"] += 1
            answers = (False,) * sum(query.shards)
        found, position = set(), 0
        for block, shards in zip(query.blocks, query.shards, strict=True):
            if shards and all(answers[position : position + shards]):
                found.add(block)
            position += shards
        self._counts["blocks_absent"] += len(query.blocks) - len(found)
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
