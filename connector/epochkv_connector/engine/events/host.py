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

from epochkv_connector.engine.blocks import hash_block_size_of
from epochkv_connector.engine.events.outgoing import Outgoing, queue_all_blocks_cleared
from epochkv_connector.engine.interface import kv_cache_utils
from epochkv_connector.scheduler.tiers.index import Key
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


class HostEvents:
    """Told which blocks L1 holds (`scheduler.tiers.state`); tells routers. Scheduler thread only.

    Args:
        on_error: called with the error that ended the events.
    """

    def __init__(self, on_error: Callable[[str, Exception], None]) -> None:
        self._on_error = on_error
        self._outgoing: Outgoing | None = None
        self._over = True  # until somebody listens
        self._sizes: list[int] = []
        self._hash_block_size = 0
        self._max_offered = 0
        self._offered: OrderedDict[Key, Described] = OrderedDict()  # under way to L1
        self._held: dict[Key, Described | None] = {}  # in L1, blocks of other roots included
        self._announced: set[Key] = set()
        self._found: list[Key] = []

    def __len__(self) -> int:
        return len(self._announced)

    def bind(self, outgoing: Outgoing, books: Bookkeeping | None) -> None:
        """The queue that events go into, and the bookkeeping whose L1 is told of, if it has one."""
        self._outgoing = outgoing
        if not outgoing.enabled or books is None or not books.state.index.indexed:
            return
        self._sizes = [group.block_size for group in books.state.layout.groups]
        self._hash_block_size = hash_block_size_of(outgoing.pool)
        self._max_offered = 2 * books.state.index.num_slots
        self._over = False
        books.state.listener = self

    def all_found(self) -> Iterable[Any]:
        """Events that announce all that can be found in L1."""
        return map(self._event, self._announced)

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
        self._queue(self._event(key))
        self._announced.add(key)

    def _queue(self, event: Any) -> None:
        if self._outgoing is not None:
            self._outgoing.pool.kv_event_queue.append(event)

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
            self._queue(BlockRemoved(block_hashes=names, medium=MEDIUM_CPU, group_idx=group, locality="LOCAL"))

    def found_again(self, keys: Iterable[Key]) -> None:
        """These blocks can be found again, because an earlier root is back. `cleared` announces them."""
        self._found = list(keys)

    # -- everything --------------------------------------------------------------------------------------------------

    def cleared(self, *, drop_pending: bool) -> None:
        """The names changed: tell routers to forget everything, then announce the blocks that can still be found."""
        if self._outgoing is not None:
            queue_all_blocks_cleared(self._outgoing.pool, drop_pending=drop_pending)
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
            self.end()
            self._on_error("events", error)

    def end(self) -> None:
        """Nothing more is told of L1."""
        self._over = True
        for told in (self._offered, self._held, self._announced):
            told.clear()
