"""Builders: golden files show whole objects to a reviewer, and each promise has an assertion of its own.

After an intended change run `EPOCHKV_UPDATE_GOLDEN=1 pytest tests/unit/operator/test_builders.py` and review the
difference of the golden files.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml

from epochkv_connector.config import ConnectorConfig
from epochkv_operator.planning.connection import connection
from epochkv_operator.planning.context import Context, Observed
from epochkv_operator.planning.engine import desired_engine
from epochkv_operator.planning.names import VERSION_ANNOTATION
from epochkv_operator.planning.plan import plan_engine, plan_pool
from epochkv_operator.planning.pool import desired_pool
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
    assert list(yaml.safe_load_all(path.read_text())) == objects, (
        f"differs from {path.name}: if intended, run with {UPDATE}=1 and review it"
    )


@pytest.mark.parametrize("spec", POOL_SPECS)
def test_golden_pool(spec: str) -> None:
    golden(f"pool-{spec}", desired_pool(pool(spec), CONTEXT))


@pytest.mark.parametrize("spec", ENGINE_SPECS)
def test_golden_engine(spec: str) -> None:
    golden(f"engine-{spec}", desired_engine(engine(spec), None if spec == "no-pool" else pool("l1-l2"), CONTEXT))


@pytest.mark.parametrize("spec", [name for name in POOL_SPECS if name not in ("l1", "external", "external-rdma")])
def test_what_a_pool_with_mooncake_runs(spec: str) -> None:
    kinds = {(obj["kind"], obj["metadata"]["name"]) for obj in desired_pool(pool(spec), CONTEXT)}
    expected = {
        ("ConfigMap", "policy-connection"),
        ("Deployment", "policy-master"),
        ("PodDisruptionBudget", "policy-master"),
        ("StatefulSet", "policy-store"),
        ("Service", "policy-store"),
        ("PodDisruptionBudget", "policy-store"),
    }
    if spec != "ha":
        expected.add(("Service", "policy-master"))
    if spec != "rdma":  # its policies are disabled
        expected |= {("NetworkPolicy", "policy-master"), ("NetworkPolicy", "policy-store")}
    assert kinds == expected


@pytest.mark.parametrize("spec", ["l1", "external", "external-rdma"])
def test_a_pool_without_mooncake_runs_nothing(spec: str) -> None:
    assert [obj["kind"] for obj in desired_pool(pool(spec), CONTEXT)] == ["ConfigMap"]


@pytest.mark.parametrize("spec", POOL_SPECS)
def test_the_connector_reads_what_is_rendered(spec: str) -> None:
    """Parsed with the connector's own parser, which refuses unknown keys."""
    wanted = pool(spec)
    deployment = one(desired_engine(engine("minimal"), wanted, CONTEXT), "Deployment")
    args = containers(deployment)[0]["args"]
    transfer = json.loads(args[args.index("--kv-transfer-config") + 1])
    assert transfer.keys() == {
        "kv_connector",
        "kv_connector_module_path",
        "kv_role",
        "kv_load_failure_policy",
        "kv_connector_extra_config",
    }
    assert (transfer["kv_connector"], transfer["kv_connector_module_path"]) == ("EpochKVConnector", "epochkv_connector.connector")
    assert (transfer["kv_role"], transfer["kv_load_failure_policy"]) == ("kv_both", "recompute")
    config = ConnectorConfig.parse(transfer["kv_connector_extra_config"], environ={})
    assert (config.pool.name, config.pool.namespace, config.pool.uid) == ("policy", "rl", wanted.metadata.uid)
    assert config.hub is not None
    assert (config.hub.endpoint, config.hub.credentials_dir) == (CONTEXT.hub_endpoint, "/etc/epochkv/fence")
    assert (config.local.capacity_bytes if config.local else None) == {"l1": 2147483648, "l1-l2": 1073741824}.get(spec)
    addresses = {
        "l1": None,
        "external": "mooncake.shared:50051",
        "external-rdma": "etcd://e0:2379;e1:2379",
        "ha": "etcd://e0:2379;e1:2379",
    }
    address = config.distributed.master_address if config.distributed else None
    assert address == addresses.get(spec, "policy-master.rl.svc:50051")
    if spec == "rdma":
        assert config.distributed is not None
        assert (config.distributed.protocol, config.distributed.device_name) == ("rdma", "mlx5_0,mlx5_1")


