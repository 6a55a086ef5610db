"""Which weights made which token of an answer.

A token belongs to the step that sampled it, and a step to what the ranks held when it was scheduled. vLLM takes the results of steps in the
order in which it scheduled them. So a change shows when the results of the first step after it are about to be counted: each request
that wants a stamp has then as many tokens as were made before. Nothing is kept per step and request.

A rank may see, behind a step, that it had held something else (`StepMetadata.digest_number`). On a GPU it says so one step late, maybe
behind other changes. The tokens of all steps that it may have been are then unknown.

Our stamp travels with the first output of a request, with the first one after each change, and with its end. So the front end has it where
it ends an answer by itself: at a stop string, or when everything is aborted (`engine.answers`).
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from epochkv_connector.engine import patches
from epochkv_connector.guard import Guard
from epochkv_connector.naming.root import Pins, RootState, is_session
from epochkv_connector.weights.adapters import Adapters
from epochkv_connector.weights.watch import Watch
from epochkv_connector.wire import WorkerReport
from epochkv_fence.protocol.messages import STAMP_KEY, UNKNOWN_WEIGHTS, WEIGHTS_BYTES

MAX_LABELS = 64
"""Of weights that engines held: a long rollout ends after many pushes."""
OF_US = ("l1", "l2")


class Held(NamedTuple):
    """Digests of what the ranks held in one step: of the weights, and of adapters by vLLM's ids. None, or an absent one: unknown."""

    weights: bytes | None = None
    adapters: Mapping[int, bytes | None] = MappingProxyType({})


@dataclass(slots=True)
class Open:
    """A request that wants a stamp.

    Attributes:
        made: (until, held): its tokens below `until`, and not below the entry before, were made with these.
        num_loaded: tokens that were loaded for it from L1 and from L2.
        cached: prompt tokens that were not computed, by where they came from.
        epoch: of its names when it was first scheduled; -1: before the first.
        l2_answered: L2 has said which blocks of its prompt it holds.
    """

    request: Any
    adapter: int | None
    made: list[tuple[int, Held]] = field(default_factory=list)
    num_loaded: Sequence[int] = (0, 0)
    cached: dict[str, int] = field(default_factory=dict)
    epoch: int = -1
    l2_answered: bool = False

    def hear_of_l2(self) -> None:
        self.l2_answered = True

    def made_with(self, held: Held) -> tuple[bytes | None, bytes | None]:
        """Weights and adapter of tokens of this request in steps that held these."""
        return held.weights, None if self.adapter is None else held.adapters.get(self.adapter)

    def doubt(self, known: Callable[[Held], Held], num_tokens: int) -> None:
        """Of the last so many tokens of which less is known than it seemed, take that back."""
        starts = [0, *(until for until, _ in self.made)]
        for index in reversed(range(len(self.made))):
            until, held = self.made[index]
            first = max(starts[index], until - num_tokens)
            if first < until and self.made_with(doubted := known(held)) != self.made_with(held):
                self.made[index : index + 1] = [(first, held), (until, doubted)]
                num_tokens -= until - first

    def segments(self, now: Held) -> Iterator[tuple[int, bytes | None, bytes | None]]:
        """(first token, weights, adapter) as they follow each other."""
        start, last = 0, None
        for until, held in (*self.made, (self.request.num_output_tokens, now)):
            if until > start and (made_with := self.made_with(held)) != last:
                yield start, *made_with
                last = made_with
            start = max(start, until)


