"""The operator beside others: names that are taken already, counts that autoscalers own, Secrets that a quota refuses."""

import shlex
from typing import Any

import yaml

from hack.waiting import eventually
from tests.cluster.operator_harness import CHILDREN, ENGINES, POOLS, ROOT, Namespace, OperatorProcess, condition

L1 = {"local": {"capacity": "64Mi"}}
L2 = {"distributed": {"mooncake": {"store": {"replicas": 1, "segmentSize": "256Mi"}}}}
ENGINE: dict[str, Any] = {"model": {"name": "tiny"}, "replicas": 2}


def ready(status: dict[str, Any], reason: str) -> dict[str, Any] | None:
    found = condition(status, "Ready")
    return found if found.get("reason") == reason else None


def replicas_of(space: Namespace, deployment: str) -> int | None:
    found = space.get(CHILDREN["deployments"], deployment)
    return found["spec"]["replicas"] if found is not None else None


def poke(space: Namespace, collection: str, name: str) -> None:
    """Have an object looked at now rather than at the next round."""
    space.patch(collection, name, {"metadata": {"annotations": {"poked": "yes"}}})


def test_a_users_object_of_a_wanted_name_is_left_alone(namespace: Namespace, operator: OperatorProcess) -> None:
    """It carries none of the operator's labels, so no watch shows it."""
    kind, about = "services", "policy-master"
    spec = {"ports": [{"port": 80}], "selector": {"app": "mine"}}
    mine = namespace.create(CHILDREN[kind], {"metadata": {"name": about}, "spec": spec})
    namespace.create_pool("policy", **L1, **L2)
    refused = eventually(lambda: ready(namespace.status("policy"), "NameConflict"), "a condition")
    assert f"{namespace.name}/{about} is not controlled by this operator: delete it, or give it another name" in refused["message"]
    assert namespace.get(CHILDREN[kind], about) == mine
    namespace.delete(CHILDREN[kind], about)
    poke(namespace, POOLS, "policy")
    eventually(lambda: about in namespace.names(kind), "made once the name is free")
    eventually(lambda: not ready(namespace.status("policy"), "NameConflict"), "the condition goes")


