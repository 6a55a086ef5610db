"""What `epochkv doctor` says of a cluster: conditions that are not True, the Lease, the operator's rights, the CRDs, and each pool's hub.

Conditions and hubs judge; this only reads them. Nothing is written: the only requests that are no reads are access reviews.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from datetime import UTC, datetime
from functools import partial
from typing import Final, NamedTuple, TypeVar

from kubernetes.aio.config import ConfigException

from epochkv_fence.cli.doctor import CHECK_SECONDS, CannotLook, ClusterScope, Finding, Level, guarded
from epochkv_fence.client.probe import HubAnswer, is_inside, probe_hub
from epochkv_fence.common import duration, end
from epochkv_fence.connection import CLIENT_ENVS, ConfigurationError, Connection, HubRef, PoolRef, check_endpoint
from epochkv_fence.net.keys import CLIENT_FILES
from epochkv_fence.protocol.pool import listed
from epochkv_fence.version import VERSION
from epochkv_operator.api.base import MANAGED_BY
from epochkv_operator.api.generate import CRDS, manifest
from epochkv_operator.api.resources import DEPLOYMENTS, ENGINES, LEASES, POOLS, SECRETS, Resource, Right, rights
from epochkv_operator.keys import decoded, whole
from epochkv_operator.kube.client import ApiError, Forbidden, Json, KubeClient, NotFound
from epochkv_operator.planning.names import component_name
from epochkv_operator.settings import LEASE

T = TypeVar("T")
API_SECONDS: Final = 5.0
AT_ONCE: Final = 16
HUBS_SECONDS: Final = CHECK_SECONDS - 5.0
"""For the hubs of all pools: each may take half of this, and more than `CHECK_SECONDS` leaves no finding."""
PATIENCE_SECONDS: Final = 60.0
"""What rolls or resets takes so long without being stuck."""
START_SECONDS: Final = 1800.0
"""The same for pods that start, and for what waits for them: an engine reads its weights. One that fails has another reason before that."""
STARTING: Final = ("Starting", "NotCreated", "SchedulingGated", "RollingOut", "NotReporting", "Advancing")
SLACK_SECONDS: Final = 3.0
"""Two clocks that tell whole seconds, and an answer on its way."""
OPERATOR: Final = "app.kubernetes.io/part-of=epochkv,app.kubernetes.io/component=operator"
DEFINITIONS: Final = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition")
APPLY_CRDS: Final = "epochkv-operator crds | kubectl apply --server-side --force-conflicts -f -"
LOGS: Final = f"kubectl get pods -A -l {OPERATOR} --no-headers | while read -r ns pod _; do kubectl -n $ns logs $pod --tail=50; done"
LEADER: Final = f"$(kubectl -n {{home}} get lease {LEASE} -o jsonpath='{{{{.spec.holderIdentity}}}}' | cut -d_ -f1)"
FORWARD: Final = f"kubectl -n {{home}} port-forward {LEADER} 7700 & sleep 2; epochkv doctor --hub tcp://127.0.0.1:7700"
COSTS_ONLY: Final = ("TiersUsable", "Drained", "Reclaimed", "KeysRotated", "WeightsConverged")
"""While one of these is not True, nothing is wrong or missing: hits or memory are, or it is still on its way."""
ALWAYS_WRONG: Final = ("Diverged", "TiersBroken", "LayoutUnsupported")
KINDS: Final = {POOLS.kind: ("kvp", "pool"), ENGINES.kind: ("ie", "engine")}
FIXES: Final = {
    "PoolNotFound": "kubectl -n {ns} get kvp   # create the pool that spec.poolRef names",
    "HubUnavailable": "kubectl get leases -A -l app.kubernetes.io/managed-by=epochkv-operator   # who leads?",
    "WaitingForEngines": "kubectl -n {ns} get kvp {name} -o jsonpath='{{.status.reset.laggards}}'   # then: kubectl -n {ns} delete pod POD",
    "NotReporting": "kubectl -n {ns} logs -l epochkv.io/{word}={name} --tail=200 | grep -i epochkv",
    "NoLeader": "kubectl -n {ns} logs -l epochkv.io/pool={name},app.kubernetes.io/component=master --tail=20   # and look at etcd",
    "SecretConflict": "kubectl -n {ns} delete secret {name}-fence",
    "CrashLooping": "kubectl -n {ns} logs -l epochkv.io/{word}={name} --previous --tail=50",
    "Unschedulable": "kubectl -n {ns} get events --field-selector reason=FailedScheduling",
    "PodSecurityDenied": "kubectl label namespace {ns} pod-security.kubernetes.io/enforce=privileged --overwrite   # for RDMA",
}
"""Commands for reasons whose object does not say more."""


async def examine_cluster(scope: ClusterScope) -> list[Finding]:
    """Everything, check by check; one that cannot be made costs no other."""
    client = None

    async def connect() -> list[Finding]:
        nonlocal client
        try:
            client = await KubeClient.connect(API_SECONDS)
        except (ConfigException, OSError, ValueError) as error:
            remedy = "export KUBECONFIG=PATH   # or give --config to look at one pool"
            raise CannotLook(f"no cluster to look at: {error}", remedy) from error
        version = await _request(client, "GET", "/version")
        return [Finding("cluster", Level.OK, f"{client.configuration.host} ({version.get('gitVersion', 'no version')}) answers")]

    checks: dict[str, Callable[[KubeClient, ClusterScope], Awaitable[list[Finding]]]]
    checks = {"crds": _definitions, "operator": _operators, "hub": _hubs, "conditions": _conditions}
    try:
        found = await guarded("cluster", connect())
        if client is None or found[0].level is not Level.OK:
            return found
        made = await asyncio.gather(*(guarded(name, check(client, scope)) for name, check in checks.items()))
        return [*found, *(finding for findings in made for finding in findings)]
    finally:
        if client is not None:
            await client.close()


async def _answered(call: Awaitable[T], what: str) -> T:
    """Raises `CannotLook` for whatever but a success; `NotFound` goes through."""
    try:
        return await call
    except NotFound:
        raise
    except Forbidden as error:
        raise CannotLook(f"this user may not look: {error.message}", f"kubectl auth can-i --list   # {what} is needed") from error
    except ApiError as error:
        raise CannotLook(f"the API server does not answer: {error.message or error.reason}", "kubectl get --raw /readyz?verbose") from error


async def _request(client: KubeClient, verb: str, path: str, body: Json | None = None) -> Json:
    return await _answered(client.request(verb, path, body=body), f"{verb} {path}")


async def _get(client: KubeClient, resource: Resource, namespace: str | None, name: str) -> Json | None:
    try:
        return await _request(client, "GET", resource.path(namespace, name))
    except NotFound:
        return None


async def _list(client: KubeClient, resource: Resource, namespace: str | None, selector: str = "") -> list[Json]:
    try:
        items, _ = await _answered(client.list(resource, namespace, selector), f"list {resource.path(namespace)}")
    except NotFound as error:
        raise CannotLook(f"the API server does not know {resource.plural}: the CRDs are not installed", APPLY_CRDS) from error
    return items


# ---------------------------------------------------------------------------------------------------------------- conditions


async def _conditions(client: KubeClient, scope: ClusterScope) -> list[Finding]:
    objects = [*await _list(client, POOLS, scope.namespace), *await _list(client, ENGINES, scope.namespace)]
    now = client.server_date or datetime.now(UTC)
    found = [finding for obj in objects for finding in judge_object(obj, now)]
    return found or [Finding("conditions", Level.OK, f"{len(objects)} pools and engines are as they should be")]


def judge_object(obj: Json, now: datetime) -> Iterator[Finding]:
    """What its conditions say is not True, since when, with the remedy. Times are the API server's."""
    metadata, status = obj["metadata"], obj.get("status") or {}
    kind, word = KINDS[obj["kind"]]
    names = {"ns": metadata["namespace"], "name": metadata["name"], "word": word}
    describe = "kubectl -n {ns} describe {kind} {name}".format(kind=kind, **names)
    say = partial(Finding, "conditions", about=f"{word} {metadata['namespace']}/{metadata['name']}")
    if metadata.get("deletionTimestamp"):
        ago = duration(_seconds(metadata["deletionTimestamp"], now))
        yield say(level=Level.WARNING, text=f"it has been deleted for {ago}, and is still there", fix=describe)
        return
    if not status.get("conditions"):
        late = _seconds(metadata.get("creationTimestamp"), now) > PATIENCE_SECONDS
        text = "it has no status: no operator has looked at it; does one run, and serve this namespace?"
        yield say(level=Level.WRONG if late else Level.WARNING, text=text, fix=LOGS)
        return
    bad = [one for one in status["conditions"] if one["status"] != "True" and (one["type"], one["reason"]) != ("Available", "ScaledToZero")]
    without_pods = any(one["type"] == "Available" for one in bad)
    causes: dict[str, list[Json]] = {}
    for one in bad:
        if not (without_pods and one["reason"] in ("NotReporting", "Advancing")):  # who does not run does not report
            causes.setdefault(one["reason"], []).append(one)
    for reason, found in causes.items():
        first, *others = [one for one in found if one["type"] != "Ready"] or found  # `Ready` repeats what is not True
        seconds = _seconds(first.get("lastTransitionTime"), now)
        patience = START_SECONDS if reason in STARTING else PATIENCE_SECONDS
        costs = all(one["type"] in COSTS_ONLY for one in (first, *others)) or seconds < patience
        level = Level.WARNING if costs and reason not in ALWAYS_WRONG else Level.WRONG
        fix = FIXES[reason].format(**names) if reason in FIXES else describe
        also = f", and so {', '.join(one['type'] for one in others)}" if others else ""
        yield say(
            level=level, text=f"{first['type']}={first['status']} for {duration(seconds)} ({reason}){also}: {first['message']}", fix=fix
        )


