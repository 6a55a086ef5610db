"""Builders: golden files show whole objects to a reviewer. What has to hold whatever is in them has an assertion of its own.

After an intended change run `EPOCHKV_UPDATE_GOLDEN=1 pytest tests/unit/operator/test_builders.py` and review the
difference of the golden files.
"""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from epochkv_connector.config import ConnectorConfig, UpTo
from epochkv_fence.connection import ATTACH_ENV, CONFIG_ENV
from epochkv_operator.api import parse_pool
from epochkv_operator.api.base import PodSecurity
from epochkv_operator.planning.context import Context, Observed
from epochkv_operator.planning.engine import desired_engine
from epochkv_operator.planning.names import VERSION_ANNOTATION, component_name
from epochkv_operator.planning.plan import plan_engine, plan_pool
from epochkv_operator.planning.podspec import InvalidTemplate
from epochkv_operator.planning.pool import desired_pool
from epochkv_operator.settings import Settings
from tests.support.planning import CONTEXT, ENGINE_SPECS, POOL_SPECS, containers, engine, one, pool, variables

Json = dict[str, Any]
GOLDEN = Path(__file__).parent / "golden"
UPDATE = "EPOCHKV_UPDATE_GOLDEN"


def golden(name: str, objects: list[Json]) -> None:
    path = GOLDEN / f"{name}.yaml"
    text = yaml.safe_dump_all(json.loads(json.dumps(objects)), sort_keys=False, width=120)
    if os.environ.get(UPDATE):
        path.write_text(text)
    assert path.exists(), f"{path.name} does not exist: run with {UPDATE}=1 and review it"
    assert list(yaml.safe_load_all(path.read_text())) == objects, f"differs from {path.name}: if intended, run with {UPDATE}=1"


@pytest.mark.parametrize("spec", POOL_SPECS)
def test_golden_pool(spec: str) -> None:
    golden(f"pool-{spec}", desired_pool(pool(spec), CONTEXT))


@pytest.mark.parametrize("spec", ENGINE_SPECS)
def test_golden_engine(spec: str) -> None:
    golden(f"engine-{spec}", desired_engine(engine(spec), None if spec == "no-pool" else pool("l1-l2"), CONTEXT))


def transfer_of(container: Json) -> Json:
    """What the connector of this container is told."""
    transfer = json.loads(container["args"][container["args"].index("--kv-transfer-config") + 1])
    found: Json = transfer["kv_connector_extra_config"]
    return found


@pytest.mark.parametrize("spec", POOL_SPECS)
def test_the_connector_reads_what_is_rendered(spec: str) -> None:
    """Parsed with the connector's own parser, which refuses unknown keys."""
    wanted = pool(spec)
    deployment = one(desired_engine(engine("minimal"), wanted, CONTEXT), "Deployment")
    config = ConnectorConfig.parse(transfer_of(containers(deployment)[0]), environ={})
    assert (config.pool.name, config.pool.namespace, config.pool.uid) == ("policy", "rl", wanted.metadata.uid)
    assert config.hub is not None
    assert (config.hub.endpoint, config.hub.credentials_dir) == (CONTEXT.settings.endpoint, "/etc/epochkv/fence")
    assert (config.local.capacity_bytes if config.local else None) == {"l1": 2147483648, "l1-l2": 1073741824}.get(spec)
    addresses = {"l1": None, "external": "mooncake.shared:50051", "external-rdma": "etcd://e0:2379;e1:2379", "ha": "etcd://e0:2379;e1:2379"}
    address = config.distributed.master_address if config.distributed else None
    assert address == addresses.get(spec, "policy-master.rl.svc:50051")
    if spec == "rdma":
        assert config.distributed is not None
        assert (config.distributed.protocol, config.distributed.device_name) == ("rdma", "mlx5_0,mlx5_1")


