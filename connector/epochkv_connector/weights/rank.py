"""What one worker rank knows of its weights and adapters, and the calls that the scheduler role makes on it.

The functions here are sent through vLLM's `Executor.collective_rpc` and get the worker. None of them raises: on several ranks an
exception would leave the answers of the others in vLLM's queues. A digest has no deadline, whatever its size: the next would take as long.

vLLM keeps an adapter's weights by an id that says nothing of them. It reads files again when its cache was too small, or with every
step for requests that load in place, and trainers send tensors that have no file. So an adapter's digest is that of the tensors vLLM
has loaded (`LoRAModel`), after it has merged and packed them: what it copies to the device. The identity of that object tells whether
it is the same one; another object that holds the same tensors is as good.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from epochkv_connector.engine import patches
from epochkv_connector.engine.describe import engine_id, layers_digest
from epochkv_connector.weights.adapters import LATER
from epochkv_connector.weights.digest import (
    Hidden,
    Sample,
    Unreadable,
    digest,
    homes,
    is_of_experts,
    models,
    packed,
    parts,
    scales,
    weights,
    why_unreadable,
)
from epochkv_connector.weights.domain import TOLD_BYTES, UNKNOWN, Column, Domain
from epochkv_connector.weights.watch import IDLE_SECONDS, NO_PASS, Wanted
from epochkv_connector.wire import RankLayout
from epochkv_fence.protocol.messages import ASLEEP

MEMORY = frozenset(("weights", "kv_cache"))
"""vLLM's tags of what it unmaps."""

KNOWN = "_epochkv_digest"
"""Attribute of a `LoRAModel`: the digest of its tensors."""

LOAD_SECONDS = 0.5
"""Loading goes on for so long before one step; what is left is loaded before the next ones."""

MAX_ASKED = 65_536
"""Adapters of which a rank knows what it said: those in use may have been asked about long ago."""

_MERGED = frozenset(("module_name", "rank", "lora_alpha", "lora_alphas"))
"""Attributes of a layer's weights that vLLM has merged into its tensors, or that its tensors say."""


def digest_of(model: Any, dtype: torch.dtype | None) -> bytes:
    """32 bytes of what the adapter changes, module by module. Where and how the tensors lie does not count.

    Args:
        dtype: of the device's copies; the tensors count as they are there.

    Raises:
        Unreadable: there is none.
    """
    known = getattr(model, KNOWN, None)
    if isinstance(known, bytes):
        return known
    tensors: list[tuple[str, torch.Tensor]] = []  # all of them live until the end: a digest tells copies by where they lie
    extra: list[list[str]] = []
    for name, value in _parts(model):
        if isinstance(value, torch.Tensor):
            cast = dtype if name.startswith("lora.") and value.is_floating_point() else None
            tensors.append((name, value.detach().to("cpu", cast).contiguous()))
        else:
            extra.append([name, str(float(value)) if isinstance(value, (int, float)) else repr(value)])
    if not tensors:
        raise Unreadable("it has no tensors")
    found = digest(tensors, extra)
    setattr(model, KNOWN, found)
    return found


def _parts(model: Any) -> Iterator[tuple[str, Any]]:
    """(name, value) of every attribute of every layer's weights."""
    for kind, layers in (("lora", model.loras), ("full", getattr(model, "modules_to_save", None) or {})):
        for module, layer in sorted(layers.items()):
            for attribute, value in sorted(vars(layer).items()):
                if attribute in _MERGED:
                    continue
                parts = enumerate(value) if isinstance(value, (list, tuple)) else [(0, value)]
                yield from ((f"{kind}.{module}.{attribute}.{index}", part) for index, part in parts)


@dataclass(slots=True)
class _Asked:
    """The answer to the latest question about an adapter.

    Attributes:
        model: the object that was digested, while vLLM keeps it.
    """

    number: int
    value: bytes
    model: weakref.ref[Any]


