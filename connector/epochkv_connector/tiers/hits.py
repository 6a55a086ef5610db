"""From a prompt to a load job: what the tiers can give, held until vLLM accepts it or does not, and what was accepted.

The order is what keeps promises: the hit is computed over both tiers, cut to what can be held (referenced L1 blocks plus
reserved slots), and only then answered; vLLM's allocation turns it into moves, and slots are allocated when the step is
known. Nothing here waits except for the step's share of an L2 query.

vLLM has no callback for a hit that it drops (vllm#42372): between the lookup and the allocation it may give the request
up at a dozen places, or shrink the hit. So a plan holds what it promised until it is committed, aborted, too old, or
the oldest while too much is held. A plan is also the memo of its lookup: asking again finds it, nothing is done twice.

A hit of thousands of tokens is hundreds of blocks, and all of this runs on the scheduler thread: what is asked of every
block is done by built-ins over slices of the prompt's hashes, some hundred at a time, and what was found is remembered.

vLLM may accept fewer tokens than were planned, and with a sliding window a shorter hit ends with another window. So the plan is
compared with the blocks that vLLM has allocated, and a hit that cannot fill every one of them is refused.
Slots are allocated when the whole step is known (`tiers.state`), so an accepted hit waits as a draft until then.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import Final

import msgspec

from epochkv_connector.naming.identity import Snapshot
from epochkv_connector.tiers.layout import GroupKind, RequestView, align_down, cdiv, longest_hit, needed_range, tokens_by_tier
from epochkv_connector.tiers.lookup import READ_LEASE_SECONDS, LoadPause, Lookups, Prefetches, Query
from epochkv_connector.tiers.state import HostIndex, Key, Loaded, TierState, block_keys
from epochkv_connector.wire import BlockMove, LoadJob, Tier

ABSENT: Final = -1
"""In a column of slots: not in L1."""

FIRST_STRETCH: Final = 64
LONGEST_STRETCH: Final = 1024
"""Blocks that are looked up at a time, twice as many each time: most prompts end, or miss, early."""


@dataclass(slots=True)
class Span:
    """Neighbouring blocks of one group, in chain order: `names[i]` and `slots[i]` belong to block `first + i`."""

    group: int
    first: int
    names: list[bytes]
    slots: list[int]  # or ABSENT
    num_absent: int  # in `slots`

    def held(self) -> list[int]:
        return [slot for slot in self.slots if slot != ABSENT] if self.num_absent else self.slots

    def part(self, blocks: range) -> Span | None:
        """These blocks alone; None if they are not all in it."""
        if blocks.start == self.first and len(blocks) == len(self.slots):
            return self
        if blocks.start < self.first or blocks.stop > self.first + len(self.slots):
            return None
        inside = slice(blocks.start - self.first, blocks.stop - self.first)
        slots = self.slots[inside]
        return Span(self.group, blocks.start, self.names[inside], slots, slots.count(ABSENT) if self.num_absent else 0)


@dataclass(slots=True)
class PromptBlocks:
    """What the tiers hold of a prompt.

    Attributes:
        hashes: the prompt's, in units of the hash block size.
        scales: hash blocks per block, by group.
        remote: what L2 is known to hold; to be set before a hit is looked for.
    """

    index: HostIndex
    hashes: Sequence[bytes]
    scales: Sequence[int]
    remote: frozenset[Key] = frozenset()
    _runs: dict[int, Span] = field(default_factory=dict)  # of the last `first_absent` of each group

    def blocks(self, group: int, first: int, end: int) -> Span:
        """Blocks `first` to `end`, as far as they are whole and so have names."""
        scale = self.scales[group]
        names = list(self.hashes[(first + 1) * scale - 1 : end * scale : scale])
        slots = list(map(self.index.finder(group), names, repeat(ABSENT)))
        return Span(group, first, names, slots, slots.count(ABSENT))

    def present(self, group: int, block: int) -> bool:
        position = (block + 1) * self.scales[group] - 1
        if position >= len(self.hashes):
            return False
        name = self.hashes[position]
        return self.index.get(group, name) is not None or (group, name) in self.remote

    def first_absent(self, group: int, first: int, end: int) -> int:
        """The first of the blocks `first` to `end` that no tier holds; `end` if there is none."""
        run: Span | None = None
        block, stretch = first, FIRST_STRETCH
        while block < end:
            stop = min(end, block + stretch)
            part = self.blocks(group, block, stop)
            if part.num_absent:
                part = self._up_to_absent(part)
            if run is None:
                run = self._runs[group] = part
            else:
                run.names += part.names
                run.slots += part.slots
                run.num_absent += part.num_absent
            if block + len(part.slots) < stop:
                return block + len(part.slots)
            block, stretch = stop, min(2 * stretch, LONGEST_STRETCH)
        return block

    def _up_to_absent(self, span: Span) -> Span:
        """Its first blocks, without those from the first one on that L2 does not hold either."""
        for index, slot in enumerate(span.slots):
            if slot == ABSENT and (span.group, span.names[index]) not in self.remote:
                slots = span.slots[:index]
                return Span(span.group, span.first, span.names[:index], slots, slots.count(ABSENT))
        return span

    def locate(self, group: int, blocks: range) -> Span:
        """These blocks, all of which some tier holds."""
        run = self._runs.get(group)
        return (run and run.part(blocks)) or self.blocks(group, blocks.start, blocks.stop)


PLAN_TTL_STEPS = 8
PLAN_TTL_SECONDS = 2.0
"""A plan that was not asked for in so many steps, or seconds, belongs to a request that vLLM dropped silently."""

HELD_FRACTION = 0.5
"""Share of the host region that plans together may hold; beyond it the oldest are aborted. One plan alone may hold more
(a long prompt), up to what is there."""


@dataclass(slots=True)
class Plan:
    """What one lookup promised.

    Attributes:
        root, num_local_tokens: with the request id, what the answer is valid for.
        num_tokens: the answer, tokens beyond the local ones; 0: a remembered miss, which holds nothing.
        spans: the blocks of each group that is restored, in the groups' order: those with a slot are referenced in L1 (`num_pinned`), the
            others are to be fetched from L2 (`num_missing`).
        reserved: slots promised for the latter; fewer where blocks only pass through (a staging ring).
        valid_until: when the answer must be found anew (the store's read lease, or the life of a remembered miss).
    """

    request_id: str
    root: bytes
    num_local_tokens: int
    namespace: str | None
    valid_until: float
    num_tokens: int = 0
    spans: list[Span] = field(default_factory=list)
    num_pinned: int = 0
    num_missing: int = 0
    reserved: int = 0
    asked_step: int = 0
    asked_at: float = 0.0

    @property
    def num_held(self) -> int:
        return self.num_pinned + self.reserved

    def choose(self, spans: list[Span]) -> None:
        """Promise these blocks; what is held of them, and slots for the others, is the caller's to take."""
        self.spans = spans
        self.num_pinned = self.num_missing = 0
        for span in spans:
            self.num_missing += span.num_absent
            self.num_pinned += len(span.slots) - span.num_absent

    def pinned(self) -> list[int]:
        """Referenced slots, in chain order group by group."""
        return self.spans[0].held() if len(self.spans) == 1 else [slot for span in self.spans for slot in span.held()]

    def answers(self, num_local_tokens: int, root: bytes, namespace: str | None, now: float) -> bool:
        """Whether the same question may be answered by this plan."""
        return self.num_local_tokens == num_local_tokens and self.root == root and self.namespace == namespace and now < self.valid_until

    def clear(self) -> None:
        """Promise nothing (any more); what was held is the caller's to give back."""
        self.spans, self.num_tokens, self.num_pinned, self.num_missing, self.reserved = [], 0, 0, 0, 0


class PlanTable:
    """Open plans, one per request, least recently asked first."""

    def __init__(self) -> None:
        self._plans: OrderedDict[str, Plan] = OrderedDict()
        self.num_held = 0

    def __len__(self) -> int:
        return len(self._plans)

    def get(self, request_id: str) -> Plan | None:
        return self._plans.get(request_id)

    def add(self, plan: Plan) -> None:
        assert plan.request_id not in self._plans, f"request {plan.request_id} has a plan already"
        self._plans[plan.request_id] = plan
        self.num_held += plan.num_held

    def refresh(self, plan: Plan, step: int, now: float) -> None:
        plan.asked_step, plan.asked_at = step, now
        self._plans.move_to_end(plan.request_id)

    def pop(self, request_id: str) -> Plan | None:
        """Take a plan out; what it holds is now the caller's to release."""
        plan = self._plans.pop(request_id, None)
        if plan is not None:
            self.num_held -= plan.num_held
        return plan

    def asked_in(self, step: int) -> list[Plan]:
        """Those asked for in this step, and not accepted."""
        return list(itertools.takewhile(lambda plan: plan.asked_step == step, reversed(self._plans.values())))

    def pop_oldest_holder(self) -> Plan | None:
        """Take out the least recently asked plan that holds anything."""
        holder = next((plan for plan in self._plans.values() if plan.num_held), None)
        return None if holder is None else self.pop(holder.request_id)

    def pop_expired(self, step: int, now: float) -> list[Plan]:
        """Take out every plan that nobody asked for lately."""
        expired = []
        for plan in self._plans.values():
            if step - plan.asked_step < PLAN_TTL_STEPS and now - plan.asked_at < PLAN_TTL_SECONDS:
                break
            expired.append(plan)
        for plan in expired:
            self.pop(plan.request_id)
        return expired

    def pop_all(self) -> list[Plan]:
        plans = list(self._plans.values())
        self._plans.clear()
        self.num_held = 0
        return plans


SLOT_WAIT_STEPS = 2
"""So many steps a hit that lacks slots waits for saves to give theirs back. An engine without work takes no step, so puts that have
long ended are told in the first one after it; with asynchronous scheduling what a step told is known two steps later."""


class HitPlanner:
    """Answers lookups and holds what it promised.

    Attributes:
        plans: those that are open, remembered misses included.
        pause: whether L2 may be asked.
        prefetches: of requests that wait.
        is_on_gpu: whether vLLM's own cache holds a block (group, name); known before the first request.
    """

    def __init__(self, state: TierState, lookups: Lookups) -> None:
        self._state = state
        self._lookups = lookups
        self._layout = layout = state.layout
        self._index = state.index
        self._count = state.counts
        self.plans = PlanTable()
        self.pause = LoadPause(2 * state.config.job_deadline_seconds, state.clock)
        self.prefetches = Prefetches(state, lookups, self.pause, self._missing)
        self._lacking: dict[str, int] = {}  # since which step a request's hit waits for slots
        self._awaited: dict[str, tuple[Key, str]] = {}  # whose load of which block a request has waited for
        self._step = 0
        self.is_on_gpu: Callable[[int, bytes], bool] = lambda group, name: False
        self._unit_blocks = sum(layout.alignment_tokens // max(1, g.block_size) for _, g in layout.restored) or 1

    def leak_report(self) -> dict[str, int]:
        plans = {"plans": len(self.plans), "plan_slots": self.plans.num_held}
        plans |= {"hits_lacking_slots": len(self._lacking), "hits_awaited": len(self._awaited)}
        return {**plans, "queries": len(self._lookups), **self.prefetches.leak_report()}

    def begin(self, req: RequestView, snap: Snapshot) -> None:
        """Start asking L2 for what L1 does not hold, before the scheduler needs the answer. Returns at once."""
        max_tokens = self._max_tokens(req)
        if self._state.is_usable and (max_tokens > 0 or req.hear_of_l2 is not None):
            query = self._query(req, self.find(req), self._state.namespace(snap), snap.root, 0, max_tokens)
            if query is not None:
                self.prefetches.watch(req.request_id, query)

    def _missing(self, query: Query) -> list[tuple[int, int, bytes]]:
        """See `lookup.Missing`. What L1 holds of the hit is its newest then, so that no prefetch evicts it."""
        found, max_tokens = self.find(query.request), self._max_tokens(query.request)
        if self._lookups.is_stale(query):
            if (fresh := self._query(query.request, found, query.namespace, query.root, 0, max_tokens)) is not None:
                self.prefetches.watch(query.request.request_id, fresh, again=True)
            return []
        assert query.found is not None
        found.remote = self._state.doubts.without(query.found)
        total = longest_hit(self._layout, 0, max_tokens, found.present, found.first_absent)
        spans = [found.locate(group, needed_range(spec, 0, total)) for group, spec in self._layout.restored]
        held = [slot for span in spans for slot in span.held()]
        self._index.pin(held)
        self._index.unpin(reversed(held))
        missing = [
            (span.group, block, name)
            for span in spans
            for block, (name, slot) in enumerate(zip(span.names, span.slots, strict=True), span.first)
            if slot == ABSENT and not self.is_on_gpu(span.group, name)
        ]
        return [] if missing and self._state.loader((missing[-1][0], missing[-1][2])) else missing

    def answer(self, req: RequestView, num_local_tokens: int, snap: Snapshot) -> int | None:
        """How many tokens beyond the local ones the tiers give, held by a plan; the same question again finds the same plan.
        None: ask again next step.

        The hit never covers the last token: vLLM has to compute one, and with a sliding window a load of the whole
        prompt would leave out a block that this token attends to.
        """
        self._count["lookups"] += 1
        if not self._state.is_usable:
            return 0
        now, namespace = self._state.clock(), self._state.namespace(snap)
        plan = self.plans.get(req.request_id)
        if plan is not None:
            if plan.answers(num_local_tokens, snap.root, namespace, now):
                self.plans.refresh(plan, self._step, now)
                return plan.num_tokens
            self.plans.pop(req.request_id)
            self._count["plans_expired"] += plan.num_held > 0
            self.release(plan)
        max_tokens = self._max_tokens(req)
        if max_tokens <= num_local_tokens and req.hear_of_l2 is None:
            return 0
        found = self.find(req)
        on_its_way = self._is_on_its_way(req.request_id) or (
            req.hear_of_l2 is None and self._awaits_load(req.request_id, max_tokens, found)  # L2's answer may be late
        )
        query = None if on_its_way else self._query(req, found, namespace, snap.root, num_local_tokens, max_tokens)
        plan = Plan(req.request_id, snap.root, num_local_tokens, namespace, now + PLAN_TTL_SECONDS)
        if on_its_way or (query is not None and self._lookups.is_pending(query)):
            self._count["lookups_deferred"] += 1
            return None
        if query is not None and query.found is not None and not query.failed:
            # What failed to come is to be put again: the store's word is not enough.
            self._state.known.add(key for key in query.blocks if key in query.found and key not in self._state.doubts)
            self._state.known.discard(key for key in query.blocks if key not in query.found)
            if req.hear_of_l2 is not None:
                req.hear_of_l2()
            if self.pause.allows():
                found.remote = self._state.doubts.without(query.found)
            plan.valid_until = query.begun_at + READ_LEASE_SECONDS
        whole = longest_hit(self._layout, num_local_tokens, max_tokens, found.present, found.first_absent)
        awaits = whole > num_local_tokens and self._awaits_load(req.request_id, whole, found)
        if not awaits:
            self._fill(plan, whole, found)
        if awaits or (num_local_tokens + plan.num_tokens < whole and self._await_slots(req.request_id)):
            self._count["lookups_deferred"] += 1
            return None
        self._open(plan, now)
        return plan.num_tokens

    def _is_on_its_way(self, request_id: str) -> bool:
        """Whether blocks of the request are. Asked first: it costs no walk along the prompt."""
        last, owner = self._awaited.get(request_id, ((0, b""), ""))
        return bool(owner and self._state.loader(last) == owner) or self.prefetches.is_open(request_id)

    def _awaits_load(self, request_id: str, total: int, found: PromptBlocks) -> bool:
        """Whether another request's load, or prefetch, brings this very hit. vLLM's own cache holds it then: of n rollouts of one prompt,
        one loads. Only one that succeeds is waited for: vLLM's cache may be off."""
        group, spec = self._layout.restored[-1]
        end = cdiv(total, spec.block_size)
        last = group, bytes(found.blocks(group, end - 1, end).names[0])
        owner = self._state.loader(last)
        if owner in ("", request_id) or request_id in self._awaited:
            return False
        self._awaited[request_id] = last, owner
        return True

    def free_waiters(self, request_id: str, failed: bool) -> None:
        """vLLM's own cache does not hold what they have waited for: one loads what came, and the others wait for that load. After a failure
        they do not wait for L2 once more."""
        for waiter in [waiter for waiter, (_, owner) in self._awaited.items() if owner == request_id]:
            del self._awaited[waiter]
            if failed:
                self._lookups.give_up(waiter)

    def _await_slots(self, request_id: str) -> bool:
        """Whether a hit that lacks slots is worth asking for again: saves are open, and it has not waited for them yet."""
        return self._state.jobs.num_saves > 0 and self._step < self._lacking.setdefault(request_id, self._step) + SLOT_WAIT_STEPS

    def _max_tokens(self, req: RequestView) -> int:
        full = min(req.num_tokens - 1, len(req.block_hashes) * self._state.hash_block_size)
        return align_down(max(0, full), self._layout.alignment_tokens)

    def find(self, req: RequestView) -> PromptBlocks:
        return PromptBlocks(self._index, req.block_hashes, self._state.scales)

    def _query(
        self, req: RequestView, found: PromptBlocks, namespace: str | None, root: bytes, local: int, max_tokens: int
    ) -> Query | None:
        """The request's L2 query, begun if need be; None when L2 is not to be asked."""
        if namespace is None:
            return None
        if req.hear_of_l2 is not None:
            local, max_tokens = 0, len(req.block_hashes) * self._state.hash_block_size
        elif not self.pause.allows():
            return None
        query = self._lookups.get(req.request_id, namespace, root)
        if query is not None and not self._lookups.is_stale(query):
            return query
        wanted: list[Key] = []
        for group, spec in self._layout.restored:
            span = found.blocks(group, local // spec.block_size, max_tokens // spec.block_size + (1 if spec.eagle else 0))
            slots = zip(span.names, span.slots, strict=True)
            wanted += [(group, name) for name, slot in slots if slot == ABSENT or req.hear_of_l2 is not None]
        return self._lookups.begin(req, namespace, root, wanted) if wanted else None

    def _fill(self, plan: Plan, total: int, found: PromptBlocks) -> None:
        """Make the plan promise the longest hit up to `total` tokens that can be held. Takes nothing yet."""
        local, alignment = plan.num_local_tokens, self._layout.alignment_tokens
        cap = int(self._index.num_slots * HELD_FRACTION)
        while total > local:
            plan.choose([found.locate(group, needed_range(spec, local, total)) for group, spec in self._layout.restored])
            plan.reserved, plan.num_tokens = self._slots_for(plan.num_missing), total - local
            while self.plans.num_held and self.plans.num_held + plan.num_held > cap:
                oldest = self.plans.pop_oldest_holder()
                assert oldest is not None, "plans hold slots that no plan holds"
                self.release(oldest)
                self._count["plans_over_cap"] += 1
            room = self._index.num_available - plan.reserved
            if plan.num_pinned <= room or (excess := self._index.num_idle(plan.pinned()) - room) <= 0:
                return
            self._count["hits_shrunk"] += 1
            if not self._index.indexed:
                break  # not even one slot of the ring
            limit = total - max(1, excess // self._unit_blocks) * alignment
            total = longest_hit(self._layout, local, limit, found.present, found.first_absent) if limit > local else local
        plan.clear()

    def _slots_for(self, num_missing: int) -> int:
        """How many slots fetch so many blocks: one for each where they stay; of a ring that they pass through, a third of what is left, so
        that the next loads and saves find some, too.
        """
        return num_missing if self._index.indexed else min(num_missing, max(1, self._index.num_available // 3))

    def _open(self, plan: Plan, now: float) -> None:
        if not plan.num_tokens:
            self._count["lookups_missed"] += 1
            plan.clear()
        else:
            self._count["plans_opened"] += 1
            if not plan.num_missing:
                plan.valid_until = float("inf")  # referenced L1 blocks cannot go away
            self._index.pin(plan.pinned())
            self._index.reserve(plan.reserved)
        self.plans.add(plan)
        self.plans.refresh(plan, self._step, now)

    def take(self, request_id: str) -> Plan | None:
        """The request's plan, which is now the caller's to `release`. Its query ends, and its prefetch."""
        self._lookups.drop(request_id)
        self.prefetches.release(request_id)
        return self.plans.pop(request_id)

    def release(self, plan: Plan) -> None:
        if plan.num_held:
            self._index.unpin(reversed(plan.pinned()))
            self._index.unreserve(plan.reserved)
        plan.clear()

    def forget_request(self, request_id: str) -> None:
        """The hit was not taken, or the request is over: no plan, no query."""
        self._lacking.pop(request_id, None)
        self._awaited.pop(request_id, None)
        plan = self.take(request_id)
        if plan is not None:
            self._count["plans_aborted"] += plan.num_held > 0
            self.release(plan)

    def forget_all(self) -> None:
        """The names changed: no plan and no answer holds."""
        self._lacking.clear()
        self._awaited.clear()
        for plan in self.plans.pop_all():
            self._count["plans_dropped"] += plan.num_held > 0
            self.release(plan)
        self._lookups.drop_all()
        self.prefetches.release_all()

    def end_step(self) -> None:
        """Age the plans; the next step has its own share of waiting. What vLLM has left, as it has no room for it, may come early."""
        for plan in self.plans.asked_in(self._step):
            if plan.num_missing and self.prefetches.offer(plan.request_id):
                self.plans.pop(plan.request_id)
                self._count["plans_aborted"] += 1
                self.release(plan)
        self._step += 1
        for plan in self.plans.pop_expired(self._step, self._state.clock()):
            self._count["plans_expired"] += plan.num_held > 0
            self.release(plan)
        self._lookups.new_step()


# ----------------------------------------------------------------------------------------------------------------------
# Hits that vLLM has accepted: from the promise to the job that goes out, and what its end says about L1 and L2.


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
    moves: tuple[BlockMove, ...]
    num_fetched: int
    num_reserved: int
    sources: Mapping[Tier, int]
    abandoned: bool = False


def _moves(span: Span, gpu_blocks: Sequence[int]) -> Iterable[BlockMove]:
    """One for each of the span's first blocks, into these GPU blocks."""
    columns = repeat(span.group), itertools.count(span.first), gpu_blocks, span.slots, span.names
    if not span.num_absent:
        return map(BlockMove, *columns)
    return map(BlockMove, *columns, [Tier.STORE if slot == ABSENT else Tier.HOST for slot in span.slots])


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
        """vLLM has allocated blocks for a hit, or a part of it.

        Returns:
            Whether a load goes out. False: the promise cannot be kept (no plan, other root, more tokens than
            planned, a block that vLLM expects to be filled and the plan does not cover).
        """
        assert not self.is_open(req.request_id), "nothing is promised to a request while a load of it is open"
        plan, draft = self._planner.take(req.request_id), None
        if plan is not None:
            if plan.root == snap.root and num_tokens <= plan.num_tokens:
                draft = self._bind(plan, num_tokens, group_block_ids)
            self._state.counts["plans_aborted"] += draft is None and plan.num_held > 0
            self._planner.release(plan)  # what the draft did not take
        if draft is None:
            self._state.counts["loads_failed_before_send"] += 1
            return False
        self._state.counts["plans_committed"] += 1
        self._drafts[req.request_id] = draft
        self._state.begin_load(req.request_id, draft.moves[-1])
        if draft.num_fetched:
            self._planner.pause.begin(req.request_id)
        return True

    def _bind(self, plan: Plan, num_tokens: int, group_block_ids: Sequence[Sequence[int]]) -> LoadDraft | None:
        """Moves for the accepted tokens; takes their holds out of the plan. None if any block is not covered.

        vLLM caches every block it allocated here under its name, so every one of them must be filled.
        """
        total = plan.num_local_tokens + num_tokens
        moves: tuple[BlockMove, ...] = ()
        dropped: list[int] = []  # slots of the plan that the load does not use
        for span in plan.spans:
            spec = self._state.layout.groups[span.group]
            first, end = plan.num_local_tokens // spec.block_size, cdiv(total, spec.block_size)
            gpu_blocks = group_block_ids[span.group][first:end]
            has_null = self.null_block in gpu_blocks
            refused = len(gpu_blocks) < end - first or (spec.kind is GroupKind.FULL and has_null)
            if not refused and span.first == first and end - first <= len(span.slots) and not has_null:  # which is the rule
                moves += tuple(_moves(span, gpu_blocks))
                dropped += span.slots[end - first :]
            elif refused or (window := self._bind_window(span, first, gpu_blocks, dropped)) is None:
                return None
            else:
                moves += tuple(window)
        num_fetched = sum(move.source is Tier.STORE for move in moves) if plan.num_missing else 0
        num_reserved = min(plan.reserved, num_fetched)
        if dropped:
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

    def _bind_window(self, span: Span, first: int, gpu_blocks: Sequence[int], dropped: list[int]) -> list[BlockMove] | None:
        """As `_bind` for one group of which vLLM left blocks out. None: it wants others than were planned."""
        moves: list[BlockMove] = []
        left = dict(enumerate(span.slots, span.first))
        for block, gpu_block in enumerate(gpu_blocks, first):
            if gpu_block == self.null_block:
                continue  # out of the window
            if block not in left:
                return None  # a shrunk hit ends with another window
            slot, name = left.pop(block), span.names[block - span.first]
            moves.append(BlockMove(span.group, block, gpu_block, slot, name, Tier.STORE if slot == ABSENT else Tier.HOST))
        dropped += left.values()
        return moves

    def sources(self, request_id: str) -> Mapping[Tier, int]:
        """Tokens by tier of the hit accepted in this step (for vLLM's metrics)."""
        draft = self._drafts.get(request_id)
        return {} if draft is None else draft.sources

    def end_step(self) -> tuple[LoadJob, ...]:
        jobs = tuple(map(self._open, self._drafts.values()))
        self._drafts = {}
        return jobs

    def _open(self, draft: LoadDraft) -> LoadJob:
        moves = draft.moves
        if draft.num_fetched:
            fresh = itertools.cycle(self._index.allocate(draft.num_reserved, reserved=True))
            moves = tuple(m if m.source is Tier.HOST else msgspec.structs.replace(m, slot=next(fresh)) for m in moves)
        job = LoadJob(next(self._state.ids), draft.request_id, draft.namespace, moves, self._state.config.job_deadline_seconds)
        self._state.jobs.open_load(job, self._state.clock(), draft.abandoned)
        return job

    def abandon(self) -> None:
        """The names changed: what these hits bring must not be indexed."""
        for draft in self._drafts.values():
            draft.abandoned = True

    def loaded(self, done: Loaded) -> None:
        self._state.end_load(done.job.request_id, done.job.moves[-1])
        if done.job.prefetch and not self._planner.prefetches.is_wanted(done.job.job_id):
            done = msgspec.structs.replace(done, failed=False, doubted=())  # cancelled: L2 may hold what did not come
        if not done.abandoned:
            self._state.loaded(done)
            if done.failed or done.job.prefetch:
                self._planner.free_waiters(done.job.request_id, done.failed)
        if done.job.prefetch:
            return self._planner.prefetches.ended(done)
        self._index.read(move.slot for move in done.job.moves)
        self._state.counts["loads_done"] += 1
        self._state.counts["loads_failed"] += done.failed
        self._state.counts["blocks_loaded"] += len(done.job.moves) - len(done.doubted)
        fetched = sum(move.source is Tier.STORE for move in done.job.moves) if done.failed else len(done.filled)
        if fetched:
            arrived = len(done.filled) == fetched
            self._planner.pause.end(done.job.request_id, None if done.abandoned else arrived)
            if not (arrived or done.abandoned):
                self._state.doubts.add(block_keys(done.doubted))
