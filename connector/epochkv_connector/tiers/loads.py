"""Hits that vLLM has accepted: from the promise to the job that goes out, and what its end says about L1 and L2.

vLLM may accept fewer tokens than were planned, and with a sliding window a shorter hit ends with another window. So the plan is
compared with the blocks that vLLM has allocated, and a hit that cannot fill every one of them is refused.
Slots are allocated when the whole step is known (`tiers.state`), so an accepted hit waits here as a draft until then.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

import msgspec

from epochkv_connector.naming.identity import Snapshot
from epochkv_connector.tiers.hits import ABSENT, HitPlanner, Plan, Span
from epochkv_connector.tiers.jobs import Loaded
from epochkv_connector.tiers.layout import GroupKind, RequestView, cdiv, tokens_by_tier
from epochkv_connector.tiers.state import TierState
from epochkv_connector.wire import BlockMove, LoadJob, Tier


@dataclass(slots=True)
class LoadDraft:
    """An accepted hit. Slot -1 in a move: reserved, to be allocated when the step is known.

    Attributes:
        num_fetched: moves that come from L2.
        num_reserved: slots for the blocks that are fetched; where there are fewer slots, they are used in turns.
        sources: tokens by tier.
        abandoned: the root changed since, so its blocks must not be indexed.
    """

    request_id: str
    namespace: str | None
    moves: list[BlockMove]
    num_fetched: int
    num_reserved: int
    sources: Mapping[Tier, int]
    abandoned: bool = False


def _moves(span: Span, gpu_blocks: Sequence[int]) -> Iterable[BlockMove]:
    """One for each of the span's first blocks, into these GPU blocks."""
    count = len(gpu_blocks)
    blocks, slots = range(span.first, span.first + count), span.slots[:count]
    if not span.num_absent:
        return map(BlockMove, repeat(span.group), blocks, gpu_blocks, slots, span.names)
    sources = [Tier.STORE if slot == ABSENT else Tier.HOST for slot in slots]
    return map(BlockMove, repeat(span.group), blocks, gpu_blocks, slots, span.names, sources)


