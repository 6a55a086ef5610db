"""From a prompt to a plan, and from an accepted plan to the moves of a load.

The order is what keeps promises: the hit is computed over both tiers, cut to what can be held (referenced L1 blocks plus
reserved slots), and only then answered; vLLM's allocation turns it into moves, and slots are allocated when the step is
known. Nothing here waits except for the step's share of an L2 query.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat

from epochkv_connector.config.keys import ConnectorConfig
from epochkv_connector.scheduler import hits
from epochkv_connector.scheduler.found import ABSENT, Found, Span
from epochkv_connector.scheduler.index import HostIndex, Key
from epochkv_connector.scheduler.lookup import READ_LEASE_SECONDS, KnownInStore, Lookups, Query, State
from epochkv_connector.scheduler.pause import LoadPause
from epochkv_connector.scheduler.plans import HELD_FRACTION, PLAN_TTL_SECONDS, Plan, PlanTable
from epochkv_connector.scheduler.tracker import Tracker
from epochkv_connector.scheduler.views import CacheLayout, GroupKind, Hit, RequestView
from epochkv_connector.wire.jobs import BlockMove, Source

RING_SHARE = 8
"""A load through the staging ring gets at most this part of it: several go on at a time, and saves find slots, too."""

SLOT_WAIT_STEPS = 2
"""So many steps a hit that lacks slots waits for saves to give theirs back. An engine without work takes no step, so puts that have
long ended are told in the first one after it; with asynchronous scheduling what a step told is known two steps later."""

MISS = Hit(0)
ASK_AGAIN = Hit(None)


@dataclass(slots=True)
class LoadDraft:
    """An accepted hit. Slot -1 in a move: reserved, to be allocated when the step is known.

    Attributes:
        num_fetched: moves that come from L2.
        num_reserved: slots for the blocks that are fetched; where there are fewer slots, they are used in turns.
    """

    request_id: str
    namespace: str | None
    moves: list[BlockMove]
    num_fetched: int
    num_reserved: int
    abandoned: bool = False  # the root changed since: its blocks must not be indexed


def _moves(span: Span, gpu_blocks: Sequence[int]) -> Iterable[BlockMove]:
    """One for each of the span's first blocks, into these GPU blocks."""
    count = len(gpu_blocks)
    blocks, slots = range(span.first, span.first + count), span.slots[:count]
    if not span.num_absent:
        return map(BlockMove, repeat(span.group), blocks, gpu_blocks, slots, span.names)
    sources = [Source.STORE if slot == ABSENT else Source.HOST for slot in slots]
    return map(BlockMove, repeat(span.group), blocks, gpu_blocks, slots, span.names, sources)


