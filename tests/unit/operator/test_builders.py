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
from epochkv_operator.planning.connection import connection
from epochkv_operator.planning.context import Context, Observed
from epochkv_operator.planning.engine import desired_engine
from epochkv_operator.planning.names import VERSION_ANNOTATION
from epochkv_operator.planning.plan import plan_engine, plan_pool
from epochkv_operator.planning.pool import desired_pool
from epochkv_operator.settings import Settings
from tests.support.planning import CONTEXT, ENGINE_SPECS, POOL_SPECS, containers, engine, one, pool

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


@pytest.mark.parametrize("spec", POOL_SPECS)
def test_the_connector_reads_what_is_rendered(spec: str) -> None:
    """Parsed with the connector's own parser, which refuses unknown keys."""
    wanted = pool(spec)
    deployment = one(desired_engine(engine("minimal"), wanted, CONTEXT), "Deployment")
    args = containers(deployment)[0]["args"]
    transfer = json.loads(args[args.index("--kv-transfer-config") + 1])
    assert transfer["kv_load_failure_policy"] == "recompute"
    config = ConnectorConfig.parse(transfer["kv_connector_extra_config"], environ={})
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
    of_pool_spec = {"save": of_pool, "trust_media_ids": of_pool == "Prompts"}
    wanted = wanted.model_copy(update={"spec": wanted.spec.model_copy(update=of_pool_spec)})
    used = used.model_copy(update={"spec": used.spec.model_copy(update={"save": of_engine})})
    args = containers(one(desired_engine(used, wanted, CONTEXT), "Deployment"))[0]["args"]
    transfer = json.loads(args[args.index("--kv-transfer-config") + 1])
    config = ConnectorConfig.parse(transfer["kv_connector_extra_config"], environ={})
    assert (config.save, config.trust_media_ids) == (expected, of_pool == "Prompts")


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


@pytest.mark.parametrize(("segment", "failures"), [("256Mi", 60), ("64Gi", 60 + 128), ("2Ti", 60 + 4096)])
def test_a_store_has_time_to_fill_its_segment(segment: str, failures: int) -> None:
    """A slow machine fills 256 MiB a second."""
    spec = json.loads(json.dumps(POOL_SPECS["l1-l2"]))
    spec["distributed"]["mooncake"]["store"]["segmentSize"] = segment
    store = containers(one(desired_pool(pool(spec), CONTEXT), "StatefulSet"))[0]
    assert "exec python3 -m epochkv_connector.storenode " in store["command"][2]
    assert store["startupProbe"]["failureThreshold"] == failures
    assert store["startupProbe"]["periodSeconds"] == 2
    spec["distributed"]["mooncake"]["image"] = "registry.example/mooncake:1"  # which has Mooncake, and nobody knows what else
    store = containers(one(desired_pool(pool(spec), CONTEXT), "StatefulSet"))[0]
    assert "exec python3 -m mooncake.mooncake_store_service " in store["command"][2]
    probes = [store[probe] for probe in ("startupProbe", "readinessProbe", "livenessProbe")]
    assert all("127.0.0.1" in probe["exec"]["command"][2] for probe in probes), "its HTTP servers listen on IPv4 alone"


def arguments(spec: Json) -> list[str]:
    deployment = one(desired_engine(engine({**ENGINE_SPECS["minimal"], **spec}), pool(), CONTEXT), "Deployment")
    found: list[str] = containers(deployment)[0]["args"]
    return found


def test_a_users_timeout_replaces_ours() -> None:
    assert "--shutdown-timeout" not in arguments({"args": ["--shutdown-timeout=9"]})


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
    assert (transfer["from"], transfer["ports"]) == (members, [{"protocol": "TCP", "port": 15000, "endPort": 15127}])
    assert health["ports"] == [{"protocol": "TCP", "port": 9300}]
    everybody, pool_only = rules(desired_engine(engine(), pool(), CONTEXT), "rollout")
    assert "from" not in everybody
    covered = {port for entry in everybody["ports"] if entry["protocol"] == "TCP" for port in range(entry["port"], entry["endPort"] + 1)}
    assert set(range(1, 65536)) - covered == set(range(15000, 15128))
    assert (pool_only["from"], pool_only["ports"]) == (members, [{"protocol": "TCP", "port": 15000, "endPort": 15127}])
    assert rules(objects, "policy-joined") == [everybody, pool_only]
    assert one(objects, "NetworkPolicy", "policy-joined")["spec"]["podSelector"] == {
        "matchLabels": {"epochkv.io/pool": "policy"},
        "matchExpressions": [{"key": "app.kubernetes.io/managed-by", "operator": "NotIn", "values": ["epochkv-operator"]}],
    }
    everything = objects + desired_engine(engine(), pool(), CONTEXT)
    workloads = [obj for obj in everything if obj["kind"] in ("Deployment", "StatefulSet")]
    assert len(workloads) == 3
    for workload in workloads:
        selector = one(everything, "NetworkPolicy", workload["metadata"]["name"])["spec"]["podSelector"]["matchLabels"]
        labels = workload["spec"]["template"]["metadata"]["labels"]
        assert selector.items() <= labels.items()
        assert labels["epochkv.io/pool"] == "policy"


def test_an_engine_has_no_network_policy_where_its_pool_wants_none() -> None:
    assert "NetworkPolicy" not in {obj["kind"] for obj in desired_engine(engine(), pool("rdma"), CONTEXT)}
