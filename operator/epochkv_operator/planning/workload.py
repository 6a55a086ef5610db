"""What a Deployment or StatefulSet and its pods say about themselves, reduced to one stable reason and a sentence."""

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import NamedTuple

from epochkv_operator.planning.context import Json
from epochkv_operator.planning.names import HASH_ANNOTATION, controller_of

_IMAGE_REASONS = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "ImageInspectError",
    "RegistryUnavailable",
    "SignatureValidationFailed",
)
_REVISION_LABELS = ("pod-template-hash", "leaderworkerset.sigs.k8s.io/template-revision-hash")
_ROLLING = frozenset({"UpdateInProgress", "Progressing"})  # of a LeaderWorkerSet
_ENDED = {"Succeeded": "Completed", "Failed": "Failed"}
"""Phases of pods of which nothing runs again, and what to call one that gives no reason."""
_LONG_RUN_SECONDS = 600.0
_CONFIG_REASONS = ("CreateContainerConfigError", "CreateContainerError", "RunContainerError")


class Health(NamedTuple):
    """State of one workload. `wanted` is what its spec asks for; the other counts are 0 until the controller has seen that spec."""

    wanted: int
    replicas: int
    ready: int
    updated: int
    reason: str
    """`Available` when every wanted pod is ready and up to date."""
    message: str


def find(children: Iterable[Json], kind: str, name: str, owner_uid: str) -> Json | None:
    """The live object of that kind and name, if this owner controls it."""
    for child in children:
        if (child["kind"], child["metadata"]["name"]) == (kind, name) and controller_of(child).get("uid") == owner_uid:
            return child
    return None


def ended(pod: Json) -> bool:
    """It was evicted, shut down with its node, refused by it, or has completed: nothing of it runs again, and it may stay for ever."""
    return (pod.get("status") or {}).get("phase") in _ENDED


def condition_of(pod: Json, kind: str) -> Json:
    """Empty: it has none of this kind."""
    return next((item for item in (pod.get("status") or {}).get("conditions") or [] if item.get("type") == kind), {})


def is_ready(pod: Json) -> bool:
    return condition_of(pod, "Ready").get("status") == "True"


def select(pods: Iterable[Json], labels: dict[str, str], namespace: str) -> list[Json]:
    """Pods of a namespace that carry all these labels, those that have ended among them."""
    return [
        pod
        for pod in pods
        if pod["metadata"]["namespace"] == namespace
        and all((pod["metadata"].get("labels") or {}).get(key) == value for key, value in labels.items())
    ]


def health(workload: Json | None, pods: Sequence[Json], what: str, asked: int | None = None) -> Health:
    """Reduce a workload and its pods. `what` names it in messages, such as `the master`; `asked` is the count in the user's own object,
    when somebody may have scaled the workload behind its back."""
    found = _health(workload, [pod for pod in pods if not ended(pod)], what)
    if workload is None:
        return found
    return found._replace(message=found.message + _scaled_elsewhere(workload, asked) + _left_over([pod for pod in pods if ended(pod)]))


def without_leader(state: Health, endpoints: str) -> Health:
    """Of masters that elect one of them through etcd: those that are ready say that none serves. Other troubles are told as they are."""
    reason, text = "NoLeader", "none of them leads (service_ready is false in /health), so engines neither find nor save anything in L2"
    if state.reason not in ("Available", "Updating", "Starting"):
        return state
    remedy = f"they elect a leader through etcd: does {endpoints} answer, and do they reach it? The log of each says what it waits for"
    return state._replace(reason=reason, message=f"{state.message}; {text}; {remedy}")


class Rollout(NamedTuple):
    """How far a change of what pods run has come, as a Deployment says it: a count that changes is no rollout."""

    done: bool
    text: str
    stalled: tuple[str, str] | None = None
    """Why it does not go on: reason and sentence."""


def rollout(workload: Json, pods: Sequence[Json], state: Health) -> Rollout:
    """The rollout of a Deployment or LeaderWorkerSet. What ails pods of an older spec does not count: they are being replaced."""
    status = workload.get("status") or {}
    said = {condition.get("type"): condition for condition in status.get("conditions") or []}
    old = state.replicas - state.updated
    text = f"{state.updated} of {state.wanted} replicas run the current spec" + (f", {old} an older one" if old > 0 else "")
    if workload["kind"] == "LeaderWorkerSet":
        updating = any((said.get(kind) or {}).get("status") == "True" for kind in _ROLLING)
        done = bool(status) and not updating and state.updated >= state.wanted
    else:
        # It keeps this reason until the next rollout, whatever happens to pods meanwhile.
        seen = status.get("observedGeneration", 0) >= workload["metadata"].get("generation", 1)
        done = seen and old <= 0 and (said.get("Progressing") or {}).get("reason") == "NewReplicaSetAvailable"
    if done:
        return Rollout(True, text)
    current = _newest([pod for pod in pods if not ended(pod)])
    stalled = _trouble(workload, current)
    waits = _starting(workload, current) if stalled is None else ""
    return Rollout(False, f"{text}: {waits}" if waits else text, stalled)


