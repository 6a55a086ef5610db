"""The client's promise: an answer, or an `ApiError` of the right kind, whatever comes back."""

import asyncio
import json

import pytest
from aiohttp import web
from kubernetes.aio import client as kubernetes_client

from epochkv_operator.kube.client import AlreadyExists, ApiError, Conflict, Expired, Forbidden, Invalid, KubeClient, NotFound, Unavailable


async def ask(status: int, body: str, headers: dict[str, str]) -> object:
    """What `request` makes of one answer of a real server."""

    async def answer(_: web.Request) -> web.Response:
        return web.Response(status=status, text=body, headers=headers)

    app = web.Application()
    app.router.add_get("/api", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    configuration = kubernetes_client.Configuration(host=f"http://127.0.0.1:{runner.addresses[0][1]}")
    configuration.client_session_kwargs = {"trust_env": False}
    client = KubeClient(configuration, deadline_seconds=5)
    try:
        return await client.request("GET", "/api")
    except ApiError as error:
        return error
    finally:
        await client.close()
        await runner.cleanup()


def test_a_field_that_the_schema_lacks_is_no_outage() -> None:
    """As the API server of 1.34 answers an apply with `nodeSelectr` in a pod template: 500, for ever."""
    message = "failed to create typed patch object (ns/x; apps/v1, Kind=Deployment): .spec.template.spec.nodeSelectr: field not declared"
    error = asyncio.run(ask(500, json.dumps({"reason": "", "message": message}), {}))
    assert type(error) is Invalid


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        (400, "BadRequest", Invalid),
        (401, "Unauthorized", Forbidden),
        (403, "Forbidden", Forbidden),
        (404, "NotFound", NotFound),
        (409, "Conflict", Conflict),
        (409, "AlreadyExists", AlreadyExists),
        (410, "Expired", Expired),
        (422, "Invalid", Invalid),
        (429, "TooManyRequests", Unavailable),
        (500, "InternalError", Unavailable),
        (503, "ServiceUnavailable", Unavailable),
    ],
)
def test_every_refusal_has_its_kind_and_its_words(status: int, reason: str, kind: type[ApiError]) -> None:
    error = asyncio.run(ask(status, json.dumps({"reason": reason, "message": "because"}), {"Retry-After": "7"}))
    assert type(error) is kind
    assert (error.status, error.reason, error.message) == (status, reason, "because")
    if isinstance(error, Unavailable):
        assert error.retry_after_seconds == 7.0


@pytest.mark.parametrize("status", [200, 502])
def test_what_is_not_json_is_an_error_to_try_again_on(status: int) -> None:
    """A load balancer's page, say. The Lease must not be lost over it."""
    error = asyncio.run(ask(status, "<html>sorry</html>", {}))
    assert isinstance(error, Unavailable)
    assert "<html>sorry</html>" in str(error)


def test_an_answer_is_json_and_may_be_empty() -> None:
    assert asyncio.run(ask(200, '{"kind": "Pod"}', {})) == {"kind": "Pod"}
    assert asyncio.run(ask(200, "", {})) == {}
