"""Hits that vLLM has accepted: from the promise to the job that goes out, and what its end says about L1 and L2.

Slots are allocated when the whole step is known (`scheduler.index`), so an accepted hit waits here as a draft until then.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import msgspec

from epochkv_connector.scheduler.binding import LoadDraft
from epochkv_connector.scheduler.jobs import Loaded
from epochkv_connector.scheduler.planner import HitPlanner
from epochkv_connector.scheduler.stock import Stock
from epochkv_connector.scheduler.views import Commit, RequestView, Snapshot
from epochkv_connector.wire.jobs import LoadJob, Source


class Loads:
    """Accepted hits of this step, and the end of those that went out.

    Attributes:
        null_block: vLLM's GPU block that holds nothing.
    """

    def __init__(self, stock: Stock, hits: HitPlanner) -> None:
        self._stock = stock
        self._hits = hits
        self._drafts: dict[str, LoadDraft] = {}
        self.null_block = 0

    @property
    def num_unsent(self) -> int:
        """Accepted hits that no rank was told of yet."""
        return len(self._drafts)

    def is_open(self, request_id: str) -> bool:
        """Whether some rank has not reported a load of this request, those accepted in this step included."""
        return request_id in self._drafts or self._stock.ledger.is_loading(request_id)

    def commit(self, req: RequestView, group_block_ids: Sequence[Sequence[int]], num_tokens: int, snap: Snapshot) -> Commit:
        """vLLM has allocated blocks. 0 tokens abort the plan; fewer than planned shrink it; a second call does nothing.

        A promise that cannot be kept (no plan, other root, more tokens than planned, a block vLLM expects to be filled
        and the plan does not cover) makes the request DOOMED.
        """
        if num_tokens <= 0:
            self._hits.forget_request(req.request_id)
            return Commit.NOTHING
        if self.is_open(req.request_id):
            return Commit.LOADING
        draft = self._hits.accept(req, snap.root, num_tokens, group_block_ids, self.null_block)
        if draft is None:
            self._stock.counts["loads_doomed"] += 1
            return Commit.DOOMED
        self._stock.counts["plans_committed"] += 1
        self._drafts[req.request_id] = draft
        if draft.num_fetched:
            self._stock.pause.begin(req.request_id)
        return Commit.LOADING

    def sources(self, request_id: str) -> Mapping[Source, int]:
        """Tokens by tier of the hit accepted in this step (for vLLM's metrics)."""
        draft = self._drafts.get(request_id)
        return {} if draft is None else draft.sources

    def end_step(self) -> tuple[LoadJob, ...]:
        """The jobs of the hits accepted in this step."""
        now = self._stock.clock()
        jobs = tuple(self._open(draft, now) for draft in self._drafts.values())
        self._drafts = {}
        return jobs

    def _open(self, draft: LoadDraft, now: float) -> LoadJob:
        moves = tuple(draft.moves)
        if draft.num_fetched:
            fresh = itertools.cycle(self._stock.index.allocate(draft.num_reserved, reserved=True))
            moves = tuple(m if m.source is Source.HOST else msgspec.structs.replace(m, slot=next(fresh)) for m in moves)
        job = LoadJob(next(self._stock.ids), draft.request_id, draft.namespace, moves, self._stock.config.job_deadline_seconds)
        self._stock.ledger.open_load(job, now, draft.abandoned, reads=draft.num_fetched > 0)
        return job

    def abandon(self) -> None:
        """The names changed: what these hits bring must not be indexed."""
        for draft in self._drafts.values():
            draft.abandoned = True

    def loaded(self, done: Loaded) -> None:
        """Every rank has reported a load."""
        self._stock.counts["loads_done"] += 1
        self._stock.counts["loads_failed"] += done.failed
        self._stock.counts["blocks_loaded"] += len(done.job.moves) - len(done.doubted)
        fetched = sum(move.source is Source.STORE for move in done.job.moves)
        if fetched:
            arrived = not done.failed or len(done.filled) == fetched
            self._stock.pause.end(done.job.request_id, None if done.abandoned else arrived)
        if not done.abandoned:
            self._stock.loaded(done)