class HitPlanner:
    """Answers lookups and holds what it promised.

    Args:
        lookups: L2 queries; None: L1 alone.
        pause: whether L2 may be asked.
        slots_due: whether saves are open that will give slots back.
        counts: counters of the scheduler half, shared.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        layout: CacheLayout,
        index: HostIndex,
        known: KnownInStore,
        *,
        tracker: Tracker | None,
        lookups: Lookups | None,
        pause: LoadPause,
        slots_due: Callable[[], bool],
        counts: Counter[str],
        clock: Callable[[], float],
    ) -> None:
        self._config = config
        self._slots_due = slots_due
        self._pause = pause
        self._layout = layout
        self._index = index
        self._known = known
        self._tracker = tracker
        self._lookups = lookups
        self._count = counts
        self._clock = clock
        self._plans = PlanTable()
        self._lacking: dict[str, int] = {}  # since which step a request's hit waits for slots
        self._step = 0
        self._unit_blocks = sum(layout.alignment_tokens // max(1, g.block_size) for g in layout.groups) or 1

    @property
    def num_plans(self) -> int:
        """Open plans, remembered misses included."""
        return len(self._plans)

    @property
    def num_held(self) -> int:
        """Slots that plans reference or reserve."""
        return self._plans.num_held

    @property
    def num_lacking(self) -> int:
        """Requests whose hit lacked slots."""
        return len(self._lacking)

    # -- asking --------------------------------------------------------------------------------------------------

    def begin(self, req: RequestView, namespace: str | None) -> None:
        """Start asking L2 for what L1 does not hold. Returns at once."""
        max_tokens = self._max_tokens(req)
        if max_tokens >= max(1, self._config.min_load_tokens):
            self._query(req, self._found(req), 0, max_tokens, namespace)

    def answer(self, req: RequestView, num_local_tokens: int, namespace: str | None) -> Hit:
        """The hit beyond the local tokens, held by a plan; the same question again finds the same plan."""
        now = self._clock()
        plan = self._plans.get(req.request_id)
        if plan is not None:
            if plan.answers(num_local_tokens, req.root, namespace, now):
                self._plans.refresh(plan, self._step, now)
                return plan.hit
            self.drop(req.request_id)
        max_tokens = self._max_tokens(req)
        if max_tokens - num_local_tokens < max(1, self._config.min_load_tokens):
            return MISS
        found = self._found(req)
        query = self._query(req, found, num_local_tokens, max_tokens, namespace)
        plan = Plan(req.request_id, req.root, num_local_tokens, MISS, namespace, now + PLAN_TTL_SECONDS)
        if query is not None and self._lookups is not None:
            state = self._lookups.poll(query)
            if state is State.PENDING:
                self._count["lookups_deferred"] += 1
                return ASK_AGAIN
            if state is State.READY and query.found is not None:
                self._known.add(query.found)
                self._known.discard(key for key in query.blocks if key not in query.found)
                found.remote = query.found
                plan.valid_until = query.begun_at + READ_LEASE_SECONDS
        whole = hits.longest_hit(self._layout, num_local_tokens, max_tokens, found.present, found.first_absent)
        self._fill(plan, whole, found)
        if num_local_tokens + (plan.hit.num_tokens or 0) < whole and self._await_slots(req.request_id):
            self._count["lookups_deferred"] += 1
            return ASK_AGAIN
        self._open(plan, now)
        return plan.hit

    def _await_slots(self, request_id: str) -> bool:
        """Whether a hit that lacks slots is worth asking for again: saves are open, and it has not waited for them yet."""
        return self._slots_due() and self._step < self._lacking.setdefault(request_id, self._step) + SLOT_WAIT_STEPS

    def _max_tokens(self, req: RequestView) -> int:
        full = min(req.num_tokens - 1, len(req.block_hashes) * req.hash_block_size)
        return hits.align_down(max(0, full), self._layout.alignment_tokens)

    def _found(self, req: RequestView) -> Found:
        scales = [group.block_size // req.hash_block_size for group in self._layout.groups]
        return Found(self._index, self._tracker, req.block_hashes, scales)

    def _query(self, req: RequestView, found: Found, local: int, max_tokens: int, namespace: str | None) -> Query | None:
        """The request's L2 query, begun if need be; None when L2 is not to be asked."""
        if self._lookups is None or namespace is None:
            return None
        if not self._pause.allows():
            self._count["lookups_paused"] += 1
            return None
        query = self._lookups.get(req.request_id, namespace, req.root)
        if query is not None:
            return query
        wanted: list[Key] = []
        for group, spec in enumerate(self._layout.groups):
            span = found.blocks(group, local // spec.block_size, max_tokens // spec.block_size + (1 if spec.eagle else 0))
            wanted += [(group, name) for name, slot in zip(span.names, span.slots, strict=True) if slot == ABSENT]
        return self._lookups.begin(req.request_id, namespace, req.root, wanted) if wanted else None

    # -- promising -----------------------------------------------------------------------------------------------

    def _fill(self, plan: Plan, total: int, found: Found) -> None:
        """Make the plan promise the longest hit up to `total` tokens that can be held. Takes nothing yet."""
        local, alignment = plan.num_local_tokens, self._layout.alignment_tokens
        cap = int(self._index.num_slots * HELD_FRACTION)
        while total > local:
            self._choose(plan, total, found)
            while self._plans.num_held and self._plans.num_held + plan.num_held > cap:
                self._evict_oldest()
            newly_held = self._index.num_idle(plan.pinned()) + plan.reserved
            excess = newly_held - self._index.num_available
            if excess <= 0:
                return
            self._count["hits_shrunk"] += 1
            if not self._index.indexed:
                break  # not even one slot of the ring
            limit = total - max(1, excess // self._unit_blocks) * alignment
            total = hits.longest_hit(self._layout, local, limit, found.present, found.first_absent) if limit > local else local
        plan.hit = MISS
        plan.clear()

    def _slots_for(self, num_missing: int) -> int:
        """How many slots fetch so many blocks: one for each where they stay, a share of a ring where they pass through."""
        if self._index.indexed:
            return num_missing
        share = max(1, self._index.num_slots // RING_SHARE)
        return min(num_missing, share, max(1, self._index.num_available))

    def _choose(self, plan: Plan, total: int, found: Found) -> None:
        """The blocks of a hit of `total` tokens and where they come from."""
        local = plan.num_local_tokens
        plan.choose([found.locate(group, hits.needed_range(spec, local, total)) for group, spec in enumerate(self._layout.groups)])
        plan.reserved = self._slots_for(plan.num_missing)
        plan.hit = Hit(total - local, self._sources_of(plan, total - local))

    def _sources_of(self, plan: Plan, num_tokens: int) -> dict[Source, int]:
        if not plan.num_missing or not plan.num_pinned:
            return {Source.STORE if plan.num_missing else Source.HOST: num_tokens}
        store = [span.num_absent for span in plan.spans]
        return self._split([len(span.slots) - absent for span, absent in zip(plan.spans, store, strict=True)], store, num_tokens)

    def _open(self, plan: Plan, now: float) -> None:
        num_tokens = plan.hit.num_tokens or 0
        if num_tokens < max(1, self._config.min_load_tokens):
            self._count["lookups_below_min" if num_tokens else "lookups_missed"] += 1
            plan.hit = MISS
            plan.clear()
        else:
            self._count["plans_opened"] += 1
            for source, tokens in plan.hit.sources.items():
                self._count[f"tokens_planned_{source.name.lower()}"] += tokens
            if not plan.num_missing:
                plan.valid_until = float("inf")  # referenced L1 blocks cannot go away
            self._index.pin(plan.pinned())
            reserved = self._index.reserve(plan.reserved)
            assert reserved, "a plan was made larger than what is available"
            if self._tracker is not None:
                self._tracker.use((span.group, name) for span in plan.spans for name in span.names)
        self._plans.add(plan)
        self._plans.refresh(plan, self._step, now)

    def _split(self, host: Sequence[int], store: Sequence[int], num_tokens: int) -> dict[Source, int]:
        """Tokens of a hit from both tiers, of blocks by group; counted in the first full-attention group (every token is in it), else
        in all."""
        groups = self._layout.groups
        counted = next(([index] for index, group in enumerate(groups) if group.kind is GroupKind.FULL), range(len(groups)))
        from_host, from_store = (sum(blocks[index] * groups[index].block_size for index in counted) for blocks in (host, store))
        whole = from_host + from_store
        host_tokens = num_tokens * from_host // whole if whole else 0
        return {s: n for s, n in ((Source.HOST, host_tokens), (Source.STORE, num_tokens - host_tokens)) if n}

    def sources(self, draft: LoadDraft, num_tokens: int) -> dict[Source, int]:
        """Tokens by tier of an accepted hit."""
        if draft.num_fetched == 0 or draft.num_fetched == len(draft.moves):
            return {Source.STORE if draft.num_fetched else Source.HOST: num_tokens}
        blocks = {source: [0] * len(self._layout.groups) for source in Source}
        for move in draft.moves:
            blocks[move.source][move.group] += 1
        return self._split(blocks[Source.HOST], blocks[Source.STORE], num_tokens)

    # -- keeping or dropping -------------------------------------------------------------------------------------

    def accept(
        self,
        req: RequestView,
        root: bytes,
        num_tokens: int,
        group_block_ids: Sequence[Sequence[int]],
        null_block: int,
    ) -> LoadDraft | None:
        """Turn the request's plan into a load of `num_tokens`; None if the promise cannot be kept. Ends the plan."""
        plan = self._plans.pop(req.request_id)
        if self._lookups is not None:
            self._lookups.drop(req.request_id)
        if plan is None:
            return None
        draft = None
        if plan.root == root and num_tokens <= (plan.hit.num_tokens or 0):
            draft = self._bind(req, plan, num_tokens, group_block_ids, null_block)
        self._release(plan)  # what the draft did not take
        return draft

    def _bind(
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
        return LoadDraft(req.request_id, plan.namespace, moves, num_fetched, num_reserved)

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
        """As `_bind` for one group of which vLLM left blocks out, or wants others than were planned; False: they cannot be had."""
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
        found = self._found(req).blocks(group, block, block + 1)
        if not found.slots or found.slots[0] == ABSENT:
            return None
        slot = found.slots[0]
        if self._index.is_idle(slot) and self._index.num_available < 1:
            return None
        self._index.pin([slot])
        return slot, found.names[0]

    def drop(self, request_id: str) -> bool:
        """End the request's plan. True if it held anything."""
        plan = self._plans.pop(request_id)
        if plan is None:
            return False
        held = plan.num_held > 0
        self._release(plan)
        return held

    def forget_request(self, request_id: str) -> None:
        """The hit was not taken, or the request is over: no plan, no query."""
        self._lacking.pop(request_id, None)
        if self.drop(request_id):
            self._count["plans_aborted"] += 1
        if self._lookups is not None:
            self._lookups.drop(request_id)

    def forget_all(self) -> None:
        """The names changed: no plan and no answer holds."""
        self._lacking.clear()
        for plan in self._plans.pop_all():
            self._count["plans_dropped"] += plan.num_held > 0
            self._release(plan)
        if self._lookups is not None:
            self._lookups.drop_all()

    def end_step(self) -> None:
        """Age the plans; the next step has its own share of waiting."""
        self._step += 1
        for plan in self._plans.pop_expired(self._step, self._clock()):
            self._count["plans_expired"] += plan.num_held > 0
            self._release(plan)
        if self._lookups is not None:
            self._lookups.new_step()

    def _evict_oldest(self) -> None:
        oldest = self._plans.pop_oldest_holder()
        assert oldest is not None, "plans hold slots that no plan holds"
        self._release(oldest)
        self._count["plans_over_cap"] += 1

    def _release(self, plan: Plan) -> None:
        self._index.unpin(reversed(plan.pinned()))
        self._index.unreserve(plan.reserved)
        plan.clear()