def test_trainers_find_the_same_connection_in_the_config_map() -> None:
    data = one(desired_pool(pool(), CONTEXT), "ConfigMap")["data"]
    assert json.loads(data["connection.json"]) == connection(pool(), CONTEXT)
    assert ConnectorConfig.parse(json.loads(data["connection.json"]), environ={}).pool.name == "policy"


@pytest.mark.parametrize("spec", POOL_SPECS)
def test_no_epoch_anywhere(spec: str) -> None:
    """A reset changes no object at all."""

    def everything(epoch: int) -> list[Json]:
        wanted = pool({**POOL_SPECS[spec], "resetEpoch": epoch})
        return desired_pool(wanted, CONTEXT) + desired_engine(engine("full"), wanted, CONTEXT)

    assert everything(3) == everything(987654321)
    assert "987654321" not in json.dumps(everything(987654321))


def test_an_upgrade_of_the_operator_touches_nothing_that_is_as_before() -> None:
    newer = Context(**{**CONTEXT.__dict__, "operator_version": "0.2.0"})
    children = Observed(tuple(desired_pool(pool(), CONTEXT)))
    assert not plan_pool(pool(), children, newer).details
    children = Observed(tuple(desired_engine(engine(), pool(), CONTEXT)))
    assert not plan_engine(engine(), pool(), children, newer).details
    changed = engine({**ENGINE_SPECS["minimal"], "replicas": 7})
    applied = plan_engine(changed, pool(), children, newer).apply
    assert {obj["metadata"]["annotations"][VERSION_ANNOTATION] for obj in applied} == {"0.2.0"}, "who applied last"


def test_engine_without_pool_has_no_trace_of_the_connector() -> None:
    for wanted in (engine("no-pool"), engine("minimal")):
        objects = desired_engine(wanted, None, CONTEXT)
        text = json.dumps(one(objects, "Deployment")["spec"])
        for word in ("--kv-transfer-config", "MC_", "MOONCAKE_", "EPOCHKV_", "epochkv-fence", "/etc/epochkv"):
            assert word not in text
        assert {obj["kind"] for obj in objects} == {"ServiceAccount", "Deployment", "Service", "PodDisruptionBudget"}


@pytest.mark.parametrize(
    "change",
    [
        lambda: (pool("l1"), CONTEXT),
        lambda: (pool(uid="33333333-0000-4000-8000-000000000003"), CONTEXT),
        lambda: (pool(), Context(**{**CONTEXT.__dict__, "credentials_revision": "keys-2"})),
        lambda: (pool(), Context(**{**CONTEXT.__dict__, "hub_endpoint": "tcp://elsewhere:7700"})),
    ],
    ids=["tiers", "recreated-pool", "new-keys", "hub-moved"],
)
def test_a_new_connection_rolls_the_engines(change: Any) -> None:
    def template(wanted: Any, context: Context) -> Json:
        result: Json = one(desired_engine(engine(), wanted, context), "Deployment")["spec"]["template"]
        return result

    assert template(pool(), CONTEXT) == template(pool(), CONTEXT)
    assert template(*change())["metadata"]["annotations"] != template(pool(), CONTEXT)["metadata"]["annotations"]


def test_the_secret_is_mounted_for_the_group_only() -> None:
    spec = one(desired_engine(engine(), pool(), CONTEXT), "Deployment")["spec"]["template"]["spec"]
    volume = next(volume for volume in spec["volumes"] if "secret" in volume)
    assert volume["secret"] == {"secretName": "policy-fence", "defaultMode": 0o440}
    mount = next(mount for mount in spec["containers"][0]["volumeMounts"] if mount["name"] == volume["name"])
    assert (mount["mountPath"], mount["readOnly"]) == ("/etc/epochkv/fence", True)
    assert spec["securityContext"]["fsGroup"] == spec["securityContext"]["runAsGroup"]


