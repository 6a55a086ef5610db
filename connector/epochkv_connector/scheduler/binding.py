"""From an accepted plan to the moves of a load: one for each GPU block that vLLM has allocated.

vLLM may accept fewer tokens than were planned, and with a sliding window a shorter hit ends with another window. So what
was planned is compared with what was allocated, block by block, and a hit that cannot fill every block is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import repeat

from epochkv_connector.scheduler import hits
from epochkv_connector.scheduler.found import ABSENT, Found, Span
from epochkv_connector.scheduler.index import HostIndex
from epochkv_connector.scheduler.plans import Plan
from epochkv_connector.scheduler.views import CacheLayout, GroupKind, RequestView
from epochkv_connector.wire.jobs import BlockMove, Source


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
    sources: Mapping[Source, int]
    abandoned: bool = False


def sources_of(layout: CacheLayout, plan: Plan, num_tokens: int) -> dict[Source, int]:
    """Tokens by tier of a planned hit."""
    if not plan.num_missing or not plan.num_pinned:
        return {Source.STORE if plan.num_missing else Source.HOST: num_tokens}
    store = [span.num_absent for span in plan.spans]
    return _split(layout, [len(span.slots) - absent for span, absent in zip(plan.spans, store, strict=True)], store, num_tokens)


def _split(layout: CacheLayout, host: Sequence[int], store: Sequence[int], num_tokens: int) -> dict[Source, int]:
    """Tokens of a hit from both tiers, of blocks by group; counted in the first full-attention group (every token is in it), else in
    all."""
    groups = layout.groups
    counted = next(([index] for index, group in enumerate(groups) if group.kind is GroupKind.FULL), range(len(groups)))
    from_host, from_store = (sum(blocks[index] * groups[index].block_size for index in counted) for blocks in (host, store))
    whole = from_host + from_store
    host_tokens = num_tokens * from_host // whole if whole else 0
    return {s: n for s, n in ((Source.HOST, host_tokens), (Source.STORE, num_tokens - host_tokens)) if n}


def _moves(span: Span, gpu_blocks: Sequence[int]) -> Iterable[BlockMove]:
    """One for each of the span's first blocks, into these GPU blocks."""
    count = len(gpu_blocks)
    blocks, slots = range(span.first, span.first + count), span.slots[:count]
    if not span.num_absent:
        return map(BlockMove, repeat(span.group), blocks, gpu_blocks, slots, span.names)
    sources = [Source.STORE if slot == ABSENT else Source.HOST for slot in slots]
    return map(BlockMove, repeat(span.group), blocks, gpu_blocks, slots, span.names, sources)


class Binder:
    """Binds plans to GPU blocks.

    Args:
        find: where the blocks of a request's prompt are now.
    """

    def __init__(self, layout: CacheLayout, index: HostIndex, find: Callable[[RequestView], Found]) -> None:
        self._layout = layout
        self._index = index
        self._find = find

    def bind(
        self,
        req: RequestView,
        plan: Plan,
        num_tokens: int,
        group_block_ids: Sequence[Sequence[int]],
        null_block: int,
    ) -> LoadDraft | None:
        """Moves for the accepted tokens; takes their holds out of the plan. None if any block is not covered.

        vLLM caches every block it allocated here under its name, so every one of them must be filled.
        """
        total = plan.num_local_tokens + num_tokens
        moves: list[BlockMove] = []
        dropped: list[int] = []  # slots of the plan that the load does not use
        late: list[int] = []
        for span, spec in zip(plan.spans, self._layout.groups, strict=True):
            first, end = plan.num_local_tokens // spec.block_size, hits.cdiv(total, spec.block_size)
            gpu_blocks = group_block_ids[span.group][first:end]
            if len(gpu_blocks) < end - first or (spec.kind is GroupKind.FULL and null_block in gpu_blocks):
                self._index.unpin(reversed(late))
                return None
            if span.first == first and end - first <= len(span.slots) and null_block not in gpu_blocks:  # which is the rule
                moves += _moves(span, gpu_blocks)
                dropped += span.slots[end - first :]
            elif not self._bind_window(req, span, first, gpu_blocks, null_block, moves, dropped, late):
                self._index.unpin(reversed(late))
                return None
        num_fetched = sum(move.source is Source.STORE for move in moves) if plan.num_missing else 0
        num_reserved = min(plan.reserved, num_fetched)
        self._index.unpin(slot for slot in reversed(dropped) if slot != ABSENT)
        unused = plan.reserved - num_reserved
        plan.clear()
        plan.reserved = unused
        sources = self._sources(moves, num_fetched, num_tokens)
        return LoadDraft(req.request_id, plan.namespace, moves, num_fetched, num_reserved, sources)

    def _sources(self, moves: Sequence[BlockMove], num_fetched: int, num_tokens: int) -> dict[Source, int]:
        """Tokens by tier of an accepted hit."""
        if num_fetched in (0, len(moves)):
            return {Source.STORE if num_fetched else Source.HOST: num_tokens}
        blocks = {source: [0] * len(self._layout.groups) for source in Source}
        for move in moves:
            blocks[move.source][move.group] += 1
        return _split(self._layout, blocks[Source.HOST], blocks[Source.STORE], num_tokens)

    def _bind_window(
        self,
        req: RequestView,
        span: Span,
        first: int,
        gpu_blocks: Sequence[int],
        null_block: int,
        moves: list[BlockMove],
        dropped: list[int],
        late: list[int],
    ) -> bool:
        """As `bind` for one group of which vLLM left blocks out, or wants others than were planned; False: they cannot be had."""
        left = dict(enumerate(span.slots, span.first))
        for block, gpu_block in enumerate(gpu_blocks, first):
            if gpu_block == null_block:
                continue  # out of the window
            if block in left:
                slot, name = left.pop(block), span.names[block - span.first]
            else:
                found = self._pin_late(req, span.group, block)
                if found is None:
                    return False
                slot, name = found
                late.append(slot)
            moves.append(BlockMove(span.group, block, gpu_block, slot, name, Source.STORE if slot == ABSENT else Source.HOST))
        dropped += left.values()
        return True

    def _pin_late(self, req: RequestView, group: int, block: int) -> tuple[int, bytes] | None:
        """A shrunk hit ends with another window: take its blocks from L1 if they are there."""
        found = self._find(req).blocks(group, block, block + 1)
        if not found.slots or found.slots[0] == ABSENT:
            return None
        slot = found.slots[0]
        if self._index.is_idle(slot) and self._index.num_available < 1:
            return None
        self._index.pin([slot])
        return slot, found.names[0]
