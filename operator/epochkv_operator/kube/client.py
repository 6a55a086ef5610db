"""A thin client over `kubernetes.aio`: JSON in, JSON out, a deadline on every call, one exception type per kind of answer."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import json
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, Final, cast
from urllib.parse import quote, urlencode, urlsplit

import aiohttp
import yaml
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.config import kube_config
from multidict import CIMultiDict

from epochkv_operator import metrics
from epochkv_operator.api.base import MANAGED_BY
from epochkv_operator.api.resources import ObjectRef, Resource

Json = dict[str, Any]

MERGE_PATCH = "application/merge-patch+json"
APPLY_PATCH = "application/apply-patch+yaml"
JSON_PATCH = "application/json-patch+json"
STRATEGIC_MERGE_PATCH = "application/strategic-merge-patch+json"
UNTYPED = "failed to create typed patch object"
"""How the API server answers, with 500, to an apply of a field that the schema does not have."""
LIST_CHUNK = 50  # each may have more than 1 MiB: anybody may give an object the label by which we list
JSON = "application/json"
SHOWN_ACCEPT = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"


class ApiError(Exception):
    """The API server refused or could not be asked. `status` is 0 when there was no answer at all."""

    def __init__(self, status: int, reason: str, message: str, request: str) -> None:
        super().__init__(f"{request}: {status or 'no answer'} {reason}: {message}")
        self.status = status
        self.reason = reason
        self.message = message


class NotFound(ApiError):
    """404: the object, its namespace or its kind is not there."""


class Conflict(ApiError):
    """409: the object changed since it was read (or a precondition failed)."""


class AlreadyExists(Conflict):
    """409 on create."""


class Invalid(ApiError):
    """400 or 422: the request is wrong; trying again does not help."""


class Forbidden(ApiError):
    """401 or 403: RBAC, quota or admission. Also what a starting API server answers for about two seconds."""


class Expired(ApiError):
    """410: the API server has forgotten the version that a watch, or the next page of a list, would go on from."""

    STATUS = 410


class Unavailable(ApiError):
    """No answer, a timeout, 429 or 5xx: try again later. `retry_after_seconds` is what the server asked for."""

    retry_after_seconds: float | None = None


_KINDS: Final[dict[int, type[ApiError]]] = {
    400: Invalid,
    401: Forbidden,
    403: Forbidden,
    404: NotFound,
    409: Conflict,
    Expired.STATUS: Expired,
    422: Invalid,
}


def _raise(status: int, body: bytes, request: str, retry_after: str | None) -> None:
    reason, message = "", body[:500].decode(errors="replace")
    with contextlib.suppress(ValueError, AttributeError):
        document = json.loads(body)
        reason, message = str(document.get("reason", "")), str(document.get("message", message))
    kind = _KINDS.get(status, Unavailable)
    if kind is Conflict and reason == "AlreadyExists":
        kind = AlreadyExists
    if status == 500 and UNTYPED in message:
        kind = Invalid
    error = kind(status, reason, message, request)
    if isinstance(error, Unavailable) and retry_after and retry_after.isdigit():
        error.retry_after_seconds = float(retry_after)
    raise error


def _set_field(name: str, value: Any) -> list[Json]:
    """A field of a merge patch as operations of a JSON patch: null removes, at the top and one level below."""
    path = f"/status/{name}"
    if isinstance(value, dict):
        value = {key: item for key, item in value.items() if item is not None}
    if value is not None:
        return [{"op": "add", "path": path, "value": value}]
    return [{"op": "add", "path": path, "value": ""}, {"op": "remove", "path": path}]  # an absent field cannot be removed


def _asked_again(check: Callable[[str, str], None]) -> aiohttp.TraceConfig:
    """A connection may take as long as the deadline, and this process may be frozen meanwhile: look again before the first byte."""

    async def about_to_send(_session: object, _context: object, sent: aiohttp.TraceRequestHeadersSentParams) -> None:
        if sent.method not in ("GET", "HEAD"):
            check(sent.method, sent.url.path)

    trace = aiohttp.TraceConfig()
    trace.on_request_headers_sent.append(about_to_send)
    return trace


def _kubeconfig() -> str:
    """Paths of kubeconfigs, as `KUBECONFIG` has them. Empty: there is none, and this is a pod."""
    paths = os.environ.get("KUBECONFIG") or "~/.kube/config"
    if any(os.path.exists(os.path.expanduser(path)) for path in paths.split(os.pathsep)):
        return paths
    if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
        return ""
    raise kubernetes_config.ConfigException(f"{paths.replace(os.pathsep, ' and ')} not found")


def _proxy(server: str) -> str | None:
    """What the environment says, as kubectl reads it: upper case first; `NO_PROXY` has names (of their subdomains, too), addresses and
    ranges, each with a port or without. This machine needs no proxy."""
    url = urlsplit(server)
    proxy, without = (os.environ.get(name.upper()) or os.environ.get(name, "") for name in (f"{url.scheme}_proxy", "no_proxy"))
    host, beside = url.hostname or "", ["localhost", "127.0.0.0/8", "::1", *(rule.strip() for rule in without.lower().split(","))]
    port = f":{url.port or (80 if url.scheme == 'http' else 443)}"
    if not proxy or any(_is_meant(host, rule) or _is_meant(host, rule.removesuffix(port)) for rule in beside):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"


def _is_meant(host: str, rule: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(rule.strip("[]"), strict=False)
    except ValueError:
        name = rule.removeprefix("*")
        return rule == "*" or host == name or (name.strip(".") != "" and host.endswith(f".{name.removeprefix('.')}"))


def _impersonation(user: Json) -> Iterator[tuple[str, str]]:
    """Headers for what the kubeconfig's user acts as; the library leaves that out."""
    yield from ((f"Impersonate-{name}", user[key]) for name, key in (("User", "as"), ("Uid", "as-uid")) if user.get(key))
    yield from (("Impersonate-Group", group) for group in user.get("as-groups") or ())
    for name, values in (user.get("as-user-extra") or {}).items():
        yield from ((f"Impersonate-Extra-{quote(name, safe='')}", value) for value in values)