@pytest.mark.parametrize(
    ("resources", "expected"),
    [
        ({}, {"requests": {"memory": "1Gi"}}),
        ({"limits": {"memory": "4Gi"}}, {"limits": {"memory": "5Gi"}}),
        ({"requests": {"memory": "512Mi", "cpu": "1"}}, {"requests": {"memory": "1536Mi", "cpu": "1"}}),
        (
            {"requests": {"memory": "3Gi"}, "limits": {"memory": 4294967296, "nvidia.com/gpu": 1}},
            {"requests": {"memory": "4Gi"}, "limits": {"memory": "5Gi", "nvidia.com/gpu": 1}},
        ),
        ({"limits": {"nvidia.com/gpu": 1}}, {"limits": {"nvidia.com/gpu": 1}, "requests": {"memory": "1Gi"}}),
    ],
)
def test_l1_is_added_to_the_memory_asked_for(resources: Json, expected: Json) -> None:
    deployment = one(desired_engine(engine({**ENGINE_SPECS["minimal"], "resources": resources}), pool("l1-l2"), CONTEXT), "Deployment")
    assert containers(deployment)[0]["resources"] == expected
    without = one(desired_engine(engine({**ENGINE_SPECS["minimal"], "resources": resources}), pool("external"), CONTEXT), "Deployment")
    assert containers(without)[0]["resources"] == resources


@pytest.mark.parametrize("spec", ["rdma", "rdma-plugin", "external-rdma"])
def test_pods_with_rdma(spec: str) -> None:
    """What Mooncake's guides give them: root with two capabilities and the devices, the host's or those of a device plugin."""
    wanted = pool(spec)
    workloads = [one(desired_engine(engine("minimal"), wanted, CONTEXT), "Deployment")]
    workloads += [one(desired_pool(wanted, CONTEXT), "StatefulSet")] if spec != "external-rdma" else []
    for workload in workloads:
        pod = workload["spec"]["template"]["spec"]
        container = pod["containers"][0]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK", "SYS_RESOURCE"]}
        assert (pod["securityContext"]["runAsUser"], "runAsNonRoot" in pod["securityContext"]) == (0, False)
        plugin = spec == "rdma-plugin"
        assert any("hostPath" in volume for volume in pod["volumes"]) is not plugin
        assert (container["resources"].get("limits") or {}).get("rdma/hca_shared_devices_a") == (1 if plugin else None)
        assert variables(container).get("MC_GID_INDEX") == ("3" if plugin else None)
        assert variables(container).get("MC_STORE_CLUSTER_ID") == ("shared" if spec == "external-rdma" else None)


def test_a_store_with_a_disk() -> None:
    """Each line was found by running Mooncake: who is asked for blocks on disk listens on a port that the kernel chooses."""
    objects = desired_pool(pool("ssd"), CONTEXT)
    store, values = containers(one(objects, "StatefulSet"))[0], variables(containers(one(objects, "StatefulSet"))[0])
    assert "--enable_offload=true" in containers(one(objects, "Deployment"))[0]["args"]
    assert values["MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"] in {mount["mountPath"] for mount in store["volumeMounts"]}
    # 2 GiB, 4 MiB of page tables, 16 MiB, 320 MiB; a quarter of the segment and 64 MiB for the disk.
    assert store["resources"]["limits"]["memory"] == f"{2048 + 4 + 16 + 320 + 512 + 64}Mi"
    policy = next(obj for obj in objects if obj["kind"] == "NetworkPolicy" and obj["metadata"]["name"] == "policy-store")
    assert policy["spec"]["ingress"][0]["ports"] == [{"protocol": "TCP", "port": 10000, "endPort": 65535}]
    without = desired_pool(pool(), CONTEXT)
    assert "--enable_offload=true" not in containers(one(without, "Deployment"))[0]["args"]
    assert not any(name.startswith("MOONCAKE_OFFLOAD") for name in variables(containers(one(without, "StatefulSet"))[0]))


