"""KV events: what routers are told of blocks on the device and in L1, in an order that they can follow.

A router knows a block by its parent, and drops, or misplaces, a child whose parent it was not told of. It also believes what it
hears: a name that no request can have any more, or that one request has alone, would send it prompts for nothing.

Events of L1 (`HostEvents`) go through the GPU block pool's queue, in one order with vLLM's own: no event after the
`AllBlocksCleared` of an epoch change may carry a name from before it. An event carries the tokens of its block. The request may be
gone when the block arrives in L1, so a block is described when its job is sent. What is private is known when blocks are named, and
what routers know when events are taken, so both ends of that queue are wrapped (`Outgoing`), and `EventStream` decides just before
vLLM publishes. An error ends what we make of the events and is counted; it leaves vLLM its own, and never reaches the caller.
"""

from __future__ import annotations

import functools
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec

from epochkv_connector.engine import patches
from epochkv_connector.engine.interface import kv_cache_utils
from epochkv_connector.tiers.layout import GroupKind
from epochkv_connector.tiers.state import Key
from epochkv_connector.wire import BlockMove, LoadJob, SaveJob, Tier

if TYPE_CHECKING:
    from epochkv_connector.tiers.manager import TierManager

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
            if of_host and name in self._parents:
                siblings = self._orphans[parent := self._parents.pop(name)]
                del siblings[name]
                if not siblings:
                    del self._orphans[parent]
            elif not of_host and name in self._private:
                self._private.discard(name)
            else:
                (self._of_host if of_host else self._on_device).discard(name)
                kept.append(name[1])
        event.block_hashes = kept
        return [event] if kept else []


def _is_of_host(event: Any) -> bool:
    return bool(event.medium == "CPU")


def _group(event: Any) -> int:
    return int(event.group_idx or 0)


def _names(event: Any) -> list[Name]:
    return [(_group(event), name) for name in event.block_hashes]


def _plain(events: Iterable[Any]) -> list[Any]:
    """What vLLM can publish of its queue when the stream has failed."""
    from vllm.distributed.kv_events import AllBlocksCleared

    return [AllBlocksCleared() if isinstance(event, Renamed) else event for event in events if not isinstance(event, Private)]


class Outgoing:
    """One per engine; scheduler thread only, unless a docstring says otherwise.

    Args:
        is_private: whether no other request will find the blocks of this one.
        on_error: called with the error that ended the stream, or the events of L1.

    Attributes:
        host: events of L1.
        pool: vLLM's, whose queue is used; None: it is not known yet.
        enabled: vLLM publishes events. Any thread.
    """

    def __init__(self, is_private: Callable[[Any], bool], on_error: Callable[[str, Exception], None]) -> None:
        self.host = HostEvents(self, on_error)
        self.pool: Any = None
        self.enabled = False
        self._is_private = is_private
        self._on_error = on_error
        self._stream: EventStream | None = None

    def bind(self, block_pool: Any, tiers: TierManager | None) -> None:
        """vLLM's pool, and the tier manager whose L1 is told of, if there is one."""
        self.pool = block_pool
        self.enabled = bool(getattr(block_pool, "enable_kv_cache_events", False))
        if self.enabled:
            groups = tiers.state.layout.groups if tiers is not None else ()
            chained = (number for number, group in enumerate(groups) if group.kind is GroupKind.FULL)
            self._stream = EventStream(chained, self.host.all_found)
            patches.around_events(block_pool, self._of_request, self._taken)
        self.host.bind(tiers)

    @property
    def waiting(self) -> bool:
        """Events are queued, and vLLM publishes with its next step only. Any thread."""
        return self.enabled and bool(self.pool.kv_event_queue)

    def _of_request(self, request: Any, events: list[Any]) -> list[Any]:
        """vLLM has named blocks of the request on the device."""
        if self._stream is None or not events:
            return events
        try:
            private = self._is_private(request)
        except Exception as error:
            self._on_error("events", error)
            private = True
        return [Private(event) if type(event).__name__ == "BlockStored" else event for event in events] if private else events

    def _taken(self, events: list[Any]) -> list[Any]:
        """vLLM is about to publish these."""
        if self._stream is None:
            return _plain(events)
        try:
            return self._stream.pass_on(events)
        except Exception as error:
            self._stream = None
            self.host.end()
            self._on_error("events", error)
            return _plain(events)


@dataclass(frozen=True, slots=True)
class Described:
    """What an event says of a block beyond its name.

    Attributes:
        parent: name of the block before it; None: the first one.
        lora_id, lora_name, extra_keys, session_id: what vLLM's `BlockStored` says of the request that the block was made for.
    """

    tokens: array[int]
    parent: bytes | None
    lora_id: int | None
    lora_name: str | None
    extra_keys: list[Any] | None
    session_id: str | None


_NAME_ONLY = Described(array("l"), None, None, None, None, None)

P = ParamSpec("P")


def _safely(work: Callable[Concatenate[HostEvents, P], None]) -> Callable[Concatenate[HostEvents, P], None]:
    """An error ends the events of L1, and what is over does nothing."""

    @functools.wraps(work)
    def guarded(events: HostEvents, /, *args: P.args, **kwargs: P.kwargs) -> None:
        if events._over:
            return
        try:
            work(events, *args, **kwargs)
        except Exception as error:
            events.end()
            events._on_error("events", error)

    return guarded