def _seconds(moment: str | None, now: datetime) -> float:
    return max(0.0, (now - datetime.fromisoformat(moment)).total_seconds()) if moment else 0.0


# ----------------------------------------------------------------------------------------------------------------------- hubs


async def _hubs(client: KubeClient, scope: ClusterScope) -> list[Finding]:
    """Those that answer in time count, also where a hub that hangs lets the others wait for too long."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(pool: Json) -> list[Finding]:
        async with gate:
            return await guarded("hub", _hub(client, scope, pool), _about(pool))

    pools = await _list(client, POOLS, scope.namespace)
    if not pools:
        return [Finding("hub", Level.OK, "there is no pool")]
    asked = [asyncio.create_task(one(pool)) for pool in pools]
    _, late = await asyncio.wait(asked, timeout=HUBS_SECONDS)
    await end(late, 1.0)
    found = [finding for task in asked if task not in late for finding in task.result()]
    text = f"{len(late)} of {len(pools)} pools were not asked within {HUBS_SECONDS:g} s"
    return [*found, Finding("hub", Level.UNKNOWN, text, "epochkv doctor -n NAMESPACE")] if late else found


def _about(pool: Json) -> str:
    return f"pool {pool['metadata']['namespace']}/{pool['metadata']['name']}"


async def _hub(client: KubeClient, scope: ClusterScope, pool: Json) -> list[Finding]:
    """The hub as the pool's engines reach it: dialled from here with the key and the address that they have."""
    namespace, name = pool["metadata"]["namespace"], pool["metadata"]["name"]
    secret = component_name(name, "fence")
    look = f"kubectl -n {namespace} annotate kvp {name} epochkv.io/look-again=$(date +%s) --overwrite"
    endpoint = scope.hub or ((pool.get("status") or {}).get("endpoints") or {}).get("hub")
    if not endpoint:
        raise CannotLook("status.endpoints.hub is empty: no operator has looked at this pool")
    fields = decoded(await _get(client, SECRETS, namespace, secret) or {})
    again = f"kubectl -n {namespace} delete secret {secret} && {look}   # the operator makes it again with the keys that it remembers"
    if whole(fields, pool["metadata"]["uid"]) is not None:
        again = f"{LOGS}   # why does the operator not read the Secret, which is whole? see also rbac"
    environ = {variable: fields.get(file, "") for variable, file in zip(CLIENT_ENVS, CLIENT_FILES, strict=True)}
    connection = Connection(PoolRef(name, pool["metadata"]["uid"], namespace), HubRef(endpoint), _about(pool), environ)
    try:
        check_endpoint(endpoint, "--hub" if scope.hub else "status.endpoints.hub")
    except ConfigurationError as error:
        raise CannotLook(str(error)) from None
    try:
        connection.client_keys()
    except ConfigurationError:
        return [Finding("hub", Level.WRONG, f"the Secret {secret} is not there, or has no keys that fit", again, _about(pool))]
    answer = await probe_hub(connection)
    if isinstance(answer, HubAnswer):
        text = f"{endpoint} answers in {1000 * answer.round_trip_seconds:.1f} ms"
        return [Finding("hub", Level.OK, text, about=_about(pool))]
    host = endpoint.removeprefix("tcp://").rpartition(":")[0]
    if answer.dialled == "unresolved" and is_inside(host):
        raise CannotLook(f"{endpoint} is an address inside of the cluster, and this is not", FORWARD.format(home=host.split(".")[1]))
    fix = f"kubectl get pods -A -l {OPERATOR}   # does one lead, and does it hang? see also lease"
    if answer.dialled == "silent":
        fix = "kubectl get networkpolicies -A   # which one closes the hub's port? a firewall on the way?"
    return [Finding("hub", Level.WRONG, answer.text, again if answer.trouble in ("key", "pool") else fix, _about(pool))]


