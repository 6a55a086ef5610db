"""The LoRA adapters that a rank holds: a digest of the tensors of each, and whether what was asked for is still what requests use.

vLLM keeps an adapter's weights by an id that says nothing of them. It reads files again when its cache was too small, or with every
step for requests that load in place, and trainers send tensors that have no file. So the digest is that of the tensors vLLM has
loaded (`LoRAModel`), after it has merged and packed them: what it copies to the device. The identity of that object tells whether
it is the same one; another object that holds the same tensors is as good.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from epochkv_connector.weights.adapters import LATER, MAX_ADAPTERS
from epochkv_connector.weights.digest import Unreadable, digest, why_unreadable
from epochkv_connector.weights.watch import Wanted

KNOWN = "_epochkv_digest"
"""Attribute of a `LoRAModel`: the digest of its tensors."""

LOAD_SECONDS = 0.5
"""Loading goes on for so long before one step; what is left is loaded before the next ones."""

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
    found = digest(tensors, extra).value
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
        while len(self._asked) > MAX_ADAPTERS:
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
