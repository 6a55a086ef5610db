"""The queue of vLLM's block pool on its way to the publisher.

What is private is known when blocks are named, and what routers know when events are taken: so both ends of the queue are wrapped. An
error ends what we make of the events, and leaves vLLM its own. Knows of vLLM 0.30 to 0.33: `BlockPool.kv_event_queue` and
`enable_kv_cache_events`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from epochkv_connector.engine import patches
from epochkv_connector.engine.events.stream import EventStream, Private, Renamed
from epochkv_connector.scheduler.tiers.views import GroupKind

if TYPE_CHECKING:
    from epochkv_connector.engine.events.host import HostEvents
    from epochkv_connector.scheduler.tiers.bookkeeping import Bookkeeping


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


class Outgoing:
    """One per engine; scheduler thread only, unless a docstring says otherwise.

    Args:
        is_private: whether no other request will find the blocks of this one.
        on_error: called with the error that ended the stream.

    Attributes:
        host: events of L1.
        pool: vLLM's, whose queue is used; None: it is not known yet.
        enabled: vLLM publishes events. Any thread.
    """

    def __init__(self, host: HostEvents, is_private: Callable[[Any], bool], on_error: Callable[[str, Exception], None]) -> None:
        self.host = host
        self.pool: Any = None
        self.enabled = False
        self._is_private = is_private
        self._on_error = on_error
        self._stream: EventStream | None = None

    def bind(self, block_pool: Any, books: Bookkeeping | None) -> None:
        """vLLM's pool, and the bookkeeping whose L1 is told of, if there is one."""
        self.pool = block_pool
        self.enabled = bool(getattr(block_pool, "enable_kv_cache_events", False))
        if self.enabled:
            groups = books.state.layout.groups if books is not None else ()
            chained = (number for number, group in enumerate(groups) if group.kind is GroupKind.FULL)
            self._stream = EventStream(chained, self.host.all_found)
            patches.around_events(block_pool, self._of_request, self._taken)
        self.host.bind(self, books)

    @property
    def waiting(self) -> bool:
        """Events are queued, and vLLM publishes with its next step only. Any thread."""
        return self.enabled and bool(self.pool.kv_event_queue)

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
            self.host.end()
            self._on_error("events", error)
            return _plain(events)