# ---------------------------------------------------------------------------------------------------------------- the operator


class Operator(NamedTuple):
    """One installation, by its Deployment."""

    deployment: Json

    @property
    def namespace(self) -> str:
        return str(self.deployment["metadata"]["namespace"])

    @property
    def scopes(self) -> tuple[str | None, ...]:
        containers, flag = self.deployment["spec"]["template"]["spec"]["containers"], "--watch-namespace="
        return tuple(arg.removeprefix(flag) for one in containers for arg in one.get("args") or () if arg.startswith(flag)) or (None,)

    @property
    def account(self) -> str:
        name = self.deployment["spec"]["template"]["spec"].get("serviceAccountName") or MANAGED_BY
        return f"system:serviceaccount:{self.namespace}:{name}"

    @property
    def logs(self) -> str:
        return f"kubectl -n {self.namespace} logs deployment/{self.deployment['metadata']['name']} --all-pods --tail=50"


async def _operators(client: KubeClient, scope: ClusterScope) -> list[Finding]:
    found = [Operator(one) for one in await _list(client, DEPLOYMENTS, scope.operator_namespace, OPERATOR)]
    if not found:
        install = "helm install epochkv CHART -n epochkv-system --create-namespace"
        return [Finding("operator", Level.WRONG, "no operator is installed", install)]
    findings = []
    for operator in found:
        about = f"operator {operator.namespace}"
        findings += await guarded("lease", _lease(client, operator), about)
        findings += await guarded("rbac", _rights(client, operator), about)
    return findings


