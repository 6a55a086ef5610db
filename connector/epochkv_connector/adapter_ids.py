"""What each of vLLM's adapter ids stands for, as far as this engine was told, and which names may not be used again.

vLLM keeps an adapter's weights by its id. It puts others in their place without a word to who waits or runs: told to
(`load_inplace`), asked with another path under an id that is in use, or when it needs room and reads files again that were
overwritten. Requests that run go on, with the new weights under the old names. So an id that this may have happened to is *mixed*:
nothing it stands for has a name from then on, what was pinned to it is not current, and the roots that its requests shared with
other engines are *ended* here, whichever id asks for them. An adapter that is unloaded and loaded again gets an id of its own.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from epochkv_connector.adapters import MAX_ADAPTERS
from epochkv_connector.identity import Pin

MAX_ROOTS = 16
"""Of one id: one for each epoch, and roots of epochs before the last never come back."""


@dataclass(slots=True)
class _Id:
    source: tuple[object, ...]
    loads: int = 0
    mixed: bool = False
    roots: dict[bytes, None] = field(default_factory=dict)  # shared with other engines, in order


class AdapterIds:
    """See the module's docstring. `num_changes`: another number says that pins may be current no more."""

    def __init__(self) -> None:
        self._ids: dict[int, _Id] = {}
        self._ended: set[bytes] = set()
        self.num_changes = 0

    def loading(self, adapter: Any) -> None:
        """vLLM is told to load it (a `LoRARequest`), whatever its id stood for before."""
        known = self._known(adapter)
        if known is not None and _replaces(adapter, known):
            known.loads += 1
            self.num_changes += 1
            self._mix(known)

    def asked(self, adapter: Any) -> None:
        """A request asks for it: vLLM loads it with the request, if not before."""
        known = self._known(adapter)
        if known is not None and _replaces(adapter, known):
            self._mix(known)

    def changed(self, number: int) -> None:
        """Its files are not what they were."""
        known = self._ids.get(number)
        if known is not None:
            self._mix(known)

    def loads(self, number: int) -> int | None:
        """How often something was loaded in its place; None: not an id that is looked after."""
        known = self._ids.get(number)
        return known.loads if known is not None else None

    def may_name(self, number: int) -> bool:
        """Whether KV of this id may have a name that another request finds."""
        known = self._ids.get(number)
        return known is not None and not known.mixed

    def share(self, number: int, root: bytes) -> bool:
        """Whether a request of this id may have a root that other engines use; it has it from now on."""
        if root in self._ended or not self.may_name(number):
            return False
        roots = self._ids[number].roots
        roots[root] = None
        if len(roots) > MAX_ROOTS:
            del roots[next(iter(roots))]
        return True

    def holds(self, pin: Pin) -> bool:
        """Whether what the pin names is still computed with the weights that it was made for."""
        known = self._ids.get(pin.adapter)
        if known is None or known.loads != pin.loads:
            return False
        return pin.alone or not (known.mixed or pin.root in self._ended)

    def _known(self, adapter: Any) -> _Id | None:
        number = adapter.lora_int_id
        if number not in self._ids and len(self._ids) < MAX_ADAPTERS:
            self._ids[number] = _Id(_source(adapter))
        return self._ids.get(number)

    def _mix(self, known: _Id) -> None:
        if not known.mixed:
            known.mixed = True
            self.num_changes += 1
            self._ended.update(known.roots)
            known.roots.clear()


def _source(adapter: Any) -> tuple[object, ...]:
    return adapter.lora_name, adapter.lora_path, getattr(adapter, "is_3d_lora_weight", False)


def _replaces(adapter: Any, known: _Id) -> bool:
    return bool(getattr(adapter, "load_inplace", False)) or known.source != _source(adapter)
