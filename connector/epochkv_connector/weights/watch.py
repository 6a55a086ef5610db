"""When an engine takes a digest of its weights, and what it calls them meanwhile: the scheduler role's state machine.

KV is a function of tokens and weights, so names carry a digest of the weights that the ranks hold (`rank.digest_weights`). The engine
takes one at its start, and again while a rank cannot say. It also takes one after whatever may have written to the weights, before the next
step is scheduled, and names nothing between the two:

- an RPC to the workers that is not known to be harmless, whoever made it: it is marked before it is delegated;
- `load_weights` of a model, called in this very process;
- a step after which a sample was not what the digest had been made of (`late`); every scheduled step compares samples;
- the first step after a pause: somebody may have written past vLLM.

Pure: ranks, names and time are arguments. Scheduler thread, but for `told`.
"""

import hashlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from epochkv_connector.weights.domain import TOLD_BYTES, Peers, domain_digest
from epochkv_fence.protocol.messages import ASLEEP
from epochkv_fence.protocol.pool import SHOWN_DIGITS

logger = logging.getLogger("vllm.epochkv.weights")

HARMLESS = frozenset((
    "check_health", "compile_or_warm_up_model", "compute_weight_checksums", "determine_available_memory", "execute_dummy_batch",
    "execute_model", "get_kv_cache_spec", "get_kv_connector_handshake_metadata", "get_supported_kv_cache_layouts", "get_supported_tasks",
    "list_loras", "add_lora", "pin_lora", "remove_lora", "profile", "release_late_interaction_query_cache", "reset_encoder_cache",
    "reset_mm_cache", "sample_tokens", "shutdown", "supports_draft_weight_updates", "synchronize_device", "take_draft_token_ids",
))  # fmt: skip
"""Methods of vLLM's workers that leave weights alone; any other one costs a digest."""

IDLE_SECONDS = 0.5
"""A step that follows the one before by more compares the samples first."""
QUIET_SECONDS = 0.25
"""An idle engine looks when no suspicious call came for so long: a push may be hundreds of calls."""
PAUSE_SECONDS = 1.0
"""A call that comes so long after the last digest is the first of a push, or a lone one. One that takes so long may be a push itself."""
PATIENCE_SECONDS = 5.0
"""How long requests wait for a pass that tells what all ranks of a domain hold, without which none of them can be served either. Then
they are served without names."""
RETRY_SECONDS = 1.0
"""Pause between two digests while ranks cannot say what they hold; at least ten times as long as the last one took."""
SHARE = 4
"""Digests may take one part in this many of the time: a push in hundreds of calls, with steps between them, costs no more."""
UNDONE = 8
UNDONE_SECONDS = 30.0
SOON_STEPS = 8
"""So many digests in a row, over so long, that steps undid without a call, each within so many steps: no push is like that, so passes
write to what counts as weights."""
OWN_BYTES = 32
REMEMBERED = 64
"""Questions whose answer is remembered, for ranks that report late."""
STARTED = "a weight update was started and is not finished"
WRITING = "they are being written"
ENCODING = "outputs of the encoder that was there before are in use still"
NO_PASS = "no step of all data-parallel ranks has told yet what they hold"
CHANGED = "data-parallel ranks hold other weights"
MIXED = b""
"""Outputs of an encoder that steps made with weights that nobody knows: the weights that were named last may have come back since."""

Wanted = list[tuple[int, Any, bool]]
"""Of adapters: (id, `LoRARequest` to load if it is not there or None, load it though it is there)."""


def is_harmless(method: Any) -> bool:
    """Whether a call of this method of the workers leaves weights alone."""
    return isinstance(method, str) and method in HARMLESS


def fold(values: Iterable[bytes]) -> bytes:
    """32 bytes: one digest for an engine, of those of its ranks in their order. They hold unlike shards: nothing compares them."""
    return hashlib.sha256(b"".join(values)).digest()


def own_digest(digests: Iterable[bytes]) -> bytes:
    """What a data-parallel rank holds, of what its workers hold, in their order; of each, `TOLD_BYTES` count."""
    return fold(digest[:TOLD_BYTES] for digest in digests)[:TOLD_BYTES]


