"""The operators of a cluster: where they run, whether one of them leads, and whether its clock agrees with the API server's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

from epochkv_fence.doctor.finding import CannotLook, Finding, Say
from epochkv_operator.doctor.cluster import PART_OF, Cluster, MayNotLook
from epochkv_operator.kube.client import Json
from epochkv_operator.kube.resources import DEPLOYMENTS, LEASES
from epochkv_operator.settings import Settings

OPERATOR: Final = f"{PART_OF},app.kubernetes.io/component=operator"
DEFAULT_NAMESPACE: Final = "epochkv-system"
SERVICE_ACCOUNT: Final = "epochkv-operator"
SLACK_SECONDS: Final = 3.0
"""Two clocks that tell whole seconds, and an answer on its way."""
OFFSET_SECONDS: Final = 10.0
WATCH_FLAG: Final = "--watch-namespace="
LEASE_FLAG: Final = "--lease-name="


@dataclass(frozen=True)
class Operator:
    """One installation. `deployment` None: it runs in another way, as on a developer's machine."""

    namespace: str
    deployment: Json | None = None
    leases: Sequence[Json] = field(default_factory=tuple)

    @property
    def lease_name(self) -> str:
        return self._flag(LEASE_FLAG) or Settings.lease_name

    @property
    def lease(self) -> Json | None:
        return next((lease for lease in self.leases if lease["metadata"]["name"] == self.lease_name), None)

    @property
    def scopes(self) -> tuple[str | None, ...]:
        """Namespaces that it serves; `(None,)`: all."""
        return tuple(arg.removeprefix(WATCH_FLAG) for arg in self._arguments if arg.startswith(WATCH_FLAG)) or (None,)

    @property
    def service_account(self) -> str:
        account = self._pod.get("serviceAccountName") or SERVICE_ACCOUNT
        return f"system:serviceaccount:{self.namespace}:{account}"

    @property
    def image(self) -> str:
        return str(self._container.get("image", ""))

    @property
    def version(self) -> str:
        """Of its image's tag; empty: not known, as for an image by digest."""
        return image_tag(self.image)

    @property
    def release(self) -> str:
        """Of Helm; empty: not known."""
        labels = (self.deployment or {}).get("metadata", {}).get("labels") or {}
        return str(labels.get("app.kubernetes.io/instance", "")) if labels.get("app.kubernetes.io/managed-by") == "Helm" else ""

    @property
    def logs(self) -> str:
        return f"kubectl -n {self.namespace} logs deployment/epochkv-operator --tail=50"

    @property
    def restored(self) -> str:
        """The command that puts the objects of the chart back as they were installed."""
        name = self.release or "epochkv"
        deployed = f"$(helm -n {self.namespace} list --deployed --no-headers -f '^{name}$' | awk '{{print $3}}')"  # not one that failed
        return f"helm -n {self.namespace} get manifest {name} --revision {deployed} | kubectl apply -n {self.namespace} -f -"

    @property
    def pod_labels(self) -> dict[str, str]:
        template = ((self.deployment or {}).get("spec") or {}).get("template") or {}
        return dict((template.get("metadata") or {}).get("labels") or {})

    @property
    def _pod(self) -> Json:
        pod: Json = (((self.deployment or {}).get("spec") or {}).get("template") or {}).get("spec") or {}
        return pod

    @property
    def _container(self) -> Json:
        containers: list[Json] = self._pod.get("containers") or [{}]
        return next((one for one in containers if one.get("name") == "operator"), containers[0])

    @property
    def _arguments(self) -> list[str]:
        return [str(argument) for argument in self._container.get("args") or ()]

    def _flag(self, flag: str) -> str:
        return next((argument.removeprefix(flag) for argument in self._arguments if argument.startswith(flag)), "")


def image_tag(image: str) -> str:
    """The tag of an image; empty without one. A port of a registry is none."""
    return image.partition("@")[0].rpartition("/")[2].partition(":")[2]


async def find_operators(cluster: Cluster) -> list[Operator]:
    """Deployments of operators; without one, operators that only a Lease shows.

    Raises:
        CannotLook: this user may not look for them.
    """
    deployments = await _deployments(cluster)
    homes = {deployment["metadata"]["namespace"]: deployment for deployment in deployments}
    by_home: dict[str, list[Json]] = {}
    for lease in await _leases(cluster, sorted(homes)):
        by_home.setdefault(lease["metadata"]["namespace"], []).append(lease)
    found = [Operator(namespace, one, by_home.get(namespace, ())) for namespace, one in sorted(homes.items())]
    return found or [Operator(namespace, None, mine) for namespace, mine in sorted(by_home.items())]


