"""A proxy in front of the API server that refuses or loses what a test tells it to.

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

_REASONS = {403: "Forbidden", 409: "Conflict", 422: "Invalid", 429: "TooManyRequests", 500: "InternalError"}


@dataclass(frozen=True)
class Fault:
    """What happens to one request. `carried_out`: it reaches the API server, and only its answer is replaced. `status` 0: no answer
    comes until the client goes away.
    """

    status: int
    carried_out: bool = False


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
        path = self._directory / "proxied.kubeconfig"
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{self._port}"}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        content = {"apiVersion": "v1", "kind": "Config", "clusters": [cluster], "contexts": [context], "current-context": "c"}
        path.write_text(json.dumps({**content, "users": [{"name": "u", "user": {}}]}))
        return path

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
        if fault.carried_out:
            async with self._upstream(request, body) as answer:
                await answer.read()
        self.faults.append((method, request.path, fault))
        if fault.status == 0:
            await asyncio.Event().wait()
        status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": fault.status}
        text = {**status, "reason": _REASONS[fault.status], "message": "the fault proxy says no"}
        headers = {"Retry-After": "1"} if fault.status == 429 else {}
        return web.json_response(text, status=fault.status, headers=headers)

    async def _forward(self, request: web.Request, body: bytes) -> web.StreamResponse:
        async with self._upstream(request, body) as answer:
            response = web.StreamResponse(status=answer.status)
            for name in ("Content-Type", "Content-Encoding", "Retry-After"):
                if name in answer.headers:
                    response.headers[name] = answer.headers[name]
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                await response.write(chunk)
            await response.write_eof()
            return response

    def _upstream(self, request: web.Request, body: bytes) -> aiohttp.client._RequestContextManager:
        headers = {name: request.headers[name] for name in ("Accept", "Content-Type", "User-Agent") if name in request.headers}
        return self._session.request(request.method, f"{self._plane.url}{request.path_qs}", data=body or None, headers=headers)
