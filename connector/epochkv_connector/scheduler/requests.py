"""Requests: the names in use, one record for each request, and what vLLM asks of it before it computes.

Epochs are adopted on another thread, leases end and weights change between two calls of vLLM. Nothing is pushed into the
tiers then: whoever is called next begins with `SharedState.apply`, and finds that the root shows something else than was last applied.

vLLM counts the reports of a load: it dies of one that it does not wait for, and waits for ever for one that does not come.
Whether bytes arrived is not all that decides what it may be told. Names may have changed on the way, no rank may know of the load,
or the request may have ended. So each load has one state, and one table says what an event makes of it.

Every operation looks at the requests it names, and at no other: hundreds run, and few of them load.
"""

import enum
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from epochkv_connector.engine import blocks, patches
from epochkv_connector.engine.events import Outgoing
from epochkv_connector.naming.identity import Snapshot
from epochkv_connector.naming.root import Pins, Repin, awaits_transfer, is_private
from epochkv_connector.scheduler.stamps import Stamps
from epochkv_connector.tiers.layout import RequestView
from epochkv_connector.tiers.manager import TierManager
from epochkv_connector.wire import Tier


class LoadState(enum.Enum):
    """What vLLM waits for on behalf of one request, and how it must end."""

    NONE = "none"  # nothing
    FOREIGN = "foreign"  # perhaps the load of another connector, beside this one: until the request is scheduled, nobody has said so
    ACCEPTED = "accepted"  # a load that no rank was told of yet
    OVERTAKEN = "overtaken"  # the same; names have changed since, so it must end as a failure
    SENT = "sent"  # a load that ranks were told of
    INVALIDATED = "invalidated"  # the same; names have changed since, so its success must not reach vLLM
    REPEATED = "repeated"  # its success was hidden from vLLM; every rank is asked to report once more, as failed
    UNSENT = "unsent"  # a hit of which no rank was told, nor will be; every rank is asked to report it as failed
    FAILED = "failed"  # nothing; the last load failed, and the request was not scheduled since
    __hash__ = object.__hash__  # `Enum` has one in Python, of the name; each step asks for some states


class LoadEvent(enum.Enum):
    PASS = "vLLM has allocated blocks, and not for a hit of ours"
    ACCEPT = "vLLM has allocated blocks for the hit"
    FAIL_UNSENT = "no rank will be told of the hit"
    SEND = "ranks are told"
    OVERTAKE = "names have changed"
    SUCCEED = "all ranks have reported success"
    FAIL = "all ranks have reported, and vLLM knows that it failed"
    DISTRUST = "all ranks have reported success, and nobody knows whether that is true"
    SCHEDULE = "vLLM computes tokens of the request"
    FINISH = "the request has ended"


_S, _E = LoadState, LoadEvent

_MUST_FAIL = (_S.OVERTAKEN, _S.INVALIDATED, _S.REPEATED, _S.UNSENT)
TRANSITIONS: dict[LoadState, dict[LoadEvent, LoadState]] = {
    _S.NONE: {_E.PASS: _S.FOREIGN, _E.ACCEPT: _S.ACCEPTED, _E.FAIL_UNSENT: _S.UNSENT, _E.FAIL: _S.FAILED, _E.DISTRUST: _S.REPEATED},
    _S.FOREIGN: {_E.SUCCEED: _S.NONE, _E.FAIL: _S.FAILED, _E.DISTRUST: _S.REPEATED, _E.SCHEDULE: _S.NONE, _E.FINISH: _S.NONE},
    _S.ACCEPTED: {_E.SEND: _S.SENT, _E.OVERTAKE: _S.OVERTAKEN, _E.FAIL_UNSENT: _S.UNSENT},
    # FINISH: nobody will use what it brings.
    _S.OVERTAKEN: {_E.SEND: _S.INVALIDATED, _E.FAIL_UNSENT: _S.UNSENT, _E.FINISH: _S.ACCEPTED},
    _S.SENT: {_E.OVERTAKE: _S.INVALIDATED, _E.SUCCEED: _S.NONE, _E.FAIL: _S.FAILED, _E.DISTRUST: _S.REPEATED},
    _S.INVALIDATED: {_E.SUCCEED: _S.REPEATED, _E.FAIL: _S.FAILED, _E.DISTRUST: _S.REPEATED, _E.FINISH: _S.SENT},
    _S.REPEATED: {_E.SUCCEED: _S.NONE, _E.FAIL: _S.FAILED},
    _S.UNSENT: {_E.SUCCEED: _S.NONE, _E.FAIL: _S.FAILED},
    _S.FAILED: {_E.ACCEPT: _S.ACCEPTED, _E.FAIL_UNSENT: _S.UNSENT, _E.SCHEDULE: _S.NONE, _E.FINISH: _S.NONE},
}
"""Every other event changes nothing: it comes twice, or too late."""


