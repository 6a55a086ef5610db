"""The operator's own `/livez`, `/readyz` and `/metrics`.

They run on the event loop that they judge: a blocked loop answers nothing, which is the right answer.
kopf's own liveness endpoint is not used: it only proves that its reporting task runs.
"""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from epochkv_operator.metrics import REGISTRY

#: Returns what is wrong, or None.
Check = Callable[[], str | None]


class Probes:
    """Checks by name; `serve` binds two small HTTP servers."""

    def __init__(self) -> None:
        self.live: dict[str, Check] = {}
        self.ready: dict[str, Check] = {}
        self.before_metrics: Callable[[], None] = lambda: None
        self._runners: list[web.AppRunner] = []

    async def serve(self, probe_bind: str, metrics_bind: str) -> None:
        """Bind and answer until `close`.

        Raises:
            OSError: a port is taken.
        """
        probe_app = web.Application()
        probe_app.router.add_get("/livez", lambda _: self._answer(self.live))
        probe_app.router.add_get("/readyz", lambda _: self._answer(self.ready))
        metrics_app = web.Application()
        metrics_app.router.add_get("/metrics", self._metrics)
        for app, bind in ((probe_app, probe_bind), (metrics_app, metrics_bind)):
            runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.5)
            await runner.setup()
            host, port = bind.rsplit(":", 1)
            await web.TCPSite(runner, host, int(port)).start()
            self._runners.append(runner)

    async def close(self) -> None:
        for runner in self._runners:
            await runner.cleanup()

    async def _metrics(self, _: web.Request) -> web.Response:
        self.before_metrics()
        return web.Response(body=generate_latest(REGISTRY), headers={"Content-Type": CONTENT_TYPE_LATEST})

    @staticmethod
    async def _answer(checks: dict[str, Check]) -> web.Response:
        results = {name: check() for name, check in checks.items()}
        lines = [f"[{'-' if problem else '+'}] {name}: {problem or 'ok'}" for name, problem in results.items()]
        return web.Response(text="\n".join(lines) + "\n", status=503 if any(results.values()) else 200)