async def _lease(client: KubeClient, operator: Operator) -> list[Finding]:
    lease = await _get(client, LEASES, operator.namespace, LEASE)
    return [judge_lease(operator, lease, client.server_date or datetime.now(UTC))]


def judge_lease(operator: Operator, lease: Json | None, now: datetime) -> Finding:
    """Whether somebody holds the Lease and renews it, by the API server's clock alone: when it stamped the last write."""
    about = f"Lease {operator.namespace}/{LEASE}"
    spec = (lease or {}).get("spec") or {}
    holder = spec.get("holderIdentity")
    if not holder:
        return Finding("lease", Level.WRONG, "nobody holds it: no operator leads, and no hub serves", operator.logs, about)
    times = [datetime.fromisoformat(entry["time"]) for entry in (lease or {})["metadata"].get("managedFields") or () if entry.get("time")]
    age = (now - max(times, default=now)).total_seconds()
    if age > float(spec.get("leaseDurationSeconds") or 15) + SLACK_SECONDS:
        text = f"{holder} has not renewed it for {age:.0f} s, and nobody else took it: no hub serves"
        return Finding("lease", Level.WRONG, text, operator.logs, about)
    return Finding("lease", Level.OK, f"held by {holder}, renewed {max(0.0, age):.0f} s ago", about=about)