@dataclass(slots=True)
class Request:
    request_id: str
    vllm: Any | None  # vLLM's own object; None: it has ended, and its load is not reported yet
    load: LoadState = LoadState.NONE  # only `Requests` changes it
    steps_aside: bool = False  # its load has failed, and it was not asked about since
    num_offered: int = 0  # how many of its blocks were offered to the tiers, from the first on
    max_saved: int | None = None  # so many of its tokens may be; None: nobody has asked yet
    adapter: int | None = None


class Requests:
    """All requests that live, and those that ended before their load did. Iterates over the former; `adapters` counts who uses which."""

    def __init__(self, counters: Counter[str]) -> None:
        self._counters = counters
        self.adapters: Counter[int | None] = Counter()
        self._live: dict[str, Request] = {}
        self._ended: dict[str, Request] = {}
        self._in: dict[LoadState, dict[str, Request]] = {state: {} for state in LoadState if state is not LoadState.NONE}
        self._to_name: set[str] = set()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._live.values())

    def get(self, request_id: str) -> Request | None:
        """The record of a request that lives."""
        return self._live.get(request_id)

    def vllm(self, request_id: str) -> Any | None:
        """vLLM's own object, while the request lives."""
        record = self._live.get(request_id)
        return None if record is None else record.vllm

    def see(self, request: Any) -> Request:
        """The record of vLLM's request, made when it is first seen."""
        request_id = request.request_id
        record = self._live.get(request_id)
        if record is None:
            record = self._live[request_id] = self._ended.pop(request_id, Request(request_id, request))
            record.adapter = getattr(getattr(request, "lora_request", None), "lora_int_id", None)
            self.adapters[record.adapter] += 1
        record.vllm = request
        return record

    def finish(self, request_id: str) -> None:
        """The request has ended; what vLLM waits for on its behalf still has to be reported."""
        record = self._live.pop(request_id, None)
        if record is None:
            return
        record.vllm = None
        self.adapters[record.adapter] -= 1
        if not self.adapters[record.adapter]:
            del self.adapters[record.adapter]
        self.on(record, LoadEvent.FINISH)
        if record.load is not LoadState.NONE:
            self._ended[request_id] = record

    def on(self, record: Request, event: LoadEvent) -> bool:
        """Something happens to the request's load. Returns whether that changes anything."""
        after = TRANSITIONS[record.load].get(event)
        if after is None:
            return False
        self._move(record, after)
        if after in (LoadState.REPEATED, LoadState.UNSENT):
            self._to_name.add(record.request_id)
        return True

    def _move(self, record: Request, after: LoadState) -> None:
        if record.load is not LoadState.NONE:
            del self._in[record.load][record.request_id]
        record.load = after
        if after is not LoadState.NONE:
            self._in[after][record.request_id] = record

    def _of(self, *states: LoadState) -> list[Request]:
        return [record for state in states for record in self._in[state].values()]

    def overtake(self, *only: Request) -> None:
        """Names have changed, of these requests or of all: no load that vLLM waits for may succeed."""
        overtaken = only or self._of(LoadState.ACCEPTED, LoadState.SENT)
        self._counters["invalidated_loads"] += sum(self.on(record, LoadEvent.OVERTAKE) for record in overtaken)

    def send(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            record = self._live.get(request_id) or self._ended.get(request_id)
            if record is not None:
                self.on(record, LoadEvent.SEND)

    def fail_unsent(self) -> None:
        """No rank will be told of the loads that wait for it."""
        for record in self._of(LoadState.ACCEPTED, LoadState.OVERTAKEN):
            self.on(record, LoadEvent.FAIL_UNSENT)

    def report(self, request_id: str, *, failed: bool) -> Request | None:
        """All ranks have reported a load. Returns the record if the request lives."""
        ended = self._ended.pop(request_id, None)
        if ended is not None:
            self._move(ended, LoadState.NONE)
        record = self._live.get(request_id)
        if record is not None:
            self.on(record, LoadEvent.FAIL if failed else LoadEvent.SUCCEED)
            record.steps_aside = record.steps_aside or failed
        return record

    def schedule(self, scheduled: Container[str]) -> None:
        for record in self._of(LoadState.FAILED, LoadState.FOREIGN):
            if record.request_id in scheduled:
                self.on(record, LoadEvent.SCHEDULE)

    def names(self) -> list[str]:
        """Requests that every rank is to report as failed, each once."""
        names, self._to_name = sorted(self._to_name), set()
        return names

    @property
    def must_fail(self) -> bool:
        """Whether vLLM waits for a load that must end as a failure."""
        return any(map(self._in.__getitem__, _MUST_FAIL))

    def leak_report(self) -> dict[str, int]:
        loads = {f"{state.value}_loads": len(records) for state, records in self._in.items()} | {"used_adapters": len(self.adapters)}
        return {"requests": len(self._live), "ended_requests": len(self._ended), "to_name": len(self._to_name), **loads}


class SharedState:
    """One per EngineCore; scheduler thread only.

    Attributes:
        events, outgoing: what routers are told of L1; what they are told at all.
        tiers: None when no tier is configured (the fence still works).
        on_error: told of errors that were dealt with here.
        applied: the names that the tiers work with.
        manager, pool, hash_block_size: vLLM's cache manager, its GPU block pool, tokens of a hash block; known before the first request.
        broken: an error left the tiers in doubt: the tiers stay off until this engine restarts.
    """

    def __init__(
        self, pins: Pins, tiers: TierManager | None, on_error: Callable[[str, Exception], None], core: Any | None, *, trust_media_ids: bool
    ) -> None:
        self.pins = pins
        self._trust_media_ids = trust_media_ids
        self._core = core
        self.tiers = tiers
        self.on_error = on_error
        self.counters: Counter[str] = Counter()
        self.requests = Requests(self.counters)
        self.outgoing = Outgoing(lambda request: is_private(pins, request), on_error)
        self.events = self.outgoing.host
        self.applied: Snapshot = pins.root.snapshot
        self.broken = False
        self.manager: Any = None
        self.pool: Any = None
        self.hash_block_size = 0

    def names_for_tiers(self, request: Any) -> Sequence[bytes]:
        """Hashes of the request's blocks that tiers may know: up to the first whose name has a client's id in the place of content."""
        hashes: Sequence[bytes] = request.block_hashes
        first = None if self._trust_media_ids else blocks.first_client_media(request)
        return hashes if first is None else hashes[: first // self.hash_block_size]

    def apply(self) -> Snapshot:
        """Bring the tiers to what holds now: invalidate the loads that an adoption overtook. Returns what holds now."""
        snapshot = self.pins.root.refresh()
        if snapshot is self.applied:
            return snapshot
        changed_root = snapshot.root != self.applied.root
        self._rename("adopt", lambda tiers: tiers.adopt(snapshot))
        self.applied = snapshot  # from here on an error cannot leave such a load valid
        if changed_root:
            self.events.cleared(drop_pending=False)
        return snapshot

    def clear(self) -> None:
        """Every tier forgets what it holds, under whatever name."""
        self._rename("reset", lambda tiers: tiers.reset())
        self.events.cleared(drop_pending=True)

    def _rename(self, where: str, change: Callable[[TierManager], None]) -> None:
        """What is being loaded must fail, also where the tiers cannot follow."""
        self.requests.overtake()
        if self.tiers is not None:
            try:
                change(self.tiers)
            except Exception as error:
                self.fail(where, error)

    @property
    def must_tell(self) -> bool:
        """Routers have not heard yet of what holds now, and an engine that idles would not tell them. Any thread."""
        return self.outgoing.enabled and (self.outgoing.waiting or self.pins.root.refresh() is not self.applied)

    def tell_soon(self) -> None:
        """Wake an engine that idles, so that it takes the step with which vLLM publishes. Any thread."""
        if self.must_tell:
            patches.wake(self._core)

    def fail(self, where: str, error: Exception) -> None:
        """An error left the tiers in doubt: they are used no more."""
        self.broken = True
        self.on_error(where, error)


# ----------------------------------------------------------------------------------------------------------------------
# From a request's arrival to its blocks: what vLLM asks, and what it then does with the answer.
#
# vLLM has looked into its own cache before it asks, under names that may be old by then. So each answer begins with the names
# of the request, and only then speaks of what the tiers hold.


class Admission:
    """Answers vLLM's questions about waiting requests; with no hit of a tier unless it `may_load`. L2 is asked nevertheless for who waits
    until it holds a prompt."""

    def __init__(self, state: SharedState, stamps: Stamps, *, may_load: bool) -> None:
        self._stamps = stamps
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
            and snapshot.in_use
            and pin is not None
            and self._pins.may_save(pin)
            and not request.skip_reading_prefix_cache
            and not (pin.session and pin.admitted)
            and not awaits_transfer(request)
            and (self._may_load or self._stamps.hearer_of_l2(request) is not None)
        )
        return self._tiers if usable else None

    def _begin_lookup(self, request: Any, snapshot: Snapshot) -> None:
        tiers = self._usable(request, snapshot)
        if tiers is not None and self._may_load:
            tiers.hits.begin(self._view(request), snapshot)

    def _view(self, request: Any) -> RequestView:
        return RequestView(request.request_id, request.num_tokens, self._state.names_for_tiers(request), self._stamps.hearer_of_l2(request))

    def answer(self, request: Any, num_local: int) -> tuple[int | None, bool]:
        """How many tokens beyond the local ones are loaded; `(None, False)`: drop the local hit and ask again next step."""
        # When the scheduler goes on whatever is said, nothing may be deferred.
        must = bool(request.skip_reading_prefix_cache)
        record, outcome, snapshot = self.name(request, must=must)
        if must or outcome is Repin.CARRIED:
            return 0, False
        stale_hit = outcome is Repin.DONE and (num_local > 0 or blocks.has_finer_hashes(self._state.manager))
        if stale_hit or outcome is Repin.DEFERRED or self._steps_aside_once(record):
            return None, False
        tiers = self._usable(request, snapshot)
        if tiers is None or record.load is not LoadState.NONE or tiers.loads.is_open(record.request_id):
            return 0, False  # open: a rank's acknowledgement of the load before was lost, and no second job would go out
        num_tokens = tiers.hits.answer(self._view(request), num_local, snapshot)
        if num_tokens and not self._may_load:
            num_tokens = 0
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
        record, loading = self._requests.see(request), False
        if num_external == 0:
            self._requests.on(record, LoadEvent.PASS)
            self._state.apply()
            self.admit(request)
            self._abort(request.request_id)
            return
        snapshot = self._state.apply()
        if self._tiers is not None:
            loading = self._tiers.loads.commit(self._view(request), blocks.get_block_ids(), num_external, snapshot)
        self._pins.begin_load(request)
        if not loading:
            self._requests.on(record, LoadEvent.FAIL_UNSENT)
        elif self._requests.on(record, LoadEvent.ACCEPT):
            host, store = self._tokens_by_tier(request.request_id, num_external)
            self._state.counters.update(tokens_hit_host=host, tokens_hit_store=store)
            self._stamps.loaded(request.request_id, host, store)

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
        """An error of ours met this request: whatever it computes must be invisible to everybody. Returns whether it has new names now, so
        that a local hit found before must be dropped. A request that is alone under a current root already keeps its names."""
        self._requests.see(request)
        pin = self._pins.pin_of(request)
        if (pin is not None and pin.alone and self._pins.is_current(pin)) or blocks.holds_blocks(request):
            return False
        self._pins.isolate(request)
        return True