def answers_of(
    call: Callable[[], Sequence[dict[str, Any]]], number: int, num_ranks: int, what: str, kind: type
) -> tuple[list[dict[str, Any]], str, str]:
    """What the ranks have answered to question `number`, in their order; or nothing, and why: each has to say `what`, of this `kind`.
    Then why this engine has to keep its cache to itself, if a rank says so."""
    try:
        answers = sorted(call(), key=lambda answer: int(answer["rank"]))
        if len(answers) != num_ranks or any(answer["number"] != number for answer in answers):
            return [], f"{len(answers)} of {num_ranks} ranks answered, or they answered another question", ""
    except Exception as error:
        return [], f"the ranks could not be asked: {error!r}", ""
    silent = next((answer for answer in answers if not isinstance(answer[what], kind)), None)
    if silent is None:
        return answers, "", ""
    return [], f"rank {silent['rank']}: {silent['note']}", next((answer["alone"] for answer in answers if answer.get("alone")), "")


class Ranks(Protocol):
    """The worker ranks of this engine. Each method asks all of them what the function of `rank` with that name says, and may raise."""

    @property
    def num_writes(self) -> int:
        """Another number: in this process, weights were loaded, or memory of the worker was unmapped or mapped."""

    def are_asleep(self) -> bool: ...  # on any rank
    def are_unchanged(self, number: int) -> bool: ...
    def digest_weights(self, number: int) -> Sequence[dict[str, Any]]: ...
    def digest_adapters(self, number: int, wanted: Wanted, afresh: bool) -> Sequence[dict[str, Any]]: ...
    def see_domain(self, number: int, anew: bool) -> Sequence[dict[str, Any]]: ...
    def end_device_work(self) -> None: ...


class WeightNames(Protocol):
    """What is named after the weights: `scheduler.weight_changes` passes them to `RootState.hold`, and detaches requests with blocks."""

    def hold(self, weights: bytes | None) -> None:
        """The engine holds these from now on; None: nobody knows. Called when `Watch.told`, which says why, has changed."""

    def end(self, weights: bytes, *, at_once: bool = True) -> None:
        """Blocks under names of these were computed with others: the names are used here no more in this epoch. Others may have such
        blocks, unless `at_once` is False."""

    def keep_own(self, why: str) -> None:
        """From now on this engine names for itself alone."""

    def clear_encoder(self) -> bool:
        """Forget outputs of an encoder that were made with other weights; False: some are in use still."""

    def lost_blocks(self) -> None:
        """Memory of KV was unmapped: what blocks were computed with is no more what they hold."""


