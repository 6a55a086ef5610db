"""From a prompt to a plan: what the tiers can give, held until vLLM accepts it or does not.

The order is what keeps promises: the hit is computed over both tiers, cut to what can be held (referenced L1 blocks plus
reserved slots), and only then answered; vLLM's allocation turns it into moves, and slots are allocated when the step is
known. Nothing here waits except for the step's share of an L2 query.
"""

from __future__ import annotations

from collections.abc import Mapping

from epochkv_connector.naming.identity import Snapshot
from epochkv_connector.scheduler.planning import hits
from epochkv_connector.scheduler.planning.lookup import READ_LEASE_SECONDS, Lookups, Query, QueryState
from epochkv_connector.scheduler.planning.plans import HELD_FRACTION, PLAN_TTL_SECONDS, Plan, PlanTable
from epochkv_connector.scheduler.planning.prompt_blocks import ABSENT, PromptBlocks
from epochkv_connector.scheduler.tiers.index import Key
from epochkv_connector.scheduler.tiers.state import TierState
from epochkv_connector.scheduler.tiers.views import Hit, RequestView
from epochkv_connector.wire.jobs import Tier

RING_SHARE = 8
"""A load through the staging ring gets at most this part of it: several go on at a time, and saves find slots, too."""

SLOT_WAIT_STEPS = 2
"""So many steps a hit that lacks slots waits for saves to give theirs back. An engine without work takes no step, so puts that have
long ended are told in the first one after it; with asynchronous scheduling what a step told is known two steps later."""

MISS = Hit(0)
ASK_AGAIN = Hit(None)


