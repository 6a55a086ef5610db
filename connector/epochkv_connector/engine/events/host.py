"""KV events of L1, beside vLLM's own.

Events go through the GPU block pool's queue, in one order with vLLM's own: no event after the `AllBlocksCleared` of an
epoch change may carry a name from before it. An event carries the tokens of its block. The request may be gone when the
block arrives in L1, so a block is described when its job is sent. An error ends the events of this engine and is counted; it
never reaches the caller. Knows of vLLM 0.30 to 0.33: the events of `distributed.kv_events`, `BlockPool.kv_event_queue`, and
`kv_cache_utils` for hashes and extra keys.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epochkv_connector.engine import patches
from epochkv_connector.engine.blocks import hash_block_size_of
from epochkv_connector.engine.events.stream import EventStream, Private, Renamed
from epochkv_connector.engine.interface import kv_cache_utils
from epochkv_connector.scheduler.tiers.index import Key
from epochkv_connector.scheduler.tiers.views import GroupKind
from epochkv_connector.wire.jobs import BlockMove, LoadJob, SaveJob, Tier

if TYPE_CHECKING:
    from epochkv_connector.scheduler.tiers.bookkeeping import Bookkeeping


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


def host_block_stored(name: bytes, group: int, block_size: int, described: Described | None) -> Any:
    """`BlockStored` for a block in host memory. Not described, it carries the name alone, as vLLM's own offloading does."""
    from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored

    known = described or _NAME_ONLY
    return BlockStored(
        block_hashes=[kv_cache_utils.maybe_convert_block_hash(name)],
        parent_block_hash=kv_cache_utils.maybe_convert_block_hash(known.parent) if known.parent is not None else None,
        token_ids=list(known.tokens),
        block_size=block_size if described is not None else 0,
        lora_id=known.lora_id,
        medium=MEDIUM_CPU,
        lora_name=known.lora_name,
        extra_keys=known.extra_keys,
        group_idx=group,
        locality="LOCAL",
        session_id=known.session_id,
    )


def queue_all_blocks_cleared(block_pool: Any, drop_pending: bool) -> None:
    """Queue one AllBlocksCleared on the block pool's own event queue, so that it precedes events of new blocks.

    Args:
        block_pool: the bound GPU block pool.
        drop_pending: a reset: forget events not yet taken. Otherwise only names changed, and those events precede the clearing.
    """
    if block_pool is None or not getattr(block_pool, "enable_kv_cache_events", False):
        return
    from vllm.distributed.kv_events import AllBlocksCleared

    if drop_pending:
        block_pool.kv_event_queue.clear()
    block_pool.kv_event_queue.append(AllBlocksCleared() if drop_pending else Renamed())


def _plain(events: Iterable[Any]) -> list[Any]:
    """What vLLM can publish of its queue when the stream has failed."""
    from vllm.distributed.kv_events import AllBlocksCleared

    return [AllBlocksCleared() if isinstance(event, Renamed) else event for event in events if not isinstance(event, Private)]


