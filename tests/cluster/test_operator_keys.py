"""Client keys are replaced under running engines: nobody loses a lease, nothing restarts, and a crash at any write only delays."""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from epochkv_fence.net.keys import ClientKeys
from hack.cluster.controlplane import ControlPlane
from hack.waiting import eventually
from tests.cluster.fault_proxy import Fault, FaultProxy
from tests.cluster.fence_engines import FenceEngine, client_keys
from tests.cluster.operator_harness import CHILDREN, TAKEOVER_SECONDS, Namespace, OperatorProcess, condition

LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases"
POOL: dict[str, Any] = {"local": {"capacity": "64Mi"}, "reset": {"leaseSeconds": 2}}
ENGINE: dict[str, Any] = {"poolRef": {"name": "policy"}, "model": {"name": "tiny"}}


def secret(space: Namespace) -> dict[str, str]:
    """Content of the pool's Secret; empty while there is none."""
    found = space.get(CHILDREN["secrets"], "policy-fence")
    return {name: base64.b64decode(value).decode() for name, value in ((found or {}).get("data") or {}).items()}


def reader(space: Namespace) -> Callable[[], ClientKeys]:
    """Reads the keys from the Secret, as a kubelet brings them into a mounted volume."""

    def read() -> ClientKeys:
        content = secret(space)
        return ClientKeys(content["hub.pub"], content["client.pub"], content["client.key"])

    return read


def keys_now(space: Namespace) -> ClientKeys:
    return client_keys(eventually(lambda: space.get(CHILDREN["secrets"], "policy-fence"), "the pool's Secret"))


class LeaseWatch:
    """Looks every 10 ms whether engines hold their leases."""

    def __init__(self, *engines: FenceEngine) -> None:
        self._engines = engines
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)
        self.lost = 0
        self.looked = 0

    def __enter__(self) -> LeaseWatch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(10)

    def _look(self) -> None:
        while not self._stop.wait(0.01):
            self.looked += 1
            self.lost += any(not engine.leased for engine in self._engines)