class HitPlanner:
    """Answers lookups and holds what it promised.

    Args:
        lookups: L2 queries; None: L1 alone.

    Attributes:
        plans: those that are open, remembered misses included.
    """

    def __init__(self, tiers: TierState, lookups: Lookups | None) -> None:
        self._tiers = tiers
        self._lookups = lookups
        self._layout = layout = tiers.layout
        self._index = tiers.index
        self._tracker = tiers.tracker
        self._count = tiers.counts
        self.plans = PlanTable()
        self._lacking: dict[str, int] = {}  # since which step a request's hit waits for slots
        self._step = 0
        self._unit_blocks = sum(layout.alignment_tokens // max(1, g.block_size) for _, g in layout.restored) or 1

    def leak_report(self) -> dict[str, int]:
        queries = 0 if self._lookups is None else len(self._lookups)
        held, lacking = self.plans.num_held, len(self._lacking)
        return {"plans": len(self.plans), "plan_slots": held, "hits_lacking_slots": lacking, "queries": queries}

    def begin(self, req: RequestView, snap: Snapshot) -> None:
        """Start asking L2 for what L1 does not hold, before the scheduler needs the answer. Returns at once."""
        max_tokens = self._max_tokens(req)
        if self._tiers.is_usable and req.root == snap.root and max_tokens >= max(1, self._tiers.config.min_load_tokens):
            self._query(req, self.find(req), 0, max_tokens, self._tiers.namespace(snap))

    def answer(self, req: RequestView, num_local_tokens: int, snap: Snapshot) -> Hit:
        """How many tokens beyond the local ones the tiers give, held by a plan; the same question again finds the same plan.

        The hit never covers the last token: vLLM has to compute one, and with a sliding window a load of the whole
        prompt would leave out a block that this token attends to.
        """
        self._count["lookups"] += 1
        if not self._tiers.is_usable or req.root != snap.root:
            return MISS
        now, namespace = self._tiers.clock(), self._tiers.namespace(snap)
        plan = self.plans.get(req.request_id)
        if plan is not None:
            if plan.answers(num_local_tokens, req.root, namespace, now):
                self.plans.refresh(plan, self._step, now)
                return plan.hit
            self.plans.pop(req.request_id)
            self.release(plan)
        max_tokens = self._max_tokens(req)
        if max_tokens - num_local_tokens < max(1, self._tiers.config.min_load_tokens):
            return MISS
        found = self.find(req)
        query = self._query(req, found, num_local_tokens, max_tokens, namespace)
        plan = Plan(req.request_id, req.root, num_local_tokens, MISS, namespace, now + PLAN_TTL_SECONDS)
        if query is not None and self._lookups is not None:
            state = self._lookups.poll(query)
            if state is QueryState.PENDING:
                self._count["lookups_deferred"] += 1
                return ASK_AGAIN
            if state is QueryState.READY and query.found is not None:
                self._tiers.known.add(query.found)
                self._tiers.known.discard(key for key in query.blocks if key not in query.found)
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
        return self._tiers.ledger.num_saves > 0 and self._step < self._lacking.setdefault(request_id, self._step) + SLOT_WAIT_STEPS

    def _max_tokens(self, req: RequestView) -> int:
        full = min(req.num_tokens - 1, len(req.block_hashes) * req.hash_block_size)
        return hits.align_down(max(0, full), self._layout.alignment_tokens)

    def find(self, req: RequestView) -> PromptBlocks:
        scales = [group.block_size // req.hash_block_size for group in self._layout.groups]
        return PromptBlocks(self._index, self._tracker, req.block_hashes, scales)

    def _query(self, req: RequestView, found: PromptBlocks, local: int, max_tokens: int, namespace: str | None) -> Query | None:
        """The request's L2 query, begun if need be; None when L2 is not to be asked."""
        if self._lookups is None or namespace is None:
            return None
        if not self._tiers.pause.allows():
            self._count["lookups_paused"] += 1
            return None
        query = self._lookups.get(req.request_id, namespace, req.root)
        if query is not None:
            return query
        wanted: list[Key] = []
        for group, spec in self._layout.restored:
            span = found.blocks(group, local // spec.block_size, max_tokens // spec.block_size + (1 if spec.eagle else 0))
            wanted += [(group, name) for name, slot in zip(span.names, span.slots, strict=True) if slot == ABSENT]
        return self._lookups.begin(req.request_id, namespace, req.root, wanted) if wanted else None

    def _fill(self, plan: Plan, total: int, found: PromptBlocks) -> None:
        """Make the plan promise the longest hit up to `total` tokens that can be held. Takes nothing yet."""
        local, alignment = plan.num_local_tokens, self._layout.alignment_tokens
        cap = int(self._index.num_slots * HELD_FRACTION)
        while total > local:
            self._choose(plan, total, found)
            while self.plans.num_held and self.plans.num_held + plan.num_held > cap:
                oldest = self.plans.pop_oldest_holder()
                assert oldest is not None, "plans hold slots that no plan holds"
                self.release(oldest)
                self._count["plans_over_cap"] += 1
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

    def _choose(self, plan: Plan, total: int, found: PromptBlocks) -> None:
        """The blocks of a hit of `total` tokens and where they come from."""
        local = plan.num_local_tokens
        plan.choose([found.locate(group, hits.needed_range(spec, local, total)) for group, spec in self._layout.restored])
        plan.reserved = self._slots_for(plan.num_missing)
        plan.hit = Hit(total - local, self._sources(plan, total - local))

    def _sources(self, plan: Plan, num_tokens: int) -> Mapping[Tier, int]:
        if not plan.num_missing or not plan.num_pinned:  # nearly every hit; counting its blocks cost 5 us
            return {Tier.STORE if plan.num_missing else Tier.HOST: num_tokens}
        store = {span.group: span.num_absent for span in plan.spans}
        host = {span.group: len(span.slots) - span.num_absent for span in plan.spans}
        return hits.tokens_by_tier(self._layout, host, store, num_tokens)

    def _open(self, plan: Plan, now: float) -> None:
        num_tokens = plan.hit.num_tokens or 0
        if num_tokens < max(1, self._tiers.config.min_load_tokens):
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
        self.plans.add(plan)
        self.plans.refresh(plan, self._step, now)

    def take(self, request_id: str) -> Plan | None:
        """The request's plan, which is now the caller's to `release`. Its query ends."""
        if self._lookups is not None:
            self._lookups.drop(request_id)
        return self.plans.pop(request_id)

    def release(self, plan: Plan) -> None:
        self._index.unpin(reversed(plan.pinned()))
        self._index.unreserve(plan.reserved)
        plan.clear()

    def forget_request(self, request_id: str) -> None:
        """The hit was not taken, or the request is over: no plan, no query."""
        self._lacking.pop(request_id, None)
        plan = self.take(request_id)
        if plan is not None:
            self._count["plans_aborted"] += plan.num_held > 0
            self.release(plan)

    def forget_all(self) -> None:
        """The names changed: no plan and no answer holds."""
        self._lacking.clear()
        for plan in self.plans.pop_all():
            self._count["plans_dropped"] += plan.num_held > 0
            self.release(plan)
        if self._lookups is not None:
            self._lookups.drop_all()

    def end_step(self) -> None:
        """Age the plans; the next step has its own share of waiting."""
        self._step += 1
        for plan in self.plans.pop_expired(self._step, self._tiers.clock()):
            self._count["plans_expired"] += plan.num_held > 0
            self.release(plan)
        if self._lookups is not None:
            self._lookups.new_step()
