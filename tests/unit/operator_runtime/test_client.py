"""What kubectl obeys of a kubeconfig and of the environment, our client and kopf's session obey, too."""

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.config import ConfigException

from epochkv_operator.kube.client import AlreadyExists, ApiError, Conflict, Expired, Forbidden, Invalid, KubeClient, NotFound, Unavailable
from hack.cluster.pki import Pki

SERVER = "http://api.invalid:6443"
Asking = Callable[[KubeClient], Awaitable[Any]]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write a kubeconfig with these fields of cluster and user; no variable says anything of proxies. TLS is that of Python 3.13."""
    for name in ("KUBERNETES_SERVICE_HOST", *(f"{scheme}_proxy" for scheme in ("http", "https", "no", "all"))):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    make, path = ssl.create_default_context, tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(path))

    def write(server: str = SERVER, user: dict[str, Any] | None = None, **cluster: Any) -> None:
        contexts = [{"name": "it", "context": {"cluster": "it", "user": "me"}}]
        clusters = [{"name": "it", "cluster": {"server": server, **{key.replace("_", "-"): value for key, value in cluster.items()}}}]
        users = [{"name": "me", "user": user or {}}]
        path.write_text(json.dumps({"current-context": "it", "contexts": contexts, "clusters": clusters, "users": users}))

    def strict(**given: Any) -> ssl.SSLContext:
        made = make(**given)
        made.verify_flags |= ssl.VERIFY_X509_STRICT
        return made

    monkeypatch.setattr(ssl, "create_default_context", strict)
    return write


@asynccontextmanager
async def serving(
    context: ssl.SSLContext | None = None, status: int = 200, text: str = '{"gitVersion": "v1"}', headers: dict[str, str] | None = None
) -> AsyncIterator[tuple[int, list[web.BaseRequest]]]:
    """Port of an HTTP server (or proxy: it is sent whole addresses) that always answers so, and the requests that it had."""
    asked: list[web.BaseRequest] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        asked.append(request)
        return web.Response(status=status, text=text, headers=headers, content_type="application/json")

    server = RawTestServer(answer)
    await server.start_server(ssl=context)
    async with server:
        yield server.port or 0, asked


async def by_client(client: KubeClient) -> Any:
    return await client.request("GET", "/version")


async def by_kopf(client: KubeClient) -> Any:
    async with await client.session() as session, session.get(f"{client.configuration.host}/version") as answer:
        return await answer.json()


both = pytest.mark.parametrize("ask", [by_client, by_kopf])


async def answered(ask: Asking) -> Any:
    client = await KubeClient.connect(5.0)
    try:
        return await ask(client)
    finally:
        await client.close()


async def proxy_of(client: KubeClient) -> Any:
    return client.configuration.proxy


@pytest.mark.parametrize(
    ("server", "variables", "proxy"),
    [
        ("https://10.1.2.3:6443", {}, None),
        ("https://10.1.2.3:6443", {"HTTPS_PROXY": "http://proxy:3128"}, "http://proxy:3128"),
        ("https://10.1.2.3:6443", {"https_proxy": "proxy:3128"}, "http://proxy:3128"),
        ("https://10.1.2.3:6443", {"HTTPS_PROXY": "http://proxy:3128", "https_proxy": "http://other:1"}, "http://proxy:3128"),
        ("https://10.1.2.3:6443", {"HTTPS_PROXY": "http://proxy:3128", "https_proxy": ""}, "http://proxy:3128"),
        ("https://10.1.2.3:6443", {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "a.b", "no_proxy": "10.1.2.3"}, "http://proxy:3128"),
        ("https://10.1.2.3:6443", {"HTTP_PROXY": "http://proxy:3128", "ALL_PROXY": "http://proxy:3128"}, None),
        ("https://10.1.2.3:6443", {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "example.com,10.0.0.0/8"}, None),
        ("https://api.example.com", {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": ".example.com"}, None),
        ("https://api.example.com", {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "le.com, *.org"}, "http://proxy:3128"),
        ("https://api.example.com", {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "*.Example.com"}, None),
        ("https://10.1.2.3:6443", {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "10.1.2.3:6443"}, None),
        ("https://[fd00::1]:6443", {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "fd00::/8"}, None),
        # As of kind, and of a tunnel.
        ("https://127.0.0.1:6443", {"HTTPS_PROXY": "http://proxy:3128"}, None),
        ("https://localhost:6443", {"HTTPS_PROXY": "http://proxy:3128"}, None),
        ("https://[::1]:6443", {"HTTPS_PROXY": "http://proxy:3128"}, None),
    ],
)
def test_which_proxy_the_environment_gives(
    server: str, variables: dict[str, str], proxy: str | None, write: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write(server)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert asyncio.run(answered(proxy_of)) == proxy


@both
@pytest.mark.parametrize("by", ["HTTP_PROXY", "proxy-url"])
async def test_the_proxy_is_asked(by: str, ask: Asking, write: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (port, asked):
        proxy = f"http://127.0.0.1:{port}"
        monkeypatch.setenv("HTTP_PROXY", proxy if by == "HTTP_PROXY" else "http://wrong.invalid:1")
        write(**({} if by == "HTTP_PROXY" else {"proxy_url": proxy}))
        assert await answered(ask) == {"gitVersion": "v1"}
        assert [request.headers["Host"] for request in asked] == ["api.invalid:6443"]


@both
@pytest.mark.parametrize("host", ["https://10.1.2.3:6443", ""])
async def test_in_a_cluster_no_proxy_counts(host: str, ask: Asking, write: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (port, _):
        monkeypatch.delenv("KUBECONFIG")
        monkeypatch.setenv("HOME", "/nowhere")
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.1.2.3")
        for name in ("HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")

        def load(client_configuration: Any) -> None:
            client_configuration.host = host or f"http://127.0.0.1:{port}"

        monkeypatch.setattr(kubernetes_config, "load_incluster_config", load)
        assert await answered(proxy_of if host else ask) == (None if host else {"gitVersion": "v1"})


def test_a_proxy_that_we_cannot_use_is_named(write: Callable[..., None]) -> None:
    write(proxy_url="socks5://me:secret@10.0.0.1:1080")
    with pytest.raises(ConfigException, match=r"socks5://10\.0\.0\.1:1080 is neither http"):
        asyncio.run(answered(by_client))


@pytest.mark.parametrize("text", ["", "no mapping", "a: ["])
def test_a_file_that_is_no_kubeconfig_is_named(write: Callable[..., None], text: str, tmp_path: Path) -> None:
    (tmp_path / "config").write_text(text)
    with pytest.raises(ConfigException, match="config is no kubeconfig: "):
        asyncio.run(KubeClient.connect())


@both
async def test_the_user_that_it_acts_as(ask: Asking, write: Callable[..., None]) -> None:
    acts = {"as": "robot", "as-uid": "7", "as-groups": ["dev", "ops"], "as-user-extra": {"acme.com/team": ["a", "b"]}}

    async with serving() as (port, asked):
        write(f"http://127.0.0.1:{port}", {"token": "secret", **acts})
        await answered(ask)
        headers = asked[0].headers
        assert headers["Authorization"] == "Bearer secret"
        assert (headers["Impersonate-User"], headers["Impersonate-Uid"]) == ("robot", "7")
        assert headers.getall("Impersonate-Group") == ["dev", "ops"]
        assert headers.getall("Impersonate-Extra-acme.com%2Fteam") == ["a", "b"]


async def test_in_a_pod_a_kubeconfig_comes_first_and_a_file_of_a_token_ends_with_its_line(
    write: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving() as (port, asked):
        write(f"http://127.0.0.1:{port}", {"tokenFile": "token"})
        (tmp_path / "token").write_text("secret\n")
        (tmp_path / ".kube").symlink_to(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.1.2.3")
        monkeypatch.delenv("KUBECONFIG")
        await answered(by_client)
        assert asked[0].headers["Authorization"] == "Bearer secret"


def plugin(tmp_path: Path, expires: str) -> dict[str, Any]:
    """A program that gives tokens 1, 2 and so on, as often as it runs."""
    script, version = tmp_path / "login", "client.authentication.k8s.io/v1"
    credential = {"apiVersion": version, "kind": "ExecCredential", "status": {"token": "TOKEN", "expirationTimestamp": expires}}
    script.write_text(f"#!/bin/sh\necho >> {tmp_path}/runs\necho '{json.dumps(credential)}' | sed s/TOKEN/$(wc -l < {tmp_path}/runs)/\n")
    script.chmod(0o755)
    return {"exec": {"apiVersion": version, "command": "./login", "interactiveMode": "Never"}}


@pytest.mark.parametrize(("expires", "tokens"), [("2999-01-01T00:00:00Z", ["1", "1", "1"]), ("2001-01-01T00:00:00Z", ["2", "3", "4"])])
async def test_a_plugin_runs_again_when_its_token_is_over(
    expires: str, tokens: list[str], write: Callable[..., None], tmp_path: Path
) -> None:
    async with serving() as (port, asked):
        write(f"http://127.0.0.1:{port}", plugin(tmp_path, expires))

        async def ask(client: KubeClient) -> None:
            for one in (by_client, by_client, by_kopf):
                await one(client)

        await answered(ask)
        assert [request.headers["Authorization"] for request in asked] == [f"Bearer {token}" for token in tokens]


def test_a_plugin_that_fails_is_named(write: Callable[..., None]) -> None:
    for hint, remedy in ((None, "run it by hand"), ("apt install it", "apt install it")):
        write(user={"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "/bin/false", "installHint": hint}})
        with pytest.raises(ConfigException, match=f"/bin/false, .* gave no credentials: {remedy}"):
            asyncio.run(answered(by_client))


@both
async def test_the_certificate_and_the_name_in_it(ask: Asking, write: Callable[..., None], tmp_path: Path) -> None:
    """Without an Authority Key Identifier, which Python 3.13 wants by default. Those of EKS and of old CAs have none either."""
    pki, context = Pki(tmp_path), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    pki.ensure_ca()
    pki.ensure("server", "server", hosts=["DNS:api.example\nauthorityKeyIdentifier=none"])
    context.load_cert_chain(pki.crt("server"), pki.key("server"))

    async with serving(context) as (port, _):
        write(f"https://127.0.0.1:{port}", certificate_authority=str(pki.ca), tls_server_name="api.example")
        assert await answered(ask) == {"gitVersion": "v1"}


# ----------------------------------------------------------------------------------------------------------- answers
async def ask(status: int, body: str, headers: dict[str, str]) -> object:
    """What `request` makes of one answer of a real server."""
    async with serving(None, status, body, headers) as (port, _):
        client = KubeClient(kubernetes_client.Configuration(host=f"http://127.0.0.1:{port}"), deadline_seconds=5)
        try:
            return await client.request("GET", "/api")
        except ApiError as error:
            return error
        finally:
            await client.close()


@pytest.mark.parametrize(
    ("status", "reason", "kind"),
    [
        *((400, "BadRequest", Invalid), (401, "Unauthorized", Forbidden), (403, "Forbidden", Forbidden), (404, "NotFound", NotFound)),
        *((409, "Conflict", Conflict), (409, "AlreadyExists", AlreadyExists), (410, "Expired", Expired), (422, "Invalid", Invalid)),
        *((429, "TooManyRequests", Unavailable), (500, "InternalError", Unavailable), (503, "ServiceUnavailable", Unavailable)),
        # An apply of a field that the schema lacks. This is the message of 1.34, for ever: no outage.
        (500, "failed to create typed patch object (ns/x; apps/v1, Kind=Deployment): .spec.nodeSelectr: field not declared", Invalid),
    ],
)
def test_every_refusal_has_its_kind_and_its_words(status: int, reason: str, kind: type[ApiError]) -> None:
    error = asyncio.run(ask(status, json.dumps({"reason": reason, "message": f"because {reason}"}), {"Retry-After": "7"}))
    assert type(error) is kind
    assert (error.status, error.reason, error.message) == (status, reason, f"because {reason}")
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
