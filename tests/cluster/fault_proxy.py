"""A proxy in front of the API server that refuses, delays or loses what a test tells it to.

Plain HTTP on loopback towards the client, the admin's certificate towards the API server. Watches stream through.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp
from aiohttp import web

from hack.cluster.controlplane import ControlPlane

_REASONS = {
    **{403: "Forbidden", 404: "NotFound", 409: "Conflict", 410: "Expired", 422: "Invalid", 429: "TooManyRequests"},
    **{500: "InternalError", 503: "ServiceUnavailable"},
}
NO_ANSWER, CUT, LATE = 0, -1, -2
"""Instead of a status: nothing comes until the client goes away; the connection is closed; the API server's own answer, late."""


@dataclass(frozen=True)
class Fault:
    """What happens to one request.

    Attributes:
        status: of the answer, or one of `NO_ANSWER`, `CUT`, `LATE`.
        carried_out: it reaches the API server, and only its answer is replaced.
        seconds: pass first.
    """

    status: int
    carried_out: bool = False
    seconds: float = 0.0


Decide = Callable[[str, str], Fault | None]
WATCH, SHOW = "WATCH", "SHOW"
"""Methods of the proxy's own: a GET that watches, and a list that shows metadata only."""


def method_of(request: web.Request) -> str:
    if request.query.get("watch"):
        return WATCH
    return SHOW if "PartialObjectMetadataList" in request.headers.get("Accept", "") else request.method


def is_write(method: str, path: str) -> bool:
    """A write that is about pools and engines: not the Lease, not an Event."""
    return method not in ("GET", "HEAD", WATCH, SHOW) and "/leases" not in path and "/events" not in path


@dataclass(eq=False)
class _OpenWatch:
    """A watch that streams to the client."""

    request: web.Request
    response: web.StreamResponse
    whole_lines: bool = True


class FaultProxy:
    """Context manager. `decide(method, path)` is asked about every request, on the proxy's thread; `faults` lists what it did, and
    `requests` counts what it was asked for.
    """

    def __init__(self, plane: ControlPlane, directory: Path) -> None:
        self._plane = plane
        self._directory = directory
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._started = threading.Event()
        self._port = 0
        self._watches: set[_OpenWatch] = set()
        self.decide: Decide = lambda method, path: None
        self.faults: list[tuple[str, str, Fault]] = []
        self.requests: Counter[tuple[str, str]] = Counter()

    def __enter__(self) -> FaultProxy:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    @property
    def kubeconfig(self) -> Path:
        """Reaches the API server through this proxy, as admin."""
        path = self._directory / f"proxied-{self._port}.kubeconfig"
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{self._port}"}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        content = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context], "current-context": "c"}
        path.write_text(json.dumps({**content, "users": [{"name": "u", "user": {}}]}))
        return path

    def cut_watches(self, *, expired: bool) -> int:
        """End all watches that are open now, with an error 410 in the stream or without a word. How many they were."""
        watches = list(self._watches)
        asyncio.run_coroutine_threadsafe(self._cut(watches, expired), self._loop).result(10)
        return len(watches)

    async def _cut(self, watches: list[_OpenWatch], expired: bool) -> None:
        for watch in watches:
            if expired and watch.whole_lines:
                event = {"type": "ERROR", "object": {**_answer(410), "message": "too old resource version"}}
                await watch.response.write(json.dumps(event).encode() + b"\n")
            if watch.request.transport is not None:
                watch.request.transport.close()

    def _serve(self) -> None:
        self._loop.run_until_complete(self._run())
        self._loop.close()

    async def _run(self) -> None:
        self._stop = asyncio.Event()
        pki = self._plane.layout.pki
        context = ssl.create_default_context(cafile=str(pki.ca))
        context.load_cert_chain(pki.crt("admin"), pki.key("admin"))
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(ssl=context, limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False) as session:
            self._session = session
            app = web.Application(client_max_size=2**24)
            app.router.add_route("*", "/{path:.*}", self._handle)
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            self._port = runner.addresses[0][1]
            self._started.set()
            await self._stop.wait()
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        method = method_of(request)
        self.requests[method, request.path] += 1
        fault = self.decide(method, request.path)
        if fault is None:
            return await self._forward(request, body)
        await asyncio.sleep(fault.seconds)
        if fault.status == LATE:
            self.faults.append((method, request.path, fault))
            return await self._forward(request, body)
        if fault.carried_out:
            async with self._upstream(request, body) as answer:
                await answer.read()
        self.faults.append((method, request.path, fault))
        if fault.status == CUT and request.transport is not None:
            request.transport.close()
        if fault.status in (NO_ANSWER, CUT):
            await asyncio.Event().wait()
        headers = {"Retry-After": "1"} if fault.status == 429 else {}
        return web.json_response(_answer(fault.status), status=fault.status, headers=headers)

    async def _forward(self, request: web.Request, body: bytes) -> web.StreamResponse:
        async with self._upstream(request, body) as answer:
            response = web.StreamResponse(status=answer.status)
            for name in ("Content-Type", "Content-Encoding", "Retry-After"):
                if name in answer.headers:
                    response.headers[name] = answer.headers[name]
            await response.prepare(request)
            watch = _OpenWatch(request, response)
            if "watch" in request.query:
                self._watches.add(watch)
            try:
                async for chunk in answer.content.iter_any():
                    watch.whole_lines = chunk.endswith(b"\n")
                    await response.write(chunk)
                await response.write_eof()
            finally:
                self._watches.discard(watch)
            return response

    def _upstream(self, request: web.Request, body: bytes) -> aiohttp.client._RequestContextManager:
        headers = {name: request.headers[name] for name in ("Accept", "Content-Type", "User-Agent") if name in request.headers}
        return self._session.request(request.method, f"{self._plane.url}{request.path_qs}", data=body or None, headers=headers)


def _answer(status: int) -> dict[str, object]:
    failure = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": status}
    return {**failure, "reason": _REASONS[status], "message": "the fault proxy says no"}
