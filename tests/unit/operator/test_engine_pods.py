"""What the pods of an engine are given: time to start, a model, other pods to compute with; and how they are replaced."""

import json
from dataclasses import replace
from typing import Any

import pytest

from epochkv_operator.planning.context import Observed
from epochkv_operator.planning.engine import desired_engine
from epochkv_operator.planning.plan import plan_engine, plan_pool
from epochkv_operator.planning.pool import desired_pool
from tests.support.planning import CONTEXT, ENGINE_SPECS, engine, one, pool, variables

Json = dict[str, Any]
LABELLED = replace(CONTEXT.settings, monitor_labels=(("release", "prometheus"),))
EVERYTHING = replace(CONTEXT, settings=LABELLED, served=frozenset({"LeaderWorkerSet", "PodMonitor"}))
SPANNING: Json = {"parallelism": {"tensor": 8, "pipeline": 2, "nodes": 4}}


def objects(spec: Json, wanted: Any = None) -> list[Json]:
    return desired_engine(engine({**ENGINE_SPECS["minimal"], **spec}), wanted or pool(), EVERYTHING)


def deployment(spec: Json) -> Json:
    found: Json = one(objects(spec), "Deployment")["spec"]
    return found


def container(template: Json) -> Json:
    found: Json = next(item for item in template["spec"]["containers"] if item["name"] == "engine")
    return found