def _newest(pods: Sequence[Json]) -> list[Json]:
    """Pods of the newest revision, which is the one that the youngest pod has. Times of creation are whole seconds: in a second that made
    pods of two revisions, both count."""

    def revision(pod: Json) -> str:
        labels = pod["metadata"].get("labels") or {}
        return next((str(labels[label]) for label in _REVISION_LABELS if label in labels), "")

    def made(pod: Json) -> str:
        return str(pod["metadata"].get("creationTimestamp", ""))

    youngest = max(map(made, pods), default="")
    newest = {revision(pod) for pod in pods if made(pod) == youngest}
    return [pod for pod in pods if revision(pod) in newest]


def _scaled_elsewhere(workload: Json, asked: int | None) -> str:
    """A count set through the workload's own scale subresource (the store notes that) is left alone. Say so: `spec.replicas` is dead."""
    count = workload["spec"].get("replicas", 1)
    if asked is None or count == asked or not workload.get("x-scaled-by-others"):
        return ""
    kind, name = workload["kind"], workload["metadata"]["name"]
    back = (
        f'kubectl -n {workload["metadata"]["namespace"]} patch {kind.lower()} {name} --type=merge -p \'{{"spec":{{"replicas":{asked}}}}}\''
    )
    return f"; somebody scaled {kind} {name} itself to {count}, so the {asked} asked for here do not count: to have them count, {back}"


def _left_over(gone: Sequence[Json]) -> str:
    """How many pods have ended and why, such as evictions: they say nothing of how the workload is, and something of its nodes."""
    if not gone:
        return ""
    last = max(gone, key=lambda pod: (str(pod["metadata"].get("creationTimestamp", "")), str(pod["metadata"]["name"])))["status"]
    counts = Counter(str(pod["status"].get("reason") or _ENDED[pod["status"]["phase"]]) for pod in gone)
    why = " ".join(str(last.get("message", "")).split())
    text = ", ".join(f"{count} {reason}" for reason, count in sorted(counts.items()))
    return f"; pods that ended and were not deleted: {text}" + (f" (the last: {why})" if why else "")


def _health(workload: Json | None, pods: Sequence[Json], what: str) -> Health:
    if workload is None:
        return Health(0, 0, 0, 0, "NotCreated", f"{what} does not exist yet")
    status = workload.get("status") or {}
    metadata = workload["metadata"]
    wanted = workload["spec"].get("replicas", 1)
    seen = status.get("observedGeneration", 0) >= metadata.get("generation", 1) if workload["kind"] != "LeaderWorkerSet" else bool(status)
    ready, updated = status.get("readyReplicas", 0), status.get("updatedReplicas", 0)
    if workload["kind"] == "LeaderWorkerSet":  # its status does not say which spec it is about; the first pod of each group does
        made = [workload["spec"]["leaderWorkerTemplate"]["leaderTemplate"], *pods]
        current, *theirs = ((one["metadata"].get("annotations") or {}).get(HASH_ANNOTATION) for one in made)
        updated = min(updated, theirs.count(current))
    replicas = status.get("replicas", 0)
    if seen and ready >= wanted and updated >= wanted and replicas <= max(wanted, updated):
        text = f"{ready} of {wanted} replicas of {what} are ready" if wanted else f"{what} is scaled to zero: no pod runs, and none serves"
        return Health(wanted, replicas, ready, updated, "Available" if wanted else "ScaledToZero", text)
    reason, text = _trouble(workload, pods) or ("Starting", _starting(workload, pods))
    if seen and reason == "Starting" and ready >= wanted:
        reason, text = "Updating", f"{updated} of {wanted} replicas run the current spec"
    counts = f"{ready} of {wanted} replicas of {what} are ready"
    return Health(wanted, replicas, ready, updated, reason, f"{counts}: {text}" if text else counts)


def _trouble(workload: Json, pods: Sequence[Json]) -> tuple[str, str] | None:
    """The first thing found that will not mend itself soon, most telling first."""
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
        found = pod_trouble(pod)
        if found is not None:
            return found
    for condition in (workload.get("status") or {}).get("conditions") or []:
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            why = condition.get("message", "")
            if "violates PodSecurity" not in why:
                return "CreateFailed", why
            fix = "give the namespace the level its pods need (RDMA: privileged), or remove what violates it from template"
            return "PodSecurityDenied", f"{why}; {fix}"
        if condition.get("type") == "Progressing" and condition.get("reason") == "ProgressDeadlineExceeded":
            return "RolloutStuck", str(condition.get("message", ""))
    return None