def test_store_memory_covers_segment_and_process() -> None:
    """331 MiB were measured with a full segment of 256 MiB; its page tables take half a MiB."""
    store = containers(one(desired_pool(pool(), CONTEXT), "StatefulSet"))[0]
    assert store["resources"]["limits"]["memory"] == store["resources"]["requests"]["memory"] == "593Mi"
    values = variables(store)
    assert values["MOONCAKE_GLOBAL_SEGMENT_SIZE"] == "268435456"
    assert values["MOONCAKE_LOCAL_HOSTNAME"] == "$(POD_IP)"
    assert values["MOONCAKE_MASTER"] == "policy-master.rl.svc:50051"
    assert list(values).index("POD_IP") < list(values).index("MOONCAKE_LOCAL_HOSTNAME")  # or it would not be expanded


@pytest.mark.parametrize(("segment", "failures"), [("256Mi", 60), ("64Gi", 60 + 128), ("2Ti", 60 + 150)])
def test_a_store_has_time_to_touch_its_segment(segment: str, failures: int) -> None:
    """A slow machine touches 256 MiB a second; after 300 s a store goes on with what it has."""
    spec = json.loads(json.dumps(POOL_SPECS["l1-l2"]))
    spec["distributed"]["mooncake"]["store"]["segmentSize"] = segment
    store = containers(one(desired_pool(pool(spec), CONTEXT), "StatefulSet"))[0]
    assert store["command"] == ["python3", "-m", "epochkv_connector.storenode"]
    assert store["startupProbe"]["failureThreshold"] == failures
    assert store["startupProbe"]["periodSeconds"] == 2


def test_an_image_of_the_owners_runs_mooncakes_own_service() -> None:
    """It has Mooncake, and nobody knows what else."""
    spec = json.loads(json.dumps(POOL_SPECS["l1-l2"]))
    spec["distributed"]["mooncake"]["image"] = "registry.example/mooncake:1"
    store = containers(one(desired_pool(pool(spec), CONTEXT), "StatefulSet"))[0]
    assert store["command"] == ["python3", "-m", "mooncake.mooncake_store_service"]


# Measured in real failures; a missing one costs minutes or poisons a client.
MOONCAKE_ENVIRONMENT = {
    "MC_RPC_TIMEOUT_MS": "1000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "500",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",
    "MC_TCP_MAX_PENDING_ADMISSIONS_PER_PEER": "65535",
    "MC_TCP_ADMISSION_TIMEOUT_MS": "30000",
    "MC_MIN_RPC_PORT": "15000",
    "MC_MAX_RPC_PORT": "15063",
    "MC_YLT_LOG_LEVEL": "warn",
}


