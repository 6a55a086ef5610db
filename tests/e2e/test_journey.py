"""The main job in pods, as the demo tells it: share, push new weights, share again, raise resetEpoch; nothing old is ever seen."""

import random

import pytest

from hack.demo.journey import NAMESPACE, POOL, Journey
from hack.demo.kube import Kube
from hack.demo.setup import Setup

pytestmark = pytest.mark.timeout(1500)


@pytest.fixture(scope="module")
def journey(setup: Setup) -> Journey:
    """The journey, told once; the tests below look at what it saw."""
    seed = random.SystemRandom().randrange(1_000_000)
    print(f"journey: --seed {seed}")
    told = Journey(setup.kube(), print, seed)
    told.prepare()
    told.share()
    told.push()
    told.after()
    told.reset()
    return told


def test_every_claim_of_the_demo_holds(journey: Journey) -> None:
    assert [f"{claim.what}: expected {claim.expected}, saw {claim.seen}" for claim in journey.claims.broken] == []
    # 1 + 6 for sharing, 3 for the push, 2 + 2 x 6 afterwards, 4 + 2 x 6 for the bump: a claim that was not checked has not held.
    assert len([claim for claim in journey.claims.items if "after a miss" not in claim.what]) == 40


def test_the_published_epoch_is_in_the_status(journey: Journey, kube: Kube) -> None:
    published = kube.kubectl("-n", NAMESPACE, "get", "kvp", POOL, "-o", "jsonpath={.status.epoch}/{.status.targetEpoch}/{.spec.resetEpoch}")
    epoch = journey.bumps[-1].epoch
    assert published == f"{epoch}/{epoch}/{epoch}"


def test_what_the_engines_hold_is_in_the_status(journey: Journey, kube: Kube) -> None:
    shown = kube.kubectl("-n", NAMESPACE, "get", "kvp", POOL, "-o", "jsonpath={.status.weightsSummary}/{.status.weights[*].engines}")
    assert shown.endswith(" 2/2/2")


def test_no_pod_was_restarted_by_the_reset(journey: Journey, kube: Kube) -> None:
    restarts = [
        container["restartCount"]
        for selector in ("epochkv.io/pool=policy", "epochkv.io/engine=reference")
        for pod in kube.pods(NAMESPACE, selector)
        for container in pod["status"]["containerStatuses"]
    ]
    assert len(restarts) == 5  # two engines, master, store, reference
    names = {engine.name for engine in journey.engines}
    assert names == {pod["metadata"]["name"] for pod in kube.pods(NAMESPACE, "epochkv.io/engine=rollout")}


def test_pods_satisfy_restricted_pod_security(kube: Kube) -> None:
    labels = kube.get(f"/api/v1/namespaces/{NAMESPACE}")["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"
    running = [pod for pod in kube.pods(NAMESPACE, "app.kubernetes.io/part-of=epochkv") if pod["status"]["phase"] == "Running"]
    assert len(running) >= 5
    for pod in running:
        assert pod["spec"]["securityContext"]["runAsUser"] == 65532
        assert all(container["securityContext"]["readOnlyRootFilesystem"] for container in pod["spec"]["containers"])
