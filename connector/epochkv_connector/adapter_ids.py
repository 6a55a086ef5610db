"""Which adapter each of vLLM's ids stands for, as far as this engine was told, and which names may not come back.

vLLM keeps an adapter's weights by its id, and puts others in their place (`load_inplace`, or another path under an id that was
used) without a word to who waits or runs: their requests go on, with the new weights under the old names. So what was pinned to
the id is not current from then on, and a name that other engines share stands for two versions here and is given to nobody again.
Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from epochkv_connector.adapters import MAX_ADAPTERS, Version


@dataclass(slots=True)
class _Id:
    source: tuple[str, str]  # name and path
    replaced: int = 0
    each_time: bool = False  # requests of it have it loaded again
    shared: set[tuple[str, str]] = field(default_factory=set)  # (name, version) that its requests were pinned to


class AdapterIds:
    """See the module's docstring. `num_replaced`: of all ids together."""

    def __init__(self) -> None:
        self._ids: dict[int, _Id] = {}
        self._ended: set[tuple[str, str]] = set()
        self.num_replaced = 0

    def replaced(self, number: int) -> int:
        """How often other weights may have taken the place of this id's."""
        known = self._ids.get(number)
        return known.replaced if known is not None else 0

    def loading(self, adapter: Any) -> None:
        """vLLM is told to load it (a `LoRARequest`), whatever its id stood for before."""
        known = self._known(adapter)
        if known is not None and (getattr(adapter, "load_inplace", False) or known.source != _source(adapter)):
            self._replace(known)
            known.source = _source(adapter)

    def may_name(self, adapter: Any) -> bool:
        """Whether a request's adapter is known to be what vLLM computes with: then its id and version name its KV."""
        known = self._known(adapter)
        if known is None:
            return False
        if getattr(adapter, "load_inplace", False):  # when the request is scheduled: nobody can say what was computed before
            self._replace(known)
            known.each_time = True
        return not known.each_time and known.source == _source(adapter)

    def share(self, adapter: Any, version: Version) -> bool:
        """Whether a request of it may have a name that other engines use; it has it from now on."""
        known, name = self._known(adapter), (adapter.lora_name, version.name)
        if known is None or known.replaced or not version.shareable or name in self._ended:
            return False
        known.shared.add(name)
        return True

    def _known(self, adapter: Any) -> _Id | None:
        number = adapter.lora_int_id
        if number not in self._ids and len(self._ids) < MAX_ADAPTERS:
            self._ids[number] = _Id(_source(adapter))
        return self._ids.get(number)

    def _replace(self, known: _Id) -> None:
        known.replaced += 1
        self.num_replaced += 1
        self._ended |= known.shared
        known.shared.clear()


def _source(adapter: Any) -> tuple[str, str]:
    return adapter.lora_name, adapter.lora_path