class LoadJobs:
    """Accepted hits of this step, and the end of those that went out.

    Attributes:
        null_block: vLLM's GPU block that holds nothing.
    """

    def __init__(self, state: TierState, planner: HitPlanner) -> None:
        self._state = state
        self._index = state.index
        self._planner = planner
        self._drafts: dict[str, LoadDraft] = {}
        self.null_block = 0

    def leak_report(self) -> dict[str, int]:
        return {"unsent_loads": len(self._drafts)}

    def is_open(self, request_id: str) -> bool:
        """Whether some rank has not reported a load of this request, those accepted in this step included."""
        return request_id in self._drafts or self._state.jobs.is_loading(request_id)

    def commit(self, req: RequestView, group_block_ids: Sequence[Sequence[int]], num_tokens: int, snap: Snapshot) -> bool:
        """vLLM has allocated blocks for a hit, or a part of it. A second call does nothing.

        Returns:
            Whether a load goes out or is under way. False: the promise cannot be kept (no plan, other root, more tokens than
            planned, a block that vLLM expects to be filled and the plan does not cover).
        """
        if self.is_open(req.request_id):
            return True
        plan, draft = self._planner.take(req.request_id), None
        if plan is not None:
            if plan.root == snap.root and num_tokens <= plan.num_tokens:
                draft = self._bind(plan, num_tokens, group_block_ids)
            self._planner.release(plan)  # what the draft did not take
        if draft is None:
            self._state.counts["loads_failed_before_send"] += 1
            return False
        self._state.counts["plans_committed"] += 1
        self._drafts[req.request_id] = draft
        if draft.num_fetched:
            self._planner.pause.begin(req.request_id)
        return True

    def _bind(self, plan: Plan, num_tokens: int, group_block_ids: Sequence[Sequence[int]]) -> LoadDraft | None:
        """Moves for the accepted tokens; takes their holds out of the plan. None if any block is not covered.

        vLLM caches every block it allocated here under its name, so every one of them must be filled.
        """
        total = plan.num_local_tokens + num_tokens
        moves: list[BlockMove] = []
        dropped: list[int] = []  # slots of the plan that the load does not use
        for span in plan.spans:
            spec = self._state.layout.groups[span.group]
            first, end = plan.num_local_tokens // spec.block_size, cdiv(total, spec.block_size)
            gpu_blocks = group_block_ids[span.group][first:end]
            has_null = self.null_block in gpu_blocks
            refused = len(gpu_blocks) < end - first or (spec.kind is GroupKind.FULL and has_null)
            if not refused and span.first == first and end - first <= len(span.slots) and not has_null:  # which is the rule
                moves += _moves(span, gpu_blocks)
                dropped += span.slots[end - first :]
            elif refused or not self._bind_window(span, first, gpu_blocks, moves, dropped):
                return None
        num_fetched = sum(move.source is Tier.STORE for move in moves) if plan.num_missing else 0
        num_reserved = min(plan.reserved, num_fetched)
        self._index.unpin(slot for slot in reversed(dropped) if slot != ABSENT)
        unused = plan.reserved - num_reserved
        plan.clear()
        plan.reserved = unused
        sources = self._sources(moves, num_fetched, num_tokens)
        return LoadDraft(plan.request_id, plan.namespace, moves, num_fetched, num_reserved, sources)

    def _sources(self, moves: Sequence[BlockMove], num_fetched: int, num_tokens: int) -> Mapping[Tier, int]:
        if num_fetched in (0, len(moves)):
            return {Tier.STORE if num_fetched else Tier.HOST: num_tokens}
        blocks: dict[Tier, Counter[int]] = {source: Counter() for source in Tier}
        for move in moves:
            blocks[move.source][move.group] += 1
        return tokens_by_tier(self._state.layout, blocks[Tier.HOST], blocks[Tier.STORE], num_tokens)

    def _bind_window(self, span: Span, first: int, gpu_blocks: Sequence[int], moves: list[BlockMove], dropped: list[int]) -> bool:
        """As `_bind` for one group of which vLLM left blocks out. False: it wants others than were planned."""
        left = dict(enumerate(span.slots, span.first))
        for block, gpu_block in enumerate(gpu_blocks, first):
            if gpu_block == self.null_block:
                continue  # out of the window
            if block not in left:
                return False  # a shrunk hit ends with another window
            slot, name = left.pop(block), span.names[block - span.first]
            moves.append(BlockMove(span.group, block, gpu_block, slot, name, Tier.STORE if slot == ABSENT else Tier.HOST))
        dropped += left.values()
        return True

    def sources(self, request_id: str) -> Mapping[Tier, int]:
        """Tokens by tier of the hit accepted in this step (for vLLM's metrics)."""
        draft = self._drafts.get(request_id)
        return {} if draft is None else draft.sources

    def end_step(self) -> tuple[LoadJob, ...]:
        now = self._state.clock()
        jobs = tuple(self._open(draft, now) for draft in self._drafts.values())
        self._drafts = {}
        return jobs

    def _open(self, draft: LoadDraft, now: float) -> LoadJob:
        moves = tuple(draft.moves)
        if draft.num_fetched:
            fresh = itertools.cycle(self._index.allocate(draft.num_reserved, reserved=True))
            moves = tuple(m if m.source is Tier.HOST else msgspec.structs.replace(m, slot=next(fresh)) for m in moves)
        job = LoadJob(next(self._state.ids), draft.request_id, draft.namespace, moves, self._state.config.job_deadline_seconds)
        self._state.jobs.open_load(job, now, draft.abandoned, reads=draft.num_fetched > 0)
        return job

    def abandon(self) -> None:
        """The names changed: what these hits bring must not be indexed."""
        for draft in self._drafts.values():
            draft.abandoned = True

    def loaded(self, done: Loaded) -> None:
        self._state.counts["loads_done"] += 1
        self._state.counts["loads_failed"] += done.failed
        self._state.counts["blocks_loaded"] += len(done.job.moves) - len(done.doubted)
        fetched = sum(move.source is Tier.STORE for move in done.job.moves)
        if fetched:
            arrived = not done.failed or len(done.filled) == fetched
            self._planner.pause.end(done.job.request_id, None if done.abandoned else arrived)
        if not done.abandoned:
            self._state.loaded(done)