def _starting(workload: Json, pods: Sequence[Json]) -> str:
    """What the first pod that is not ready is at; a store that never gets ready has no deadline that would tell."""
    if not pods and workload["kind"] == "StatefulSet":  # which has no condition for pods that admission refuses
        look = f"kubectl -n {workload['metadata']['namespace']} describe statefulset {workload['metadata']['name']}"
        return f"it has no pod; if that lasts, {look} says why (Pod Security: RDMA needs privileged; a quota)"
    for pod in sorted(pods, key=lambda pod: str(pod["metadata"]["name"])):
        name, status = pod["metadata"]["name"], pod.get("status") or {}
        if is_ready(pod) or pod["metadata"].get("deletionTimestamp") is not None:
            continue
        containers = status.get("containerStatuses") or []
        if any("waiting" in (container.get("state") or {}) for container in containers):
            look = f"kubectl -n {pod['metadata']['namespace']} describe pod {name}"
            return f"pod {name} waits for its image, volumes or network; {look} says for which"
        if again := next((container for container in containers if container.get("restartCount") and not container.get("ready")), None):
            return f"container {again['name']} of pod {name} {_last_exit(again)}, and it starts again"
        gate = next((item for item in status.get("conditions") or [] if item.get("reason") == "ReadinessGatesNotReady"), None)
        why = "but its readiness probe does not succeed yet" if gate is None else f"and is kept out of its Service: {gate.get('message')}"
        return f"pod {name} runs, {why}" if containers else f"pod {name} is {str(status.get('phase', 'Pending')).lower()}"
    return ""


def pod_trouble(pod: Json) -> tuple[str, str] | None:
    """Why a pod will not run soon, as a stable reason and a sentence; None: nothing says that it will not."""
    name, status = pod["metadata"]["name"], pod.get("status") or {}
    if pod["metadata"].get("deletionTimestamp") is not None:
        return None
    for container in [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]:
        waiting = (container.get("state") or {}).get("waiting") or {}
        reason, detail = waiting.get("reason", ""), waiting.get("message", "")
        if reason in _IMAGE_REASONS:
            return "ImagePullFailed", f"pod {name} cannot pull {container.get('image', 'its image')}: {detail or reason}"
        if reason == "CrashLoopBackOff" or _fails_at_once(container):
            return "CrashLooping", f"container {container['name']} of pod {name} {_last_exit(container)}"
        if reason in _CONFIG_REASONS:
            return "StartFailed", f"container {container['name']} of pod {name} cannot start: {detail or reason}"
    scheduled = condition_of(pod, "PodScheduled")
    if (gated := scheduled.get("reason") == "SchedulingGated") or scheduled.get("reason") == "Unschedulable":
        said, why = scheduled.get("message", ""), "fits on no node"
        if gated:
            why = "is held by a scheduling gate, such as Kueue's until there is quota"
        elif "persistentvolumeclaim" in said.lower():
            why = f"waits for a claim that is missing or has no volume (kubectl -n {pod['metadata']['namespace']} get pvc)"
        return "SchedulingGated" if gated else "Unschedulable", f"pod {name} {why}: {said}"
    return None


def _fails_at_once(container: Json) -> bool:
    """It was started more than once for less than the time after which a kubelet forgets that, and is not ready now: between two
    back-offs it runs, and would otherwise pass for one that starts."""
    last = (container.get("lastState") or {}).get("terminated") or {}
    if container.get("ready") or container.get("restartCount", 0) < 2 or not last.get("startedAt") or not last.get("finishedAt"):
        return False
    ran = datetime.fromisoformat(last["finishedAt"]) - datetime.fromisoformat(last["startedAt"])
    return ran.total_seconds() < _LONG_RUN_SECONDS


def _last_exit(container: Json) -> str:
    """A dead worker ends vLLM's container with exit code 0, so the count of restarts is what tells."""
    last = (container.get("lastState") or {}).get("terminated") or {}
    times = f"{container.get('restartCount', 0)} time{'s' if container.get('restartCount') != 1 else ''}"
    said = next((line.strip() for line in reversed(str(last.get("message", "")).splitlines()) if line.strip()), "")
    log = f"its log ended: {said[:300]}" if said else "see its log (--previous)"
    return f"was restarted {times}, last exit {last.get('exitCode', 'unknown')} ({last.get('reason', 'unknown')}); {log}"
