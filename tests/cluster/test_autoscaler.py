"""The sample autoscaler on a real API server: the real HorizontalPodAutoscaler controller scales an engine, and nobody scales it back."""

from __future__ import annotations

from typing import Any

import yaml

from hack.waiting import eventually
from tests.cluster.operator_harness import ENGINES, ROOT, Namespace, OperatorProcess

AUTOSCALERS = "/apis/autoscaling/v2/namespaces/{}/horizontalpodautoscalers"
DEPLOYMENTS = "/apis/apps/v1/namespaces/{}/deployments"
ENGINE = {"model": {"name": "facebook/opt-125m"}, "image": "epochkv/engine:dev"}


def found(namespace: Namespace, collection: str) -> dict[str, Any]:
    """The engine, or its Deployment; empty when it is not there."""
    return namespace.get(collection, "rollout") or {}


def replicas(namespace: Namespace) -> tuple[int, int]:
    """What the engine asks for, and what its Deployment has."""
    engine, deployment = found(namespace, ENGINES), found(namespace, DEPLOYMENTS)
    return engine["spec"]["replicas"], deployment["spec"]["replicas"] if deployment else 0


def test_the_sample_scales_an_engine(operator: OperatorProcess, namespace: Namespace) -> None:
    namespace.create_engine("rollout", **ENGINE)
    eventually(lambda: replicas(namespace) == (1, 1), f"one pod; log:\n{operator.tail()}")
    # The controller adds up the pods that this selector finds.
    eventually(lambda: "selector" in namespace.engine_status("rollout"), "a status")
    scale = namespace.request("GET", f"{ENGINES.format(namespace.name)}/rollout/scale")
    template = found(namespace, DEPLOYMENTS)["spec"]["template"]["metadata"]["labels"]
    pairs = dict(part.split("=") for part in scale["status"]["selector"].split(","))
    assert pairs.items() <= template.items()

    sample = yaml.safe_load((ROOT / "config/samples/autoscaler.yaml").read_text())
    namespace.create(AUTOSCALERS, sample)
    eventually(lambda: replicas(namespace) == (2, 2), f"scaled to minReplicas; log:\n{operator.tail()}", 90)
    # The engine's manifest, applied again without `replicas`, changes nothing.
    namespace.patch(ENGINES, "rollout", {"spec": {**ENGINE, "env": [{"name": "A", "value": "1"}]}})
    eventually(
        lambda: "env" in found(namespace, ENGINES)["spec"] and namespace.engine_status("rollout").get("observedGeneration") == 3,
        f"the edit was looked at; log:\n{operator.tail()}",
    )
    assert replicas(namespace) == (2, 2)
