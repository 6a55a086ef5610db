"""kopf watches our two kinds, and does nothing more: every handler is an `on.event` that hands the raw object to a sink.

kopf's own reconciliation is not used: create, update and delete handlers, timers, daemons, indices, finalizers, patches.
It writes to the objects that it watches and keeps state in annotations, and one 4xx ends a timer for good (measured).
kopf ends when an answer is 404, as those of a starting API server may be, or when a watch is told of an error. All that it expects is a
version that has expired, and that only in the stream. So kopf is given a session that shows it nothing else.
"""

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import aiohttp
import kopf
import structlog

from epochkv_operator.api.base import GROUP
from epochkv_operator.api.resources import PRIMARY
from epochkv_operator.kube import watch
from epochkv_operator.kube.client import LIST_CHUNK, KubeClient
from epochkv_operator.settings import LEASE, Settings

log = structlog.get_logger(__name__)
Gap = Callable[[], None]
"""Told when kopf has listed, or a watch had to begin anew: neither shows what was deleted meanwhile. Must return at once."""
_ABSENT, _GONE = 404, 410
_EXPIRED = b'{"type": "ERROR", "object": {"code": 410}}\n'


class _Backoffs:
    """Seconds between tries of a request that is refused or gets no answer, without an end.

    kopf ends when they end, and the operator with it. Rights that are missing for minutes would then end the hub, which needs few.
    """

    def __iter__(self) -> Iterator[float]:
        return itertools.chain((0.2, 0.5, 1.0), itertools.repeat(2.0))


class _NoHistory(kopf.DiffBaseStorage):
    """kopf copies what it sees, to find what has changed since. Nobody asks it."""

    def build(self, *, body: Any, extra_fields: Any = None) -> Any:
        return None

    def fetch(self, *, body: Any) -> None:
        return None

    def store(self, *, body: Any, patch: Any, essence: Any) -> None:
        """Nothing is kept."""


def kopf_settings() -> kopf.OperatorSettings:
    """Each value was measured to matter; the reasons are beside them."""
    result = kopf.OperatorSettings()
    result.networking.error_backoffs = _Backoffs()
    # A new leader waits for its first lists: one request without an answer must not take all of that time.
    result.networking.request_timeout = 10.0
    # A failed kopf otherwise lingers for ten minutes: live tasks, dead watches.
    result.process.ultimate_exiting_timeout = 5.0
    # Kinds and namespaces are fixed at start: no need to list CRDs and namespaces, so no right to.
    result.scanning.disabled = True
    result.posting.enabled = False
    # A watch that hangs ends then, and goes on at the version that it had. An integer: the API server refuses "60.0".
    result.watching.server_timeout = 60
    result.watching.client_timeout = 65.0
    result.watching.reconnect_backoff = 0.1
    result.watching.chunk_size = LIST_CHUNK
    result.queueing.exit_timeout = 0.5
    result.persistence.diffbase_storage = _NoHistory()
    return result


def kopf_registry(sink: watch.Seen, gap: Gap, client: KubeClient) -> kopf.OperatorRegistry:
    registry = kopf.OperatorRegistry()

    async def login(**_: Any) -> kopf.AiohttpSession:
        """The connection that our own client uses: one source for server, CA and credentials."""
        return kopf.AiohttpSession(server=client.configuration.host, aiohttp_session=await client.session(_begin_anew(gap)))

    async def observe(event: kopf.RawEvent, param: Any = None, **_: Any) -> None:
        sink(param, event["type"], dict(event["object"]))

    kopf.on.login(id="login", registry=registry)(login)
    for one in PRIMARY:
        kopf.on.event(one.group, one.version, one.plural, id=f"observe-{one.plural}", param=one, registry=registry)(observe)
    return registry


async def drive(sink: watch.Seen, gap: Gap, client: KubeClient, settings: Settings, started: asyncio.Event) -> None:
    """Watch until cancelled. Returns or raises when kopf gives up, upon which the process must end."""
    await kopf.operator(
        registry=kopf_registry(sink, gap, client),
        settings=kopf_settings(),
        standalone=True,
        clusterwide=not settings.watch_namespaces,
        namespaces=list(settings.watch_namespaces),
        ready_flag=started,
        # kopf would ask for the user's name, which a container with a bare user id has not.
        identity=cast(Any, LEASE),
    )


def _begin_anew(gap: Gap) -> aiohttp.ClientMiddlewareType:
    """Nothing ends kopf. Where a watch's version has expired, it watches from any, which begins with all objects that there are."""

    async def sent(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
        response, watches = await send(request), "watch" in request.url.query
        if response.status == _GONE:
            response.close()
            if not watches:
                raise aiohttp.ClientPayloadError("the list expired between two pages")  # which has kopf list from the first page
            log.info("watch restarted", path=request.url.path, reason="its version has expired")
            gap()
            request.url = request.url.without_query_params("resourceVersion")
            response = await send(request)
        if response.status in (_ABSENT, _GONE) and f"/apis/{GROUP}/" in request.url.path:
            response.close()
            raise aiohttp.ClientConnectionError("not served now")  # which has kopf send it again
        if watches:
            response.content = cast(Any, _Expiring(response.content))
        elif response.ok:
            gap()
        return response

    return sent


class _Expiring:
    """What a watch brings. Each error becomes that of an expired version, which has kopf list anew."""

    def __init__(self, content: aiohttp.StreamReader) -> None:
        self._content = content

    def __getattr__(self, name: str) -> Any:
        return getattr(self._content, name)

    async def iter_chunked(self, size: int) -> AsyncIterator[bytes]:
        """Lines. The type stands first in each."""
        rest = b""
        async for chunk in self._content.iter_chunked(size):
            *lines, rest = (rest + chunk).split(b"\n")
            for line in lines:
                if b'"ERROR"' in line[:20] and (error := json.loads(line)["object"]).get("code") != _GONE:
                    log.info("watch restarted", reason=error)
                    await asyncio.sleep(watch.RETRY_SECONDS)
                    yield _EXPIRED
                else:
                    yield line + b"\n"