class HostEvents:
    """Told which blocks L1 holds (`scheduler.tiers.state`); tells routers. Scheduler thread only, unless a docstring says otherwise.

    Args:
        is_private: whether no other request will find the blocks of this one.
        on_error: called with the error that ended the events.

    Attributes:
        enabled: vLLM publishes events. Any thread.
    """

    def __init__(self, is_private: Callable[[Any], bool], on_error: Callable[[str, Exception], None]) -> None:
        self._is_private = is_private
        self._on_error = on_error
        self._pool: Any = None
        self.enabled = False
        self._over = True  # of L1, until somebody listens
        self._stream: EventStream | None = None
        self._sizes: list[int] = []
        self._hash_block_size = 0
        self._max_offered = 0
        self._offered: OrderedDict[Key, Described] = OrderedDict()  # under way to L1
        self._held: dict[Key, Described | None] = {}  # in L1, blocks of other roots included
        self._announced: set[Key] = set()
        self._found: list[Key] = []

    def __len__(self) -> int:
        return len(self._announced)

    def bind(self, block_pool: Any, books: Bookkeeping | None) -> None:
        """vLLM's pool, whose queue is used, and the bookkeeping whose L1 is told of, if it has one."""
        self._pool = block_pool
        self.enabled = bool(getattr(block_pool, "enable_kv_cache_events", False))
        if not self.enabled:
            return
        groups = books.state.layout.groups if books is not None else ()
        self._stream = EventStream(
            (number for number, group in enumerate(groups) if group.kind is GroupKind.FULL), lambda: map(self._event, self._announced)
        )
        patches.around_events(block_pool, self._of_request, self._taken)
        if books is not None and books.state.index.indexed:
            self._sizes = [group.block_size for group in groups]
            self._hash_block_size = hash_block_size_of(block_pool)
            self._max_offered = 2 * books.state.index.num_slots
            self._over = False
            books.state.listener = self

    @property
    def waiting(self) -> bool:
        """Events are queued, and vLLM publishes with its next step only."""
        return self.enabled and bool(self._pool.kv_event_queue)

    def _of_request(self, request: Any, events: list[Any]) -> list[Any]:
        """vLLM has named blocks of the request on the device."""
        if self._stream is None or not events or not self._ask_private(request):
            return events
        return [Private(event) for event in events]

    def _ask_private(self, request: Any) -> bool:
        try:
            return self._is_private(request)
        except Exception as error:
            self._on_error("events", error)
            return True

    def _taken(self, events: list[Any]) -> list[Any]:
        """vLLM is about to publish these."""
        if self._stream is None:
            return _plain(events)
        try:
            return self._stream.pass_on(events)
        except Exception as error:
            self._stream = None
            self._end(error)
            return _plain(events)

    # -- what goes out ---------------------------------------------------------------------------------------------

    def offer(self, find: Callable[[str], Any | None], jobs: Iterable[SaveJob | LoadJob]) -> None:
        """Describe the blocks that these jobs will bring into L1. `find`: vLLM's request of an id, if it lives."""
        self._safely(lambda: self._offer(find, jobs))

    def _offer(self, find: Callable[[str], Any | None], jobs: Iterable[SaveJob | LoadJob]) -> None:
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

    def arrived(self, keys: Iterable[Key]) -> None:
        """Blocks are findable in L1."""
        self._safely(lambda: self._arrived(list(keys)))

    def _arrived(self, keys: list[Key]) -> None:
        for key in keys:
            self._held[key] = self._offered.pop(key, None)
            self._announce(key)

    def _announce(self, key: Key) -> None:
        self._pool.kv_event_queue.append(self._event(key))
        self._announced.add(key)

    def _event(self, key: Key) -> Any:
        group, name = key
        return host_block_stored(name, group, self._sizes[group], self._held[key])

    def left(self, key: Key) -> None:
        """A block is in L1 no more."""
        self._safely(lambda: self._left(key))

    def _left(self, key: Key) -> None:
        from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved

        self._held.pop(key, None)
        if key in self._announced:
            self._announced.discard(key)
            group, name = key
            names = [kv_cache_utils.maybe_convert_block_hash(name)]
            self._pool.kv_event_queue.append(BlockRemoved(block_hashes=names, medium=MEDIUM_CPU, group_idx=group, locality="LOCAL"))

    def found_again(self, keys: Iterable[Key]) -> None:
        """These blocks can be found again, because an earlier root is back. `cleared` announces them."""
        self._found = list(keys)

    # -- everything --------------------------------------------------------------------------------------------------

    def cleared(self, *, drop_pending: bool) -> None:
        """The names changed: tell routers to forget everything, then announce the blocks that can still be found."""
        queue_all_blocks_cleared(self._pool, drop_pending=drop_pending)
        self._safely(self._cleared)

    def _cleared(self) -> None:
        self._announced.clear()
        self._offered.clear()
        found, self._found = self._found, []
        for key in found:
            if key in self._held:
                self._announce(key)

    def _safely(self, work: Callable[[], None]) -> None:
        if self._over:
            return
        try:
            work()
        except Exception as error:
            self._end(error)

    def _end(self, error: Exception) -> None:
        self._over = True
        self._offered.clear()
        self._held.clear()
        self._announced.clear()
        self._on_error("events", error)
