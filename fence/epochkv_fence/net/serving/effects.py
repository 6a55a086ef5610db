"""What the state machines of pools ask a hub to do outside of it: calls to the authority and to stores.

Every call is a task with a deadline, and its answer goes back to the state machine as an event. None ever raises. The log says
only when a call stops or starts to work.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from functools import partial
from typing import Any, Final, TypeVar

from epochkv_fence.hub import events as ev
from epochkv_fence.net.say_once import SayOnce
from epochkv_fence.net.serving.pools import ServedPool
from epochkv_fence.protocol.authority import Authority, AuthorityError, PoolRecord, Term
from epochkv_fence.stores.admin import Removed, StoreAdmin, StoreAdminError

logger = logging.getLogger(__name__)
T = TypeVar("T")

STOP_SECONDS: Final = 2.0


class Effects:
    """Makes the calls, and counts those that fail.

    Args:
        stores: None: this hub reaches no store.
        answer: gives an answer to a pool's state machine; returns False if that failed.
    """

    def __init__(
        self,
        authority: Authority,
        deadline_seconds: float,
        stores: StoreAdmin | None,
        store_deadline_seconds: float,
        counters: Counter[str],
        answer: Callable[[ServedPool, ev.Event], bool],
    ) -> None:
        self._authority = authority
        self._deadline = deadline_seconds
        self._stores = stores
        self._store_deadline = store_deadline_seconds
        self._counters = counters
        self._answer = answer
        self._said: dict[str, SayOnce] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def do(self, pool: ServedPool, action: ev.Action) -> None:
        uid, authority = pool.config.uid, self._authority
        match action:
            case ev.RecordTarget(epoch, origin):
                self._write(pool, "record", partial(authority.record, uid, epoch, origin), ev.Recorded(epoch), ev.RecordFailed(epoch))
            case ev.Publish(epoch):
                self._write(pool, "publish", partial(authority.publish, uid, epoch), ev.Published(epoch), ev.PublishFailed(epoch))
            case ev.NoteGranting():
                self._write(pool, "note", partial(authority.note_granting, uid), ev.Noted(), ev.NoteFailed())
            case ev.NoteLabels(labels):
                write = partial(authority.note_labels, uid, labels)
                self._write(pool, "note labels", write, ev.LabelsNoted(labels), ev.LabelsNoteFailed(labels))
            case ev.Wipe(epoch):
                self.spawn(self._empty(pool, "wipe", partial(ev.Wiped, epoch), ev.WipeFailed(epoch)))
            case ev.Sweep(below):
                self.spawn(self._empty(pool, "sweep", partial(ev.Swept, below), ev.SweepFailed(below)))

    async def load(self, pool: ServedPool) -> PoolRecord | None:
        """The pool's record; None: no answer."""
        return await self._call(pool.config.name, "load", self._deadline, partial(self._authority.load, pool.config.uid))

    async def verify(self, term: Term) -> bool | None:
        """The leadership read; None: no answer."""
        return await self._call("leadership", "verify", self._deadline, partial(self._authority.verify, term))

    def _write(self, pool: ServedPool, what: str, write: Callable[[], Awaitable[None]], done: ev.Event, failed: ev.Event) -> None:
        async def call() -> bool:
            await write()
            return True

        async def work() -> None:
            written = await self._call(pool.config.name, what, self._deadline, call)
            if not (written and self._answer(pool, done)):
                self._answer(pool, failed)

        self.spawn(work())

    async def _empty(self, pool: ServedPool, what: str, done: Callable[[int, int | None], ev.Event], failed: ev.Event) -> None:
        """Have the store's admin remove everything that nobody reads."""

        async def remove() -> Removed:
            if self._stores is None:
                raise StoreAdminError("this hub was started without access to any store's admin endpoint")
            return await self._stores.remove_all(pool.config.uid)

        removed = await self._call(pool.config.name, what, self._store_deadline, remove)
        if removed is None or not self._answer(pool, done(removed.keys, removed.num_bytes)):
            self._answer(pool, failed)

    def forget(self, pool: ServedPool) -> None:
        self._said.pop(pool.config.name, None)

    async def _call(self, name: str, what: str, seconds: float, call: Callable[[], Awaitable[T]]) -> T | None:
        """What `call` answered; None when it failed or gave no answer in time: it may still take effect.

        Args:
            name: of the pool, for the log.
            what: one word for the kind of call.
            seconds: the deadline.
        """
        try:
            async with asyncio.timeout(seconds):
                answer = await call()
        except (AuthorityError, StoreAdminError, TimeoutError, OSError) as error:
            reason = f"no answer within {seconds} s" if isinstance(error, TimeoutError) else str(error)
            self._failed(name, what, "failed", logging.WARNING, f"{what} failed: {reason}; trying again")
            return None
        except Exception as error:
            self._failed(name, what, repr(error), logging.ERROR, f"{what} failed: {error!r}; trying again")
            return None
        self._say(name, what, "", logging.INFO, f"{what} works again")
        return answer

    def _failed(self, name: str, what: str, state: str, level: int, text: str) -> None:
        self._counters[f"{what}_failed"] += 1
        self._say(name, what, state, level, text)

    def _say(self, name: str, topic: str, state: str, level: int, text: str) -> None:
        self._said.setdefault(name, SayOnce(logger, first=""))(topic, state, level, "%s: %s", name, text)

    # ------------------------------------------------------------------ tasks

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run this beside everything else, until `stop`."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._counters["tasks_failed"] += 1
            logger.error("a task of the hub failed", exc_info=task.exception())

    async def stop(self) -> None:
        """End every task within seconds, even if the authority hangs."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks, timeout=STOP_SECONDS)
        self._tasks.clear()
