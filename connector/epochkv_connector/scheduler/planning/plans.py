"""Hits that were answered and not yet accepted.

vLLM has no callback for a hit that it drops (vllm#42372): between the lookup and the allocation it may give the request
up at a dozen places, or shrink the hit. So a plan holds what it promised until it is committed, aborted, too old, or
the oldest while too much is held. A plan is also the memo of its lookup: asking again finds it, nothing is done twice.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from epochkv_connector.scheduler.planning.prompt_blocks import Span
from epochkv_connector.scheduler.tiers.views import Hit

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
        hit: the answer; a plan with 0 tokens is a remembered miss and holds nothing.
        spans: the blocks of each group that is restored, in the groups' order: those with a slot are referenced in L1 (`num_pinned`), the
            others are to be fetched from L2 (`num_missing`).
        reserved: slots promised for the latter; fewer where blocks only pass through (a staging ring).
        valid_until: when the answer must be found anew (the store's read lease, or the life of a remembered miss).
    """

    request_id: str
    root: bytes
    num_local_tokens: int
    hit: Hit
    namespace: str | None
    valid_until: float
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
        self.spans, self.num_pinned, self.num_missing, self.reserved = [], 0, 0, 0


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

    def pop_oldest_holder(self) -> Plan | None:
        """Take out the least recently asked plan that holds anything."""
        for plan in self._plans.values():
            if plan.num_held:
                return self.pop(plan.request_id)
        return None

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
