"""Which adapters the ranks hold: the scheduler role's state machine, as `watch` is that of the model's weights.

A request that uses an adapter is named by the digest of the tensors that the ranks have loaded for it (`rank.HeldAdapters`). The
adapter's name, path, files and vLLM's id do not count. Whatever may have put other tensors in place is followed by a question before the
next step is scheduled:

- a call that loads, unloads or pins an adapter, whoever made it: asked at once, so that requests which follow have their names;
- any other call to the workers that is not known to be harmless: it may hold adapters, too, or write to them;
- a request for an adapter that nobody asked about, or that vLLM may have dropped since: the ranks load it, as vLLM would with the next
  step;
- a request that loads in place: vLLM reads it again, and so do we before it is named;
- a step in which vLLM has read other tensors again by itself (`late`).

Where the tensors of this engine's ranks do not say what KV depends on, each question has a new answer at random, and nothing is saved: as
in vLLM, its own GPU cache finds what the newest call has left in place, and nobody else finds anything.

Pure but for that: ranks, names and time are arguments. Scheduler thread.
"""

import itertools
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from epochkv_connector.weights.watch import Ranks, Wanted, answers_of, fold
from epochkv_fence.protocol.pool import SHOWN_DIGITS

logger = logging.getLogger("vllm.epochkv.adapters")

ADAPTER_CALLS = frozenset(("add_lora", "pin_lora", "remove_lora"))
"""Harmless calls (`watch.HARMLESS`) after which an id may stand for other tensors."""

LATER = "it is not loaded yet"
"""What a rank says that had no more time before this step."""
MAX_ADAPTERS = 1024
"""That are looked after, but for those in use; more than any engine has at a time."""
MAX_ANSWERS = 16 * MAX_ADAPTERS
"""Of ranks that are remembered, but for those that names follow."""
RETRY_SECONDS = 1.0
"""Until a request for an adapter that had no digest has the ranks asked again."""


class AdapterNames(Protocol):
    """What is named after adapters."""

    def adapters_in_use(self) -> Mapping[int, Any]:
        """A `LoRARequest` for each id that a live request uses."""

    def adapters_changed(self, numbers: set[int]) -> None:
        """Pins of these ids are current no more."""

    def end_adapter(self, value: bytes) -> None:
        """Blocks under names of these tensors were computed with others: the names are used here no more in this epoch."""


@dataclass(slots=True)
class Known:
    """What one id stands for."""

    value: bytes | None = None  # 32 bytes; None: unknown
    version: int = 0  # another number than before says that its pins are not current; never comes back, also if `value` does
    number: int = -1  # of the question that `value` is the answer to
    retry_at: float = 0.0  # when the ranks may be asked again for what they could not say


