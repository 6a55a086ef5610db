"""Pods that nobody wrote for EpochKV join the pool by a label: an image that has vLLM and nothing of ours, in a Deployment, a StatefulSet
and, in another namespace, a Job. Pod Security is `restricted`, and the root file system read-only."""

import itertools
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hack.demo.journey import ANSWER_TOKENS, BASE_WEIGHTS, CACHED, ENGINE, MODEL, NAMESPACE, POOL, REFERENCE, make_prompts
from hack.demo.kube import Kube, PodEngine, pod_ready
from hack.demo.setup import Setup
from hack.demo.volumes import provide_folder
from hack.engine_api import Answer
from hack.images.builder import Builder
from hack.images.recipe import JOINING
from hack.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
GUESTS = "epochkv-guests"
LABEL = {"epochkv.io/pool": POOL}
IN = {"epochkv.io/pool-namespace": NAMESPACE}
"""Annotation of pods of another namespace."""
COPIED = ("-l", f"epochkv.io/pool={POOL},epochkv.io/shared=true", "-o", "name")
MEMORY = 5 * 2**30
TRIES = 10


def pod_spec(**more: Any) -> dict[str, Any]:
    """A vLLM server as somebody else would write it, who knows nothing of EpochKV."""
    arguments = [f"--model={BASE_WEIGHTS}", f"--served-model-name={MODEL}", "--skip-tokenizer-init", "--enforce-eager", "--dtype=float32"]
    arguments += ["--host=::", "--max-model-len=2048", "--max-num-seqs=8", "--enable-prompt-tokens-details"]
    variables = {"VLLM_SERVER_DEV_MODE": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    variables |= {"OMP_WAIT_POLICY": "PASSIVE", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    mounts = {"vllm-env": "/venv", "models": "/models", "tmp": "/tmp", "shm": "/dev/shm"}
    container = {
        "name": "server",
        "image": "epochkv/vllm:dev",
        "imagePullPolicy": "IfNotPresent",
        "command": ["python", "-m", "vllm.entrypoints.openai.api_server", *arguments],
        "env": [{"name": name, "value": value} for name, value in variables.items()],
        "resources": {"requests": {"cpu": "100m", "memory": "1Gi"}, "limits": {"memory": str(MEMORY)}},
        "readinessProbe": {"httpGet": {"path": "/health", "port": 8000}, "periodSeconds": 3, "timeoutSeconds": 5},
        "securityContext": {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }
    claims = [{"name": name, "persistentVolumeClaim": {"claimName": name, "readOnly": True}} for name in ("vllm-env", "models")]
    return {
        "automountServiceAccountToken": False,
        "terminationGracePeriodSeconds": 5,
        "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [*claims, {"name": "tmp", "emptyDir": {}}, {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "256Mi"}}],
        **more,
    }


def workload(kind: str, name: str) -> dict[str, Any]:
    labels = {"app": name}
    template = {"metadata": {"labels": labels | LABEL, "annotations": IN}, "spec": pod_spec()}
    selected = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    if kind == "Job":
        return {
            "apiVersion": "batch/v1",
            "kind": kind,
            "metadata": {"name": name},
            "spec": {"template": {**template, "spec": pod_spec(restartPolicy="Never")}, "backoffLimit": 0},
        }
    more = {"serviceName": name} if kind == "StatefulSet" else {}
    return {"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name}, "spec": selected | more}


def apply(kube: Kube, namespace: str, obj: dict[str, Any]) -> None:
    kube.kubectl("-n", namespace, "apply", "-f", "-", stdin=json.dumps(obj))


def only_pod(kube: Kube, namespace: str, name: str) -> dict[str, Any]:
    found: dict[str, Any] = eventually(lambda: next(iter(kube.pods(namespace, f"app={name}")), None), f"a pod of {name}", 60, 0.5)
    return found


def ready(kube: Kube, namespace: str, name: str) -> PodEngine:
    def described() -> str:
        pod = only_pod(kube, namespace, name)["metadata"]["name"]
        return f"{kube.kubectl('-n', namespace, 'describe', 'pod', pod)}\n{kube.kubectl('-n', namespace, 'logs', pod, '--tail=40')}"

    eventually(lambda: pod_ready(only_pod(kube, namespace, name)), described, 900, 2.0)
    return PodEngine(kube, namespace, only_pod(kube, namespace, name)["metadata"]["name"], MODEL)


def allow(kube: Kube, names: list[str] | None) -> None:
    patch = {"spec": {"allowedNamespaces": {"names": names} if names else None}}
    kube.kubectl("-n", NAMESPACE, "patch", "kvp", POOL, "--type=merge", "-p", json.dumps(patch))


def status(kube: Kube) -> dict[str, Any]:
    found: dict[str, Any] = kube.get(f"/apis/epochkv.io/v1alpha1/namespaces/{NAMESPACE}/kvcachepools/{POOL}")["status"]
    return found


def handed_over(writer: PodEngine, reader: PodEngine, reference: PodEngine) -> int:
    """Tokens of a new prompt that one engine finds after another has computed it; each answers as the reference does."""
    (prompt,) = make_prompts(time.time_ns() % 2**31, 1)
    right = reference.complete(prompt, ANSWER_TOKENS).tokens
    assert writer.complete(prompt, ANSWER_TOKENS) == Answer(right, 0)
    time.sleep(0.5)  # until it is in the store
    found = reader.complete(prompt, ANSWER_TOKENS)
    assert found.tokens == right
    return found.cached


def share(members: list[PodEngine], reference: PodEngine) -> None:
    """Each finds what another has computed."""
    for writer, reader in itertools.permutations(members, 2):
        found = [handed_over(writer, reader, reference)]
        while found[-1] != CACHED and len(found) < TRIES:  # a late answer of the store, on a busy machine
            found.append(handed_over(writer, reader, reference))
        assert found[-1] == CACHED, f"{reader.name} finds of {writer.name}: {found}"


def reset(kube: Kube) -> None:
    epoch = int(status(kube).get("targetEpoch", 0)) + 1
    kube.kubectl("-n", NAMESPACE, "patch", "kvp", POOL, "--type=merge", "-p", json.dumps({"spec": {"resetEpoch": epoch}}))
    kube.kubectl("-n", NAMESPACE, "wait", f"kvp/{POOL}", f"--for=jsonpath={{.status.epoch}}={epoch}", "--timeout=60s")


def instances(kube: Kube) -> dict[str, list[int]]:
    """Of each pod, which instance of its containers runs."""
    found = kube.pods(NAMESPACE, f"epochkv.io/pool={POOL}")
    return {pod["metadata"]["name"]: [one["restartCount"] for one in pod["status"]["containerStatuses"]] for pod in found}


@pytest.fixture(scope="module")
def guests(setup: Setup, kube: Kube) -> Iterator[None]:
    """Images, and a namespace that the pool does not know."""
    setup.provider.load_images(Builder(print).ensure(JOINING), print)
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": GUESTS, "labels": labels}}
    kube.kubectl("apply", "-f", "-", stdin=json.dumps(namespace))
    for claim, folder in (("vllm-env", setup.engine_venv), ("models", setup.models)):
        provide_folder(kube, GUESTS, claim, folder)
    yield
    allow(kube, None)
    kube.kubectl("-n", NAMESPACE, "delete", "deployment/serving", "statefulset/replayed", "--ignore-not-found", "--timeout=60s")
    kube.kubectl("delete", "namespace", GUESTS, "--ignore-not-found", "--timeout=120s", seconds=150)


def test_pods_with_the_label_share_and_follow_a_reset(setup: Setup, kube: Kube, guests: None) -> None:
    allow(kube, [GUESTS])
    eventually(lambda: kube.kubectl("-n", GUESTS, "get", "configmaps", *COPIED), "a copy", 60, 0.5)
    apply(kube, NAMESPACE, workload("Deployment", "serving"))
    apply(kube, NAMESPACE, workload("StatefulSet", "replayed"))
    apply(kube, GUESTS, workload("Job", "rollouts"))
    places = {"serving": NAMESPACE, "replayed": NAMESPACE, "rollouts": GUESTS}
    for name, namespace in places.items():
        pod = only_pod(kube, namespace, name)
        assert pod["metadata"]["annotations"]["epochkv.io/joined"] == "server"
        assert pod["spec"]["containers"][0]["resources"]["limits"]["memory"] == str(MEMORY + 128 * 2**20)
    joined = [ready(kube, namespace, name) for name, namespace in places.items()]
    wanted = {(engine.name, namespace) for engine, namespace in zip(joined, places.values(), strict=True)}

    def listed() -> set[tuple[str, str]]:
        return {(one["pod"], one["namespace"]) for one in status(kube)["externalEngines"]}

    eventually(lambda: listed() == wanted, lambda: f"listed: {listed()}", 60, 0.5)
    assert status(kube)["engines"]["external"] == 3

    ours, reference = kube.engines(NAMESPACE, ENGINE, MODEL), kube.engines(NAMESPACE, REFERENCE, MODEL)[0]
    for engine in (*ours, reference):
        engine.reload_weights(BASE_WEIGHTS)
    eventually(lambda: len(status(kube)["weights"]) == 1, lambda: f"equal weights: {status(kube)['weights']}", 60, 0.5)
    members = [ours[0], *joined]
    share(members, reference)
    (prompt,) = make_prompts(time.time_ns() % 2**31, 1)
    right = reference.complete(prompt, ANSWER_TOKENS).tokens
    assert [members[1].complete(prompt, ANSWER_TOKENS) == Answer(right, cached) for cached in (0, CACHED)] == [True, True]

    reset(kube)
    assert members[1].complete(prompt, ANSWER_TOKENS) == Answer(right, 0)
    wide = kube.kubectl("-n", NAMESPACE, "get", "kvp", POOL, "-o", "wide")
    assert "EXTERNAL" in wide.splitlines()[0]


def test_the_chart_is_upgraded_removed_and_installed_over_living_pods(setup: Setup, kube: Kube, guests: None) -> None:
    (reference,) = kube.engines(NAMESPACE, REFERENCE, MODEL)
    kinds = {"serving": "Deployment", "replayed": "StatefulSet"}
    for name, kind in kinds.items():
        apply(kube, NAMESPACE, workload(kind, name))
    joined = [ready(kube, NAMESPACE, name) for name in kinds]
    members, before = [kube.engines(NAMESPACE, ENGINE, MODEL)[0], *joined], instances(kube)
    (prompt,) = make_prompts(time.time_ns() % 2**31, 1)
    right = reference.complete(prompt, ANSWER_TOKENS).tokens
    setup.install(print, "--set", "operator.workers=5")
    share(members, reference)
    setup.helm("uninstall", "epochkv", "--wait")
    assert [engine.complete(prompt, ANSWER_TOKENS).tokens for engine in members] == [right] * len(members)
    setup.install(print)
    setup.wait_ready(print)
    share(members, reference)
    reset(kube)
    assert members[0].complete(prompt, ANSWER_TOKENS) == Answer(right, 0)
    assert instances(kube) == before, setup.diagnosis()