@pytest.mark.parametrize(
    ("of_pool", "of_engine", "expected"),
    [(None, None, "All"), ("Prompts", None, "Prompts"), ("Prompts", 0, UpTo(0)), (4096, "All", "All"), (4096, None, UpTo(4096))],
)
def test_what_is_saved_is_what_the_engine_says_or_its_pool(of_pool: Any, of_engine: Any, expected: Any) -> None:
    wanted, used = pool(), engine("minimal")
    of_pool_spec = {"save": of_pool, **({"media_ids": "Trusted", "stamp": "All"} if of_pool == "Prompts" else {})}
    wanted = wanted.model_copy(update={"spec": wanted.spec.model_copy(update=of_pool_spec)})
    used = used.model_copy(update={"spec": used.spec.model_copy(update={"save": of_engine})})
    config = ConnectorConfig.parse(transfer_of(containers(one(desired_engine(used, wanted, CONTEXT), "Deployment"))[0]), environ={})
    assert (config.save, config.trust_media_ids, config.stamp) == (expected, *[of_pool == "Prompts"] * 2)


def test_an_upgrade_of_the_operator_touches_nothing_that_is_as_before() -> None:
    newer = replace(CONTEXT, operator_version="0.2.0")
    children = Observed(tuple(desired_pool(pool(), CONTEXT)))
    assert not plan_pool(pool(), children, newer).details
    children = Observed(tuple(desired_engine(engine(), pool(), CONTEXT)))
    assert not plan_engine(engine(), pool(), children, newer).details
    changed = engine({**ENGINE_SPECS["minimal"], "replicas": 7})
    applied = plan_engine(changed, pool(), children, newer).apply
    assert {obj["metadata"]["annotations"][VERSION_ANNOTATION] for obj in applied} == {"0.2.0"}, "who applied last"


@pytest.mark.parametrize(
    "change",
    [
        lambda: (pool("l1"), CONTEXT),
        lambda: (pool(uid="33333333-0000-4000-8000-000000000003"), CONTEXT),
        lambda: (pool(), replace(CONTEXT, credentials_revision="keys-2")),
        lambda: (pool(), replace(CONTEXT, settings=Settings("epochkv-system", hub_endpoint="tcp://elsewhere:7700"))),
    ],
    ids=["tiers", "recreated-pool", "new-keys", "hub-moved"],
)
def test_a_new_connection_rolls_the_engines(change: Any) -> None:
    def template(wanted: Any, context: Context) -> Json:
        result: Json = one(desired_engine(engine(), wanted, context), "Deployment")["spec"]["template"]
        return result

    assert template(pool(), CONTEXT) == template(pool(), CONTEXT)
    assert template(*change())["metadata"]["annotations"] != template(pool(), CONTEXT)["metadata"]["annotations"]


@pytest.mark.parametrize("own", [{}, {"save": "Prompts"}])
def test_what_a_pool_saves_rolls_only_engines_that_follow_it(own: Json) -> None:
    said, unsaid = (
        one(desired_engine(engine({**ENGINE_SPECS["minimal"], **own}), pool({**POOL_SPECS["l1"], **saves}), CONTEXT), "Deployment")
        for saves in ({"save": "All"}, {})
    )
    assert (said["spec"]["template"] == unsaid["spec"]["template"]) == bool(own)


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({}, {"requests": {"memory": "1Gi"}}),
        ({"limits": {"memory": "4Gi", "cpu": 2}}, {"limits": {"memory": "5Gi", "cpu": 2}}),
        ({"requests": {"memory": "512Mi", "cpu": "1"}}, {"requests": {"memory": "1536Mi", "cpu": "1"}}),
        ({"requests": {"memory": "3Gi"}, "limits": {"memory": 4294967296}}, {"requests": {"memory": "4Gi"}, "limits": {"memory": "5Gi"}}),
        ({"limits": {"nvidia.com/gpu": 1}}, {"limits": {"nvidia.com/gpu": 1}, "requests": {"memory": "1Gi"}}),
    ],
)
def test_l1_is_added_to_the_memory_asked_for(resources: Json, expected: Json) -> None:
    for spec, wanted in (("l1-l2", expected), ("external", resources)):
        found = one(desired_engine(engine({**ENGINE_SPECS["minimal"], "resources": resources}), pool(spec), CONTEXT), "Deployment")
        assert containers(found)[0]["resources"] == wanted