class HeldAdapters:
    """What this rank has said of its adapters. The worker's thread, as every method says what holds between two steps."""

    def __init__(self) -> None:
        self._manager: Any = None
        self._asked: dict[int, _Asked] = {}
        self._copy_all = False  # something has failed in the middle of a copy
        self._epoch = -1
        self._ended: set[bytes] = set()  # of this epoch: blocks under names of these were computed with others

    def digest(self, worker: Any, number: int, wanted: Wanted, afresh: bool) -> dict[int, tuple[bytes | None, str]]:
        """(digest, or None and why) by id. Absent adapters that nobody wants loaded are left out.

        Args:
            number: of the question.
            afresh: the tensors may have been written to, or their copies on the device.

        Raises:
            Unreadable: this worker has no adapters.
        """
        manager = getattr(getattr(worker.model_runner, "lora_manager", None), "_adapter_manager", None)
        if manager is None:
            raise Unreadable("this worker has no manager of adapters")
        self._manager = manager
        if afresh or self._copy_all:
            self._copy_all = True
            self._copy_again()
            self._copy_all = False
        end = time.monotonic() + LOAD_SECONDS
        found: dict[int, tuple[bytes | None, str]] = {}
        for adapter_id, request, load in wanted:
            self._asked.pop(adapter_id, None)
            try:
                if request is not None and (load or adapter_id not in self._manager.list_adapters()):
                    if time.monotonic() > end:
                        found[adapter_id] = None, LATER
                        continue
                    worker.add_lora(request)
                model = self._manager.list_adapters().get(adapter_id)
                if model is not None:
                    value = self._digest(model)
                    self._asked[adapter_id] = _Asked(number, value, weakref.ref(model))
                    found[adapter_id] = value, ""
            except Exception as error:
                self._copy_all = True
                found[adapter_id] = None, why_unreadable(error)
        while len(self._asked) > MAX_ASKED:
            del self._asked[next(iter(self._asked))]
        return found

    def replaced(self, epoch: int) -> list[tuple[int, int]]:
        """(id, number of the question) of adapters in whose place requests have used another one, each once. After every step."""
        if epoch > self._epoch:
            self._epoch = epoch
            self._ended.clear()
        found = []
        for adapter_id, model in self._manager.list_adapters().items() if self._asked else ():
            asked = self._asked.get(adapter_id)
            if asked is not None and asked.model() is not model and not self._is_equal(asked, model):
                del self._asked[adapter_id]
                self._ended.add(asked.value)
                found.append((adapter_id, asked.number))
        return found

    def are_unchanged(self, used: Iterable[tuple[int, int]]) -> bool:
        """Whether blocks named after these adapters (id, number of the question) were computed with them. Behind `replaced`."""
        answers = [(self._asked.get(adapter_id), number) for adapter_id, number in used]
        return all(asked is not None and asked.number == number and asked.value not in self._ended for asked, number in answers)

    def _is_equal(self, asked: _Asked, model: Any) -> bool:
        """Also where vLLM has read the same tensors again, which are looked at from now on."""
        try:
            if self._digest(model) != asked.value:
                return False
        except Exception:
            return False
        asked.model = weakref.ref(model)
        return True

    def _digest(self, model: Any) -> bytes:
        dtype = getattr(getattr(self._manager, "lora_config", None), "lora_dtype", None)
        return digest_of(model, dtype if isinstance(dtype, torch.dtype) else None)

    def _copy_again(self) -> None:
        """Digests are forgotten, and what lies on the device is copied once more from what will be digested."""
        manager = self._manager
        for model in manager.list_adapters().values():
            model.__dict__.pop(KNOWN, None)
        active = manager._active_adapters
        pinned = set(active.pinned_items)
        for adapter_id in list(active.cache):
            manager.deactivate_adapter(adapter_id)
            manager._last_mapping = None  # it says which copy is whose
            manager.activate_adapter(adapter_id)
            if adapter_id in pinned:
                active.pin(adapter_id)


SLEEP_SECONDS = 30.0
"""How long the copies of all ranks may take to end: each moves at most one job's blocks, at the speed of the bus."""


class Copies(Protocol):
    """`worker.role.JobRunner`."""

    def settle_for_sleep(self, timeout: float) -> int: ...
    def woken(self) -> None: ...
    def put_settled(self) -> None: ...


Answer = dict[str, Any]
"""`number`: of the question; `weights`: 32 bytes, or None; `note`: why None; `rank`: whose answer."""


