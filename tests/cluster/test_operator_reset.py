"""A reset through the real operator, the real API server and real sockets; and what must hold when processes die or
freeze in the middle of one.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hack.chaos.epochs import EpochWatch
from hack.cluster.controlplane import ControlPlane
from hack.waiting import eventually
from tests.cluster.fence_engines import FenceEngine, Service, client_keys
from tests.cluster.operator_harness import CHILDREN, LEASES, TAKEOVER_SECONDS, Namespace, OperatorProcess, condition, leading_operator

#: L1 only: nothing to run. Short leases, so that a takeover does not take a minute.
POOL: dict[str, Any] = {"local": {"capacity": "64Mi"}, "reset": {"leaseSeconds": 2}}


@contextlib.contextmanager
def engines(endpoint: str, space: Namespace, count: int = 2, pool: str = "policy") -> Iterator[list[FenceEngine]]:
    secret = eventually(lambda: space.get(CHILDREN["secrets"], f"{pool}-fence"), "the pool's Secret")
    with contextlib.ExitStack() as stack:
        keys = client_keys(secret)
        found = [stack.enter_context(FenceEngine(endpoint, keys, f"engine-{index}")) for index in range(count)]
        eventually(lambda: all(engine.epoch is not None for engine in found), "every engine has a grant")
        yield found


def published(space: Namespace, epoch: int, pool: str = "policy") -> dict[str, Any] | None:
    """The status once the whole reset is reported in it."""
    status = space.status(pool)
    reset = status.get("reset") or {}
    return status if status.get("epoch") == epoch and reset.get("epoch") == epoch and reset.get("completionTime") else None


def holder(space: Namespace) -> str:
    lease = space.get(LEASES, "epochkv-operator")
    return (lease or {}).get("spec", {}).get("holderIdentity") or ""


def test_a_raised_epoch_is_published_when_both_engines_have_adopted_it(namespace: Namespace, tmp_path: Path) -> None:
    with leading_operator(namespace, tmp_path) as operator:
        namespace.create_pool("policy", **{**POOL, "reset": {"leaseSeconds": 60}})
        with engines(f"tcp://127.0.0.1:{operator.hub_port}", namespace) as (first, second):
            eventually(lambda: (namespace.status("policy").get("engines") or {}).get("summary") == "2/2", "2/2")
            first.num_old_epoch, second.is_busy = 5, True
            namespace.bump("policy", 1)

            def named() -> dict[str, Any] | None:
                """The status once it names the one that holds back; the other one's answer may come after a first status."""
                status = namespace.status("policy")
                laggards = [laggard["name"] for laggard in status.get("reset", {}).get("laggards") or []]
                return status if laggards == ["engine-1"] else None

            status = eventually(named, "a laggard named")
            assert (first.epoch, status["targetEpoch"], status["epoch"]) == (1, 1, 0)
            assert condition(status, "EpochConverged")["status"] == "False"
            second.is_busy = False
            namespace.kubectl("wait", "--for=jsonpath={.status.epoch}=1", "kvp/policy", "--timeout=20s")
            # Published means: both are there already, not soon.
            assert (first.epoch, second.epoch) == (1, 1)
            status = eventually(lambda: published(namespace, 1), "the reset reported")
            assert status["reset"]["durationMilliseconds"] >= 0
            assert "laggards" not in status["reset"]
            assert status["engines"] == {"total": 2, "converged": 2, "external": 2, "oldEpochRequests": 5, "summary": "2/2"}
            assert {engine["name"] for engine in status["externalEngines"]} == {"engine-0", "engine-1"}
            eventually(lambda: condition(namespace.status("policy"), "EpochConverged").get("status") == "True", "EpochConverged")
            assert "engine-0 (5)" in condition(namespace.status("policy"), "Drained")["message"]
            eventually(lambda: operator.metric("epochkv_pool_published_epoch") == 1, "metric")
            assert operator.metric("epochkv_pool_old_epoch_requests") == 5
            assert operator.metric("epochkv_pool_reset_seconds_count") == 1
            assert operator.metric('epochkv_hub_messages_total{outcome="received"}') > 0
            assert operator.metric('epochkv_hub_messages_total{outcome="pool_step_failed"}') == 0
            assert 'epochkv_hub_messages_total{outcome="unencodable"} 0.0' in operator.http("/metrics")[1]
            eventually(lambda: operator.logged("epoch published"), "logged")
            assert len(namespace.events("EpochPublished")) <= 1
            first.num_old_epoch = 0
            first.agent.poke()
            eventually(lambda: condition(namespace.status("policy"), "Drained").get("status") == "True", "drained")


def test_a_frozen_leader_that_wakes_up_after_a_reset_changes_nothing(plane: ControlPlane, namespace: Namespace, tmp_path: Path) -> None:
    operators: list[OperatorProcess] = []

    def ready_port() -> int | None:
        return next((operator.hub_port for operator in operators if operator.http("/readyz", 0.5)[0] == 200), None)

    with contextlib.ExitStack() as stack:
        operators += [
            stack.enter_context(OperatorProcess(plane, namespace.name, tmp_path, lease_duration_seconds=TAKEOVER_SECONDS)) for _ in range(2)
        ]
        service = stack.enter_context(Service(ready_port))
        leader = eventually(lambda: next((o for o in operators if o.http("/readyz")[0] == 200), None), "a leader", 60)
        standby = next(operator for operator in operators if operator is not leader)
        eventually(lambda: standby.http("/livez")[0] == 200, "the standby alive")
        assert standby.http("/readyz")[0] == 503  # but not ready
        namespace.create_pool("policy", **POOL)
        found = stack.enter_context(engines(service.endpoint, namespace))
        epochs = stack.enter_context(EpochWatch(namespace, service.endpoint))
        old = holder(namespace)

        leader.process.freeze()
        standby.wait_ready()
        assert holder(namespace) not in ("", old)
        namespace.bump("policy", 1)
        eventually(lambda: namespace.status("policy").get("epoch") == 1, "published by the new leader", 60)
        leader.process.thaw()
        eventually(lambda: not leader.process.alive(), "the old leader ends")
        assert leader.process.popen.returncode == 1
        assert leader.logged("component exited")

        namespace.bump("policy", 2)
        eventually(lambda: namespace.status("policy").get("epoch") == 2, "published", 60)
        eventually(lambda: all(engine.epoch == 2 for engine in found), "adopted")
        eventually(lambda: epochs.published == 2, "seen")
        assert epochs.problems == []
        for engine in found:
            assert engine.adopted == sorted(engine.adopted)


def test_sigterm_releases_the_lease_and_the_standby_takes_over_with_the_engines(
    plane: ControlPlane, namespace: Namespace, tmp_path: Path
) -> None:
    ports: list[int] = []
    with Service(lambda: ports[-1]) as service, OperatorProcess(plane, namespace.name, tmp_path, lease_duration_seconds=60) as first:
        ports.append(first.hub_port)
        first.wait_ready()
        namespace.create_pool("policy", **POOL)
        with engines(service.endpoint, namespace) as found:
            namespace.bump("policy", 1)
            eventually(lambda: published(namespace, 1), "published")
            assert first.terminate() == 0
            assert holder(namespace) == ""
            assert first.logged("lease released")
            # Its Lease would last another minute: only the release lets the next one in this fast.
            with OperatorProcess(plane, namespace.name, tmp_path, lease_duration_seconds=60) as second:
                ports.append(second.hub_port)
                second.wait_ready(30)
                namespace.bump("policy", 2)
                eventually(lambda: namespace.status("policy").get("epoch") == 2, "published", 60)
                assert all(engine.epoch == 2 for engine in found)
