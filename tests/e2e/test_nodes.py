"""Two nodes. The one with the store and both engines is drained, then one with an engine killed: no wrong answer, and hits return."""

import hashlib
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from hack.cluster.kind import KindCluster
from hack.demo.journey import ANSWER_TOKENS, CACHED, ENGINE, MODEL, NAMESPACE, POOL, REFERENCE, make_prompts
from hack.demo.kube import DemoError, Json, Kube, condition
from hack.demo.setup import ROOT, Setup
from hack.engine_api import EngineError
from hack.waiting import eventually

ON_KIND = pytest.mark.skipif(os.environ.get("CLUSTER") != "kind", reason="the local provider has one node: CLUSTER=kind")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400), ON_KIND]
NAME = "nodes-" + hashlib.sha256(str(ROOT).encode()).hexdigest()[:6]
STAYS, GOES = f"{NAME}-control-plane", f"{NAME}-worker"
ENGINES, STORE = f"epochkv.io/engine={ENGINE}", f"epochkv.io/pool={POOL},app.kubernetes.io/component=store"
READY_SECONDS = 900.0


@pytest.fixture(scope="module")
def cluster() -> Iterator[KindCluster]:
    made = KindCluster(NAME, workers=1)
    made.down(print)
    yield made
    made.down(print)


@pytest.fixture(scope="module")
def setup(cluster: KindCluster) -> Iterator[Setup]:
    """The demo over two nodes."""
    made = install(cluster)
    yield made
    made.remove(print)


def install(cluster: KindCluster) -> Setup:
    made = Setup(cluster=cluster.name)
    archives = made.prepare(lambda text, part="": print(f"{part}: {text}"))
    made.make_models(print)
    cluster.up(print, [made.models, made.engine_venv])
    kube = made.kube()
    if kube.get(f"/api/v1/nodes/{STAYS}")["spec"].get("taints"):
        kube.kubectl("taint", "nodes", STAYS, "node-role.kubernetes.io/control-plane-")
    made.load_images(archives, print)
    made.install(print)
    made.apply(print)
    return made


@pytest.fixture
def kube(setup: Setup) -> Kube:
    return place(setup)


def place(setup: Setup) -> Kube:
    """Wait until all is Ready with one engine and the store on the node that goes, the judge on the one that stays."""
    setup.wait_ready(lambda text: None, READY_SECONDS)
    made = setup.kube()
    engines = made.pods(NAMESPACE, ENGINES)
    if (first := engines[0]["spec"]["nodeName"]) == engines[1]["spec"]["nodeName"]:
        move(made, engines[0], GOES if first == STAYS else STAYS)
    move(made, made.pods(NAMESPACE, STORE)[0], GOES)
    move(made, made.pods(NAMESPACE, f"epochkv.io/engine={REFERENCE}")[0], STAYS)
    setup.wait_ready(lambda text: None, READY_SECONDS)
    assert {pod["spec"]["nodeName"] for pod in made.pods(NAMESPACE, ENGINES)} == {STAYS, GOES}
    return made


def move(kube: Kube, pod: Json, node: str) -> None:
    """Let the pod's controller make it anew on this node."""
    if pod["spec"]["nodeName"] == node:
        return
    other = STAYS if node == GOES else GOES
    kube.kubectl("cordon", other)
    kube.kubectl("-n", NAMESPACE, "delete", "pod", pod["metadata"]["name"], seconds=180.0)
    label, owner = "app.kubernetes.io/instance", pod["metadata"]["labels"]["app.kubernetes.io/instance"]
    eventually(lambda: all(found["spec"].get("nodeName") for found in kube.pods(NAMESPACE, f"{label}={owner}")), "it has a node", 120, 0.5)
    kube.kubectl("uncordon", other)


class Traffic:
    """Prompts to every Ready engine, again and again; each answer is compared with the one of an engine without a cache."""

    def __init__(self, kube: Kube, seed: int) -> None:
        self.kube, self.answered, self.fewest, self.wrong = kube, 0, 2, list[str]()
        (judge,) = kube.engines(NAMESPACE, REFERENCE, MODEL)
        self.prompts = make_prompts(seed, 4)
        self.right = [judge.complete(prompt, ANSWER_TOKENS).tokens for prompt in self.prompts]

    def ask(self, number: int) -> list[int]:
        """The prompt to every engine in turn; tokens that each took from a cache."""
        hits, engines = [], self.kube.engines(NAMESPACE, ENGINE, MODEL)
        self.fewest = min(self.fewest, len(engines))
        for engine in engines:
            answer = engine.complete(self.prompts[number], ANSWER_TOKENS)
            self.answered += 1
            if answer.tokens != self.right[number]:
                self.wrong.append(f"{engine.name}, prompt {number}: {answer.tokens}, not {self.right[number]}")
            hits.append(answer.cached)
        return hits

    @contextmanager
    def running(self) -> Iterator[None]:
        ended = threading.Event()

        def run() -> None:
            number = 0
            while not ended.is_set():
                try:
                    self.ask(number % 3)
                except (EngineError, DemoError, OSError):
                    ended.wait(0.5)  # the pod goes
                number += 1

        with ThreadPoolExecutor(1) as threads:
            running = threads.submit(run)
            try:
                yield
            finally:
                ended.set()
            running.result(120)


def hits_return(setup: Setup, kube: Kube, traffic: Traffic) -> None:
    """Everything is Ready on the node that stays, and a prompt that nobody has seen passes from one engine to the other."""
    setup.wait_ready(lambda text: None, READY_SECONDS)
    assert {pod["spec"]["nodeName"] for pod in [*kube.pods(NAMESPACE, ENGINES), *kube.pods(NAMESPACE, STORE)]} == {STAYS}
    eventually(lambda: traffic.ask(3)[1:] == [CACHED], "the second engine takes the prompt from a cache", 120, 1.0)
    assert traffic.wrong == []


def test_a_drained_node(setup: Setup, kube: Kube) -> None:
    """Both engines are on it, so without the budget they would go at once."""
    for pod in kube.pods(NAMESPACE, ENGINES):
        move(kube, pod, GOES)
    setup.wait_ready(lambda text: None, READY_SECONDS)
    assert {pod["spec"]["nodeName"] for pod in kube.pods(NAMESPACE, ENGINES)} == {GOES}
    traffic = Traffic(kube, 811)
    with traffic.running():
        eventually(lambda: traffic.answered > 1, "both engines answer")
        before = traffic.answered
        kube.kubectl("drain", GOES, "--ignore-daemonsets", "--delete-emptydir-data", "--timeout=600s", seconds=630.0)
        during = traffic.answered
        hits_return(setup, kube, traffic)
    kube.kubectl("uncordon", GOES)
    assert during > before
    assert traffic.fewest == 1, "the budget lets one of two engines go at a time"
    assert traffic.wrong == []


def test_a_killed_node(cluster: KindCluster, setup: Setup, kube: Kube) -> None:
    traffic = Traffic(kube, 812)
    with traffic.running():
        cluster.docker("kill", GOES)
        eventually(lambda: condition(kube.get(f"/api/v1/nodes/{GOES}"), "Ready").get("status") != "True", "the node is lost", 180, 1.0)
        # What an admin says of a node that will not come back: its pods need not be waited for.
        kube.kubectl("taint", "nodes", GOES, "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute")
        hits_return(setup, kube, traffic)
    assert traffic.wrong == []
    cluster.up(print)
    assert all(line.alive for line in cluster.status())