class Stamps:
    """One per scheduler, on its thread.

    Args:
        watch: at the weights; there before the first step.
        root: of the names, whose epoch a stamp says.
        stored: of a request: how many tokens of its prompt L2 is known to hold, and how many it can.
        all_requests: each request gets one.
        tokens_per_step: that a request may gain in one step, at most; 0: several steps decide a token, so nobody knows what made it.
    """

    def __init__(
        self,
        watch: Callable[[], Watch],
        adapters: Adapters,
        root: RootState,
        stored: Callable[[Any], tuple[int, int]],
        *,
        all_requests: bool,
        tokens_per_step: int,
    ) -> None:
        self._watch, self._adapters, self._root, self._stored = watch, adapters, root, stored
        self._all_requests, self._tokens_per_step = all_requests, tokens_per_step
        self._labels: dict[bytes, str] = {}
        self._open: dict[str, Open] = {}
        self._due: set[str] = set()  # scheduled, and their newest stamp has not left the engine
        self._steps: deque[tuple[Any, Held]] = deque()  # scheduled while a request wanted a stamp, without results
        self._now = Held()  # of the step whose results came last

    def join(self, scheduler: Any, guard: Guard) -> None:
        """Follow the steps of this scheduler."""

        def guarded(work: Callable[[], dict[str, Any] | None]) -> dict[str, Any] | None:
            return guard.run("stamps", work, lambda: None)

        def schedule(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            output = function(*args, **kwargs)
            if self._open:
                guarded(lambda: self.scheduled(output))
            return output

        def update(function: Callable[..., Any], scheduler_output: Any, model_output: Any, *args: Any, **kwargs: Any) -> Any:
            if self._open:
                guarded(lambda: self.made(scheduler_output, reports_of(model_output)))
            outputs = function(scheduler_output, model_output, *args, **kwargs)
            if self._due:
                guarded(lambda: self.send(outputs))
            return outputs

        def finish(function: Callable[..., Any], request: Any, *args: Any, **kwargs: Any) -> Any:
            delay, params = function(request, *args, **kwargs)
            stamp = guarded(lambda: self.finish(request))
            return delay, params if stamp is None else {**(params or {}), STAMP_KEY: stamp}

        patches.around(scheduler, "schedule", schedule)
        patches.around(scheduler, "update_from_output", update)
        patches.around(scheduler, "_connector_finished", finish)

    def label(self, weights: bytes, label: str) -> None:
        """People call these weights so. Any thread."""
        self._labels = dict([*self._labels.items(), (weights, label)][-MAX_LABELS:])

    # ------------------------------------------------------------------ a request's life

    def open(self, request: Any) -> None:
        """A new request. vLLM counts the tokens of a session anew with each of its inputs, so a session has no stamp."""
        if not is_session(request) and (self._all_requests or (asked_of(request) or {}).get("stamp") is True):
            adapter = getattr(request, "lora_request", None)
            if not self._open:
                self._watch().overwritten = None  # it is of steps that nobody followed
                self._steps.clear()
            self._open[request.request_id] = Open(request, None if adapter is None else int(adapter.lora_int_id))

    def hearer_of_l2(self, request: Any) -> Callable[[], None] | None:
        """See `RequestView`: for one whose stamp is to say how much of its prompt L2 holds."""
        stamp = self._open.get(request.request_id)
        return stamp.hear_of_l2 if stamp is not None and _asks_stored(request) else None

    def loaded(self, request_id: str, *num_tokens: int) -> None:
        """So many tokens come from L1 and from L2."""
        if (stamp := self._open.get(request_id)) is not None:
            stamp.num_loaded = num_tokens

    def finish(self, request: Any) -> dict[str, Any] | None:
        """Its stamp, if it wanted one. Nothing is kept of it."""
        self._due.discard(request.request_id)
        if (stamp := self._open.pop(request.request_id, None)) is None:
            return None
        written = self._write(stamp)
        if _asks_stored(request):
            stored, written["storable_tokens"] = self._stored(request)
            written["stored_tokens"] = stored if stamp.l2_answered else 0
        return written

    def __len__(self) -> int:
        return len(self._open)

    # ------------------------------------------------------------------ steps

    def scheduled(self, scheduler_output: Any) -> None:
        """A step was scheduled, and some request wants a stamp."""
        follows = self._tokens_per_step and not self._root.lost  # else nobody follows changes any more
        held = Held(self._watch().known, self._adapters.held) if follows else Held()
        self._steps.append((scheduler_output, held))
        for new in scheduler_output.scheduled_new_reqs:  # on GPUs also those that resume
            if (stamp := self._open.get(new.req_id)) is not None and not stamp.cached:
                pin = Pins.pin_of(stamp.request)
                stamp.epoch, stamp.cached = -1 if pin is None else pin.epoch, cached_tokens(stamp, new)
                self._due.add(new.req_id)

    def made(self, scheduler_output: Any, reports: Iterable[WorkerReport]) -> None:
        """The results of a step are about to be counted."""
        held, step = self._now, None
        if any(scheduler_output is followed for followed, _ in self._steps):
            while step is not scheduler_output:
                step, held = self._steps.popleft()
        wrong = [report for report in reports if report.late or report.mixed or report.replaced]
        if wrong or self._watch().overwritten is not None:
            held = self._doubt(held, wrong)
        if held != self._now:
            self._change(held)

    def _doubt(self, held: Held, reports: Iterable[WorkerReport]) -> Held:
        """Ranks had held something else than they said, in this step or in one before. What this step held, as far as known."""
        watch = self._watch()
        weights = {watch.found(number) for report in reports for number in (*report.late, *report.mixed)} | {watch.overwritten}
        adapters = {(one, self._adapters.found(one, number)) for report in reports for one, number in report.replaced}
        watch.overwritten = None

        def known(of: Held) -> Held:
            left = {one: None if (one, value) in adapters else value for one, value in of.adapters.items()} if adapters else of.adapters
            return Held(None if of.weights in weights else of.weights, left)

        self._change(self._now, doubted=True)
        num_doubted = (1 + len(self._steps)) * self._tokens_per_step
        for stamp in self._open.values():
            stamp.doubt(known, num_doubted)
        self._steps = deque((step, known(of)) for step, of in self._steps)
        return known(held)

    def _change(self, held: Held, *, doubted: bool = False) -> None:
        for request_id, stamp in self._open.items():
            if not doubted and stamp.made_with(held) == stamp.made_with(self._now):
                continue
            num_made = stamp.request.num_output_tokens  # the next ones are of others
            stamp.made.append((num_made, self._now))
            if num_made:
                self._due.add(request_id)
        self._now = held

    def send(self, outputs: Mapping[int, Any]) -> None:
        """Put stamps that the front end does not know yet into the outputs of this step. New requests are the last of a step."""
        ready = any(self._open[request_id].request.num_output_tokens for request_id in self._due)
        for of_client in outputs.values() if ready else ():
            for output in reversed(of_client.outputs):
                if output.request_id in self._due and output.new_token_ids:
                    self._due.discard(output.request_id)
                    output.kv_transfer_params = {**(output.kv_transfer_params or {}), STAMP_KEY: self._write(self._open[output.request_id])}
                    if not self._due:
                        return

    def _write(self, stamp: Open) -> dict[str, Any]:
        tokens = []
        for first, weights, adapter in stamp.segments(self._now):
            entry: dict[str, Any] = {"from_token": first, "weights": shown(weights)}
            if weights is not None and (label := self._labels.get(weights[:WEIGHTS_BYTES])):
                entry["label"] = label
            if stamp.adapter is not None:
                entry["adapter"] = shown(adapter)
            tokens.append(entry)
        return {"tokens": tokens, "epoch": stamp.epoch if stamp.epoch >= 0 else None, "cached_tokens": stamp.cached}


def asked_of(request: Any) -> Mapping[str, Any] | None:
    """What a request wants of us."""
    asked = (request.kv_transfer_params or {}).get(STAMP_KEY)
    return asked if isinstance(asked, Mapping) else None


def _asks_stored(request: Any) -> bool:
    return (asked_of(request) or {}).get("stored") is True


def shown(digest: bytes | None) -> str:
    """As status and CLI show it, in full."""
    return UNKNOWN_WEIGHTS if digest is None else digest[:WEIGHTS_BYTES].hex()


def cached_tokens(stamp: Open, new: Any) -> dict[str, int]:
    """Where the prompt tokens came from that this first step of the request does not compute."""
    stats = getattr(stamp.request, "prefill_stats", None)
    external = min(int(getattr(stats, "num_external_cached_tokens", 0)), new.num_computed_tokens)
    found = {"gpu": new.num_computed_tokens - external}
    for tier, number in zip(OF_US, stamp.num_loaded, strict=True):
        found[tier] = min(number, external)
        external -= found[tier]
    return found if not external else {**found, "other": external}


def reports_of(model_output: Any) -> list[WorkerReport]:
    """What the ranks say of a step; ours may be one child of a MultiConnector."""
    meta = getattr(getattr(model_output, "kv_connector_output", None), "kv_connector_worker_meta", None)
    return [one for one in (meta, *(getattr(meta, "metadata", None) or ())) if isinstance(one, WorkerReport)]