class HostEvents:
    """Told which blocks L1 holds (`tiers.state`); tells routers. Scheduler thread only. An error ends these events; `on_error` gets it."""

    def __init__(self, outgoing: Outgoing, on_error: Callable[[str, Exception], None]) -> None:
        self._on_error = on_error
        self._outgoing = outgoing
        self._over = True  # until somebody listens
        self._sizes: list[int] = []
        self._hash_block_size = 0
        self._max_offered = 0
        self._offered: OrderedDict[Key, Described] = OrderedDict()  # under way to L1
        self._held: dict[Key, Described | None] = {}  # in L1, blocks of other roots included
        self._announced: set[Key] = set()
        self._found: list[Key] = []

    def bind(self, tiers: TierManager | None) -> None:
        """The tier manager whose L1 is told of, if it has one."""
        if not self._outgoing.enabled or tiers is None or not tiers.state.index.indexed:
            return
        self._sizes = [group.block_size for group in tiers.state.layout.groups]
        self._hash_block_size = tiers.state.hash_block_size
        self._max_offered = 2 * tiers.state.index.num_slots
        self._over = False
        tiers.state.listener = self

    def all_found(self) -> Iterable[Any]:
        """Events that announce all that can be found in L1."""
        return map(self._event, self._announced)

    # -- what goes out ---------------------------------------------------------------------------------------------

    @_safely
    def offer(self, find: Callable[[str], Any | None], jobs: Iterable[SaveJob | LoadJob]) -> None:
        """Describe the blocks that these jobs will bring into L1. `find`: vLLM's request of an id, if it lives."""
        for job in jobs:
            if (request := find(job.request_id)) is None:
                continue
            fills = (lambda move: move.copy) if isinstance(job, SaveJob) else (lambda move: move.source is Tier.STORE)
            for move in filter(fills, job.moves):
                self._offered[move.group, move.block_hash] = self._describe(request, move)
        while len(self._offered) > self._max_offered:
            self._offered.popitem(last=False)

    def _describe(self, request: Any, move: BlockMove) -> Described:
        size = self._sizes[move.group]
        start, names = move.block * size, size // self._hash_block_size
        parent = bytes(request.block_hashes[move.block * names - 1]) if move.block else None
        tokens = array("l", request.all_token_ids[start : start + size])
        extra, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, start + size, 0)
        untagged = getattr(kv_cache_utils, "to_event_extra_keys", lambda keys: keys)  # 0.31 and later tag them for the hash
        lora = request.lora_request
        return Described(
            *(tokens, parent),
            lora_id=lora.adapter_id if lora else None,
            lora_name=lora.name if lora else None,
            extra_keys=untagged([extra]),
            session_id=getattr(request, "session_id", None),
        )

    # -- what L1 holds ---------------------------------------------------------------------------------------------

    @_safely
    def arrived(self, keys: Iterable[Key]) -> None:
        """Blocks are findable in L1."""
        for key in keys:
            self._held[key] = self._offered.pop(key, None)
            self._announce(key)

    def _announce(self, key: Key) -> None:
        self._queue(self._event(key))
        self._announced.add(key)

    def _queue(self, event: Any) -> None:
        self._outgoing.pool.kv_event_queue.append(event)

    def _event(self, key: Key) -> Any:
        """`BlockStored` of a block in L1. Not described, it carries the name alone, as vLLM's own offloading does."""
        from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored

        (group, name), described = key, self._held[key] or _NAME_ONLY
        return BlockStored(
            block_hashes=[kv_cache_utils.maybe_convert_block_hash(name)],
            parent_block_hash=kv_cache_utils.maybe_convert_block_hash(described.parent) if described.parent is not None else None,
            token_ids=list(described.tokens),
            block_size=self._sizes[group] if described is not _NAME_ONLY else 0,
            lora_id=described.lora_id,
            medium=MEDIUM_CPU,
            lora_name=described.lora_name,
            extra_keys=described.extra_keys,
            group_idx=group,
            locality="LOCAL",
            session_id=described.session_id,
        )

    @_safely
    def left(self, key: Key) -> None:
        """A block is in L1 no more."""
        from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved

        self._held.pop(key, None)
        if key in self._announced:
            self._announced.discard(key)
            group, name = key
            names = [kv_cache_utils.maybe_convert_block_hash(name)]
            self._queue(BlockRemoved(block_hashes=names, medium=MEDIUM_CPU, group_idx=group, locality="LOCAL"))

    def found_again(self, keys: Iterable[Key]) -> None:
        """These blocks can be found again, because an earlier root is back. `cleared` announces them."""
        self._found = list(keys)

    # -- everything --------------------------------------------------------------------------------------------------

    def cleared(self, *, drop_pending: bool) -> None:
        """The names changed: routers forget everything before they hear of new blocks, and hear again of blocks that can still be found.

        Args:
            drop_pending: a reset, which forgets events that were not taken yet. Where only names changed, they precede the clearing.
        """
        if self._outgoing.enabled:
            from vllm.distributed.kv_events import AllBlocksCleared

            if drop_pending:
                self._outgoing.pool.kv_event_queue.clear()
            self._queue(AllBlocksCleared() if drop_pending else Renamed())
        self._announce_found()

    @_safely
    def _announce_found(self) -> None:
        self._announced.clear()
        self._offered.clear()
        found, self._found = self._found, []
        for key in found:
            if key in self._held:
                self._announce(key)

    def end(self) -> None:
        """Nothing more is told of L1."""
        self._over = True
        for told in (self._offered, self._held, self._announced):
            told.clear()