class Places:
    """Where every tensor of a worker lies, by name, and which object keeps it.

    Whoever swaps a storage or a parameter leaves the sample looking at memory that nobody computes with.

    Attributes:
        lie: addresses.
    """

    def __init__(self, worker: Any) -> None:
        self._steps: list[tuple[Any, Any, Any]] = []
        self._tensors: list[torch.Tensor] = []
        for home in homes(worker):
            self._steps += home.steps
            self._tensors += (tensor for _, tensor in parts(home.name, home.tensor))
        self.lie = [tensor.data_ptr() for tensor in self._tensors]

    def stay(self) -> bool:
        """Whether all still lie and are kept there; for each step, so nothing is enumerated anew."""
        try:
            return all(container[key] is kept for container, key, kept in self._steps) and self.lie == [
                tensor.data_ptr() for tensor in self._tensors
            ]
        except (LookupError, RuntimeError):
            return False


@dataclass(slots=True)
class Held:
    """What this rank held when it was last asked.

    Attributes:
        number: of the scheduler role's question.
        value: its digest; None: unknown.
        sample: drawn with it; `places`: where every tensor lay, and was kept.
        writes: calls of `load_weights` that have begun or ended, by whoever made them; `seen`: those before `number`.
        waits: calls of `end_device_work`.
        domain: of a worker whose KV depends on weights of other data-parallel ranks.
        expected: what its ranks said in the pass that question `number` saw; none: in none.
        confirmed: the newest of them, and the digest of this worker then.
        digested_at: passes of the domain before the newest digest.
        silent: how often weights had changed that no call announced.
        began: the domain's pass of the newest step of this rank.
        stepped_at: end of the newest step with tokens of this rank, on the monotonic clock.
        newest: the comparison that was made since the domain's newest pass; `older`: the one before it.
        layout: how this rank's KV tensors and host slots lie.
        adapters: what it said of its adapters.
        runners: what copies for it, for as long as that lives.
        unmapped: memory of this worker that a call has unmapped, from before it begins until one has mapped it.
        naps: how often that was the memory of KV, whose contents are gone.
        scales: of attention layers, as the first digest found them.
    """

    number: int = -1
    value: bytes | None = None
    sample: Sample | None = None
    places: Places | None = None
    writes: int = 0
    seen: int = 0
    waits: int = 0
    domain: Domain | None = None
    expected: tuple[Column, ...] = ()
    confirmed: tuple[bytes | None, tuple[Column, ...]] = (None, ())
    digested_at: int = 0
    silent: int = 0
    began: int = 0
    stepped_at: float = float("-inf")
    newest: Comparison | None = None
    older: Comparison | None = None
    layout: RankLayout = field(default_factory=RankLayout)
    adapters: HeldAdapters = field(default_factory=HeldAdapters)
    runners: weakref.WeakSet[Copies] = field(default_factory=weakref.WeakSet)
    unmapped: frozenset[str] = frozenset()
    naps: int = 0
    scales: list[list[Any]] | None = None

    def scales_of(self, worker: Any) -> list[list[Any]]:
        """The scales of attention layers, and what they were at first where that differs: FlashInfer's kernels go on with what they took
        from the layer at their first forward pass (vLLM 0.32, `v1/attention/backends/flashinfer.py`). That of outputs, which they keep at
        the layer, stays as they found it."""
        found, outputs = scales(worker, "qkv", 1.0), scales(worker, "o", None)
        self.scales = found if self.scales is None else self.scales
        return [*found, *outputs] if found == self.scales else [*found, *outputs, ["at first", *self.scales]]

    def sleep(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """vLLM's, whoever calls it; so are `discard` and `wake_up`."""
        return self._unmapping(MEMORY, call, *args, **kwargs)

    def discard(self, call: Callable[..., Any], tags: Iterable[str]) -> Any:
        return self._unmapping(frozenset(tags), call, tags)

    def wake_up(self, call: Callable[..., Any], tags: Iterable[str] | None = None) -> Any:
        return self._mapping(MEMORY if tags is None else frozenset(tags), call, tags)

    def _unmapping(self, tags: frozenset[str], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Copies end before. If the call fails in the middle, too, nothing looks at the memory and nothing is copied before one maps it:
        vLLM may have unmapped it first.

        Raises:
            RuntimeError: copies still run.
        """
        if "kv_cache" in tags and (late := self.settle_for_sleep()):
            self._copy_if_mapped()
            check_settled(late)
        self.forget()
        self.unmapped |= tags
        self.naps += "kv_cache" in tags
        return self._mapping(frozenset(), call, *args, **kwargs)

    def _mapping(self, tags: frozenset[str], call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.writes += 1
        done = call(*args, **kwargs)
        self.writes += 1
        self.unmapped -= tags
        self._copy_if_mapped()
        return done

    def _copy_if_mapped(self) -> None:
        if "kv_cache" not in self.unmapped:
            self.woken()

    def settle_for_sleep(self) -> int:
        """End the copies: sleep unmaps the memory under them. None begins before `woken`. How many still run after the deadline."""
        return sum(runner.settle_for_sleep(SLEEP_SECONDS) for runner in self.runners)

    def woken(self) -> None:
        """The memory of KV is mapped."""
        for runner in self.runners:
            runner.woken()

    def forget(self) -> None:
        """Nothing is known any more. What the latest step began with is compared first: whoever calls may have written past vLLM before."""
        if self.domain is not None and self.value is not None and self.newest is None:
            self.newest = Comparison(self, self.number)
        self.value, self.sample, self.places, self.expected = None, None, None, ()
        self.silent += any(one is not None and not one.holds() for one in (self.older, self.newest))
        self.newest = self.older = None

    def learn(self, number: int, value: bytes) -> None:
        """The digest that answers question `number`. If it is what it was, all that the other ranks said still counts."""
        self.number, self.value = number, value
        before, columns = self.confirmed
        self.expected = columns if before == value else ()

    def begin(self, number: int) -> bool:
        """A step has begun: the model's pass is the domain's newest one. Whether it began with what question `number` had seen, if any."""
        self.began = self.domain.passes if self.domain is not None else 0
        return number < 0 or self.is_as_expected(number)

    def is_as_expected(self, number: int) -> bool:
        """In a domain: all ranks began the latest pass with what question `number` had seen, and have said so since before this step."""
        domain, columns = self.domain, self.expected if self.number == number else ()
        return domain is None or bool(domain.alone) or (bool(columns) and domain.columns == columns and domain.since <= self.began)

    def compare(self, number: int) -> Comparison:
        """Compare what is there with what question `number` found, behind the forward pass that was issued."""
        self.newest, self.stepped_at = Comparison(self, number), time.monotonic()
        return self.newest

    def is_unchanged(self, number: int) -> bool:
        """Whether what is there is what question `number` found, as far as samples tell."""
        unchanged = self.places is not None and Comparison(self, number).holds()
        self.silent += not unchanged
        return unchanged

    def claim(self) -> Column:
        """What this worker says in the domain's next pass. A comparison that was made before the latest pass has ended by now, so that
        waiting for its result costs nothing; on a CPU, all have."""
        if self.value is not None and self.writes == self.seen:
            before, self.older, self.newest = self.older, self.newest or Comparison(self, self.number), None
            if (before is None or before.holds()) and (not self.older.ended() or self.older.holds()):
                return self.value[:TOLD_BYTES] + self.silent.to_bytes(4, "little")
            self.newest = before  # whose result counts, too
            self.forget()
        return UNKNOWN + self.silent.to_bytes(4, "little")


class Comparison:
    """This rank with its own answer to question `number`, at this place of the device's work; the result waits for the device.

    A call that writes is announced (`end_device_work`), so a write that begins after the announcement is none of this step's.

    Attributes:
        as_expected: see `Held.is_as_expected`; `settled` knows two passes later.
    """

    def __init__(self, held: Held, number: int) -> None:
        self.number = number
        self._held = held
        self._writes, self._waits = held.writes, held.waits
        known = held.sample if held.number == number and held.writes == held.seen and held.places is not None else None
        stays = known is not None and held.places is not None and held.places.stay()
        self._compared = known.compare() if known is not None and stays else lambda: False
        self._event = torch.cuda.current_stream().record_event() if known is not None and torch.cuda.is_available() else None
        self._result: bool | None = None
        self._domain = domain = held.domain if held.domain is not None and not held.domain.alone else None
        self._pass = domain.passes if domain is not None else 0  # that of a draft, where there is one
        self._columns = held.expected if held.number == number else ()
        self.as_expected = held.is_as_expected(number)

    def ended(self) -> bool:
        """The device is past it."""
        return self._event is None or bool(self._event.query())

    def holds(self) -> bool:
        """Whether nothing had changed; found out once. Any thread."""
        if self._result is None:
            overwritten = self._held.writes != self._writes and self._held.waits == self._waits
            self._result = not overwritten and self._compared()
        return self._result

    def settled(self) -> bool | None:
        """Whether all ranks of the domain ended the pass with what they had begun it with. None: a later pass will tell."""
        return True if self._domain is None else self._domain.settled(self._pass, self._columns)


_ranks: dict[str, Held] = {}
"""Of this process, by vLLM's engine id: the worker role of the connector is another object than the worker."""


def held_by(engine_id: str) -> Held:
    """The rank of this process that belongs to this engine; in another process than the worker's it never knows anything."""
    return _ranks.setdefault(engine_id, Held())


def forget(engine_id: str) -> None:
    """The engine ends. Its process may go on, and must not keep the weights."""
    _ranks.pop(engine_id, None)


def _of(worker: Any) -> Held:
    return held_by(engine_id(worker.vllm_config))


def _held(worker: Any) -> Held:
    held = _of(worker)
    for _, model in models(worker):
        _notice_writes(model, held)
    _notice_sleep(worker, held)
    return held


def _notice_sleep(worker: Any, held: Held) -> None:
    """Calls of any name may lead to these methods of vLLM's worker."""
    worker = getattr(worker, "worker", None) or worker
    for name, instead in (("sleep", held.sleep), ("discard", held.discard), ("wake_up", held.wake_up)):
        patches.wrap(worker, name, instead)  # `discard` is younger than the others


def _notice_writes(model: Any, held: Held) -> None:
    load = getattr(model, "load_weights", None)
    if load is None or getattr(load, "epochkv", None) is held:
        return
    if hasattr(load, "epochkv"):  # another engine's in this process; anybody else's wrapper stays
        model.load_weights = load.__wrapped__

    def noticed(load: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        held.writes += 1
        held.forget()
        try:
            return load(*args, **kwargs)
        finally:
            held.writes += 1

    patches.around(model, "load_weights", noticed)
    model.load_weights.epochkv = held


def digest_weights(worker: Any, number: int) -> Answer:
    """Digest everything this rank holds, and draw a new sample. In a domain, `rest` is a digest of what is of no routed expert.

    No bytes: memory is unmapped, and was not looked at. `naps`: see `Held`. `alone`: why there will never be a digest.
    """
    answer: Answer = {"number": number, "weights": None, "note": "", "rank": getattr(worker, "rank", 0), "naps": 0, "alone": ""}
    held: Held | None = None
    try:
        held = _held(worker)
        answer["naps"] = held.naps
        if held.unmapped:
            return {**answer, "weights": b"", "note": ASLEEP}
        held.forget()
        writes = held.writes
        held.digested_at = held.domain.passes if held.domain is not None else 0
        _synchronize()
        sample = Sample(weights(worker))
        places = Places(worker)
        told = [*packed(worker), *held.scales_of(worker)]
        found = digest(weights(worker), told)
        if held.domain is not None:
            rest = ((name, tensor) for name, tensor in weights(worker) if not is_of_experts(name))
            answer["rest"] = digest(rest, [one for one in told if not is_of_experts(one[0])])
        if not sample.holds() or places.lie != Places(worker).lie or writes != held.writes:
            raise Unreadable("weights were written while they were read")
        held.sample, held.places, held.seen = sample, places, writes
        held.learn(number, found)
        answer["weights"] = found
    except Exception as error:
        answer["note"] = why_unreadable(error)
        answer["alone"] = answer["note"] if isinstance(error, Hidden) else ""
    if held is not None and held.value is None:
        held.number = number
    return answer


def join_domain(worker: Any) -> str:
    """Before the first pass: from then on this worker says in each one what it holds. Why it cannot, in words; empty: it will."""
    try:
        parallel, held = worker.vllm_config.parallel_config, _of(worker)

        def carry(tensor: torch.Tensor, reduce: Callable[[torch.Tensor], Any]) -> Any:
            return reduce(tensor) if held.domain is None else held.domain.carry(tensor, reduce)

        def after_pass() -> None:
            for runner in held.runners:
                runner.put_settled()

        if why := patches.around_all_reduce(carry):
            return why
        store = torch.distributed.distributed_c10d._get_default_store()
        size, rank, group = int(parallel.data_parallel_size), int(parallel.data_parallel_rank), str(getattr(worker, "rank", 0))
        held.domain = Domain(size, rank, store, group, held.claim, after_pass)
        return ""
    except Exception as error:
        return f"the data-parallel ranks cannot tell each other what they hold: {error!r}"


def see_domain(worker: Any, number: int, anew: bool) -> Answer:
    """What all ranks began the newest pass with: `columns`, or None and a `note`. From then on steps of this number expect that.

    `silent`: how often the weights of each had changed that no call announced, also of one that does not know what it holds now.
    `knows`: whether this worker does. `anew`: only a later pass tells, from now on.
    """
    held = _of(worker)
    answer: Answer = {"number": number, "columns": None, "silent": (), "note": "", "alone": "", "rank": getattr(worker, "rank", 0)}
    answer["knows"] = held.value is not None
    domain = held.domain
    if domain is None or domain.alone:
        answer["alone"] = domain.alone if domain is not None else "this worker has not joined the other data-parallel ranks"
        return answer
    if anew:
        held.digested_at = domain.passes
    answer["silent"] = tuple(int.from_bytes(column[TOLD_BYTES:], "little") for column in domain.columns)
    if domain.passes <= held.digested_at or time.monotonic() - max(domain.at, held.stepped_at) > IDLE_SECONDS:
        answer["note"] = NO_PASS
    elif silent := [str(rank) for rank, column in enumerate(domain.columns) if column.startswith(UNKNOWN)]:
        answer["note"] = f"data-parallel rank {', '.join(silent)} does not know what it holds"
    elif not answer["knows"]:
        answer["note"] = "the weights have changed"
    else:
        held.number, held.expected, held.confirmed = number, domain.columns, (held.value, domain.columns)
        answer["columns"] = domain.columns
    return answer


def digest_adapters(worker: Any, number: int, wanted: Wanted, afresh: bool) -> Answer:
    """See `HeldAdapters.digest`; its result is `adapters`, and None with a `note` where this rank has none at all."""
    answer: Answer = {"number": number, "adapters": None, "note": "", "rank": getattr(worker, "rank", 0)}
    try:
        if _of(worker).unmapped:
            raise Unreadable(ASLEEP)
        answer["adapters"] = _of(worker).adapters.digest(worker, number, wanted, afresh)
    except Exception as error:
        answer["note"] = why_unreadable(error)
    return answer


def layout(worker: Any) -> RankLayout:
    """See `Held.layout`. Where no tier of ours has measured the tensors, what runs each layer is known all the same."""
    held = _of(worker)
    _notice_sleep(worker, held)  # also of an engine that is never asked for its weights
    measured = held.layout
    if measured != RankLayout():
        return measured
    try:
        return RankLayout(layers_digest(worker.vllm_config))
    except Exception:
        return measured


def is_unchanged(worker: Any, number: int) -> bool:
    """Whether the sample, and the places of all tensors, are those of question `number`."""
    try:
        held = _held(worker)
        return held.is_unchanged(number) and held.places is not None and held.places.lie == Places(worker).lie
    except Exception:
        return False


def is_asleep(worker: Any) -> bool:
    """Whether memory of this worker is unmapped, or may be."""
    return bool(_of(worker).unmapped)


def end_device_work(worker: Any) -> bool:
    """The next call may write weights, on another stream too. Wait for the device, then drop the sample, which keeps old memory alive."""
    try:
        _synchronize()
        held = _held(worker)
        held.waits += 1
        held.forget()
        return True
    except Exception:
        return False


def settle_for_sleep(worker: Any) -> int:
    return _of(worker).settle_for_sleep()


def check_settled(late: int) -> None:
    """Raises RuntimeError where copies run that were to end before memory is unmapped."""
    if late:
        raise RuntimeError(f"EpochKV: {late} copies of KV blocks still run, so their memory cannot be unmapped; sleep later")


def woken(worker: Any) -> None:
    _of(worker).woken()


def _synchronize() -> None:
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
