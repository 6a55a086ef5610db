"""KV events of L1, for routers that send a prompt to the engine that holds its blocks.

They go through the GPU block pool's own queue, in one order with vLLM's events: after the `AllBlocksCleared` of an epoch
change nothing may follow that speaks of names from before. An event carries the tokens of its block, and when a block has
arrived its request may be gone, so a block is described when its job goes out. Nothing here may harm the bookkeeping that
calls it: an error ends the events of this engine, and is counted.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epochkv_connector.engine import compat
from epochkv_connector.scheduler.index import Key
from epochkv_connector.wire.jobs import BlockMove, LoadJob, SaveJob, Source

if TYPE_CHECKING:
    from epochkv_connector.scheduler.bookkeeping import Bookkeeping


@dataclass(frozen=True, slots=True)
class Described:
    """What an event says of a block beyond its name.

    Attributes:
        parent: name of the block before it; None: the first one.
        about: what vLLM adds (adapter, extra keys, session).
    """

    tokens: array[int]
    parent: bytes | None
    about: compat.AboutRequest


class HostEvents:
    """`scheduler.views.NameListener` that tells routers. Scheduler thread only.

    Args:
        on_error: told of the error that ended the events.
    """

    def __init__(self, on_error: Callable[[str, Exception], None]) -> None:
        self._on_error = on_error
        self._pool: Any = None
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

    def bind(self, block_pool: Any, books: Bookkeeping | None) -> None:
        """vLLM's pool, whose queue is used, and the bookkeeping whose L1 is told of (None: there is no L1)."""
        self._pool = block_pool
        if books is not None and compat.has_kv_events(block_pool):
            self._sizes = [group.block_size for group in books.stock.layout.groups]
            self._hash_block_size = compat.hash_block_size_of(block_pool)
            self._max_offered = 2 * books.stock.index.num_slots
            self._over = False
            books.stock.listener = self

    # -- what goes out ---------------------------------------------------------------------------------------------

    def offer(self, requests: Mapping[str, Any], jobs: Iterable[SaveJob | LoadJob]) -> None:
        """Jobs go out that will fill slots of L1, for some of these requests (by id)."""
        if not self._over:
            self._safely(lambda: self._offer_all(requests, jobs))

    def _offer_all(self, requests: Mapping[str, Any], jobs: Iterable[SaveJob | LoadJob]) -> None:
        for job in jobs:
            if (request := requests.get(job.request_id)) is not None:
                self._offer(request, job)

    def _offer(self, request: Any, job: SaveJob | LoadJob) -> None:
        fills = (lambda move: move.copy) if isinstance(job, SaveJob) else (lambda move: move.source is Source.STORE)
        for move in filter(fills, job.moves):
            self._offered[move.group, move.block_hash] = self._describe(request, move)
        while len(self._offered) > self._max_offered:
            self._offered.popitem(last=False)

    def _describe(self, request: Any, move: BlockMove) -> Described:
        size = self._sizes[move.group]
        start, names = move.block * size, size // self._hash_block_size
        parent = bytes(request.block_hashes[move.block * names - 1]) if move.block else None
        tokens = array("l", request.all_token_ids[start : start + size])
        return Described(tokens, parent, compat.about_request(request, start, start + size))

    # -- what L1 holds ---------------------------------------------------------------------------------------------

    def arrived(self, keys: Iterable[Key]) -> None:
        """Blocks are findable in L1."""
        self._safely(lambda: self._arrived(list(keys)))

    def _arrived(self, keys: list[Key]) -> None:
        for key in keys:
            self._held[key] = self._offered.pop(key, None)
            self._announce(key)

    def _announce(self, key: Key) -> None:
        described = self._held[key]
        group, name = key
        self._announced.add(key)
        self._put(
            compat.host_block_stored(name, group, None, [], 0, None)
            if described is None
            else compat.host_block_stored(name, group, described.parent, list(described.tokens), self._sizes[group], described.about)
        )

    def left(self, key: Key) -> None:
        """A block is in L1 no more."""
        self._safely(lambda: self._left(key))

    def _left(self, key: Key) -> None:
        self._held.pop(key, None)
        if key in self._announced:
            self._announced.discard(key)
            self._put(compat.host_block_removed(key[1], key[0]))

    def found_again(self, keys: Iterable[Key]) -> None:
        """An earlier root is back, and so are these blocks; they are told once everything was cleared."""
        self._found = list(keys)

    # -- everything --------------------------------------------------------------------------------------------------

    def cleared(self, *, drop_pending: bool) -> None:
        """The names changed: routers forget everything, then hear what is findable all the same."""
        compat.queue_all_blocks_cleared(self._pool, drop_pending=drop_pending)
        self._safely(self._cleared)

    def _cleared(self) -> None:
        self._announced.clear()
        self._offered.clear()
        found, self._found = self._found, []
        for key in found:
            if key in self._held:
                self._announce(key)

    def _put(self, event: Any) -> None:
        self._pool.kv_event_queue.append(event)

    def _safely(self, work: Callable[[], None]) -> None:
        if self._over:
            return
        try:
            work()
        except Exception as error:
            self._over = True
            self._offered.clear()
            self._held.clear()
            self._on_error("events", error)