@pytest.mark.parametrize(
    ("resources", "parallelism", "minutes"),
    [
        ({}, {}, 14),  # nobody said anything: 64 GiB
        ({"requests": {"memory": "4Gi"}}, {}, 10),
        ({"requests": {"memory": "4Gi"}, "limits": {"memory": "512Gi"}}, {}, 44),
        ({"limits": {"nvidia.com/gpu": 1, "memory": "16Gi"}}, {}, 22),
        ({"limits": {"nvidia.com/gpu": 8}}, {"tensor": 8}, 112),
        ({"limits": {"nvidia.com/gpu": 8}}, {"tensor": 2}, 35),  # six of them idle
        ({"limits": {"amd.com/gpu": 8}}, {"tensor": 8, "pipeline": 2, "nodes": 2}, 112),
        ({"limits": {"nvidia.com/gpu": 8}}, {"tensor": 2, "data": 4}, 112),
        ({"limits": {"nvidia.com/gpu": 8}}, {"tensor": 2, "data": 4, "nodes": 4}, 35),
        ({"limits": {"hugepages-2Mi": "8Gi", "ephemeral-storage": "1Ti", "cpu": 64}}, {}, 14),
    ],
)
def test_a_start_may_take_as_long_as_the_largest_model_that_fits(resources: Json, parallelism: Json, minutes: int) -> None:
    """10 minutes, and 256 MiB a second of what could be weights: 192 GiB of an accelerator, or else the memory."""
    found = objects({"resources": resources, "parallelism": parallelism})
    made = next(obj["spec"] for obj in found if obj["kind"] in ("Deployment", "LeaderWorkerSet"))
    probe = container(made["template"] if "template" in made else made["leaderWorkerTemplate"]["leaderTemplate"])["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] // 60 == minutes


@pytest.mark.parametrize(
    ("probe", "seconds"),
    [({"failureThreshold": 100}, 1400), ({"periodSeconds": 60, "initialDelaySeconds": 7}, 900 + 7 + 60 * 172), (None, 930)],
)
def test_a_rollout_waits_for_the_startup_probe_that_counts(probe: Json | None, seconds: int) -> None:
    """Else a Deployment would call a big model stuck while it loads."""
    overrides = {"template": {"spec": {"containers": [{"name": "engine", "startupProbe": probe}]}}}
    assert deployment({**overrides, "resources": {"limits": {"memory": "64Gi"}}})["progressDeadlineSeconds"] == seconds


@pytest.mark.parametrize(
    ("args", "tls"),
    [
        (["--ssl-certfile", "/tls/tls.crt", "--ssl-keyfile", "/tls/tls.key"], True),
        (["--ssl_certfile=/tls/tls.crt"], True),
        (["--ssl-ca-certs=/tls/ca.crt"], False),
    ],
)
def test_probes_and_prometheus_speak_https_to_an_engine_with_a_certificate(args: list[str], tls: bool) -> None:
    """Else no pod of it would ever be ready."""
    made = objects({"args": args})
    runs = container(one(made, "Deployment")["spec"]["template"])
    schemes = {runs[probe]["httpGet"].get("scheme") for probe in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert schemes == ({"HTTPS"} if tls else {None})
    [endpoint] = one(made, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint.get("scheme") == ("https" if tls else None)
    assert endpoint["relabelings"] == [
        {"sourceLabels": ["__meta_kubernetes_pod_label_epochkv_io_pool"], "targetLabel": "pool"},
        {"sourceLabels": ["__meta_kubernetes_pod_label_epochkv_io_engine"], "targetLabel": "inference_engine"},
    ]


@pytest.mark.parametrize(
    ("given", "rolling", "budget"),
    [
        ({}, {"maxUnavailable": 1, "maxSurge": 0}, 1),
        ({"maxUnavailable": "25%", "maxSurge": 2}, {"maxUnavailable": "25%", "maxSurge": 2}, "25%"),
        ({"maxUnavailable": 0, "maxSurge": 1}, {"maxUnavailable": 0, "maxSurge": 1}, 1),
        ({"maxUnavailable": "0%", "maxSurge": 1}, {"maxUnavailable": "0%", "maxSurge": 1}, 1),
    ],
)
def test_how_pods_are_replaced(given: Json, rolling: Json, budget: int | str) -> None:
    """A budget of 0 would keep every node from being drained."""
    made = objects({"updateStrategy": given})
    assert one(made, "Deployment")["spec"]["strategy"] == {"type": "RollingUpdate", "rollingUpdate": rolling}
    assert one(made, "PodDisruptionBudget")["spec"]["maxUnavailable"] == budget
    spread = one(objects({"updateStrategy": given, **SPANNING}), "LeaderWorkerSet")["spec"]["rolloutStrategy"]
    assert spread == {"type": "RollingUpdate", "rollingUpdateConfiguration": rolling}


@pytest.mark.parametrize(
    ("model", "path", "source", "mount", "extra"),
    [
        (
            {"volume": {"claimName": "models", "path": "qwen/8b"}},
            "/models/qwen/8b",
            {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}},
            {"mountPath": "/models", "readOnly": True},
            {"HF_HUB_OFFLINE": "1"},
        ),
        (
            {"volume": {"image": {"reference": "r/m:1", "pullPolicy": "IfNotPresent"}}},
            "/models",
            {"image": {"reference": "r/m:1", "pullPolicy": "IfNotPresent"}},
            {"mountPath": "/models", "readOnly": True},
            {"HF_HUB_OFFLINE": "1"},
        ),
        (
            {"cache": {"claimName": "hub"}, "source": "org/other"},
            "org/other",
            {"persistentVolumeClaim": {"claimName": "hub"}},
            {"mountPath": "/cache"},
            {"HF_HOME": "/cache/huggingface"},
        ),
    ],
)
def test_where_the_model_comes_from(model: Json, path: str, source: Json, mount: Json, extra: Json) -> None:
    spec = {"model": {"name": "org/m", **model}}
    template = deployment(spec)["template"]
    made = container(template)
    assert made["args"][made["args"].index("--model") + 1] == path
    assert made["args"][made["args"].index("--served-model-name") + 1] == "org/m"
    volume = template["spec"]["volumes"][2]
    assert {key: value for key, value in volume.items() if key != "name"} == source
    assert {"name": volume["name"], **mount} in made["volumeMounts"]
    assert variables(made).items() >= extra.items()
    [name] = extra
    mine = variables(container(deployment({**spec, "env": [{"name": name, "value": "mine"}]})["template"]))
    assert mine[name] == "mine"


def test_groups_of_pods() -> None:
    made = objects({**SPANNING, "replicas": 3, "resources": {"limits": {"memory": "8Gi"}}}, pool("l1"))
    assert not [obj for obj in made if obj["kind"] == "Deployment"]
    lws = one(made, "LeaderWorkerSet")
    spec = lws["spec"]["leaderWorkerTemplate"]
    leader, follower = container(spec["leaderTemplate"]), container(spec["workerTemplate"])
    assert (lws["spec"]["replicas"], spec["size"], spec["restartPolicy"]) == (3, 4, "RecreateGroupOnPodRestart")
    for made_of in (leader, follower):
        assert made_of["resources"] == {"limits": {"memory": "10Gi"}}  # each pod has an L1 of the pool's 2 GiB
        assert variables(made_of)["VLLM_HOST_IP"] == "$(POD_IP)"
    assert "exec python3 -m vllm.entrypoints.openai.api_server " in leader["command"][2]
    assert follower["command"][-1] == "vllm.entrypoints.cli.main"
    shm = next(volume for volume in spec["workerTemplate"]["spec"]["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"]["sizeLimit"] == "1Gi"  # four ranks of sixteen


@pytest.mark.parametrize(("nodes", "shm"), [(1, "2Gi"), (2, "1Gi")])
def test_data_parallel_ranks_of_a_pod_share_its_memory(nodes: int, shm: str) -> None:
    shape = {"tensor": 2, "data": 4, "nodes": nodes}
    made = objects({"parallelism": shape, "resources": {"limits": {"memory": "32Gi"}}}, pool({"local": {"capacity": "64Gi"}}))
    found = next(obj["spec"] for obj in made if obj["kind"] in ("Deployment", "LeaderWorkerSet"))
    for template in (
        [found["template"]] if nodes == 1 else [found["leaderWorkerTemplate"][f"{role}Template"] for role in ("leader", "worker")]
    ):
        runs = container(template)
        assert runs["resources"]["limits"]["memory"] == "96Gi"
        config = json.loads(runs["args"][runs["args"].index("--kv-transfer-config") + 1])["kv_connector_extra_config"]
        assert config["local"]["capacity_bytes"] == 64 << 30, "the connector divides it"
        [volume] = [volume for volume in template["spec"]["volumes"] if volume["name"] == "shm"]
        assert volume["emptyDir"]["sizeLimit"] == shm


def test_only_the_first_pod_of_a_group_answers() -> None:
    template = {"spec": {"containers": [{"name": "engine", "startupProbe": {"failureThreshold": 9}}]}}
    made = objects({**SPANNING, "template": template})
    spec = one(made, "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]
    assert container(spec["leaderTemplate"])["startupProbe"]["failureThreshold"] == 9
    follower = container(spec["workerTemplate"])
    assert not [key for key in follower if key.endswith("Probe")]
    assert "ports" not in follower
    # It goes on until the first has finished its requests: 5 s, and 40 s of its --shutdown-timeout.
    assert follower["lifecycle"]["preStop"]["sleep"]["seconds"] == 45
    leaders = {"epochkv.io/engine": "rollout", "app.kubernetes.io/component": "engine", "leaderworkerset.sigs.k8s.io/worker-index": "0"}
    assert one(made, "Service")["spec"]["selector"] == leaders
    assert one(made, "PodMonitor")["spec"]["selector"]["matchLabels"] == leaders
    everyone = one(made, "PodDisruptionBudget")["spec"]["selector"]["matchLabels"]
    assert everyone == {key: value for key, value in leaders.items() if "leaderworkerset" not in key}


def test_without_leaderworkerset_nothing_is_changed_and_its_name_is_said() -> None:
    wanted = engine({**ENGINE_SPECS["minimal"], **SPANNING})
    before = Observed(tuple(desired_engine(engine(), pool(), CONTEXT)))
    plan = plan_engine(wanted, pool(), before, CONTEXT)
    assert (plan.apply, plan.delete) == ((), ())
    assert plan.problem is not None
    assert plan.problem.reason == "KindNotServed"
    for word in ("spec.parallelism.nodes is 4", "leaderworkerset.x-k8s.io/v1", "https://lws.sigs.k8s.io"):
        assert word in plan.problem.message
    after = plan_engine(wanted, pool(), before, EVERYTHING)
    assert "LeaderWorkerSet" in {obj["kind"] for obj in after.apply}
    assert [obj["kind"] for obj in after.delete] == ["Deployment"]
    back = plan_engine(engine(), pool(), Observed(tuple(desired_engine(wanted, pool(), EVERYTHING))), EVERYTHING)
    assert [obj["kind"] for obj in back.delete] == ["LeaderWorkerSet"]


def test_a_kind_that_cannot_be_seen_now_is_left_alone() -> None:
    """Rights that are taken away for a while must not end an engine, nor its monitor."""
    seen = Observed(tuple(objects({}) + desired_pool(pool(), EVERYTHING)))
    assert not plan_engine(engine(), pool(), seen, CONTEXT).delete
    assert not plan_pool(pool(), seen, CONTEXT).delete


def test_what_prometheus_is_told() -> None:
    assert not [obj for obj in desired_engine(engine(), pool(), CONTEXT) + desired_pool(pool(), CONTEXT) if obj["kind"] == "PodMonitor"]
    ports = {}
    for obj in objects({}) + desired_pool(pool(), EVERYTHING):
        if obj["kind"] == "PodMonitor":
            [endpoint] = obj["spec"]["podMetricsEndpoints"]
            ports[obj["metadata"]["name"]] = endpoint["port"]
            assert endpoint["path"] == "/metrics"
            assert obj["metadata"]["labels"]["release"] == "prometheus"
            assert obj["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "epochkv-operator"
    assert ports == {"rollout": "http", "policy-master": "admin", "policy-store": "health"}
    named = json.dumps(objects({}) + desired_pool(pool(), EVERYTHING))
    assert all(f'"name": "{port}", "containerPort"' in named for port in ports.values())
    assert not [obj for obj in desired_pool(pool("external"), EVERYTHING) if obj["kind"] == "PodMonitor"]


def test_where_groups_are_placed_is_for_leaderworkerset_to_read() -> None:
    where = {"leaderworkerset.sigs.k8s.io/exclusive-topology": "rack"}
    lws = one(objects({**SPANNING, "template": {"metadata": {"annotations": {**where, "note": "x"}}}}), "LeaderWorkerSet")
    assert lws["metadata"]["annotations"].items() >= where.items()
    assert "note" not in lws["metadata"]["annotations"]


def test_an_engine_called_default_leaves_the_namespaces_own_account_alone() -> None:
    objects = desired_engine(engine(name="default"), pool(), CONTEXT)
    account = one(objects, "ServiceAccount")["metadata"]["name"]
    assert account == "default-engine"
    assert one(objects, "Deployment", "default")["spec"]["template"]["spec"]["serviceAccountName"] == account
