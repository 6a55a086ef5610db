"""From a request's arrival to its blocks: what vLLM asks before it computes, and what it then does with the answer.

vLLM has looked into its own cache before it asks, under names that may be old by then. So each answer begins with the names
of the request, and only then speaks of what the tiers hold.
"""

from __future__ import annotations

from typing import Any

from epochkv_connector.engine import blocks
from epochkv_connector.naming.identity import Snapshot
from epochkv_connector.naming.pins import Repin, awaits_transfer
from epochkv_connector.scheduler.state import LoadEvent, LoadState, Request, SharedState
from epochkv_connector.tiers.layout import RequestView
from epochkv_connector.tiers.manager import TierManager
from epochkv_connector.wire import Tier


class Admission:
    """Answers vLLM's questions about waiting requests; with no hit of a tier unless it `may_load`."""

    def __init__(self, state: SharedState, *, may_load: bool) -> None:
        self._state, self._pins, self._requests, self._tiers = state, state.pins, state.requests, state.tiers
        self._may_load = may_load

    def arrive(self, request: Any) -> None:
        """Pin a new request, and begin its L2 lookup."""
        self._pins.pin(request)
        self._begin_lookup(request, self._state.apply())

    def _usable(self, request: Any, snapshot: Snapshot) -> TierManager | None:
        """The tiers, if they may serve this request now."""
        pin = self._pins.pin_of(request)
        usable = (
            not self._state.broken
            and self._may_load
            and snapshot.in_use
            and pin is not None
            and self._pins.may_save(pin)
            and not request.skip_reading_prefix_cache
            and not (pin.session and pin.admitted)
            and not awaits_transfer(request)
        )
        return self._tiers if usable else None

    def _begin_lookup(self, request: Any, snapshot: Snapshot) -> None:
        tiers = self._usable(request, snapshot)
        if tiers is not None:
            tiers.hits.begin(self._view(request), snapshot)

    @staticmethod
    def _view(request: Any) -> RequestView:
        return RequestView(request.request_id, request.num_tokens, request.block_hashes)

    def answer(self, request: Any, num_local: int) -> tuple[int | None, bool]:
        """How many tokens beyond the local ones are loaded; `(None, False)`: drop the local hit and ask again next step."""
        # When the scheduler goes on whatever is said, nothing may be deferred.
        must = bool(request.skip_reading_prefix_cache)
        record, outcome, snapshot = self.name(request, must=must)
        if must or outcome is Repin.CARRIED:
            return 0, False
        stale_hit = outcome is Repin.DONE and num_local > 0
        if stale_hit or outcome is Repin.DEFERRED or self._steps_aside_once(record):
            return None, False
        tiers = self._usable(request, snapshot)
        if tiers is None or record.load is not LoadState.NONE or tiers.loads.is_open(record.request_id):
            return 0, False  # open: a rank's acknowledgement of the load before was lost, and no second job would go out
        num_tokens = tiers.hits.answer(self._view(request), num_local, snapshot)
        return num_tokens, bool(num_tokens)

    def name(self, request: Any, *, must: bool) -> tuple[Request, Repin, Snapshot]:
        """Bring the names of a request that vLLM considers to what holds now, and the tiers with them. `must`: see `Pins.repin`."""
        self._pins.enter_schedule()
        record = self._requests.see(request)
        outcome = Repin.CARRIED if blocks.holds_blocks(request) else self._pins.repin(request, must=must)
        snapshot = self._state.apply()
        self.renamed(record, outcome, snapshot)
        return record, outcome, snapshot

    def renamed(self, record: Request, outcome: Repin, snapshot: Snapshot) -> None:
        """The request's blocks may have new names now."""
        if outcome is not Repin.DONE:
            return
        record.num_offered = 0
        self._abort(record.request_id)
        self._begin_lookup(record.vllm, snapshot)

    def _abort(self, request_id: str) -> None:
        if self._tiers is not None:
            self._tiers.hits.forget_request(request_id)

    @staticmethod
    def _steps_aside_once(record: Request) -> bool:
        """After a failed load "ask again" once: it moves the request out of vLLM's queue of those that hold blocks.

        At the head of that queue it would wait for blocks that others behind it hold, and vLLM looks at none of them while it
        does not fit: with a sliding window a load holds fewer blocks than computing takes (seen: a permanent hang).
        """
        asked_first, record.steps_aside = record.steps_aside, False
        return asked_first

    def allocate(self, request: Any, blocks: Any, num_external: int) -> None:
        """Commit or abort the plan. Decided on `num_external` alone: a MultiConnector loser gets real blocks and 0."""
        if num_external == 0:
            self._requests.on(self._requests.see(request), LoadEvent.PASS)
        snapshot = self._state.apply()
        if num_external == 0:
            self.admit(request)
            self._abort(request.request_id)
            return
        record, loading = self._requests.see(request), False
        if self._tiers is not None:
            loading = self._tiers.loads.commit(self._view(request), blocks.get_block_ids(), num_external, snapshot)
        self._pins.begin_load(request)
        if not loading:
            self._requests.on(record, LoadEvent.FAIL_UNSENT)
        elif self._requests.on(record, LoadEvent.ACCEPT):
            host, store = self._tokens_by_tier(request.request_id, num_external)
            self._state.counters.update(tokens_hit_host=host, tokens_hit_store=store)

    def admit(self, request: Any) -> None:
        """vLLM computes tokens of this request from now on."""
        pin = self._pins.pin_of(request)
        if pin is not None and not pin.loading:
            self._pins.admit(request)

    def fail_unsent(self, request: Any) -> None:
        """An error of ours met an accepted hit: vLLM waits for it, so it must be reported as failed, exactly once."""
        self._pins.begin_load(request)
        record = self._requests.see(request)
        if self._tiers is not None and self._tiers.loads.is_open(request.request_id):
            self._requests.on(record, LoadEvent.ACCEPT)
            self._requests.on(record, LoadEvent.OVERTAKE)
        else:
            self._requests.on(record, LoadEvent.FAIL_UNSENT)

    def hit_sources(self, request: Any, num_external: int) -> dict[Any, int]:
        """Which tier supplies how many of the external tokens."""
        return blocks.hit_sources(*self._tokens_by_tier(request.request_id, num_external))

    def _tokens_by_tier(self, request_id: str, num_external: int) -> tuple[int, int]:
        sources = self._tiers.loads.sources(request_id) if self._tiers is not None else {}
        host = min(sources.get(Tier.HOST, 0), num_external)
        return host, num_external - host

    def isolate(self, request: Any) -> bool:
        """An error of ours met this request: whatever it computes must be invisible to everybody.

        Returns:
            Whether it has new names now, so that a local hit found before must be dropped. A request that is alone under a
            current root already keeps its names.
        """
        self._requests.see(request)
        pin = self._pins.pin_of(request)
        if (pin is not None and pin.alone and self._pins.is_current(pin)) or blocks.holds_blocks(request):
            return False
        self._pins.isolate(request)
        return True