async def _run_plugin_again(loader: Any, configuration: Any) -> None:
    """Before a request: the library looks when the plugin's token is over."""
    if hasattr(loader, "exec_plugin_expiry") and await loader.load_from_exec_plugin():
        configuration.api_key["BearerToken"] = loader.token


class KubeClient:
    """Requests to one API server. Not bound to a namespace; every method may raise `ApiError` and nothing else.

    Args:
        headers: of every request.
    """

    def __init__(self, configuration: Any, deadline_seconds: float = 10.0, headers: Sequence[tuple[str, str]] = ()) -> None:
        self.configuration = configuration
        self._headers = [*headers, ("User-Agent", MANAGED_BY)]
        self.may_not_write: Callable[[], str | None] = lambda: None
        """Why nothing may be written now, or None. Asked before each write, and again when its connection stands."""
        self.deadline_seconds = deadline_seconds
        self.server_date: datetime | None = None
        """The API server's clock when it answered last, to the second."""
        configuration.client_session_kwargs = {"trust_env": False, "trace_configs": [_asked_again(self._check_leading)]}
        configuration.connection_pool_maxsize = 0  # each watch holds a connection: there is no most
        configuration.disable_strict_ssl_verification = True  # as kubectl: Python 3.13 refuses certificates such as EKS's
        self._api = kubernetes_client.ApiClient(configuration)
        self._api.user_agent = MANAGED_BY

    @classmethod
    async def connect(cls, deadline_seconds: float = 10.0) -> KubeClient:
        """Configure from `KUBECONFIG` or `~/.kube/config`, as kubectl does; else from the pod's service account, where no proxy counts.

        Raises:
            kubernetes.aio.config.ConfigException: neither is there or usable.
        """
        configuration = kubernetes_client.Configuration()
        if not (paths := _kubeconfig()):
            kubernetes_config.load_incluster_config(client_configuration=configuration)
            return cls(configuration, deadline_seconds)
        try:
            loader = kube_config._get_kube_config_loader_for_yaml_file(paths, persist_config=True)
            user = loader._user.value if loader._user else {}
            if os.path.dirname((user.get("exec") or {}).get("command") or ""):  # it begins at its kubeconfig's folder
                user["exec"]["command"] = os.path.join(loader._get_base_path(loader._user.path), user["exec"]["command"])
            await loader.load_and_set(configuration)
        except (TypeError, AttributeError, yaml.YAMLError) as error:
            raise kubernetes_config.ConfigException(f"{paths} is no kubeconfig: {error}") from error
        configuration.api_key = {name: key.strip() for name, key in configuration.api_key.items()}  # a file's ends with its line
        if plugin := user.get("exec"):
            if not (configuration.api_key or configuration.cert_file):
                remedy = plugin.get("installHint") or "run it by hand"
                text = f"{plugin.get('command')}, which the kubeconfig names, gave no credentials: {remedy}"
                raise kubernetes_config.ConfigException(text)
            configuration.refresh_api_key_hook = partial(_run_plugin_again, loader)
        configuration.proxy = configuration.proxy or _proxy(configuration.host)
        if configuration.proxy and not configuration.proxy.startswith(("http://", "https://")):
            proxy = urlsplit(configuration.proxy)
            at = f"{proxy.scheme}://{proxy.netloc.rpartition('@')[2]}"  # without its password
            raise kubernetes_config.ConfigException(
                f"the proxy {at} is neither http:// nor https://: run `kubectl proxy`, with a kubeconfig for its address"
            )
        return cls(configuration, deadline_seconds, list(_impersonation(user)))

    async def session(self, *middlewares: aiohttp.ClientMiddlewareType) -> aiohttp.ClientSession:
        """For others that talk to this API server: the same way to it, and fresh credentials. Whoever asks closes it."""
        rest, headers = self._api.rest_client, await self._with_credentials()
        name = self.configuration.tls_server_name

        async def named(request: aiohttp.ClientRequest, send: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
            request.server_hostname = name
            return await send(request)

        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=rest.ssl_context),
            headers=headers,
            middlewares=(*middlewares, *((named,) if name else ())),
            proxy=rest.proxy,
        )

    async def _with_credentials(self, **headers: str) -> CIMultiDict[str]:
        """Headers of a request. Tokens that rotate are read again when that is due."""
        given = CIMultiDict([*self._headers, *headers.items()])
        await self._api.update_params_for_auth(given, [], ["BearerToken"], "/", "GET", None)
        return given

    async def close(self) -> None:
        await self._api.close()

    async def request(
        self,
        verb: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | list[Json] | None = None,
        content_type: str = JSON,
        accept: str = JSON,
        deadline_seconds: float | None = None,
    ) -> Json:
        """One call, one answer, within a deadline (seconds)."""
        if verb != "GET":
            self._check_leading(verb, path)
        request, seconds = f"{verb} {path}", deadline_seconds or self.deadline_seconds
        try:
            async with asyncio.timeout(seconds):
                headers = await self._with_credentials(**{"Accept": accept, "Content-Type": content_type})
                url = self.configuration.host + path + (f"?{urlencode(query)}" if query else "")
                response = await self._api.rest_client.request(
                    verb, url, headers=headers, body=body, _request_timeout=aiohttp.ClientTimeout(total=seconds)
                )
                data = cast(bytes, await response.read())
        except TimeoutError as error:
            metrics.API_REQUESTS.labels(verb=verb, code="timeout").inc()
            raise Unavailable(0, "Timeout", f"no answer within {seconds:g} s", request) from error
        except (aiohttp.ClientError, OSError) as error:
            metrics.API_REQUESTS.labels(verb=verb, code="unreachable").inc()
            raise Unavailable(0, "Unreachable", str(error) or type(error).__name__, request) from error
        metrics.API_REQUESTS.labels(verb=verb, code=str(response.status)).inc()
        with contextlib.suppress(KeyError, ValueError):
            self.server_date = parsedate_to_datetime(response.headers["Date"])
        if not 200 <= response.status < 300:
            _raise(response.status, data, request, response.headers.get("Retry-After"))
        try:
            return cast(Json, json.loads(data)) if data else {}
        except ValueError as error:  # a proxy in between, say
            raise Unavailable(response.status, "NotJson", data[:200].decode(errors="replace"), request) from error

    def _check_leading(self, verb: str, path: str) -> None:
        if (reason := self.may_not_write()) is not None:
            raise Unavailable(0, "NotLeading", reason, f"{verb} {path}")

    async def get(self, resource: Resource, namespace: str | None, name: str, deadline_seconds: float | None = None) -> Json:
        """A quorum read: no resourceVersion parameter, so the answer is linearizable."""
        return await self.request("GET", resource.path(namespace, name), deadline_seconds=deadline_seconds)

    async def pages(
        self, resource: Resource, namespace: str | None, label_selector: str = "", accept: str = JSON
    ) -> AsyncIterator[tuple[list[Json], int]]:
        """All objects of a kind (namespace None: of the whole cluster), page by page, and the version of the list."""
        query = {"limit": str(LIST_CHUNK), **({"labelSelector": label_selector} if label_selector else {})}
        while True:
            page = await self.request("GET", resource.path(namespace), query=query, accept=accept)
            items, metadata = page.get("items") or [], page.get("metadata", {})
            for item in items:
                item.setdefault("kind", resource.kind)
                item.setdefault("apiVersion", resource.api_version)
            yield items, int(metadata.get("resourceVersion") or 0)
            if not (token := metadata.get("continue")):
                return
            query["continue"] = token

    async def list(self, resource: Resource, namespace: str | None, label_selector: str = "") -> tuple[list[Json], int]:
        """All objects of a kind of which there are few, and the version of the list."""
        pages = [page async for page in self.pages(resource, namespace, label_selector)]
        return [item for items, _ in pages for item in items], pages[-1][1]

    async def shown(self, resource: Resource, namespace: str | None, label_selector: str = "") -> tuple[dict[str, int], int]:
        """Versions of all objects of a kind by uid, and the version of the list. Nothing else of them is sent but metadata."""
        found: dict[str, int] = {}
        version = 0
        async for items, of_list in self.pages(resource, namespace, label_selector, SHOWN_ACCEPT):
            version = of_list
            found |= {item["metadata"]["uid"]: int(item["metadata"]["resourceVersion"]) for item in items}
        return found, version

    async def create(self, resource: Resource, namespace: str, body: Json) -> Json:
        return await self.request("POST", resource.path(namespace), body=body, query={"fieldManager": MANAGED_BY})

    async def replace(self, resource: Resource, namespace: str, body: Json, deadline_seconds: float | None = None) -> Json:
        """PUT; compare-and-swap when the body carries metadata.resourceVersion."""
        path = resource.path(namespace, body["metadata"]["name"])
        return await self.request("PUT", path, body=body, deadline_seconds=deadline_seconds)

    async def apply(self, resource: Resource, namespace: str, body: Json) -> Json:
        """Server-side apply under the operator's one field manager, taking conflicting fields over."""
        return await self.request(
            "PATCH",
            resource.path(namespace, body["metadata"]["name"]),
            query={"fieldManager": MANAGED_BY, "force": "true"},
            body=body,
            content_type=APPLY_PATCH,
        )

    async def patch_status(self, ref: ObjectRef, resource_version: str, status: Json, deadline_seconds: float | None = None) -> Json:
        """Merge-patch of the status, accepted only at `resource_version` (raises `Conflict` otherwise)."""
        body = {"metadata": {"resourceVersion": resource_version}, "status": status}
        return await self._patch_status(ref, body, MERGE_PATCH, deadline_seconds)

    async def patch_status_fields(self, ref: ObjectRef, seen: Json, status: Json, deadline_seconds: float | None = None) -> Json:
        """Set fields of an existing status: None removes a field, and an object replaces the one that is there.

        The write is accepted only by the object with this uid, and only while the fields `seen` hold (None: the field is absent).

        The API server tests and writes the newest object, and tries again by itself. So writes to other fields do not conflict.

        Raises:
            Invalid: a field has changed, or a namesake with another uid stands there.
            Conflict: the API server gave up trying.
        """
        operations: list[Json] = [{"op": "test", "path": "/metadata/uid", "value": ref.uid}]
        operations += [{"op": "test", "path": f"/status/{name}", "value": value} for name, value in seen.items()]
        operations += [operation for name, value in status.items() for operation in _set_field(name, value)]
        return await self._patch_status(ref, operations, JSON_PATCH, deadline_seconds)

    async def patch_condition(self, ref: ObjectRef, condition: Json) -> Json:
        """Set a condition of an object of a kind of Kubernetes' own. `Conflict`: a namesake with another uid stands there."""
        body = {"metadata": {"uid": ref.uid}, "status": {"conditions": [condition]}}
        return await self._patch_status(ref, body, STRATEGIC_MERGE_PATCH, None)

    async def _patch_status(self, ref: ObjectRef, body: Any, content_type: str, deadline_seconds: float | None) -> Json:
        path, query = ref.resource.path(ref.namespace, ref.name, "status"), {"fieldManager": MANAGED_BY}
        return await self.request("PATCH", path, query=query, body=body, content_type=content_type, deadline_seconds=deadline_seconds)

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str) -> None:
        """Delete exactly this object: a namesake with another uid is left alone (`Conflict`)."""
        options = {"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        await self.request("DELETE", resource.path(namespace, name), body=options)
        metrics.API_WRITES.labels(kind=resource.kind, operation="delete").inc()

    async def watch(
        self, resource: Resource, namespace: str | None, resource_version: str, label_selector: str = ""
    ) -> AsyncIterator[Json]:
        """Watch events as they come, and bookmarks, for at most a minute."""
        path = resource.path(namespace)
        given = {"watch": "true", "resourceVersion": resource_version, "timeoutSeconds": "60", "allowWatchBookmarks": "true"}
        query = urlencode({**given, "labelSelector": label_selector} if label_selector else given)
        url, timeout = f"{self.configuration.host}{path}?{query}", aiohttp.ClientTimeout(total=65)
        rest = b""  # an object may be longer than what aiohttp takes for a line
        try:
            headers = await self._with_credentials(Accept=JSON)
            response = await self._api.rest_client.request("GET", url, headers=headers, _request_timeout=timeout)
            if response.status != 200:
                _raise(response.status, cast(bytes, await response.read()), f"WATCH {path}", None)
            async for chunk in response.response.content.iter_any():
                *lines, rest = (rest + chunk).split(b"\n")
                for line in filter(None, lines):
                    yield json.loads(line)
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unavailable(0, "Unreachable", str(error) or type(error).__name__, f"WATCH {path}") from error
