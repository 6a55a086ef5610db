"""From a prompt to a plan, and from an accepted plan to the moves of a load.

The order is what keeps promises: the hit is computed over both tiers, cut to what can be held (referenced L1 blocks plus
reserved slots), and only then answered; vLLM's allocation turns it into moves, and slots are allocated when the step is
known. Nothing here waits except for the step's share of an L2 query.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from epochkv_connector.config import ConnectorConfig
from epochkv_connector.records import BlockMove, Source
from epochkv_connector.scheduler import hits
from epochkv_connector.scheduler.index import HostIndex, Key
from epochkv_connector.scheduler.lookup import READ_LEASE_SECONDS, KnownInStore, Lookups, Query, State
from epochkv_connector.scheduler.pause import LoadPause
from epochkv_connector.scheduler.plans import HELD_FRACTION, PLAN_TTL_SECONDS, Plan, PlanTable
from epochkv_connector.scheduler.tracker import Tracker
from epochkv_connector.scheduler.views import CacheLayout, GroupKind, Hit, RequestView

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


@dataclass(slots=True)
class _Found:
    """Where the blocks of one prompt are, asked lazily and answered from both tiers."""

    index: HostIndex
    tracker: Tracker | None
    hashes: Sequence[bytes]
    scales: list[int]
    remote: frozenset[Key] = frozenset()

    def name(self, group: int, block: int) -> bytes | None:
        position = (block + 1) * self.scales[group] - 1
        return bytes(self.hashes[position]) if position < len(self.hashes) else None

    def slot(self, group: int, name: bytes) -> int | None:
        if self.tracker is not None and not self.tracker.covers((group, name)):
            return None
        return self.index.get(group, name)

    def present(self, group: int, block: int) -> bool:
        position = (block + 1) * self.scales[group] - 1  # as `name` and `slot`, without calls: asked for every block
        if position >= len(self.hashes):
            return False
        name = bytes(self.hashes[position])
        if self.index.get(group, name) is not None and (self.tracker is None or self.tracker.covers((group, name))):
            return True
        return (group, name) in self.remote

    def locate(self, group: int, blocks: range) -> Iterator[tuple[int, bytes, int | None]]:
        """(block, name, slot or None) of each; all of them have names."""
        hashes, scale, find, tracker = self.hashes, self.scales[group], self.index.finder(group), self.tracker
        for block in blocks:
            name = bytes(hashes[(block + 1) * scale - 1])
            yield block, name, find(name) if tracker is None or tracker.covers((group, name)) else None


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
        whole = hits.longest_hit(self._layout, num_local_tokens, max_tokens, found.present)
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

    def _found(self, req: RequestView) -> _Found:
        scales = [group.block_size // req.hash_block_size for group in self._layout.groups]
        return _Found(self._index, self._tracker, req.block_hashes, scales)

    def _query(self, req: RequestView, found: _Found, local: int, max_tokens: int, namespace: str | None) -> Query | None:
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
            for block in range(local // spec.block_size, max_tokens // spec.block_size + (1 if spec.eagle else 0)):
                name = found.name(group, block)
                if name is not None and found.slot(group, name) is None:
                    wanted.append((group, name))
        return self._lookups.begin(req.request_id, namespace, req.root, wanted) if wanted else None

    # -- promising -----------------------------------------------------------------------------------------------

    def _fill(self, plan: Plan, total: int, found: _Found) -> None:
        """Make the plan promise the longest hit up to `total` tokens that can be held. Takes nothing yet."""
        local, alignment = plan.num_local_tokens, self._layout.alignment_tokens
        cap = int(self._index.num_slots * HELD_FRACTION)
        while total > local:
            self._choose(plan, total, found)
            while self._plans.num_held and self._plans.num_held + plan.num_held > cap:
                self._evict_oldest()
            newly_held = self._index.num_idle(slot for slot, _ in plan.pinned.values()) + plan.reserved
            excess = newly_held - self._index.num_available
            if excess <= 0:
                return
            self._count["hits_shrunk"] += 1
            if not self._index.indexed:
                break  # not even one slot of the ring
            limit = total - max(1, excess // self._unit_blocks) * alignment
            total = hits.longest_hit(self._layout, local, limit, found.present) if limit > local else local
        plan.hit = MISS
        plan.clear()

    def _slots_for(self, num_missing: int) -> int:
        """How many slots fetch so many blocks: one for each where they stay, a share of a ring where they pass through."""
        if self._index.indexed:
            return num_missing
        share = max(1, self._index.num_slots // RING_SHARE)
        return min(num_missing, share, max(1, self._index.num_available))

    def _choose(self, plan: Plan, total: int, found: _Found) -> None:
        """The blocks of a hit of `total` tokens and where they come from."""
        plan.clear()
        pinned, missing = plan.pinned, plan.missing
        for group, spec in enumerate(self._layout.groups):
            for block, name, slot in found.locate(group, hits.needed_range(spec, plan.num_local_tokens, total)):
                if slot is None:
                    missing[(group, block)] = name
                else:
                    pinned[(group, block)] = (slot, name)
        plan.reserved = self._slots_for(len(plan.missing))
        num_tokens = total - plan.num_local_tokens
        plan.hit = Hit(num_tokens, self.split(plan.pinned, plan.missing, num_tokens))

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
            if not plan.missing:
                plan.valid_until = float("inf")  # referenced L1 blocks cannot go away
            self._index.pin(slot for slot, _ in plan.pinned.values())
            reserved = self._index.reserve(plan.reserved)
            assert reserved, "a plan was made larger than what is available"
            if self._tracker is not None:
                self._tracker.use((group, name) for (group, _), (_, name) in plan.pinned.items())
        self._plans.add(plan)
        self._plans.refresh(plan, self._step, now)

    def split(self, host: Collection[tuple[int, int]], store: Collection[tuple[int, int]], num_tokens: int) -> dict[Source, int]:
        """Tokens of a hit by tier, counted in the first full-attention group (every token is in it), else in all."""
        if not host or not store:
            return {Source.HOST if host else Source.STORE: num_tokens} if num_tokens else {}
        full = [index for index, group in enumerate(self._layout.groups) if group.kind is GroupKind.FULL]
        weights = {Source.HOST: 0, Source.STORE: 0}
        for source, blocks in ((Source.HOST, host), (Source.STORE, store)):
            for group, _ in blocks:
                if not full or group == full[0]:
                    weights[source] += self._layout.groups[group].block_size
        whole = sum(weights.values())
        from_host = num_tokens * weights[Source.HOST] // whole if whole else 0
        return {s: n for s, n in ((Source.HOST, from_host), (Source.STORE, num_tokens - from_host)) if n}

    def sources(self, draft: LoadDraft, num_tokens: int) -> dict[Source, int]:
        """Tokens by tier of an accepted hit."""
        if draft.num_fetched == 0 or draft.num_fetched == len(draft.moves):
            return {Source.STORE if draft.num_fetched else Source.HOST: num_tokens}
        host = [(move.group, move.block) for move in draft.moves if move.source is Source.HOST]
        store = [(move.group, move.block) for move in draft.moves if move.source is Source.STORE]
        return self.split(host, store, num_tokens)

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
        local, total = plan.num_local_tokens, plan.num_local_tokens + num_tokens
        pinned, missing = plan.pinned, plan.missing
        moves: list[BlockMove] = []
        num_fetched = 0
        for group, spec in enumerate(self._layout.groups):
            gpu_blocks = group_block_ids[group]
            for block in range(local // spec.block_size, hits.cdiv(total, spec.block_size)):
                if block >= len(gpu_blocks):
                    return None
                gpu_block = gpu_blocks[block]
                if gpu_block == null_block:
                    if spec.kind is GroupKind.FULL:
                        return None
                    continue  # vLLM left it out of the window
                key = (group, block)
                if key in missing:
                    moves.append(BlockMove(group, block, gpu_block, -1, missing[key], Source.STORE))
                    num_fetched += 1
                    continue
                if key not in pinned and not self._pin_late(req, plan, key):
                    return None
                slot, name = pinned[key]
                moves.append(BlockMove(group, block, gpu_block, slot, name))
        num_reserved = min(plan.reserved, num_fetched)
        plan.reserved -= num_reserved
        if len(moves) == len(pinned) + len(missing):  # the whole plan, which is the rule
            plan.pinned, plan.missing = {}, {}
        else:
            for move in moves:
                del (pinned if move.source is Source.HOST else missing)[(move.group, move.block)]
        return LoadDraft(req.request_id, plan.namespace, moves, num_fetched, num_reserved)

    def _pin_late(self, req: RequestView, plan: Plan, key: tuple[int, int]) -> bool:
        """A shrunk hit ends with another window: take its blocks from L1 if they are there."""
        found = self._found(req)
        name = found.name(*key)
        slot = None if name is None else found.slot(key[0], name)
        if slot is None or name is None or (self._index.is_idle(slot) and self._index.num_available < 1):
            return False
        self._index.pin([slot])
        plan.pinned[key] = (slot, name)
        return True

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
        self._index.unpin(slot for slot, _ in reversed(list(plan.pinned.values())))
        self._index.unreserve(plan.reserved)
        plan.clear()
