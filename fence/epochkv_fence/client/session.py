"""A client's connection to a hub that leads, and the questions that it asks there."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
import socket
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Final

import zmq

from epochkv_fence.client.arguments import check_timeout
from epochkv_fence.client.results import HubUnreachable, KeyRefused, PoolStatus, WrongPool
from epochkv_fence.common import end, on_daemon_thread
from epochkv_fence.connection import ConfigurationError, Connection, check_endpoint
from epochkv_fence.net.dealer import REDIAL_SECONDS, Link, LinkEvent
from epochkv_fence.net.gate import SocketReader
from epochkv_fence.net.keys import ClientKeys
from epochkv_fence.protocol import messages as ms

logger = logging.getLogger(__name__)

TEND_SECONDS: Final = 0.1
MAX_QUEUED: Final = 64
NOBODY: Final = "nobody listens there"
KEY_REFUSED: Final = (
    "it rejects our key, which is not authorized for any pool of this hub, or was retired: take the files of the Secret <pool>-fence"
    " (or STATE/client) again"
)
NO_HANDSHAKE: Final = "no CURVE handshake: hub.pub is not the key of that hub, what listens there is no hub, or it hangs"
RESOLVE_SECONDS: Final = 1.0
STATUS_SECONDS: Final = 10.0
FIRST_RETRY_SECONDS: Final = 0.25
MAX_RETRY_SECONDS: Final = 2.0
REFUSED_SECONDS: Final = 2.0
"""A starting hub refuses keys until it knows its pools; a key that it refuses for longer is wrong."""

Question = ms.Status | ms.Bump | ms.Label
Answer = ms.Status | ms.BumpStatus | ms.Labelled


@dataclass(eq=False)
class Conversation:
    """One request number and the answers to it, however often it is asked."""

    _session: Session
    request: int
    _queue: asyncio.Queue[Answer | None] = field(default_factory=asyncio.Queue)

    async def answers(self, message: Question, first_pause: float, most: float, until: float) -> AsyncIterator[Answer | None]:
        """Ask until `until`, after pauses that double: the answers, and None each time before it asks again. Raises `WrongPool`."""
        pause, connection = first_pause, self._session.connection
        while True:
            self._session.send(message)
            again = min(until, time.monotonic() + pause)
            while (answer := await self._next(again - time.monotonic())) is not None:
                if isinstance(answer, ms.Status) and answer.pool and answer.pool != (pool := connection.pool).uid:
                    raise WrongPool(
                        f"the key speaks for the pool with uid {answer.pool}, and {connection.origin} names {pool.name} with uid "
                        f"{pool.uid}; take both from one pool"
                    )
                yield answer
            yield None
            if time.monotonic() >= until:
                return
            pause = min(2 * pause, most)

    async def _next(self, seconds: float) -> Answer | None:
        """The next answer, or None when it is time to ask again: nothing for `seconds`, or a new connection."""
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                return await self._queue.get()
        except TimeoutError:
            return None

    def put(self, answer: Answer | None) -> None:
        if self._queue.qsize() < MAX_QUEUED:
            self._queue.put_nowait(answer)


@dataclass(eq=False)
class Session:
    """The connection of one client, and what it asks there."""

    connection: Connection
    problem: str = NOBODY
    """Why there is no answer, in words."""
    _link: Link | None = None
    _proven: ClientKeys | None = None  # a hub has said that they are our pool's
    _readers: list[SocketReader] = field(default_factory=list)
    _task: asyncio.Task[None] | None = None
    _conversations: dict[int, Conversation] = field(default_factory=dict)
    _next_request: int = field(default_factory=lambda: secrets.randbits(62))
    _refused_since: float | None = None

    # ------------------------------------------------------------------ life

    async def close(self) -> None:
        """Hang up; returns at once."""
        if self._task is not None:
            await end([self._task], 1.0)

    # ------------------------------------------------------------------ asking

    @contextlib.contextmanager
    def conversation(self) -> Iterator[Conversation]:
        """A fresh request number; answers are kept for it until the block ends."""
        self._next_request = (self._next_request + 1) % 2**62
        made = self._conversations[self._next_request] = Conversation(self, self._next_request)
        try:
            yield made
        finally:
            del self._conversations[made.request]

    def send(self, message: Question) -> None:
        """Best effort: without a connection it is dropped, and asked for again when there is one."""
        if self._link is not None:
            if self._link.keys != self._proven:  # newer ones may be those of a new pool with our pool's name, which gets no ask of ours
                message = ms.Status(message.request)
            self._link.send(ms.encode(message))
            self._readers[0].kick()

    async def explain(self) -> str:
        """`problem`, or that the name of the hub's host is none. Returns within `RESOLVE_SECONDS`."""
        if self.problem == NOBODY:
            try:
                await resolve(*check_endpoint(self.connection.hub.endpoint, "the hub's endpoint"), RESOLVE_SECONDS)
            except OSError as error:
                return str(error)
        return self.problem

    @property
    def refused_seconds(self) -> float:
        """For how long handshakes have been refused, without one that was not; 0.0 when the last one was not."""
        return 0.0 if self._refused_since is None else time.monotonic() - self._refused_since

    # ------------------------------------------------------------------ the state of the pool, asked until it is answered

    async def greet(self, timeout_s: float) -> None:
        """Dial, and prove that a hub answers, takes our key and serves the right pool. A hub that refuses the key is not waited for long.

        Raises:
            ConfigurationError: the credentials cannot be used.
        """
        self._task = asyncio.create_task(self._run(self.connection.client_keys()))
        with self.conversation() as conversation:
            await self.page(conversation, None, time.monotonic() + timeout_s, REFUSED_SECONDS)

    async def status(self, timeout_s: float = STATUS_SECONDS) -> PoolStatus:
        """The pool and its live engines.

        Raises:
            HubUnreachable: no hub answered in time.
        """
        check_timeout(timeout_s)
        page, engines = await self.engines(time.monotonic() + timeout_s)
        pool = self.connection.pool
        return PoolStatus.of(pool.name, pool.uid, page, engines)

    async def engines(self, until: float) -> tuple[ms.Status, list[ms.EngineStatus]]:
        found: dict[bytes, ms.EngineStatus] = {}
        with self.conversation() as conversation:
            first = page = await self.page(conversation, None, until)
            while page.engines:
                found.update({engine.instance: engine for engine in page.engines})
                if page is first and len(found) >= page.total:
                    break  # later pages may count fewer than were found, while some of those found have left
                page = await self.page(conversation, page.engines[-1].instance, until)
        return first, list(found.values())

    async def page(self, conversation: Conversation, after: bytes | None, until: float, refused_seconds: float = math.inf) -> ms.Status:
        """The page of the pool's state that begins after this engine instance (None: the first page)."""
        question = ms.Status(conversation.request, after=after)
        async for answer in conversation.answers(question, FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS, until):
            if isinstance(answer, ms.Status) and answer.after == after and answer.lease_seconds > 0:
                return answer
            if answer is None and self.refused_seconds > refused_seconds and self.problem == KEY_REFUSED:
                break
        raise await self.unreachable()

    async def unreachable(self) -> HubUnreachable:
        """The error to raise, which says why no hub answered."""
        kind = KeyRefused if self.refused_seconds > 0 else HubUnreachable
        return kind(f"no answer from the hub at {self.connection.hub.endpoint}: {await self.explain()}")

    # ------------------------------------------------------------------ the connection

    async def _run(self, keys: ClientKeys) -> None:
        """Until it is cancelled. The context ends here, on a thread of its own: it waits for a look-up of a name that is under way."""
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        try:
            while True:
                try:
                    self._tend(context, keys)
                    keys = self._link.keys if self._link is not None else keys
                except Exception as error:
                    self.problem = f"the client's connection failed: {error!r}"
                    logger.debug("the connection failed", exc_info=True)
                    await asyncio.sleep(REDIAL_SECONDS)
                await asyncio.sleep(TEND_SECONDS)
        finally:
            self._hang_up()
            on_daemon_thread(context.term, "epochkv-context")

    def _tend(self, context: zmq.Context[zmq.Socket[bytes]], keys: ClientKeys) -> None:
        """Dial when that is due, with the keys that there are by then: they may have been rotated."""
        if self._link is not None and time.monotonic() < self._link.redial_at:
            return
        if self._link is not None:
            with contextlib.suppress(ConfigurationError):  # unreadable by now: those in use may do
                keys = self.connection.client_keys()
            if keys == self._link.keys:
                if self._link.connected:
                    self.problem = "it does not answer any more"
                self._link.redial()
                return
        self._hang_up()
        # As an agent's, but a trainer that waits dials sooner than thousands of agents that all come back.
        link = self._link = Link(context, self.connection.hub.endpoint, keys, handshake_ms=1500, reconnect_max_ms=1000)
        self._readers = [SocketReader(link.socket, lambda: self._receive(link)), SocketReader(link.monitor, lambda: self._watch(link))]

    def _hang_up(self) -> None:
        for reader in self._readers:
            reader.close()
        if self._link is not None:
            self._link.close()
        self._link, self._readers = None, []

    def _receive(self, link: Link) -> None:
        redial_at, frames = link.redial_at, link.receive()
        if frames is None:
            raise zmq.Again
        try:
            message = ms.decode(frames)
        except ms.WireError as error:
            self.problem = f"the hub's answer is not one: {error.text}"
            return
        if isinstance(message, ms.Status) and message.pool == self.connection.pool.uid and self._proven != link.keys:
            self._proven = link.keys
            for conversation in self._conversations.values():
                conversation.put(None)
        if self._take(message):
            link.redial_at = min(redial_at, time.monotonic() + REDIAL_SECONDS)  # the hub may say so once a second

    def _take(self, message: ms.Message) -> bool:
        """Returns whether this connection is of no use any more: its key was accepted when it was made, and is not now."""
        match message:
            case ms.Status(request=request) | ms.BumpStatus(request=request) | ms.Labelled(request=request):
                if conversation := self._conversations.get(request):
                    self.problem = "it answers, and has not done what was asked: its log says why"
                    conversation.put(message)
            case ms.Error(code, text):
                self.problem = f"the hub rejected a message: {text}"
                if code is ms.Refusal.POOL:
                    self._refused_since = self._refused_since or time.monotonic()
                    return True
        return False

    def _watch(self, link: Link) -> None:
        events = link.events()
        if not events:
            raise zmq.Again
        for event in events:
            match event:
                case LinkEvent.CONNECTED:
                    self.problem = "it is connected and does not answer"
                    self._refused_since = None
                    link.redial_at = math.inf  # what is asked now sets it
                    for conversation in self._conversations.values():
                        conversation.put(None)
                case LinkEvent.DISCONNECTED:
                    self.problem = "the connection is lost"
                case _:
                    self.problem = KEY_REFUSED if event is LinkEvent.REFUSED else NO_HANDSHAKE
                    self._refused_since = self._refused_since or time.monotonic()


async def resolve(host: str, port: int, seconds: float) -> list[tuple[object, ...]]:
    """The addresses of a host. The look-up is done on a thread of its own, because it cannot be ended.

    Raises:
        TimeoutError: there is no answer in time.
        OSError: it has none; the text names it.
    """
    look_up = on_daemon_thread(lambda: socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM), "epochkv-resolve")
    try:
        async with asyncio.timeout(seconds):
            return [found[4] for found in await asyncio.wrap_future(look_up)]
    except TimeoutError as error:
        raise TimeoutError(f"the name {host} was not resolved within {seconds:g} s") from error
    except (OSError, UnicodeError) as error:
        raise OSError(f"the name {host} cannot be resolved ({getattr(error, 'strerror', None) or error})") from error