@pytest.mark.parametrize(
    ("overrides", "sleep", "timeout"),
    [
        ({}, 5, "40"),
        ({"terminationGracePeriodSeconds": 300}, 5, "280"),
        ({"terminationGracePeriodSeconds": 20}, 5, "0"),
        ({"terminationGracePeriodSeconds": 3}, 3, "0"),  # the API server refuses a longer sleep
        ({"terminationGracePeriodSeconds": 0}, 0, "0"),
        ({"terminationGracePeriodSeconds": None}, 5, "10"),  # Kubernetes' own 30 s
    ],
)
def test_shutdown_ends_well_before_the_kill(overrides: Json, sleep: int, timeout: str) -> None:
    template: Json = {"template": {"spec": overrides}}
    made = container(deployment(template)["template"])
    assert (made["lifecycle"]["preStop"], made["args"][1]) == ({"sleep": {"seconds": sleep}}, timeout)
    follower = one(objects({**SPANNING, **template}), "LeaderWorkerSet")["spec"]["leaderWorkerTemplate"]["workerTemplate"]
    assert container(follower)["lifecycle"]["preStop"] == {"sleep": {"seconds": sleep + int(timeout)}}, "the first finishes its requests"
    assert "--shutdown-timeout" not in container(deployment({**template, "args": ["--shutdown-timeout=9"]})["template"])["args"]


def test_network_policies_leave_transfer_ports_alone_out_and_select_the_pods_they_are_named_after() -> None:
    """The golden files show whom they let in."""
    everything = desired_pool(pool(), CONTEXT) + desired_engine(engine(), pool(), CONTEXT)
    everybody = one(everything, "NetworkPolicy", "rollout")["spec"]["ingress"][0]
    covered = {port for entry in everybody["ports"] if entry["protocol"] == "TCP" for port in range(entry["port"], entry["endPort"] + 1)}
    assert set(range(1, 65536)) - covered == set(range(15000, 15128))
    workloads = [obj for obj in everything if obj["kind"] in ("Deployment", "StatefulSet")]
    assert len(workloads) == 3
    for workload in workloads:
        selector = one(everything, "NetworkPolicy", workload["metadata"]["name"])["spec"]["podSelector"]["matchLabels"]
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert selector.items() <= labels.items()
        assert labels["epochkv.io/pool"] == "policy"
    assert "NetworkPolicy" not in {obj["kind"] for obj in desired_engine(engine(), pool("rdma"), CONTEXT)}, "the pool wants none"


# --------------------------------------------------------------------------------------------------- pods of engines
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
    [("--ssl-certfile /tls.crt --ssl-keyfile /tls.key", True), ("--ssl_certfile=/c", True), ("--ssl-ca-certs=/c", False)],
)
def test_probes_and_prometheus_speak_https_to_an_engine_with_a_certificate(args: str, tls: bool) -> None:
    """Else no pod of it would ever be ready."""
    made = objects({"args": args.split()})
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


IMAGE: Json = {"image": {"reference": "r/m:1", "pullPolicy": "IfNotPresent"}}
CLAIM: Json = {"persistentVolumeClaim": {"claimName": "models", "readOnly": True}}
READ_ONLY = {"mountPath": "/models", "readOnly": True}, {"HF_HUB_OFFLINE": "1"}
CACHE: Json = {"cache": {"claimName": "hub"}, "source": "org/other"}


