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
from kubernetes.aio.config import ConfigException

from epochkv_operator.kube.client import KubeClient
from hack.cluster.pki import Pki

SERVER = "http://api.invalid:6443"
Asking = Callable[[KubeClient], Awaitable[Any]]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write a kubeconfig with these fields of cluster and user; no variable says anything of proxies."""
    for name in ("KUBERNETES_SERVICE_HOST", *(f"{scheme}_proxy" for scheme in ("http", "https", "no", "all"))):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    path = tmp_path / "config"
    monkeypatch.setenv("KUBECONFIG", str(path))

    def write(server: str = SERVER, user: dict[str, Any] | None = None, **cluster: Any) -> None:
        contexts = [{"name": "it", "context": {"cluster": "it", "user": "me"}}]
        clusters = [{"name": "it", "cluster": {"server": server, **{key.replace("_", "-"): value for key, value in cluster.items()}}}]
        users = [{"name": "me", "user": user or {}}]
        path.write_text(json.dumps({"current-context": "it", "contexts": contexts, "clusters": clusters, "users": users}))

    return write


@asynccontextmanager
async def serving(context: ssl.SSLContext | None = None) -> AsyncIterator[tuple[int, list[web.BaseRequest]]]:
    """Port of an HTTP server (or proxy: it is sent whole addresses), and the requests that it had."""
    asked: list[web.BaseRequest] = []

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        asked.append(request)
        return web.json_response({"gitVersion": "v1"})

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield runner.addresses[0][1], asked
    finally:
        await runner.cleanup()


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


@pytest.mark.parametrize(
    ("server", "variables", "proxy"),
    [
        ("https://10.1.2.3:6443", {}, None),
        ("https://10.1.2.3:6443", {"HTTPS_PROXY": "http://proxy:3128"}, "http://proxy:3128"),
        ("https://10.1.2.3:6443", {"https_proxy": "proxy:3128"}, "http://proxy:3128"),
        ("https://10.1.2.3:6443", {"HTTP_PROXY": "http://proxy:3128", "ALL_PROXY": "http://proxy:3128"}, None),
        ("https://10.1.2.3:6443", {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": "example.com,10.0.0.0/8"}, None),
        ("https://api.example.com", {"HTTPS_PROXY": "http://proxy:3128", "NO_PROXY": ".example.com"}, None),
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

    async def found(client: KubeClient) -> Any:
        return client.configuration.proxy

    assert asyncio.run(answered(found)) == proxy


@both
@pytest.mark.parametrize("by", ["HTTP_PROXY", "proxy-url"])
async def test_the_proxy_is_asked(by: str, ask: Asking, write: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as (port, asked):
        proxy = f"http://127.0.0.1:{port}"
        monkeypatch.setenv("HTTP_PROXY", proxy if by == "HTTP_PROXY" else "http://wrong.invalid:1")
        write(**({} if by == "HTTP_PROXY" else {"proxy_url": proxy}))
        assert await answered(ask) == {"gitVersion": "v1"}
        assert [request.headers["Host"] for request in asked] == ["api.invalid:6443"]


def test_a_proxy_that_we_cannot_use_is_named(write: Callable[..., None]) -> None:
    write(proxy_url="socks5://10.0.0.1:1080")
    with pytest.raises(ConfigException, match=r"socks5://10\.0\.0\.1:1080 is neither http"):
        asyncio.run(answered(by_client))


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


def plugin(tmp_path: Path, expires: str) -> dict[str, Any]:
    """A program that gives tokens 1, 2 and so on, as often as it runs."""
    script, version = tmp_path / "login", "client.authentication.k8s.io/v1"
    credential = {"apiVersion": version, "kind": "ExecCredential", "status": {"token": "TOKEN", "expirationTimestamp": expires}}
    script.write_text(f"#!/bin/sh\necho >> {tmp_path}/runs\necho '{json.dumps(credential)}' | sed s/TOKEN/$(wc -l < {tmp_path}/runs)/\n")
    script.chmod(0o755)
    return {"exec": {"apiVersion": version, "command": str(script), "interactiveMode": "Never"}}


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
    write(user={"exec": {"apiVersion": "client.authentication.k8s.io/v1", "command": "/bin/false"}})
    with pytest.raises(ConfigException, match=r"/bin/false, .* gave no credentials: run it by hand"):
        asyncio.run(answered(by_client))


@both
async def test_the_name_in_the_certificate(ask: Asking, write: Callable[..., None], tmp_path: Path) -> None:
    pki, context = Pki(tmp_path), ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    pki.ensure_ca()
    pki.ensure("server", "server", hosts=["DNS:api.example"])
    context.load_cert_chain(pki.crt("server"), pki.key("server"))

    async with serving(context) as (port, _):
        write(f"https://127.0.0.1:{port}", certificate_authority=str(pki.ca), tls_server_name="api.example")
        assert await answered(ask) == {"gitVersion": "v1"}