def test_a_raised_generation_replaces_the_key_without_a_lost_lease_or_a_restart(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_pool("policy", **POOL)
    namespace.create_engine("rollout", **ENGINE)
    old = keys_now(namespace)
    before = secret(namespace)
    deployment = eventually(lambda: namespace.get(CHILDREN["deployments"], "rollout"), "the engine's Deployment")
    endpoint = f"tcp://127.0.0.1:{operator.hub_port}"
    with FenceEngine(endpoint, old, "engine-0", credentials=reader(namespace)) as engine:
        eventually(lambda: engine.leased, "joined")
        with LeaseWatch(engine) as leases:
            namespace.patch_spec("policy", keys={"generation": 1})
            eventually(lambda: secret(namespace).get("generation") == "1", "rotated")
            after = secret(namespace)
            assert after["client.pub"] != before["client.pub"]
            assert after["client.key"] != before["client.key"]
            assert (after["root.secret"], after["hub.pub"]) == (before["root.secret"], before["hub.pub"])
            eventually(lambda: engine.agent.counters["key_changes"] == 1, "the engine has the new key")
            eventually(lambda: "previous.pub" not in secret(namespace), "the old key retired")
            eventually(lambda: namespace.status("policy").get("keys") == {"generation": 1, "accepted": 1}, "reported")
            assert condition(namespace.status("policy"), "KeysRotated")["status"] == "True"
            namespace.bump("policy", 1)
            eventually(lambda: namespace.status("policy").get("epoch") == 1, "published")
            assert engine.epoch == 1
        assert (leases.lost, leases.looked > 100) == (0, True)
    now = namespace.get(CHILDREN["deployments"], "rollout")
    assert now is not None
    assert now["metadata"]["generation"] == deployment["metadata"]["generation"], "a rotated key restarts no engine"
    with FenceEngine(endpoint, old, "thief") as thief:
        eventually(lambda: operator.logged("fence secret changed"), "logged")
        time.sleep(3)
        assert thief.epoch is None
        assert (namespace.status("policy").get("engines") or {}).get("total", 0) <= 1


def test_an_engine_that_keeps_the_old_key_is_named_and_can_be_cut_off(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_pool("policy", **POOL)
    with FenceEngine(f"tcp://127.0.0.1:{operator.hub_port}", keys_now(namespace), "stubborn") as engine:
        eventually(lambda: engine.leased, "joined")
        namespace.patch_spec("policy", keys={"generation": 1})
        found = eventually(
            lambda: c if "stubborn" in (c := condition(namespace.status("policy"), "KeysRotated")).get("message", "") else None, "named"
        )
        assert (found["status"], found["reason"]) == ("False", "OldKeyInUse")
        assert namespace.status("policy")["keys"] == {"generation": 1, "accepted": 2}
        time.sleep(5)  # more than lease and margin: it goes on as long as the key is used
        assert engine.leased
        assert "previous.pub" in secret(namespace)
        patch = json.loads(found["message"].split("-p ")[1].strip("'"))
        path = f"{CHILDREN['secrets'].format(namespace.name)}/policy-fence"
        namespace.request("PATCH", path, patch, "application/json-patch+json")
        eventually(lambda: not engine.leased, "cut off", 90)
        eventually(lambda: namespace.status("policy").get("keys") == {"generation": 1, "accepted": 1}, "reported")


def test_a_new_hub_key_goes_into_the_secret_in_place(plane: ControlPlane, namespace: Namespace, tmp_path: Path) -> None:
    """The pool's own keys stay; only engines that were given the older hub's key have to start again."""
    with OperatorProcess(plane, namespace.name, tmp_path, lease_duration_seconds=TAKEOVER_SECONDS) as operator:
        operator.wait_ready()
        namespace.create_pool("policy", **POOL)
        before = eventually(lambda: secret(namespace), "the pool's Secret")
        uid = namespace.get(CHILDREN["secrets"], "policy-fence")["metadata"]["uid"]  # type: ignore[index]
        operator.process.kill()
        namespace.delete(CHILDREN["secrets"], "epochkv-hub")
        operator.start().wait_ready()
        after = eventually(lambda: found if (found := secret(namespace))["hub.pub"] != before["hub.pub"] else None, "new")
        assert {**after, "hub.pub": before["hub.pub"]} == before
        assert namespace.get(CHILDREN["secrets"], "policy-fence")["metadata"]["uid"] == uid  # type: ignore[index]
        with FenceEngine(f"tcp://127.0.0.1:{operator.hub_port}", keys_now(namespace), "engine-0") as engine:
            eventually(lambda: engine.leased, "let in")


def test_the_hub_knows_the_new_key_before_anybody_can_have_it(
    namespace: Namespace, proxy: FaultProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The write to the Secret lands and its answer never comes: whoever reads the Secret now must be let in."""
    with OperatorProcess(namespace.plane, namespace.name, tmp_path, kubeconfig=proxy.kubeconfig) as operator:
        operator.wait_ready()
        namespace.create_pool("policy", **POOL)
        before = keys_now(namespace)
        proxy.decide = lambda method, path: Fault(0, carried_out=True) if method == "PUT" and "/secrets/policy-fence" in path else None
        namespace.patch_spec("policy", keys={"generation": 1})
        eventually(lambda: proxy.faults, "the write is held back")
        after = keys_now(namespace)
        assert after.public != before.public
        endpoint = f"tcp://127.0.0.1:{operator.hub_port}"
        with FenceEngine(endpoint, after, "newcomer") as newcomer, FenceEngine(endpoint, before, "oldtimer") as oldtimer:
            eventually(lambda: newcomer.leased and oldtimer.leased, "both are let in")
        refused = [record.getMessage() for record in caplog.records if "refuses our key" in record.getMessage()]
        assert not refused, "let in at once, not when the operator had looked again"
        proxy.decide = lambda method, path: None
        eventually(lambda: namespace.status("policy").get("keys") == {"generation": 1, "accepted": 1}, "done", 60)
        assert keys_now(namespace).public == after.public, "one rotation, one new key"


def test_an_operator_that_dies_in_mid_rotation_is_followed_by_one_that_goes_on(
    plane: ControlPlane, namespace: Namespace, tmp_path: Path
) -> None:
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(OperatorProcess(plane, namespace.name, tmp_path, lease_duration_seconds=TAKEOVER_SECONDS))
        first.wait_ready()
        namespace.create_pool("policy", **POOL)
        before = keys_now(namespace)
        stubborn = stack.enter_context(FenceEngine(f"tcp://127.0.0.1:{first.hub_port}", before, "stubborn"))
        eventually(lambda: stubborn.leased, "joined")
        namespace.patch_spec("policy", keys={"generation": 1})
        eventually(lambda: "previous.pub" in secret(namespace), "rotated")
        first.process.kill()
        eventually(lambda: not stubborn.leased, "nobody grants")
        second = stack.enter_context(OperatorProcess(plane, namespace.name, tmp_path, hub_port=first.hub_port))
        second.wait_ready()
        newcomer = stack.enter_context(FenceEngine(f"tcp://127.0.0.1:{first.hub_port}", keys_now(namespace), "newcomer"))
        eventually(lambda: stubborn.leased and newcomer.leased, "both keys are accepted", 60)
        assert stubborn.agent.stop(5.0)
        eventually(lambda: "previous.pub" not in secret(namespace), "retired", 60)
        assert newcomer.leased
