"""The operator behind an API server that refuses."""

from pathlib import Path
from typing import Any

from hack.waiting import eventually
from tests.cluster.fault_proxy import NO_ANSWER, Fault, FaultProxy, is_write
from tests.cluster.operator_harness import CHILDREN, ENGINES, Namespace, OperatorProcess, condition

LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
POOL: dict[str, Any] = {"local": {"capacity": "64Mi"}, "reset": {"leaseSeconds": 1}}  # the next life waits for as long
ENGINE: dict[str, Any] = {"poolRef": {"name": "policy"}, "model": {"name": "tiny"}, "replicas": 2}


def settled(space: Namespace, epoch: int) -> bool:
    """Everything is made, reported and published."""
    expected = {
        "deployments": {"rollout"},
        "services": {"rollout"},
        "serviceaccounts": {"rollout"},
        "poddisruptionbudgets": {"rollout"},
        "configmaps": {"policy-connection"},
        "secrets": {"policy-fence", "epochkv-hub"},
    }
    pool, engine = space.status("policy"), space.engine_status("rollout")
    return (
        all(space.names(kind) == names for kind, names in expected.items())
        and (pool.get("targetEpoch"), pool.get("epoch")) == (epoch, epoch)
        and condition(pool, "Ready").get("reason") == "Ready"
        and condition(engine, "PoolBound").get("status") == "True"
        and condition(engine, "Ready").get("reason") == "Starting"  # no kubelet here
    )


def test_work_is_done_once_a_storm_is_over(namespace: Namespace, proxy: FaultProxy, tmp_path: Path) -> None:
    """Every write is carried out and answered with 500 for a while: when a pool and its engine are new, and again for an epoch."""
    fault = Fault(500, carried_out=True)
    with OperatorProcess(namespace.plane, namespace.name, tmp_path, kubeconfig=proxy.kubeconfig) as operator:
        operator.wait_ready()

        def storm(method: str, path: str) -> Fault | None:
            return fault if is_write(method, path) else None

        proxy.decide = storm
        namespace.create_pool("policy", **POOL)
        namespace.create_engine("rollout", **ENGINE)
        eventually(lambda: len(proxy.faults) >= 6, "the storm hits")
        proxy.decide = lambda method, path: None
        eventually(lambda: settled(namespace, 0), "all is well after the storm", 60)

        hit = len(proxy.faults)
        proxy.decide = storm
        namespace.bump("policy", 1)
        eventually(lambda: len(proxy.faults) >= hit + 3, "the storm hits the reset")
        proxy.decide = lambda method, path: None
        eventually(lambda: settled(namespace, 1), "published after the storm", 60)
        assert operator.http("/livez")[0] == 200
        assert all(found == fault for _, _, found in proxy.faults)


def test_one_object_that_cannot_be_written_holds_up_nothing_else(namespace: Namespace, proxy: FaultProxy, tmp_path: Path) -> None:
    """As a webhook for one kind would: all other objects are made, and the first status says what is missing."""
    with OperatorProcess(namespace.plane, namespace.name, tmp_path, kubeconfig=proxy.kubeconfig) as operator:
        operator.wait_ready()
        proxy.decide = lambda method, path: Fault(NO_ANSWER) if is_write(method, path) and "/serviceaccounts/" in path else None
        namespace.create_pool("policy", **POOL)
        namespace.create_engine("rollout", **ENGINE)
        eventually(lambda: namespace.names("deployments") == {"rollout"}, "the Deployment")
        ready = eventually(
            lambda: next((c for c in [condition(namespace.engine_status("rollout"), "Ready")] if c.get("reason") == "ApplyFailed"), None),
            "a condition that says so",
        )
        assert "ServiceAccount rollout" in ready["message"]
        assert namespace.names("serviceaccounts") == set()
        proxy.decide = lambda method, path: None
        eventually(lambda: settled(namespace, 0), "all is well afterwards", 60)


def test_rights_that_are_taken_away_and_given_back(namespace: Namespace, proxy: FaultProxy, tmp_path: Path) -> None:
    """403 to everything but the Lease, reads and new watches, too; what is asked for meanwhile comes through the open watches."""
    with OperatorProcess(namespace.plane, namespace.name, tmp_path, kubeconfig=proxy.kubeconfig) as operator:
        operator.wait_ready()
        namespace.create_pool("policy", **POOL)
        namespace.create_engine("rollout", **ENGINE)
        eventually(lambda: settled(namespace, 0), "settled", 60)
        before = namespace.pool("policy")["status"]
        proxy.decide = lambda method, path: None if "/leases" in path else Fault(403)
        namespace.patch(ENGINES, "rollout", {"spec": {"replicas": 3}})
        namespace.delete(CHILDREN["services"], "rollout")
        eventually(lambda: len(proxy.faults) >= 6, "requests are refused")
        assert {method for method, _, _ in proxy.faults} >= {"GET"}
        assert namespace.pool("policy")["status"] == before
        proxy.decide = lambda method, path: None

        def replicas() -> int:
            return int(namespace.get(CHILDREN["deployments"], "rollout")["spec"]["replicas"])  # type: ignore[index]

        eventually(lambda: replicas() == 3, "scaled", 60)
        eventually(lambda: settled(namespace, 0), "settled again", 60)
        assert operator.http("/livez")[0] == 200
