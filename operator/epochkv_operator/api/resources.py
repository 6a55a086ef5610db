"""The kinds this operator reads or writes, their REST paths, and what the operator has to be allowed.

One table, because watches, applies and prunes must agree on it. `rights` follows from it: the chart's roles are made from it
(`hack/sync_chart.py`), tests run with them, and `epochkv doctor` asks for them. Discovery (`/api`, `/apis`) comes with
`system:discovery`. There is no right on `finalizers`: no owner reference sets `blockOwnerDeletion`.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final, NamedTuple

from epochkv_operator.api.base import GROUP, MANAGED_BY, MANAGED_BY_LABEL, POOL_LABEL, VERSION
from epochkv_operator.settings import HUB_SECRET, LEASE

#: Server-side filter of every child watch: nothing that is not ours is ever read.
CHILD_SELECTOR: Final = f"{MANAGED_BY_LABEL}={MANAGED_BY}"


class Resource(NamedTuple):
    """One kind of the API: `group` is empty for the core group."""

    group: str
    version: str
    plural: str
    kind: str

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}" if self.group else self.version

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        """REST path of a collection (`name` None; cluster-wide when `namespace` is None, too) or of one object."""
        base = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        place = f"namespaces/{namespace}" if namespace is not None else None
        return "/".join(part for part in (base, place, self.plural, name, subresource) if part)


class ObjectRef(NamedTuple):
    """One object in one life: a recreated namesake has another uid."""

    resource: Resource
    namespace: str
    name: str
    uid: str

    def __str__(self) -> str:
        return f"{self.resource.kind} {self.namespace}/{self.name} (uid {self.uid})"


def identity(obj: dict[str, Any]) -> tuple[str, str, str]:
    """Kind, namespace and name of an object, live or wanted."""
    return obj["kind"], obj["metadata"]["namespace"], obj["metadata"]["name"]


def micro_time() -> str:
    """Now, as a `MicroTime` of the API."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def ref_of(obj: dict[str, Any]) -> ObjectRef:
    metadata = obj["metadata"]
    return ObjectRef(BY_KIND[obj["kind"]], metadata["namespace"], metadata["name"], metadata["uid"])


POOLS: Final = Resource(GROUP, VERSION, "kvcachepools", "KVCachePool")
ENGINES: Final = Resource(GROUP, VERSION, "inferenceengines", "InferenceEngine")
DEPLOYMENTS: Final = Resource("apps", "v1", "deployments", "Deployment")
STATEFULSETS: Final = Resource("apps", "v1", "statefulsets", "StatefulSet")
SERVICES: Final = Resource("", "v1", "services", "Service")
CONFIGMAPS: Final = Resource("", "v1", "configmaps", "ConfigMap")
SERVICE_ACCOUNTS: Final = Resource("", "v1", "serviceaccounts", "ServiceAccount")
PDBS: Final = Resource("policy", "v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORK_POLICIES: Final = Resource("networking.k8s.io", "v1", "networkpolicies", "NetworkPolicy")
PODS: Final = Resource("", "v1", "pods", "Pod")
LEADER_WORKER_SETS: Final = Resource("leaderworkerset.x-k8s.io", "v1", "leaderworkersets", "LeaderWorkerSet")
POD_MONITORS: Final = Resource("monitoring.coreos.com", "v1", "podmonitors", "PodMonitor")
SECRETS: Final = Resource("", "v1", "secrets", "Secret")
NAMESPACES: Final = Resource("", "v1", "namespaces", "Namespace")
LEASES: Final = Resource("coordination.k8s.io", "v1", "leases", "Lease")
EVENTS: Final = Resource("events.k8s.io", "v1", "events", "Event")

#: Objects a user owns.
PRIMARY: Final = (POOLS, ENGINES)
#: Objects this operator owns, applies and prunes.
CHILDREN: Final = (DEPLOYMENTS, STATEFULSETS, SERVICES, CONFIGMAPS, SERVICE_ACCOUNTS, PDBS, NETWORK_POLICIES)
#: Children of kinds that other projects bring: a cluster may not serve them.
OPTIONAL: Final = (LEADER_WORKER_SETS, POD_MONITORS)
# Secrets are read one by one, never listed or watched: that keeps the cluster role free of `list secrets`.
BY_KIND: Final = {resource.kind: resource for resource in (*PRIMARY, *CHILDREN, PODS, *OPTIONAL, SECRETS, LEASES, EVENTS)}


def selector(resource: Resource) -> str:
    """Of what the operator lists and watches of a kind; of pods, those that we make and those that join a pool."""
    return "" if resource in PRIMARY else POOL_LABEL if resource is PODS else CHILD_SELECTOR


READ: Final = ("get", "list", "watch")
KEEP: Final = ("get", "list", "watch", "create", "patch", "delete")
"""`delete` also where only the garbage collector deletes: `OwnerReferencesPermissionEnforcement` asks for it to give an owner back."""


class Right(NamedTuple):
    """One verb on one resource. `namespace` None: in the whole cluster. `name`: on this object alone; empty: on all."""

    group: str
    resource: str
    verb: str
    namespace: str | None
    name: str = ""
    subresource: str = ""

    @property
    def optional(self) -> bool:
        """Only where `spec.serve` is used: the chart has a value for it, and the condition `ServingGate` says where it is missing."""
        return (self.resource, self.subresource) == (PODS.plural, "status")

    def __str__(self) -> str:
        plural = f"{self.resource}.{self.group}" if self.group else self.resource
        what = f"{plural}/{self.subresource}" if self.subresource else plural
        where = f" in {self.namespace}" if self.namespace is not None else ""
        return f"{self.verb} {what}{f' {self.name}' if self.name else ''}{where}"


def rights(home: str, scopes: Sequence[str | None]) -> list[Right]:
    """All that an operator needs that runs in `home` and serves `scopes` (None: the whole cluster)."""
    return [
        *(right for scope in scopes for right in _served(scope)),
        *_rights(home, LEASES, ("get", "update"), LEASE),
        *_rights(home, LEASES, ("create",)),
        *_rights(home, SECRETS, ("get", "delete"), HUB_SECRET),
        *_rights(home, SECRETS, ("create",)),
        *_rights(home, EVENTS, ("create",)),
    ]


def _rights(namespace: str | None, resource: Resource, verbs: Iterable[str], name: str = "", subresource: str = "") -> list[Right]:
    return [Right(resource.group, resource.plural, verb, namespace, name, subresource) for verb in verbs]


def _served(scope: str | None) -> Iterable[Right]:
    right = partial(_rights, scope)
    for resource in PRIMARY:
        yield from right(resource, READ)
        yield from right(resource, ("patch",), subresource="status")
    for resource in (*CHILDREN, *OPTIONAL):
        yield from right(resource, KEEP)
    yield from right(CONFIGMAPS, ("update",))  # copies for other namespaces, as they were read
    yield from right(PODS, ("list", "watch"))
    if scope is None:  # for `allowedNamespaces.selector`
        yield from right(NAMESPACES, ("list",))
    yield from right(PODS, ("patch",), subresource="status")
    # The names of the pools' Secrets are not known beforehand, so a role cannot list them.
    yield from right(SECRETS, ("get", "create", "update", "delete"))
    yield from right(EVENTS, ("create",))
