"""Reads of a cluster, shared by the checks. Whatever cannot be read is `CannotLook`, with what lets it be read."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Final, TypeVar

from kubernetes.aio.config import ConfigException

from epochkv_fence.doctor.finding import CannotLook, Finding, Level
from epochkv_fence.doctor.running import Shared
from epochkv_fence.doctor.scope import ClusterScope
from epochkv_operator.api.base import MANAGED_BY
from epochkv_operator.kube.client import ApiError, Forbidden, Json, KubeClient, NotFound, missing_kubeconfig
from epochkv_operator.kube.resources import ENGINES, LEASES, POOLS, SECRETS, Resource

T = TypeVar("T")
API_SECONDS: Final = 5.0
OFFSET_SECONDS: Final = 30.0
PART_OF: Final = "app.kubernetes.io/part-of=epochkv"
MANAGED: Final = f"app.kubernetes.io/managed-by={MANAGED_BY}"
NO_CLUSTER_FIX: Final = "export KUBECONFIG=PATH   # or give --config to look at one pool without Kubernetes"
SELF_REVIEWS: Final = "/apis/authentication.k8s.io/v1/selfsubjectreviews"


class MayNotLook(CannotLook):
    """This user lacks the right; in another place it may have it."""


class Cluster:
    """One cluster, and the part of it that is looked at."""

    def __init__(self, scope: ClusterScope) -> None:
        self.scope = scope
        self._shared = Shared()
        self._client: KubeClient | None = None

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def client(self) -> KubeClient:
        """Raises `CannotLook` where there is no usable kubeconfig."""

        async def connect() -> KubeClient:
            if (missing := missing_kubeconfig()) is not None:
                raise CannotLook(f"no cluster to look at: {missing}", NO_CLUSTER_FIX)
            try:
                self._client = await KubeClient.connect(API_SECONDS)
            except (ConfigException, OSError, ValueError) as error:
                raise CannotLook(f"no cluster to look at: {error}", NO_CLUSTER_FIX) from error
            return self._client

        return await self._shared.get("client", connect)

    def now(self) -> datetime:
        """The API server's clock, which stamps what is looked at; ours before it answered."""
        date = self._client.server_date if self._client is not None else None
        return date or datetime.now(UTC)

    # ------------------------------------------------------------------ reads

    async def request(self, verb: str, path: str, body: Json | None = None) -> Json:
        """Raises `CannotLook` for whatever but a success; `NotFound` goes through."""
        client = await self.client()
        try:
            return await client.request(verb, path, body=body)
        except NotFound:
            raise
        except ApiError as error:
            raise self._explained(error, verb, path) from error

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Json | None:
        """The object, or None."""

        async def read() -> Json | None:
            try:
                return await self.request("GET", resource.path(namespace, name))
            except NotFound:
                return None

        return await self._shared.get((resource, namespace, name), read)

    async def objects(self, resource: Resource, namespace: str | None, selector: str = "") -> list[Json]:
        """All objects that the selector takes; `namespace` None: of the whole cluster."""

        async def read() -> list[Json]:
            client = await self.client()
            try:
                return (await client.list(resource, namespace, selector))[0]
            except NotFound as error:
                raise CannotLook(f"the API server does not know {resource.plural}: the CRDs are not installed") from error
            except ApiError as error:
                raise self._explained(error, "list", resource.path(namespace)) from error

        return await self._shared.get((resource, namespace, selector), read)

    async def pools(self) -> list[Json]:
        return await self.objects(POOLS, self.scope.namespace)

    async def engines(self) -> list[Json]:
        return await self.objects(ENGINES, self.scope.namespace)

    async def secret(self, namespace: str, name: str) -> Json | None:
        return await self.get(SECRETS, namespace, name)

    async def user(self) -> str:
        """Who we are, as the API server sees it."""

        async def review() -> str:
            body = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
            answer = await self.request("POST", SELF_REVIEWS, body)
            return str(((answer.get("status") or {}).get("userInfo") or {}).get("username", ""))

        return await self._shared.get("user", review)

    async def leases(self, namespace: str | None) -> list[Json]:
        """Leases of operators, which carry our label from their first write on."""
        return await self.objects(LEASES, namespace, MANAGED)

    def _explained(self, error: ApiError, verb: str, path: str) -> CannotLook:
        if isinstance(error, Forbidden):
            return MayNotLook(f"this user may not look: {error.message}", f"kubectl auth can-i --list   # {verb} {path} is needed")
        return CannotLook(f"the API server does not answer: {error.message or error.reason}", "kubectl get --raw /readyz?verbose")


async def look_at_api(cluster: Cluster) -> list[Finding]:
    """Whether the API server answers, in what time, and who it takes us for."""
    client = await cluster.client()
    began = time.monotonic()
    version = await cluster.request("GET", "/version")
    took = time.monotonic() - began
    try:
        user = f", as {await cluster.user()}"
    except (CannotLook, NotFound):
        user = ""
    text = f"{client.configuration.host} ({version.get('gitVersion', 'unknown version')}) answers in {1000 * took:.0f} ms{user}"
    return [Finding("cluster", Level.OK, text), *judge_our_clock(client.server_date, datetime.now(UTC))]


def judge_our_clock(server: datetime | None, ours: datetime) -> list[Finding]:
    """A clock that is far off makes certificates and tokens invalid; nothing else here depends on it."""
    off = (ours - server).total_seconds() if server is not None else 0.0
    if abs(off) <= OFFSET_SECONDS:
        return []
    text = f"this machine's clock is {abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} the API server's: tokens may be refused"
    return [Finding("cluster", Level.WARNING, text, "timedatectl   # is the clock synchronised?")]


def place(obj: Json) -> str:
    """`pool rl/policy`, for people."""
    words = {"KVCachePool": "pool", "InferenceEngine": "engine"}
    kind = str(obj.get("kind", ""))
    return f"{words.get(kind, kind.lower())} {obj['metadata'].get('namespace', '')}/{obj['metadata']['name']}"


def gathered(found: Iterable[Finding], check: str, many: str) -> list[Finding]:
    """What is not well, line by line; what is well, in one line. `many`: says it of several, with `{}` for their number."""
    findings = list(found)
    well = [finding for finding in findings if finding.level is Level.OK]
    rest = [finding for finding in findings if finding.level is not Level.OK]
    if len(well) > 1:
        return [Finding(check, Level.OK, many.format(len(well))), *rest]
    return [*well, *rest]


async def each(objects: Sequence[T], look: Callable[[T], Awaitable[list[Finding]]], check: str, about: Callable[[T], str]) -> list[Finding]:
    """`look` at one after the other; what cannot be looked at is a line of its own."""
    found: list[Finding] = []
    for obj in objects:
        try:
            found += await look(obj)
        except CannotLook as error:
            found.append(Finding(check, Level.UNKNOWN, str(error), error.fix, about(obj)))
    return found
