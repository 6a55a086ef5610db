"""The scheduler half: one object per EngineCore, made of the parts that answer vLLM's calls.

Runs on vLLM's scheduler thread only. Every rule in these parts that looks odd is one of `fence.md` section 3, found by
running vLLM. The order inside each call is the point: *first* bring the bookkeeping to what holds now
(`State.apply`), then act. What concerns more than one part is here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from epochkv_connector.engine import blocks, patches
from epochkv_connector.hub_link import HubLink
from epochkv_connector.naming.pins import TAG_KEY, Pins
from epochkv_connector.scheduler.admission import Admission
from epochkv_connector.scheduler.offering import Offers
from epochkv_connector.scheduler.state import State
from epochkv_connector.scheduler.steps import FindWorker, Steps
from epochkv_connector.scheduler.tiers.bookkeeping import Bookkeeping
from epochkv_connector.scheduler.weight_changes import WeightChanges


class SchedulerSide:
    """See the module's docstring.

    Args:
        books: bookkeeping of the tiers; None when no tier is configured (the fence still works).
        link: to the hub, which is told of changes of weights and of local resets.
        loads_off, saves_off: why loads are never answered, or nothing is saved; or None.
        local_worker: finds the worker half when it lives in this process.
        tokens_per_step: new tokens that a request may get in one step, at most.
        on_error: told of errors that were dealt with here.

    Attributes:
        state: what the parts share.
        admission, weights, steps: the parts.
    """

    def __init__(
        self,
        pins: Pins,
        books: Bookkeeping | None,
        link: HubLink,
        loads_off: str | None,
        saves_off: str | None,
        *,
        local_worker: FindWorker,
        tokens_per_step: int,
        on_error: Callable[[str, Exception], None],
    ) -> None:
        self.state = state = State(pins, books, on_error)
        self.pins, self.books, self.requests, self.counters = pins, books, state.requests, state.counters
        self.admission = Admission(state, loads_off)
        self.weights = WeightChanges(state, self.admission, link)
        self.steps = Steps(state, self.weights, Offers(state, tokens_per_step), saves_off, local_worker)

    def bind(self, manager: Any, block_pool: Any, hash_block_size_sink: Any) -> None:
        """The cache manager exists: learn the hash block size and reach the GPU block pool."""
        state = self.state
        state.manager, state.pool, state.hash_block_size = manager, block_pool, blocks.hash_block_size_of(block_pool)
        hash_block_size_sink.hash_block_size = state.hash_block_size
        patches.before_reset(manager, self.steps.let_go)
        if self.books is not None:
            self.books.bind_block_pool(blocks.BlockPoolAdapter(block_pool))
        state.events.bind(block_pool, self.books)

    def on_new_request(self, request: Any) -> None:
        """Pin, and begin the L2 lookup."""
        self.requests.see(request)
        self.weights.adapter_arrived(request)
        self.admission.arrive(request)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; GPU pins protect its saves, so frees are never delayed."""
        tag = self.pins.maker.tag(getattr(request, "lora_request", None)) if self._may_hand_off(request) else None
        self.steps.save_last_blocks(request)
        self.pins.release(request)
        self.requests.finish(request.request_id)
        self.steps.offers.forget(request.request_id)
        if self.books is not None:
            self.books.finish(request.request_id)
        return False, ({TAG_KEY: tag} if tag is not None else None)

    def _may_hand_off(self, request: Any) -> bool:
        """A P/D producer's request under a current, shareable pin: its KV may be named by our tag."""
        params = request.kv_transfer_params
        pin = self.pins.pin_of(request)
        return bool(params and params.get("do_remote_decode") and pin is not None and self.pins.may_save(pin))

    def reset_cache(self) -> bool:
        """vLLM's own reset: clear on every tier. Always True: the names make it true."""
        rotated = self.pins.root.reset()
        self.state.apply()
        self.state.clear()
        self.counters["local_resets"] += 1
        if rotated:
            self.weights.ask_for_next_epoch()
            self.weights.link.poke()
        return True

    @property
    def has_pending_work(self) -> bool:
        """Keep a multiprocess engine stepping: a save holds GPU blocks, ranks wait for word, or a load that must fail is not finally
        reported. All have deadlines."""
        return self.requests.must_fail or (self.books is not None and self.books.saves.is_pending())

    def leak_report(self) -> dict[str, int]:
        """What is still open; all zero when the engine is idle and every acknowledgement arrived."""
        report = {
            **self.requests.leak_report(),
            **self.steps.offers.leak_report(),
            "carried": self.pins.carried() + self.pins.carried(sessions=True),
        }
        if self.books is not None:
            report.update({f"books.{name}": count for name, count in self.books.leak_report().items()})
        return report