async def _deployments(cluster: Cluster) -> list[Json]:
    home = cluster.scope.operator_namespace
    try:
        return await cluster.objects(DEPLOYMENTS, home, OPERATOR)
    except MayNotLook as error:
        if home is not None:
            raise
        try:
            return await cluster.objects(DEPLOYMENTS, DEFAULT_NAMESPACE, OPERATOR)
        except MayNotLook:
            raise CannotLook(str(error), "epochkv doctor --operator-namespace NAME   # where this user may look") from error


async def _leases(cluster: Cluster, homes: Sequence[str]) -> list[Json]:
    """By our label; by name where this user may not list them, as an operator itself may not."""
    home = cluster.scope.operator_namespace
    try:
        return await cluster.leases(home)
    except MayNotLook:
        places = homes or [home or DEFAULT_NAMESPACE]
        found = [await cluster.get(LEASES, namespace, Settings.lease_name) for namespace in places]
        return [lease for lease in found if lease is not None]


async def look_at_operators(cluster: Cluster) -> list[Finding]:
    found = await find_operators(cluster)
    if not found:
        where = f" in namespace {cluster.scope.operator_namespace}" if cluster.scope.operator_namespace else ""
        return [
            Say("operator").wrong(f"no operator is installed{where}", "helm install epochkv CHART -n epochkv-system --create-namespace")
        ]
    return [finding for operator in found for finding in (*judge_deployment(operator), *judge_lease(operator, cluster.now()))]


def judge_deployment(operator: Operator) -> list[Finding]:
    """Whether its pods are ready."""
    if operator.deployment is None:
        return []
    say = Say("operator", f"operator {operator.namespace}")
    wanted = operator.deployment["spec"].get("replicas", 1)
    ready = (operator.deployment.get("status") or {}).get("readyReplicas", 0)
    if not wanted:
        back = f"kubectl -n {operator.namespace} scale deployment {operator.deployment['metadata']['name']} --replicas=2"
        return [say.wrong("it is scaled to zero, so nothing is granted, reset or reconciled", back)]
    if not ready:
        return [say.wrong(f"none of its {wanted} pods is ready", operator.logs)]
    if ready < wanted:
        return [say.warning(f"{ready} of {wanted} pods are ready", f"kubectl -n {operator.namespace} get pods -l {OPERATOR}")]
    return [say.ok(f"{ready} of {wanted} pods are ready ({operator.image})")]


def judge_lease(operator: Operator, now: datetime) -> list[Finding]:
    """Whether somebody holds the Lease and renews it. Its age is told by the API server's clock alone."""
    say, lease = Say("lease", f"Lease {operator.namespace}/{operator.lease_name}"), operator.lease
    if lease is None:
        return [say.wrong("there is none: no operator has led yet", operator.logs)]
    spec = lease.get("spec") or {}
    holder = spec.get("holderIdentity") or ""
    if not holder:
        return [say.wrong("nobody holds it: no operator leads, and no hub serves", operator.logs)]
    written = stamped(lease)
    if written is None:
        return [say.ok(f"held by {holder}")]
    age, duration = (now - written).total_seconds(), float(spec.get("leaseDurationSeconds") or 15)
    if age > duration + SLACK_SECONDS:
        return [say.wrong(f"{holder} has not renewed it for {age:.0f} s, and nobody else took it: no hub serves", operator.logs)]
    return [say.ok(f"held by {holder}, renewed {max(0.0, age):.0f} s ago")]


def judge_offset(operator: Operator) -> list[Finding]:
    """How far the leader's clock is from the API server's. The fence compares no clocks: only times in statuses and logs differ."""
    lease = operator.lease
    renewed = (lease.get("spec") or {}).get("renewTime") if lease is not None else None
    written = stamped(lease) if lease is not None else None
    if renewed is None or written is None:
        return []
    say = Say("clocks", f"operator {operator.namespace}")
    offset = (datetime.fromisoformat(renewed) - written).total_seconds()
    if abs(offset) > OFFSET_SECONDS:
        way = "ahead of" if offset > 0 else "behind"
        text = f"its clock is {abs(offset):.0f} s {way} the API server's: times in statuses and logs are off; the fence is not"
        return [say.warning(text, "timedatectl   # on its node: is the clock synchronised?")]
    return [say.ok("its clock and the API server's agree")]


def stamped(obj: Json) -> datetime | None:
    """When the object was last written, by the API server's clock, to the second."""
    times = [entry["time"] for entry in obj["metadata"].get("managedFields") or () if entry.get("time")]
    return max((datetime.fromisoformat(time) for time in times), default=None)