@pytest.mark.parametrize(
    ("model", "path", "source", "mount", "extra"),
    [
        ({"volume": {"claimName": "models", "path": "qwen/8b"}}, "/models/qwen/8b", CLAIM, *READ_ONLY),
        ({"volume": IMAGE}, "/models", IMAGE, *READ_ONLY),
        (CACHE, "org/other", {"persistentVolumeClaim": {"claimName": "hub"}}, {"mountPath": "/cache"}, {"HF_HOME": "/cache/huggingface"}),
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
    groups = found.get("leaderWorkerTemplate", {})
    for template in [found["template"]] if nodes == 1 else [groups["leaderTemplate"], groups["workerTemplate"]]:
        runs = container(template)
        assert runs["resources"]["limits"]["memory"] == "96Gi"
        assert transfer_of(runs)["local"]["capacity_bytes"] == 64 << 30, "the connector divides it"
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


# -------------------------------------------------------------------------------------------- templates of the owner


def engine_template(spec: Json) -> Json:
    result: Json = deployment({"template": {"spec": spec}})["template"]["spec"]
    return result


def test_templates_merge_like_strategic_patches() -> None:
    """`golden/engine-full.yaml` shows what is added to, and changed in, what the operator makes."""
    plain = engine_template({})
    replaced = engine_template({"volumes": [{"name": "tmp", "persistentVolumeClaim": {"claimName": "scratch"}}]})
    tmp = next(volume for volume in replaced["volumes"] if volume["name"] == "tmp")
    assert tmp == {"name": "tmp", "persistentVolumeClaim": {"claimName": "scratch"}}
    for gone in (None, {"$patch": "delete"}):
        removed = engine_template({"containers": [{"name": "engine", "livenessProbe": gone}], "securityContext": {"runAsUser": gone}})
        assert "livenessProbe" not in removed["containers"][0]
        assert removed["securityContext"] == {key: value for key, value in plain["securityContext"].items() if key != "runAsUser"}
        assert "terminationGracePeriodSeconds" not in engine_template({"terminationGracePeriodSeconds": gone})
        bare = engine_template({"containers": [{"name": "engine", "securityContext": {"capabilities": gone}}]})
        assert bare["containers"][0]["securityContext"] == {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True}
        assert not engine_template({"containers": [{"name": "engine", "securityContext": gone}]})["containers"][0]["securityContext"]
    env = engine_template({"containers": [{"name": "engine", "env": [{"name": "HOME", "value": "/h"}, {"name": "A", "value": "b"}]}]})
    values = variables(env["containers"][0])
    assert (values["HOME"], values["A"], values["USER"]) == ("/h", "b", "vllm")


IDS = {"runAsUser", "runAsGroup", "fsGroup"}


@pytest.mark.parametrize(("default", "own", "fixed"), [("restricted", "platform", False), ("platform", "restricted", True)])
def test_who_chooses_the_ids_of_pods(default: PodSecurity, own: str, fixed: bool) -> None:
    """Of an object's own choice; and of the operator's, where it makes none."""
    context = replace(CONTEXT, settings=replace(CONTEXT.settings, pod_security=default))
    for said, ids in (({"podSecurity": own}, fixed), ({}, not fixed)):
        wanted = pool({"distributed": {"mooncake": {"store": {"segmentSize": "1Gi"}, **said}}})
        made = desired_pool(wanted, context)
        deployment = one(desired_engine(engine({**ENGINE_SPECS["minimal"], **said}), wanted, context), "Deployment")
        for workload in (one(made, "Deployment"), one(made, "StatefulSet"), deployment):
            security = workload["spec"]["template"]["spec"]["securityContext"]
            assert security.keys() & IDS == (IDS if ids else set())
            assert security["runAsNonRoot"] is True
        fence = next(item for item in deployment["spec"]["template"]["spec"]["volumes"] if item["name"] == "epochkv-fence")
        assert fence["secret"]["defaultMode"] == (0o440 if ids else 0o444), "without fsGroup, others must be able to read the key"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"containers": [{"name": "engine", "command": ["sh"]}]}, "containers[engine].command belongs to the operator: use spec.args"),
        ({"containers": [{"name": "engine", "args": ["--kv-transfer-config={}"]}]}, "containers[engine].args belongs to the operator"),
        ({"containers": [{"name": "engine", "image": "x"}]}, "use spec.image"),
        ({"containers": [{"name": "engine", "env": [{"name": "PYTHONHASHSEED", "value": "0"}]}]}, "PYTHONHASHSEED"),
        ({"containers": [{"name": "engine", "volumeMounts": [{"mountPath": "/etc/epochkv/fence/", "name": "x"}]}]}, "mount elsewhere"),
        ({"volumes": [{"name": "epochkv-fence", "emptyDir": {}}]}, "choose another volume name"),
        ({"volumes": [{"emptyDir": {}}]}, "spec.template.spec.volumes[0] has no name"),
        ({"containers": {"name": "engine"}}, "spec.template.spec.containers must be a list of objects"),
        ({"containers": [{"name": "engine", "$patch": "delete"}]}, "the only directive is {$patch: delete}"),
        ({"securityContext": {"$patch": "replace"}}, "the only directive is {$patch: delete}"),
        ({"tolerations": [{"$patch": "delete"}]}, "tolerations[0].$patch: the only directive is {$patch: delete}"),
        ({"volumes": {"$patch": "delete"}}, "volumes is removed, and with it the operator's own volumes"),
        ({"securityContext": "none"}, "it must be an object"),
        ({"containers": None}, "containers is removed, and with it the operator's own"),
        ({"containers": [{"name": "engine", "env": None}]}, "containers[engine].env is removed"),
        ({"containers": [{"name": "engine", "volumeMounts": None}]}, "containers[engine].volumeMounts is removed"),
        ({"containers": [{"name": "sidecar", "securityContext": "none"}]}, "containers[sidecar].securityContext is 'none'"),
        ({"initContainers": [{"name": "prepare", "securityContext": [1]}]}, "initContainers[prepare].securityContext is [1]"),
        ({"terminationGracePeriodSeconds": "soon"}, "terminationGracePeriodSeconds is 'soon'; it must be a number of seconds"),
        ({"terminationGracePeriodSeconds": -1}, "terminationGracePeriodSeconds is -1"),
    ],
)
def test_templates_that_are_refused(spec: Json, says: str) -> None:
    with pytest.raises(InvalidTemplate) as refusal:
        engine_template(spec)
    assert says in str(refusal.value)
    assert str(refusal.value).startswith("spec.template.spec")


