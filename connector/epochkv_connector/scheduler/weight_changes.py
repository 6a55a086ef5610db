"""What follows for requests and names when the ranks hold other weights, or other tensors of an adapter.

Requests that hold blocks go on: what they make of them gets no name. All others are named anew before vLLM looks for them.
"""

from collections.abc import Callable
from typing import Any, Protocol

from epochkv_connector.engine import blocks
from epochkv_connector.scheduler.requests import Admission, SharedState
from epochkv_connector.weights.adapters import Adapters
from epochkv_connector.weights.watch import Watch
from epochkv_connector.wire import WorkerReport


class Link(Protocol):
    """To the hub (`scheduler.role.HubLink`)."""

    def propose(self, epoch: int) -> None: ...
    def poke(self) -> None: ...


class WeightChanges:
    """Told by `weights.watch` (`WeightNames`) and `weights.adapters` (`AdapterNames`); tells the root, the requests and the hub.

    Attributes:
        watch, adapters: what looks at the weights of the ranks, and at their adapters. Whoever makes them sets them before anything
            is asked: they tell this object what they find.
    """

    watch: Watch
    adapters: Adapters

    def __init__(
        self, state: SharedState, admission: Admission, link: Link, core: Any | None, scheduler: Any | None, kept_own: Callable[[str], None]
    ) -> None:
        self._core, self._scheduler, self._kept_own = core, scheduler, kept_own
        self._state, self._pins, self._requests, self._tiers = state, state.pins, state.requests, state.tiers
        self._admission = admission
        self.link = link

    def hold(self, weights: bytes | None) -> None:
        """The ranks hold these weights from now on; None: unknown. Requests that hold blocks go on without names."""
        if not self._pins.root.hold(weights):
            self.tell()
            return
        if weights is not None and self._pins.root.has_ended(weights):  # back again, and nobody else knows that they had ended here
            self.ask_for_next_epoch()
        if self._tiers is not None:
            self._tiers.saves.drop_unsent()  # of requests that have ended: no step compares what they were computed with any more
        for record in self._requests:
            if blocks.holds_blocks(record.vllm):
                self.detach(record.vllm)
        self._state.apply()
        self.tell()

    def detach(self, request: Any) -> None:
        """Blocks of the request that have no name yet get random ones, now and later."""
        self._pins.detach(request, blocks.num_named_blocks(self._state.manager, request, self._state.pool))

    def end(self, weights: bytes, *, at_once: bool = True) -> None:
        """Blocks under names of these weights were computed with others: they go, here at once, elsewhere with the next epoch. Where
        none has left this engine, the epoch has time until these weights return."""
        self._pins.root.end(weights)
        if at_once:
            self.ask_for_next_epoch()
        self._state.apply()

    def keep_own(self, why: str) -> None:
        self._pins.root.keep_own()
        self._kept_own(why)

    def clear_encoder(self) -> bool:
        if self._core is None or self._scheduler is None or blocks.encoder_outputs_in_use(self._scheduler):
            return False
        self._scheduler.reset_encoder_cache()
        self._core.model_executor.reset_encoder_cache()
        return True

    def blocks_to_free(self) -> list[int]:
        """Those that vLLM frees when steps under way have ended: preempted requests had them."""
        return [block.block_id for _, held in getattr(self._scheduler, "deferred_frees", ()) for block in held]

    def lost_blocks(self) -> None:
        """vLLM's own sleep has cleared its cache before. Other calls have not, and where requests hold blocks it cannot be cleared. Under
        the fence, another connector may have stores to send yet, so names change."""
        scheduler: Any = self._scheduler
        sends = hasattr(scheduler, "epochkv_fence") and scheduler.connector is not None
        if scheduler is not None and (not scheduler.reset_prefix_cache() or sends) and self._pins.root.reset():
            self._state.apply()
            self.ask_for_next_epoch()

    def break_off(self) -> None:
        """A change of weights could not be followed: this engine names nothing that anybody finds, until it restarts."""
        self._state.broken = True
        self._pins.root.forbid()

    def late(self, report: WorkerReport) -> None:
        """Ranks saw other weights, or adapters, behind a step than those that its blocks are named after."""
        try:
            for number in report.late:
                self.watch.late(number)
            for number in report.mixed:
                self.watch.mixed(number)
            for adapter_id, number in report.replaced:
                self.adapters.late(adapter_id, number)
        except Exception as error:
            self._state.on_error("late", error)
            self.break_off()

    def tell(self) -> None:
        if self._state.manager is not None:  # before that nobody listens yet
            self.link.poke()

    def ask_for_next_epoch(self) -> None:
        """Names of this epoch may be wrong here."""
        epoch = self._pins.root.proposal()
        if epoch is not None:
            self.link.propose(epoch)

    def adapters_in_use(self) -> dict[int, Any]:
        """A `LoRARequest` for each adapter of a live request; one that loads in place where there is one."""
        used = (getattr(record.vllm, "lora_request", None) for record in self._requests)
        adapters = sorted((one for one in used if one is not None), key=lambda one: bool(getattr(one, "load_inplace", False)))
        return {one.lora_int_id: one for one in adapters}

    def adapters_changed(self, numbers: set[int]) -> None:
        """These ids stand for other tensors from now on. Requests that hold blocks go on without names, and what is being loaded for
        them fails; the others are named anew before vLLM looks for them in its cache."""
        for record in self._requests:
            request, pin = record.vllm, self._pins.pin_of(record.vllm)
            if pin is None or pin.adapter not in numbers or self._pins.is_current(pin):
                continue
            if blocks.holds_blocks(request):
                self.detach(request)
                self._requests.overtake(record)
            else:
                self._admission.renamed(record, self._pins.repin(request, must=False), self._state.apply())

    def end_adapter(self, value: bytes) -> None:
        """Blocks under names of these tensors were computed with others. Ranks have saved none of them, so nobody else has any."""
        self._pins.root.end(value)
