"""Pods with other weights leave their Service, with a real kubelet: a client that asks through the Service while engines are pushed to,
restarted with base weights, and while no operator runs, hears no answer of other weights once the push has converged.
"""

import contextlib
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime

import pytest
import yaml

from epochkv_fence.client.stamps import ASK
from hack.demo.journey import BASE_WEIGHTS, MODEL, NAMESPACE, NEW_WEIGHTS, make_prompts
from hack.demo.kube import Json, Kube, PodEngine, condition
from hack.demo.setup import MANIFESTS, SYSTEM, Setup
from hack.engine_api import EngineError
from hack.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]
NAME = "gated"
READY_SECONDS = 900.0
ANSWERS, TOKENS = 10, 16


class ServiceEngine(PodEngine):
    """Whichever pod the Service sends a request to: the API server goes by its endpoints."""

    def request(self, method: str, path: str, body: bytes | None = None, seconds: float = 120.0) -> bytes:
        proxy = f"/api/v1/namespaces/{NAMESPACE}/services/{self.name}:8000/proxy{path}"
        status, answer = self._kube.request(method, proxy, body, self._headers, seconds)
        if status != 200:
            raise EngineError(f"{self.name} {path}: HTTP {status}: {answer.decode(errors='replace')[:500]}")
        return answer


class Client(threading.Thread):
    """Asks all the while; an answer that is not `right` is a wrong one. None at all is an outage, and no wrong answer."""

    def __init__(self, kube: Kube, right: tuple[int, ...]) -> None:
        super().__init__()
        self.engine, self.right = ServiceEngine(kube, NAMESPACE, NAME, MODEL), right
        self.answers = 0
        self.wrong: list[str] = []
        """When, and by which weights."""
        self.ended = threading.Event()

    def run(self) -> None:
        while not self.ended.wait(0.2):
            try:
                asked = datetime.now(UTC).isoformat()
                found = self.engine.complete(PROMPT, TOKENS, transfer=ASK)
            except (EngineError, OSError):
                continue
            self.answers += 1
            if found.tokens != self.right:
                self.wrong.append(f"asked at {asked}, answered at {datetime.now(UTC).isoformat()}: {found}")

    def answered(self) -> None:
        """Some more answers come."""
        known = self.answers
        eventually(lambda: self.answers >= known + ANSWERS, "answers", 120)


(PROMPT,) = make_prompts(9301, 1)


@pytest.fixture(scope="module")
def fleet(setup: Setup, kube: Kube) -> Iterator[list[str]]:
    """Two engines in a pool of their own, which serve base weights."""
    pool = {"local": {"capacity": "64Mi"}, "reset": {"leaseSeconds": 10}, "serve": {"weights": "Converged"}}
    objects: list[Json] = [{"apiVersion": "epochkv.io/v1alpha1", "kind": "KVCachePool", "metadata": {"name": NAME}, "spec": pool}]
    engine: Json = yaml.safe_load((MANIFESTS / "engine.yaml").read_text())
    engine["metadata"]["name"], engine["spec"]["poolRef"]["name"] = NAME, NAME
    for made in (*objects, engine):
        kube.kubectl("-n", NAMESPACE, "apply", "-f", "-", stdin=json.dumps(made))
    names = [pod["metadata"]["name"] for pod in eventually(lambda: two(kube), "two pods", 60)]
    eventually(lambda: endpoints(kube) == set(names), lambda: f"both serve\n{setup.diagnosis()}", READY_SECONDS, 1.0)
    yield names
    for kind in ("ie", "kvp"):
        kube.kubectl("-n", NAMESPACE, "delete", kind, NAME, "--timeout=120s")


def two(kube: Kube) -> list[Json]:
    found = kube.pods(NAMESPACE, f"epochkv.io/engine={NAME}")
    return found if len(found) == 2 else []


def endpoints(kube: Kube) -> set[str]:
    path = f"/apis/discovery.k8s.io/v1/namespaces/{NAMESPACE}/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3D{NAME}"

    def slices() -> list[Json]:
        with contextlib.suppress(OSError):  # a busy API server cuts connections
            return list(kube.get(path)["items"])
        return []

    found = [endpoint for each in eventually(slices, "its EndpointSlices", 60, 0.5) for endpoint in each.get("endpoints") or []]
    return {endpoint["targetRef"]["name"] for endpoint in found if endpoint["conditions"]["ready"]}


def pod(kube: Kube, name: str) -> Json:
    return kube.get(f"/api/v1/namespaces/{NAMESPACE}/pods/{name}")


def served(kube: Kube) -> Json:
    found: Json = kube.get(f"/apis/epochkv.io/v1alpha1/namespaces/{NAMESPACE}/kvcachepools/{NAME}")["status"]
    return found


def test_no_answer_of_other_weights_after_a_push(setup: Setup, kube: Kube, fleet: list[str]) -> None:
    first, second = (PodEngine(kube, NAMESPACE, name, MODEL) for name in fleet)
    base, both = first.complete(PROMPT, TOKENS).tokens, set(fleet)
    [before] = served(kube)["servedWeights"]
    first.reload_weights(NEW_WEIGHTS)
    right = first.complete(PROMPT, TOKENS).tokens
    assert right != base
    assert endpoints(kube) == both, "half a push moves nobody"
    second.reload_weights(NEW_WEIGHTS)
    eventually(lambda: served(kube)["servedWeights"] != [before], lambda: f"W moves\n{setup.diagnosis()}", 60)
    assert endpoints(kube) == both
    client = Client(kube, right)
    client.start()
    try:
        client.answered()
        restarts = pod(kube, second.name)["status"]["containerStatuses"][0]["restartCount"]
        kube.kubectl("-n", NAMESPACE, "exec", second.name, "--", "sh", "-c", "kill -9 -1")
        eventually(lambda: endpoints(kube) == {first.name}, lambda: f"it is down\n{setup.diagnosis()}", 60)

        def up() -> bool:
            found = pod(kube, second.name)
            restarted = found["status"]["containerStatuses"][0]["restartCount"] > restarts
            return restarted and condition(found, "ContainersReady").get("status") == "True"

        eventually(up, lambda: f"restarted\n{setup.diagnosis()}", READY_SECONDS, 1.0)
        assert second.complete(PROMPT, TOKENS).tokens == base, "it answers with base weights"
        client.answered()
        assert condition(pod(kube, second.name), "epochkv.io/weights")["status"] == "False"
        assert endpoints(kube) == {first.name}
        # Every operator is killed, and the hub with it. The next one knows nothing of pushes.
        kube.kubectl("-n", SYSTEM, "delete", "pod", "-l", "app.kubernetes.io/component=operator", "--grace-period=0", "--force")
        client.answered()
        kube.kubectl("-n", SYSTEM, "rollout", "status", "deployment/epochkv-operator", "--timeout=180s", seconds=200)
        kube.kubectl("-n", NAMESPACE, "wait", f"kvp/{NAME}", "--for=condition=EpochConverged", "--timeout=120s", seconds=140)
        client.answered()
        assert endpoints(kube) == {first.name}
        second.reload_weights(NEW_WEIGHTS)
        eventually(lambda: endpoints(kube) == both, lambda: f"back\n{setup.diagnosis()}", 120)
        client.answered()
    finally:
        client.ended.set()
        client.join()
    print(f"{client.answers} answers")
    said = kube.kubectl("-n", SYSTEM, "logs", "deployment/epochkv-operator", "--tail=-1").splitlines()
    assert client.wrong == [], "\n".join(line for line in said if NAME in line and "gate" in line)
    for engine in (first, second):
        engine.reload_weights(BASE_WEIGHTS)