def test_store_and_master_templates_are_guarded_too() -> None:
    base = {"store": {"segmentSize": "1Gi"}}
    for component in ("master", "store"):
        part = {**base.get(component, {}), "template": {"spec": {"containers": [{"name": component, "command": ["sh"]}]}}}
        with pytest.raises(InvalidTemplate, match=rf"^spec\.distributed\.mooncake\.{component}\.template\.spec\.containers\[{component}\]"):
            desired_pool(pool({"distributed": {"mooncake": {**base, component: part}}}), CONTEXT)


# ----------------------------------------------------------------- samples of trainers mount what the operator makes
SAMPLES = Path(__file__).parents[3] / "config/samples"


def pods(sample: Json) -> list[Json]:
    """Every pod, or template of one, of a manifest."""
    spec = sample["spec"]
    if sample["kind"] == "RayCluster":
        return [spec["headGroupSpec"]["template"], *(group["template"] for group in spec["workerGroupSpecs"])]
    return [sample if sample["kind"] == "Pod" else spec["template"]]


@pytest.mark.parametrize("name", ["trainer.yaml", "trainer-job.yaml", "kuberay/raycluster.yaml"])
def test_mounts_are_what_the_operator_makes(name: str) -> None:
    manifest = yaml.safe_load((SAMPLES / "pool.yaml").read_text())
    manifest["metadata"] |= {"namespace": "default", "uid": "u-1", "generation": 1}
    sample_pool = parse_pool(manifest)
    connection = one(desired_pool(sample_pool, CONTEXT), "ConfigMap")
    document = json.loads(connection["data"]["connection.json"])
    found = pods(yaml.safe_load((SAMPLES / name).read_text()))
    assert found
    for pod in found:
        assert pod["metadata"]["labels"] == {"epochkv.io/pool": sample_pool.metadata.name}
        (container,) = pod["spec"]["containers"]
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        paths = {mount["name"]: mount for mount in container["volumeMounts"]}
        assert volumes["connection"]["configMap"] == {"name": connection["metadata"]["name"]}
        assert volumes["fence"]["secret"] == {"secretName": component_name(sample_pool.metadata.name, "fence")}
        assert paths["fence"]["mountPath"] == document["hub"]["credentials_dir"]
        assert all("subPath" not in mount for mount in paths.values())
        environ = {variable["name"]: variable["value"] for variable in container["env"]}
        folder, _, key = environ[CONFIG_ENV].rpartition("/")
        assert (folder, key in connection["data"]) == (paths["connection"]["mountPath"], True)
        assert environ.get(ATTACH_ENV) == (None if name == "trainer.yaml" else "1")