class Watch:
    """See the module's docstring.

    Attributes:
        value: 32 bytes; None: unknown.
        told: (`value`, why it is None). Any thread.
        calling_since: the workers are in a call that may write to the weights. Any thread.
        awaits: no request may be let in before the next pass of the domain's ranks tells what they hold, or before an encoder's older
            outputs are used no more.
        number: of the last question that the ranks have answered.
        seconds: what it took.
        overwritten: what the domain held before a rank was last written to without a call; whoever has taken it in sets it to None.
        counters: `digests`, `changes`, `unknown`, `late` (ranks saw a change after a step), `unseen` (changes found on an idle engine),
            `mixed` (steps that ranks of the domain began with other weights than names say).
    """

    def __init__(
        self,
        ranks: Ranks,
        names: WeightNames,
        num_ranks: int,
        clock: Callable[[], float],
        *,
        has_encoder: bool = False,
        peers: Peers | None = None,
    ) -> None:
        self.value: bytes | None = None
        self.told: tuple[bytes | None, str] = (None, "the weights were not digested yet")
        self.calling_since: float | None = None
        self.number = 0
        self.seconds = 0.0
        self.counters: Counter[str] = Counter()
        self._ranks = ranks
        self._names = names
        self._num_ranks = num_ranks
        self._clock = clock
        self._encoded: bytes | None = None  # with these the encoder's cached outputs were made; None: there are none
        self._has_encoder = has_encoder
        self._waiting: bytes | None = None  # known, and to be named as soon as the encoder's outputs are gone
        self._suspicion = "the engine has started"
        self._suspected_at = clock()
        self._digest_at = 0.0
        self._started = False  # a transfer that may write after its calls have returned
        self._stepped = False  # since the device was last waited for
        self._sampled = False  # ranks hold samples
        self._steps = 0  # since the last digest
        self._naps = 0  # of the ranks: how often they have unmapped memory of KV
        self._undone: list[float] = []  # when digests in a row were
        self._writes = ranks.num_writes
        self._scheduled_at = self._looked_at = self._digested_at = clock()
        self._found: dict[int, bytes] = {}
        self._why_own: str | None = None
        self._asks = True
        self._asked = 0
        # In a domain, `value` is what KV of this engine depends on, of all ranks. Names begin with a pass that all began with it.
        self._peers = peers
        self._own: bytes | None = None  # what the ranks of this engine hold; `_rest`: beside routed experts
        self._rest = b""
        self._confirmed = False  # nothing has happened since `value` was seen
        self._heard = 0  # changes of what other ranks say
        self._patience = 0.0  # until then nobody is let in; 0.0: nobody waits
        self._drained_at = 0.0  # until then nobody is let in, so that nobody refers to an encoder's outputs; 0.0: they do not matter
        self._silent: list[tuple[int, ...]] = []  # changes without a call, by rank, and what was named before
        self._last = b""
        self.overwritten: bytes | None = None
        self.awaits = False

    def keep_own(self, why: str, *, asks: bool) -> None:
        """No digest says all that KV of this engine depends on: each stands for itself, and never for what others hold.

        Args:
            asks: ranks are asked, for writes past vLLM; False: what they hold changes by itself, or they cannot be asked.
        """
        self._why_own, self._asks = why, asks

    def tells(self) -> tuple[bytes | None, str]:
        """`told`; in a call that takes long, that weights are being written; in a domain, where no more is known of this engine than
        passes can tell, what its ranks have said since. Any thread."""
        peers, (value, note) = self._peers, self.told
        if self._is_called_long():
            return None, WRITING
        if peers is None or (value is None and note not in (NO_PASS, CHANGED)):
            return value, note
        foretold = peers.foretold
        if foretold is None and (missing := peers.missing):
            return None, f"data-parallel rank {missing} has not been heard from: it is starting, or runs without EpochKV"
        return foretold, "" if foretold is not None else NO_PASS

    @property
    def updating(self) -> bool:
        """New weights are on their way: a call writes them, or a transfer was started and is not finished. Any thread."""
        return self.tells()[1] in (WRITING, STARTED)

    @property
    def step_number(self) -> int:
        """Of the question that ranks compare their weights with behind the next step: is it still what they answered, by which blocks are
        named? -1: nothing is named, or they were never asked."""
        return self.number if self.value is not None and self.number else -1

    @property
    def known(self) -> bytes | None:
        """What decides the answers of the step that is scheduled next; None: unknown."""
        return self.value if self._why_own is None else None

    def found(self, number: int) -> bytes | None:
        """The answer to this question, if anybody remembers."""
        return self._found.get(number)

    def _is_called_long(self) -> bool:
        since = self.calling_since
        return since is not None and self._clock() >= since + PAUSE_SECONDS

    # ------------------------------------------------------------------ what happens

    def calling(self, method: Any) -> None:
        """Workers are about to be called with something that is not known to be harmless: weights are suspected before it begins."""
        name = method if isinstance(method, str) else getattr(method, "__name__", "a function")
        self.suspect(f"{name} was called on the workers")
        self._undone = []
        self.calling_since = self._clock()
        self._end_device_work()
        if "weight_update" in name or name == "reload_weights":
            self._started = name.startswith(("start_", "skyrl_start_"))

    def called(self, *, idle: bool, failed: bool = False) -> None:
        """Such a call has returned. What it left, also if it failed, is what the ranks hold.

        An idle engine looks at once, unless it did just before: then calls come one after another, and until they are over nobody
        is told that the weights are known.
        """
        long, self.calling_since = self._is_called_long(), None
        if failed:
            self._started = False
            self.suspect("a call on the workers has failed")
        elif self._why_own is not None:  # no sample may tell of what was written after a step that ran beside the call
            self.suspect("a call on the workers has ended")
        if self._asks and self._say(self._ranks.are_asleep, "they sleep"):
            self._set(None, ASLEEP)
            return
        if self.asleep:
            self._set(None, WRITING)
        if idle and self.pending and self._clock() >= max(self._may_digest_at(), self._digested_at + PAUSE_SECONDS):
            if long:
                self.told = (None, WRITING)  # as heartbeats may have said
            self._digest()
        elif self._suspicion and self.value is not None and self.told[1] != WRITING:
            self.told = (None, WRITING)
            self._names.hold(self.value)

    def suspect(self, why: str) -> None:
        """Weights may be other ones from now on."""
        self._suspicion, self._suspected_at = why, self._clock()
        if self._peers is not None:
            self._peers.say(None)

    def late(self, number: int) -> None:
        """A rank saw, behind a step, that it held other weights than those that question `number` found."""
        value = self._found.pop(number, None)
        if value is None:
            return
        self.counters["late"] += 1
        self._names.end(value)
        if number == self.number or value == self.value:
            self._encoded = MIXED
            if self._note_undone() and self._why_own is None:
                self._keep_to_itself("steps write to tensors that count as weights, so no digest lasts; report the model", asks=False)
                return
            self.suspect("they changed during a step")
            self._set(None, "they changed during a step")

    def _note_undone(self) -> bool:
        """The newest digest does not hold any more. Whether that is the model's own doing (`UNDONE`)."""
        if self._steps > SOON_STEPS:
            self._undone = []
        self._undone = [*self._undone[: UNDONE - 1], self._clock()]
        return len(self._undone) == UNDONE and self._undone[-1] >= self._undone[0] + UNDONE_SECONDS

    def mixed(self, number: int) -> None:
        """A step was not begun with what question `number` had seen on all ranks of the domain. Its blocks have not left this engine."""
        value = self._found.pop(number, None) if self._peers is not None else None
        if value is None:
            return
        self.counters["mixed"] += 1
        if number == self.number or value == self.value:
            self._encoded, self._confirmed, self._patience = MIXED, False, 0.0
            self._set(None, CHANGED)
        self._names.end(value, at_once=False)

    def _end_device_work(self) -> None:
        """A call may write on another stream while a forward pass runs, and samples keep the memory of weights that it replaces."""
        if not self._asks or not (self._stepped or self._sampled):
            return
        self._stepped = self._sampled = False
        try:
            self._ranks.end_device_work()
        except Exception as error:
            logger.warning("EpochKV: the device could not be synchronized before weights are written: %r", error)

    # ------------------------------------------------------------------ when it looks

    @property
    def pending(self) -> bool:
        """The engine should look as soon as it is quiet."""
        return bool(self._suspicion) and not self.asleep

    @property
    def asleep(self) -> bool:
        """Memory was unmapped when a rank was last asked. The call that maps it is the next reason to look."""
        return self.told == (None, ASLEEP)

    def _may_digest_at(self) -> float:
        """Each digest that a step undoes asks the pool for an epoch. From the second in a row on, the next one waits for longer."""
        undone = self._undone  # any thread
        if len(undone) < 2:
            return self._digest_at
        return max(self._digest_at, undone[-1] + min(UNDONE_SECONDS / UNDONE, 2.0 ** len(undone) / 16))

    def quiet_at(self) -> float:
        """When an idle engine should look; by the clock."""
        return max(self._suspected_at + QUIET_SECONDS, self._may_digest_at())

    def when_idle(self) -> None:
        """Nothing is scheduled now: look if it is time."""
        if self.pending and self._clock() >= self.quiet_at():
            self._digest()

    def stepped(self) -> None:
        """The results of a step are there."""
        self._scheduled_at = self._clock()

    def before_pass(self) -> None:
        """A pass of the domain follows that no step of this engine is in. What a harmless call leaves is known again before the others
        hear that this engine does not know."""
        if self._peers is not None and self.pending and self._clock() >= self._may_digest_at():
            self._digest()

    def passed(self) -> None:
        """A pass of the domain has run that no step of this engine is in. What samples show, its workers tell in the next one (`claim`)."""
        now, self._confirmed = self._clock(), False
        if self._peers is None or now < self._looked_at + IDLE_SECONDS:
            return
        self._looked_at = now
        self.when_idle()
        self._follow_domain()

    def before_schedule(self) -> None:
        """Afterwards `value` is what the ranks hold, or None. Ahead of each `schedule()` of vLLM (`executor.join`)."""
        now = self._clock()
        awaited, self.awaits = self.awaits, False  # an error of ours keeps nobody out
        idle = now - self._scheduled_at > IDLE_SECONDS
        if self._ranks.num_writes != self._writes:
            self._writes = self._ranks.num_writes
            self._undone = []
            self.suspect("load_weights was called, or memory was unmapped or mapped")
        if self._suspicion or self.asleep:
            if now >= self._may_digest_at():
                self._digest()
            elif self.value is not None:
                self._set(None, WRITING)
        elif idle and not self._as_asked():
            self.counters["unseen"] += 1
            self.suspect("they changed while the engine was idle")
            self._digest()
        elif self._waiting is not None:
            self._name(self._waiting, "the encoder's older outputs were dropped")
        if idle:
            self._confirmed = False
            if not awaited or now > self._scheduled_at + PATIENCE_SECONDS:  # else the same requests wait, and passes take long
                self._patience = 0.0
        self._follow_domain()
        self._drained_at = self._drained_at or now + PATIENCE_SECONDS if self._waiting is not None else 0.0
        self.awaits = self.awaits or now < self._drained_at  # else new requests refer to newer outputs all the time
        if self._confirmed:  # a request is let in; what a pass has told may be old again before one is
            self._patience = 0.0
        if self.value is None:
            self._encoded = MIXED
        self._scheduled_at = self._clock()
        self._stepped = True
        self._steps += 1

    def _as_asked(self) -> bool:
        if not self._asks or (self.value is None and self._waiting is None):
            return True
        return self._say(lambda: self._ranks.are_unchanged(self.number), "their weights are the same")

    @staticmethod
    def _say(ask: Callable[[], bool], what: str) -> bool:
        """What the ranks answer; no, if they do not."""
        try:
            return ask()
        except Exception as error:
            logger.warning("EpochKV: the ranks did not say whether %s: %r", what, error)
            return False

    def _digest(self) -> None:
        why, self._suspicion = self._suspicion, ""
        self._writes, self._waiting, own, self._own = self._ranks.num_writes, None, self._own, None
        if self._started:
            self._set(None, STARTED)
            return
        if not self._asks:
            self._digested_at = self._clock()
            self._name(os.urandom(OWN_BYTES), why)
            return
        self.number = self._asked = self._asked + 1
        self.counters["digests"] += 1
        self._sampled, self._steps = True, 0
        began = self._clock()
        answers, note, alone = answers_of(lambda: self._ranks.digest_weights(self.number), self.number, self._num_ranks, "weights", bytes)
        if alone and self._why_own is None and self._peers is None:  # else nobody would follow what KV depends on on other ranks
            self._keep_to_itself(alone, asks=False)
            return
        if (naps := sum(answer["naps"] for answer in answers)) > self._naps:
            self._naps = naps
            self._names.lost_blocks()
        if not all(answer["weights"] for answer in answers):
            self._set(None, ASLEEP)
            return
        value = fold(answer["weights"] for answer in answers) if answers else None
        if value is not None and self._why_own is not None:
            value = os.urandom(OWN_BYTES)
        now = self._digested_at = self._clock()
        self.seconds = now - began
        self._digest_at = now + (SHARE - 1) * self.seconds
        if value is None:
            self._suspicion, self._digest_at = why, now + max(RETRY_SECONDS, 10 * self.seconds)
            self._set(None, note)
            return
        if self._peers is None:
            self._found_out(value, why)
            return
        self._own = own_digest(answer["weights"] for answer in answers)
        self._rest = own_digest(answer["rest"] for answer in answers)
        self._peers.say(self._own, self._rest)
        if self._own == own and self.value is not None:  # the ranks expect what they did
            self._found_out(self.value, why)
        else:
            self._confirmed, self._patience = False, 0.0
            self._set(None, NO_PASS)

    def _follow_domain(self) -> None:
        """Ask with what all ranks began their newest pass, unless nothing can have changed. Requests are kept out until a pass tells,
        for `PATIENCE_SECONDS` at most: meanwhile there is nothing to schedule, and vLLM makes passes of its own accord."""
        self.awaits = False
        if self._peers is None:
            return
        # The hub hears of it as soon as this engine, so nobody may find what the domain held before.
        heard, self._heard = self._heard, self._peers.changes
        anew = heard != self._heard and (self.value is None or self._peers.foretold != self.value)
        if (self._confirmed and not anew) or self._suspicion or self._own is None:
            return
        self._confirmed = False
        number = self._asked = self._asked + 1
        said: list[dict[str, Any]] = []

        def ask() -> list[dict[str, Any]]:
            said.extend(self._ranks.see_domain(number, anew))
            return said

        answers, note, alone = answers_of(ask, number, self._num_ranks, "columns", tuple)
        self._hear_of_writes([answer["silent"] for answer in sorted(said, key=lambda answer: int(answer["rank"]))])
        if not all(answer["knows"] for answer in said):  # nobody compares for an engine that names nothing
            self.suspect("they changed without a call")
        if alone:
            self._keep_to_itself(alone, asks=True)
        elif answers:
            self.number, self._confirmed = number, True
            columns = list(zip(*(answer["columns"] for answer in answers), strict=True))  # of the workers of each data-parallel rank
            self._last = domain_digest([own_digest(workers) for workers in columns], self._rest)
            self._found_out(self._last, "all ranks have begun a step with them")
        else:
            self._patience = self._patience or self._clock() + PATIENCE_SECONDS
            self.awaits = self._clock() < self._patience
            if not self.awaits:
                self._set(None, note)

    def _hear_of_writes(self, silent: list[tuple[int, ...]]) -> None:
        """Of each worker: how often each rank of its domain was written to without a call."""
        if len(silent) != self._num_ranks or not all(silent) or silent == self._silent:
            return
        self._silent = silent
        if self._last:
            self.overwritten = self._last
            self._names.end(self._last, at_once=False)
            if self.value is not None:  # else a rank that has been written back too would change nothing, and nobody ask for an epoch
                self._set(None, CHANGED)

    def _keep_to_itself(self, why: str, *, asks: bool) -> None:
        logger.warning("EpochKV: this engine keeps its cache to itself: %s", why)
        if self._peers is not None:
            self._peers.stop()
        self._peers, self.number = None, 0
        self.keep_own(why, asks=asks)
        self._names.keep_own(why)
        self.suspect("the engine keeps a cache of its own")
        self._digest()

    def _found_out(self, value: bytes, why: str) -> None:
        self._found[self.number] = value
        while len(self._found) > REMEMBERED:
            del self._found[next(iter(self._found))]
        self._name(value, why)

    def _name(self, value: bytes, why: str) -> None:
        """Outputs of an encoder are cached by what was encoded alone, so they outlive its weights: first they have to go."""
        if self._has_encoder and self._encoded not in (None, value) and not self._names.clear_encoder():
            self._waiting = value
            self._set(None, ENCODING)
            return
        self._encoded, self._waiting = value, None
        self._set(value, "", why)

    def _set(self, value: bytes | None, note: str, why: str = "") -> None:
        told = (value, note) if value is None or self._why_own is None else (None, self._why_own)
        if told == self.told and value == self.value:  # what is told may be ahead of what is named
            return
        if value is not None and self._why_own is not None:
            self.counters["changes"] += 1
            logger.info("EpochKV: a new root of this engine's own (%s)", why)
        elif value is not None:
            self.counters["changes"] += 1
            logger.info("EpochKV: weights %s, seen in %.1f ms (%s)", value.hex()[:SHOWN_DIGITS], 1e3 * self.seconds, why)
        else:
            self.counters["unknown"] += 1
            level = logging.INFO if note in (ASLEEP, STARTED, WRITING, NO_PASS, CHANGED) else logging.WARNING
            logger.log(level, "EpochKV: the weights are unknown, so nothing is reused or saved: %s", note)
        self.value, self.told = value, told
        self._names.hold(value)
