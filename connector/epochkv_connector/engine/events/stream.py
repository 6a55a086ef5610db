"""What routers are told, in an order that they can follow.

A router knows a block by its parent, and drops, or misplaces, a child whose parent it was not told of. It also believes what it
hears: a name that no request can have any more, or that one request has alone, would send it prompts for nothing. So events pass
through here just before vLLM publishes them, in the order in which they were queued. Knows of vLLM 0.30 to 0.33: the events of
`distributed.kv_events`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Name = tuple[int, Any]
"""(KV cache group, name of a block as events have it)"""


@dataclass(frozen=True, slots=True)
class Private:
    """In place of an event for blocks of a request that no other request will find."""

    event: Any


@dataclass(frozen=True, slots=True)
class Renamed:
    """In place of `AllBlocksCleared`, where names changed: the blocks stay on the device under names that nobody asks for."""


class EventStream:
    """One per engine; scheduler thread only.

    Args:
        chained: groups in which a block is found by way of all blocks before it.
        in_host: events that announce all that can be found in L1.
    """

    def __init__(self, chained: Iterable[int], in_host: Callable[[], Iterable[Any]]) -> None:
        self._chained = frozenset(chained)
        self._in_host = in_host
        self._on_device: set[Name] = set()  # told, and not taken back
        self._of_host: set[Name] = set()  # the same for L1
        self._private: set[Name] = set()  # on the device, and not told
        self._orphans: dict[Name, dict[Name, Any]] = {}  # parent -> child in L1 -> the event that waits for the parent
        self._parents: dict[Name, Name] = {}  # of these children

    def pass_on(self, events: Iterable[Any]) -> list[Any]:
        """What is published in place of these."""
        return [told for event in events for told in self._pass(event)]

    def _pass(self, event: Any) -> Iterable[Any]:
        match type(event).__name__:
            case "Private":
                self._private.update(_names(event.event))
                return ()
            case "Renamed":
                self._private |= self._on_device
                return [self._clear()]
            case "AllBlocksCleared":  # vLLM's own cache; what L1 has can still be found
                self._private.clear()
                return [self._clear(), *(told for stored in self._in_host() for told in self._stored(stored))]
            case "BlockStored":
                return self._stored(event)
            case "BlockRemoved":
                return self._removed(event)
            case _:
                return [event]

    def _clear(self) -> Any:
        from vllm.distributed.kv_events import AllBlocksCleared

        for names in (self._on_device, self._of_host, self._orphans, self._parents):
            names.clear()
        return AllBlocksCleared()

    def _stored(self, event: Any) -> list[Any]:
        names, of_host = _names(event), _is_of_host(event)
        if of_host and names[0] in self._of_host:  # all of L1 was told with a clearing that was queued before this event
            return []
        parent = (_group(event), event.parent_block_hash)
        if parent[1] is not None and parent[0] in self._chained:
            if not of_host and parent in self._private and parent not in self._of_host:
                self._private.update(names)
                return []
            if of_host and parent not in self._on_device and parent not in self._of_host:
                self._orphans.setdefault(parent, {})[names[0]] = event
                self._parents[names[0]] = parent
                return []
        out, due = [], [event]
        while due:  # a loop: a chain may be as long as a prompt
            out.append(due.pop())
            for name in self._tell(out[-1]):
                children = self._orphans.pop(name, {})
                for child in children:
                    del self._parents[child]
                due += children.values()
        return out

    def _tell(self, event: Any) -> list[Name]:
        names = _names(event)
        if _is_of_host(event):
            self._of_host.update(names)
        else:
            self._on_device.update(names)
            self._private.difference_update(names)
        return names

    def _removed(self, event: Any) -> list[Any]:
        of_host, kept = _is_of_host(event), []
        for name in _names(event):
            if name in (self._parents if of_host else self._private):
                self._forget(name, of_host)
                continue
            (self._of_host if of_host else self._on_device).discard(name)
            kept.append(name[1])
        event.block_hashes = kept
        return [event] if kept else []

    def _forget(self, name: Name, of_host: bool) -> None:
        if of_host:
            siblings = self._orphans[parent := self._parents.pop(name)]
            del siblings[name]
            if not siblings:
                del self._orphans[parent]
        else:
            self._private.discard(name)


def _is_of_host(event: Any) -> bool:
    return bool(event.medium == "CPU")


def _group(event: Any) -> int:
    return int(event.group_idx or 0)


def _names(event: Any) -> list[Name]:
    return [(_group(event), name) for name in event.block_hashes]