async def _rights(client: KubeClient, operator: Operator) -> list[Finding]:
    """What the operator's service account may do, against what it needs. For itself, anybody may ask."""
    gate = asyncio.Semaphore(AT_ONCE)
    review = {"apiVersion": "authentication.k8s.io/v1", "kind": "SelfSubjectReview"}
    who = await _request(client, "POST", "/apis/authentication.k8s.io/v1/selfsubjectreviews", review)
    account = "" if who["status"]["userInfo"].get("username") == operator.account else operator.account

    async def allowed(right: Right) -> bool:
        async with gate:
            return await _allowed(client, right, account)

    every = rights(operator.namespace, operator.scopes)
    needed = [right for right in every if not right.optional]
    answers = await asyncio.gather(*(allowed(right) for right in needed))
    return [judge_rights(operator, [right for right, answer in zip(needed, answers, strict=True) if not answer], len(needed))]


def judge_rights(operator: Operator, missing: Sequence[Right], num_needed: int) -> Finding:
    if not missing:
        return Finding("rbac", Level.OK, f"it has all {num_needed} rights that the operator needs", about=operator.account)
    text = f"it lacks {len(missing)} of {num_needed} rights: {listed(map(str, missing), 6)}"
    release = operator.deployment["metadata"].get("labels", {}).get("app.kubernetes.io/instance", "epochkv")
    helm = f"helm -n {operator.namespace}"
    deployed = f"$({helm} list --deployed --no-headers -f '^{release}$' | awk '{{print $3}}')"  # not a revision that failed
    fix = f"{helm} get manifest {release} --revision {deployed} | kubectl apply -f -"
    return Finding("rbac", Level.WRONG, text, fix, operator.account)


async def _allowed(client: KubeClient, right: Right, account: str) -> bool:
    kind = "SubjectAccessReview" if account else "SelfSubjectAccessReview"
    fields = ("group", "resource", "subresource", "verb", "namespace", "name")
    spec: Json = {"resourceAttributes": {name: getattr(right, name) for name in fields if getattr(right, name)}}
    if account:
        namespace = account.split(":")[2]
        spec |= {"user": account, "groups": ["system:serviceaccounts", f"system:serviceaccounts:{namespace}", "system:authenticated"]}
    body = {"apiVersion": "authorization.k8s.io/v1", "kind": kind, "spec": spec}
    try:
        answer = await _request(client, "POST", f"/apis/authorization.k8s.io/v1/{kind.lower()}s", body)
    except CannotLook as error:
        if not account:
            raise
        hint = f"kubectl -n {account.split(':')[2]} exec deployment/epochkv-operator -- epochkv doctor   # it may ask for itself"
        raise CannotLook(f"this user may not ask what {account} may do", hint) from error
    return bool((answer.get("status") or {}).get("allowed"))


async def _definitions(client: KubeClient, scope: ClusterScope) -> list[Finding]:
    """No condition can tell: with CRDs of another version, fields are dropped, or refused, before an operator sees them."""
    found = []
    for crd in CRDS:
        live = await _get(client, DEFINITIONS, None, crd.name)
        wanted = manifest(crd)["spec"]["versions"][0]
        served = {one["name"]: one for one in live["spec"]["versions"]} if live is not None else {}
        if served.get(wanted["name"], {}).get("schema") != wanted["schema"]:
            text = "it is not installed" if live is None else f"it is not that of this version ({VERSION or 'from source'})"
            found.append(Finding("crds", Level.WRONG, text, APPLY_CRDS, crd.name))
    return found or [Finding("crds", Level.OK, f"they are those of this version ({VERSION or 'from source'})")]