class Adapters:
    """See the module's docstring.

    Attributes:
        counters: `asked`, `changes`, `unknown`, `late`.
        why_alone: why tensors of adapters do not say what KV depends on; None: they do.
        num_kept: of how many adapters a rank keeps the tensors, at least.
        held: digests by id of what the step that is scheduled next computes with; another object when anything has changed.
    Args:
        why_not: adapters of this engine are never named, and why.
    """

    def __init__(
        self, ranks: Ranks, num_ranks: int, clock: Callable[[], float], why_not: str | None = None, why_alone: str | None = None
    ) -> None:
        self.counters: Counter[str] = Counter()
        self.held: Mapping[int, bytes | None] = {}
        self._ranks = ranks
        self._num_ranks = num_ranks
        self._clock = clock
        self._why_not, self.why_alone, self.num_kept = why_not, why_alone, 0
        self._names: AdapterNames | None = None
        self._may_ask: Callable[[], bool] = lambda: False
        self._known: dict[int, Known] = {}
        self._answers: dict[tuple[int, int], bytes] = {}  # (id, number of the question), of late
        self._suspected: dict[int, bool] = {}  # id -> load it though it is there
        self._unloaded: set[int] = set()  # by others, who may load something else in its place: not by us
        self._afresh = False
        self._number = self._told_at = 0
        self._versions = itertools.count(1)
        self._said: set[str] = set()

    def join(self, names: AdapterNames, may_ask: Callable[[], bool]) -> None:
        """Whom to tell, and whether the ranks can be asked now: awake, and their weights known."""
        self._names, self._may_ask = names, may_ask

    # ------------------------------------------------------------------ what happens

    def of(self, request: Any) -> Known:
        """What this `LoRARequest` stands for, as far as known; asked before the next step is scheduled otherwise."""
        adapter_id = int(request.lora_int_id)
        known = self._known.get(adapter_id)
        if known is None:
            known = self._known[adapter_id] = Known(version=next(self._versions))
        if known.value is None and self._clock() >= known.retry_at:
            self._suspected.setdefault(adapter_id, False)
        return known

    def arrived(self, request: Any, num_others: int) -> None:
        """A new request uses it, and so many others do. vLLM reads it again with every step of one that loads in place, and once if it
        had more adapters than it keeps: files may have changed."""
        adapter_id, drops = int(request.lora_int_id), len(self._known) > self.num_kept and self.why_alone is None
        if getattr(request, "load_inplace", False):
            self.of(request)
            self._suspected[adapter_id] = True
        elif drops and not num_others:
            self._suspected.setdefault(adapter_id, False)

    def version(self, adapter_id: int) -> int:
        """Of what this id stands for now; -1: nothing that is known."""
        return self._known[adapter_id].version if adapter_id in self._known else -1

    def found(self, adapter_id: int, number: int) -> bytes | None:
        """The answer to this question, if anybody remembers."""
        return self._answers.get((adapter_id, number))

    def number(self, adapter_id: int) -> int:
        """Of the question that its names follow."""
        return self._known[adapter_id].number if adapter_id in self._known else -1

    def calling(self, method: str, what: Any) -> None:
        """The workers are about to load, unload or pin this: a `LoRARequest`, or an id."""
        adapter_id = getattr(what, "lora_int_id", what)
        if not isinstance(adapter_id, int):
            self.suspect_all()
            return
        (self._unloaded.add if method == "remove_lora" else self._unloaded.discard)(adapter_id)
        self._known.setdefault(adapter_id, Known(version=next(self._versions)))
        self._suspected.setdefault(adapter_id, False)

    def suspect_all(self) -> None:
        """Any of them may be other tensors from now on, also those written into tensors that were there."""
        self._afresh = True
        self._suspected.update(dict.fromkeys(self._known.keys() - self._suspected.keys(), False))

    def late(self, adapter_id: int, number: int) -> None:
        """A rank saw, behind a step, that requests had used others than those that this question found."""
        value = self._answers.pop((adapter_id, number), None)
        if value is None or self._names is None:
            return
        self.counters["late"] += 1
        logger.warning(
            "EpochKV: vLLM has read other tensors for adapter id %d by itself: %s is ended", adapter_id, value.hex()[:SHOWN_DIGITS]
        )
        self._names.end_adapter(value)
        if adapter_id in self._known:
            self._suspected.setdefault(adapter_id, False)
        self._change(other for other, one in self._known.items() if one.value == value)

    # ------------------------------------------------------------------ when the ranks are asked

    def before_schedule(self) -> None:
        """Afterwards what is known of adapters is what the ranks hold, and `held` says nothing of those that could not be asked about."""
        self.ask(load=True)
        if self._suspected or self._told_at != self._number:
            self._told_at = self._number
            unknown = self._known if self.why_alone else self._suspected
            self.held = {one: None if one in unknown else known.value for one, known in self._known.items()}

    def ask(self, *, load: bool = False) -> None:
        """Ask about everything that is suspected, if the ranks can be asked. `load`: they load what is not there and used, as vLLM will
        with the step that follows."""
        if self._names is None or not self._suspected or not self._may_ask():
            return
        in_use = self._names.adapters_in_use()
        wanted = [
            (adapter_id, in_use.get(adapter_id) if load and adapter_id not in self._unloaded else None, again)
            for adapter_id, again in sorted(self._suspected.items())
        ]
        self._suspected = {}
        self._number += 1
        self.counters["asked"] += 1
        found, why = self._ask(wanted)
        self._afresh = found is None
        changed: set[int] = set()
        for adapter_id, request, again in wanted:
            value, note = (None, why) if found is None else found.get(adapter_id, (None, ""))
            if value is not None:
                self._unloaded.discard(adapter_id)
            elif not note and adapter_id not in in_use:  # unloaded, and nobody is named after it
                self._known.pop(adapter_id, None)
                self._unloaded.discard(adapter_id)
                continue
            elif not note and request is None:
                note = LATER
            if note == LATER or (again and request is None and adapter_id in in_use):
                self._suspected[adapter_id] = again
            if self._found(adapter_id, value, note):
                changed.add(adapter_id)
        self._change(changed)
        self._forget(in_use)
        for one in list(itertools.islice(self._answers, max(0, len(self._answers) - MAX_ANSWERS))):
            if self.number(one[0]) != one[1]:  # else names follow it: `late` must find it
                del self._answers[one]

    def _ask(self, wanted: Wanted) -> tuple[dict[int, tuple[bytes | None, str]] | None, str]:
        if self._why_not is not None:
            return None, self._why_not
        if self.why_alone is not None:
            return {adapter_id: (os.urandom(32), "") for adapter_id, *_ in wanted}, ""
        answers, why, _ = answers_of(
            lambda: self._ranks.digest_adapters(self._number, wanted, self._afresh), self._number, self._num_ranks, "adapters", dict
        )
        if not answers:
            return None, why
        merged = {}
        for adapter_id, *_ in wanted:
            each = [answer["adapters"].get(adapter_id, (None, "")) for answer in answers]
            note = next((f"rank {rank}: {note}" if note != LATER else LATER for rank, (_, note) in enumerate(each) if note), "")
            known = [value for value, _ in each if value is not None]
            merged[adapter_id] = (fold(known) if len(known) == len(each) else None), note
        return merged, ""

    def _found(self, adapter_id: int, value: bytes | None, note: str) -> bool:
        """Keep an answer; whether it is another one than before."""
        known = self._known.setdefault(adapter_id, Known())
        before, known.value, known.number, known.retry_at = known.value, value, self._number, self._clock() + RETRY_SECONDS
        if value is not None:
            self._answers[adapter_id, self._number] = value
        elif note != LATER and note not in self._said:
            self._said.add(note)
            logger.warning("EpochKV: the KV of adapter id %d is not reused or saved: %s", adapter_id, note or "the ranks do not hold it")
        if value == before:
            return False
        self.counters["unknown" if value is None else "changes"] += 1
        if value is not None and self.why_alone is not None:
            if not self._said:
                self._said.add(self.why_alone)
                logger.warning("EpochKV: the KV of adapters stays in this engine's own GPU cache: %s", self.why_alone)
        elif value is not None:
            logger.info("EpochKV: adapter id %d is %s", adapter_id, value.hex()[:SHOWN_DIGITS])
        return True

    def _change(self, changed: Iterable[int]) -> None:
        numbers = set(changed)
        for adapter_id in numbers:
            self._known[adapter_id].version = next(self._versions)
        if numbers and self._names is not None:
            self._names.adapters_changed(numbers)

    def _forget(self, in_use: Mapping[int, Any]) -> None:
        """Ids of adapters that were loaded once and are used by nobody; the ranks would be asked again."""
        if len(self._known) > MAX_ADAPTERS:
            kept = in_use.keys() | self._suspected.keys()
            self._known = {adapter_id: known for adapter_id, known in self._known.items() if adapter_id in kept}
            self._said.clear()