def test_a_child_that_lost_its_labels_is_still_the_operators(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_pool("policy", **L1)
    eventually(lambda: "policy-connection" in namespace.names("configmaps"), "made")
    before = namespace.get(CHILDREN["configmaps"], "policy-connection")
    assert before is not None
    namespace.patch(CHILDREN["configmaps"], "policy-connection", {"metadata": {"labels": None}})
    eventually(lambda: "policy-connection" in namespace.names("configmaps"), "labelled again")
    after = namespace.get(CHILDREN["configmaps"], "policy-connection")
    assert after is not None
    assert after["metadata"]["uid"] == before["metadata"]["uid"]
    assert not ready(namespace.status("policy"), "NameConflict")


def test_a_count_set_on_the_deployment_itself_is_left_alone_and_said(namespace: Namespace, operator: OperatorProcess) -> None:
    """An autoscaler that targets the Deployment must not be fought; but whoever scales the engine then has to learn why nothing happens."""
    namespace.create_engine("rollout", **ENGINE)
    eventually(lambda: replicas_of(namespace, "rollout") == 2, "made")
    namespace.kubectl("scale", "deployment/rollout", "--replicas=4")

    def note() -> str | None:
        text = condition(namespace.engine_status("rollout"), "Available").get("message", "")
        return text if "somebody scaled Deployment rollout itself to 4" in text else None

    said = eventually(note, "a note in the condition")
    assert replicas_of(namespace, "rollout") == 4
    remedy = said.rpartition("to have them count, ")[2].split(" ", 1)[1]
    namespace.kubectl(*shlex.split(remedy))
    eventually(lambda: replicas_of(namespace, "rollout") == 2, "handed back")
    namespace.kubectl("scale", "ie/rollout", "--replicas=1")
    eventually(lambda: replicas_of(namespace, "rollout") == 1, "the engine's own count counts again")
    assert note() is None


def test_a_users_secret_of_the_pools_name_is_left_alone(namespace: Namespace, operator: OperatorProcess) -> None:
    """The engine serves all the same, without sharing, and says why."""
    mine = namespace.create(CHILDREN["secrets"], {"metadata": {"name": "policy-fence"}, "stringData": {"mine": "yes"}})
    namespace.create_pool("policy", **L1)
    namespace.create_engine("rollout", poolRef={"name": "policy"}, **ENGINE)
    conflict = eventually(lambda: ready(namespace.status("policy"), "SecretConflict"), "a condition")
    assert "policy-fence exists and is not this operator's; delete it" in conflict["message"]
    waiting = eventually(lambda: ready(namespace.engine_status("rollout"), "PoolNotReady"), "the engine says so")
    assert "policy-fence exists and is not this operator's; delete it" in waiting["message"]
    eventually(lambda: replicas_of(namespace, "rollout") == 2, "the engine serves")
    assert namespace.get(CHILDREN["secrets"], "policy-fence") == mine
    namespace.delete(CHILDREN["secrets"], "policy-fence")
    poke(namespace, POOLS, "policy")
    eventually(lambda: "policy-fence" in namespace.names("secrets"), "made once the name is free")
    eventually(lambda: ready(namespace.status("policy"), "Ready"), "the pool is well")
    eventually(lambda: not ready(namespace.engine_status("rollout"), "PoolNotReady"), "the engine knows")


def test_a_pool_without_its_secret_says_why_and_goes_on_when_it_may(namespace: Namespace, operator: OperatorProcess) -> None:
    path = "/api/v1/namespaces/{}/resourcequotas"
    namespace.create(path, {"metadata": {"name": "tight"}, "spec": {"hard": {"count/secrets": "0"}}})
    eventually(lambda: (namespace.get(path, "tight") or {}).get("status", {}).get("used", {}).get("count/secrets") == "0", "quota in force")
    namespace.create_pool("policy", **L1)
    namespace.create_engine("rollout", poolRef={"name": "policy"}, **ENGINE)
    refused = eventually(lambda: ready(namespace.status("policy"), "SecretRefused"), "a condition")
    assert "policy-fence" in refused["message"]
    assert "exceeded quota" in refused["message"]
    waiting = eventually(lambda: ready(namespace.engine_status("rollout"), "PoolNotReady"), "the engine says so")
    assert "KVCachePool policy has no keys" in waiting["message"]
    assert "exceeded quota" in waiting["message"]
    assert replicas_of(namespace, "rollout") is None  # its pods would wait for a volume that does not exist
    namespace.delete(path, "tight")
    eventually(lambda: replicas_of(namespace, "rollout") == 2, "the engine starts", 60)
    eventually(lambda: not ready(namespace.status("policy"), "SecretRefused"), "the condition goes")


def test_the_sample_autoscaler_scales_an_engine(namespace: Namespace, operator: OperatorProcess) -> None:
    """By the real HorizontalPodAutoscaler controller; and nobody scales the engine back."""
    namespace.create_engine("rollout", model={"name": "tiny"})
    made = eventually(lambda: namespace.get(CHILDREN["deployments"], "rollout"), "made")
    assert made["spec"]["replicas"] == 1
    # The controller adds up the pods that this selector finds.
    eventually(lambda: "selector" in namespace.engine_status("rollout"), "a status")
    scale = namespace.request("GET", f"{ENGINES.format(namespace.name)}/rollout/scale")
    pairs = dict(part.split("=") for part in scale["status"]["selector"].split(","))
    assert pairs.items() <= made["spec"]["template"]["metadata"]["labels"].items()
    sample = yaml.safe_load((ROOT / "config/samples/autoscaler.yaml").read_text())
    namespace.create("/apis/autoscaling/v2/namespaces/{}/horizontalpodautoscalers", sample)
    eventually(lambda: replicas_of(namespace, "rollout") == 2, "scaled to minReplicas", 90)
    # The engine's manifest, applied again without `replicas`, changes nothing.
    namespace.patch(ENGINES, "rollout", {"spec": {"env": [{"name": "A", "value": "1"}]}})
    eventually(lambda: namespace.engine_status("rollout").get("observedGeneration") == 3, "looked at")
    assert namespace.get(ENGINES, "rollout")["spec"]["replicas"] == replicas_of(namespace, "rollout") == 2  # type: ignore[index]