def test_engine_environment() -> None:
    values = variables(containers(one(desired_engine(engine(), pool(), CONTEXT), "Deployment"))[0])
    assert values.items() >= MOONCAKE_ENVIRONMENT.items()
    assert values["EPOCHKV_ENGINE_NAME"] == "rollout"
    assert values["POD_NAME"] == {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.name"}}
    assert values["POD_NAMESPACE"] == {"fieldRef": {"apiVersion": "v1", "fieldPath": "metadata.namespace"}}
    assert "PYTHONHASHSEED" not in values
    assert "MC_STORE_CLUSTER_ID" not in values
    l1 = variables(containers(one(desired_engine(engine(), pool("l1"), CONTEXT), "Deployment"))[0])
    assert not [name for name in l1 if name.startswith(("MC_", "MOONCAKE_"))]


def test_highly_available_masters_and_their_clients_agree_on_a_cluster() -> None:
    objects = desired_pool(pool("ha"), CONTEXT)
    master = one(objects, "Deployment")
    assert master["spec"]["replicas"] == 3
    args = containers(master)[0]["args"]
    identity = f"epochkv-{pool().metadata.uid}"
    assert {
        "--rpc_address=$(POD_IP)",
        "--enable_ha=true",
        "--ha_backend_type=etcd",
        "--ha_backend_connstring=e0:2379;e1:2379",
        f"--cluster_id={identity}",
        "--enable_oplog=true",
    } <= set(args)
    engine_env = variables(containers(one(desired_engine(engine(), pool("ha"), CONTEXT), "Deployment"))[0])
    store_env = variables(containers(one(objects, "StatefulSet"))[0])
    assert engine_env["MC_STORE_CLUSTER_ID"] == store_env["MC_STORE_CLUSTER_ID"] == identity
    assert store_env["MOONCAKE_MASTER"] == "etcd://e0:2379;e1:2379"


def test_a_single_master_is_never_two() -> None:
    master = one(desired_pool(pool(), CONTEXT), "Deployment")["spec"]
    assert (master["replicas"], master["strategy"]) == (1, {"type": "Recreate"})


def arguments(spec: Json) -> list[str]:
    deployment = one(desired_engine(engine({**ENGINE_SPECS["minimal"], **spec}), pool(), CONTEXT), "Deployment")
    found: list[str] = containers(deployment)[0]["args"]
    return found


def test_user_arguments_replace_defaults() -> None:
    assert arguments({}).count("--served-model-name") == 1
    assert "--enable-prompt-tokens-details" in arguments({})
    assert arguments({})[:2] == ["--shutdown-timeout", "40"]
    custom = arguments({"args": ["--served_model_name", "x", "--no-enable-prompt-tokens-details", "--shutdown-timeout=9"]})
    for option in ("--served-model-name", "--enable-prompt-tokens-details", "--shutdown-timeout"):
        assert option not in custom
    assert custom[custom.index("--no-enable-prompt-tokens-details") + 1] == "--shutdown-timeout=9"


@pytest.mark.parametrize(
    ("overrides", "timeout"),
    [
        ({}, "40"),
        ({"terminationGracePeriodSeconds": 300}, "280"),
        ({"terminationGracePeriodSeconds": 20}, "0"),
        ({"terminationGracePeriodSeconds": 5}, "0"),
        ({"terminationGracePeriodSeconds": None}, "10"),  # Kubernetes' own 30 s
    ],
)
def test_shutdown_ends_well_before_the_kill(overrides: Json, timeout: str) -> None:
    template = {"template": {"spec": overrides}}
    assert arguments(template)[1] == timeout


def test_tensor_ranks_and_their_shared_memory() -> None:
    spec = {**ENGINE_SPECS["minimal"], "parallelism": {"tensor": 4}}
    deployment = one(desired_engine(engine(spec), pool(), CONTEXT), "Deployment")
    args = containers(deployment)[0]["args"]
    assert args[args.index("--tensor-parallel-size") + 1] == "4"
    shm = next(volume for volume in deployment["spec"]["template"]["spec"]["volumes"] if volume["name"] == "shm")
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "1Gi"}


def rules(objects: list[Json], name: str) -> list[Json]:
    found: list[Json] = one(objects, "NetworkPolicy", name)["spec"]["ingress"]
    return found


def test_network_policies_close_mooncake() -> None:
    objects = desired_pool(pool(), CONTEXT)
    members = [{"podSelector": {"matchLabels": {"epochkv.io/pool": "policy"}}}]
    rpc, admin = rules(objects, "policy-master")
    assert (rpc["from"], rpc["ports"]) == (members, [{"protocol": "TCP", "port": 50051}])
    assert admin["ports"] == [{"protocol": "TCP", "port": 9003}]
    assert admin["from"][0]["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": "epochkv-system"}
    assert all("namespaceSelector" in peer for peer in admin["from"])
    transfer, health = rules(objects, "policy-store")
    assert (transfer["from"], transfer["ports"]) == (members, [{"protocol": "TCP", "port": 15000, "endPort": 15063}])
    assert health["ports"] == [{"protocol": "TCP", "port": 9300}]
    everybody, pool_only = rules(desired_engine(engine(), pool(), CONTEXT), "rollout")
    assert "from" not in everybody
    covered = {port for entry in everybody["ports"] if entry["protocol"] == "TCP" for port in range(entry["port"], entry["endPort"] + 1)}
    assert set(range(1, 65536)) - covered == set(range(15000, 15064))
    assert (pool_only["from"], pool_only["ports"]) == (members, [{"protocol": "TCP", "port": 15000, "endPort": 15063}])
    pod_labels = one(desired_engine(engine(), pool(), CONTEXT), "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert pod_labels["epochkv.io/pool"] == "policy"
