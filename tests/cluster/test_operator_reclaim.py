"""Old KV leaves the store: wiped or swept after publication, or left; with a real Mooncake and with engines that answer."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hack.cluster.controlplane import ControlPlane
from hack.loopback import port_open
from hack.standalone.mooncake import Mooncake
from hack.waiting import eventually
from tests.cluster.fence_engines import FenceEngine, client_keys
from tests.cluster.operator_harness import CHILDREN, Namespace, OperatorProcess, condition
from tests.cluster.store_processes import announce, pool_store, put


def pool_spec(policy: str) -> dict[str, Any]:
    reset = {"leaseSeconds": 2, "reclaimPolicy": policy}
    return {"distributed": {"mooncake": {"store": {"segmentSize": "64Mi"}}}, "reset": reset}


@pytest.fixture(scope="module")
def mooncake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mooncake]:
    with pool_store(tmp_path_factory.mktemp("mooncake"), f"127.9.{os.getpid() % 250 + 1}.1") as store:
        store.stores[0].wait_until(lambda: port_open(store.store_ports[0]), 60, "accepting connections")
        yield store


@contextlib.contextmanager
def engine(operator: OperatorProcess, space: Namespace, name: str = "engine-0") -> Iterator[FenceEngine]:
    secret = eventually(lambda: space.get(CHILDREN["secrets"], "policy-fence"), "the pool's Secret")
    with FenceEngine(f"tcp://127.0.0.1:{operator.hub_port}", client_keys(secret), name) as found:
        eventually(lambda: found.epoch is not None, f"joined; log:\n{operator.tail()}")
        yield found


def served(operator: OperatorProcess, space: Namespace, store: Mooncake, policy: str, keys: int = 5) -> None:
    """A pool whose store holds `keys` keys, with the operator leading it."""
    operator.wait_ready()
    space.create_pool("policy", **pool_spec(policy))
    announce(space, "policy", store)
    put(store, keys)
    assert len(store.keys()) == keys
    eventually(lambda: "targetEpoch" in space.status("policy"), f"served; log:\n{operator.tail()}")


def reclaimed(space: Namespace) -> tuple[str | None, str | None, int | None]:
    """Status and reason of the condition, and the epoch below which `status.reclaim` counts: 0 before the first."""
    status = space.status("policy")
    found = condition(status, "Reclaimed")
    return found.get("status"), found.get("reason"), status.get("reclaim", {}).get("epoch", 0)


def test_remove_all_wipes_the_store_after_it_has_published(
    plane: ControlPlane, namespace: Namespace, mooncake: Mooncake, tmp_path: Path
) -> None:
    with OperatorProcess(plane, namespace.name, tmp_path) as operator:
        served(operator, namespace, mooncake, "RemoveAll")
        with engine(operator, namespace):
            namespace.bump("policy", 1)
            eventually(lambda: mooncake.keys() == [], f"wiped; log:\n{operator.tail()}")
            assert namespace.status("policy")["epoch"] == 1, "published before"
            eventually(lambda: reclaimed(namespace) == ("True", "Reclaimed", 1), f"reported; log:\n{operator.tail()}", 60)
            found = namespace.status("policy")["reclaim"]
            assert (found["policy"], found["epoch"]) == ("RemoveAll", 1)
            assert found["keys"] >= 5
            assert found["bytes"] >= 5 * 4096
            assert found["completionTime"]
            assert operator.metric("epochkv_pool_reclaimed_keys") == found["keys"]
            assert operator.metric("epochkv_pool_reclaimed_bytes") == found["bytes"]


@pytest.mark.slow  # `tests/unit/fence/test_wipe.py`, on a clock of its own
def test_a_master_that_hangs_delays_no_publication(plane: ControlPlane, namespace: Namespace, mooncake: Mooncake, tmp_path: Path) -> None:
    with OperatorProcess(plane, namespace.name, tmp_path) as operator:
        served(operator, namespace, mooncake, "RemoveAll")
        with engine(operator, namespace) as reader:
            assert mooncake.master is not None
            mooncake.master.freeze()
            try:
                namespace.bump("policy", 1)
                eventually(lambda: namespace.status("policy").get("epoch") == 1, f"published; log:\n{operator.tail()}")
                assert reader.epoch == 1
                eventually(lambda: condition(namespace.status("policy"), "EpochConverged").get("status") == "True", "said so")
                time.sleep(4)  # the wipe is tried again and again
                assert reclaimed(namespace)[:2] == ("False", "Reclaiming")
            finally:
                mooncake.master.thaw()
            eventually(lambda: mooncake.keys() == [], f"wiped; log:\n{operator.tail()}")
            eventually(lambda: reclaimed(namespace) == ("True", "Reclaimed", 1), f"reported; log:\n{operator.tail()}", 60)


def test_delete_without_any_engine_is_done_through_the_master(
    plane: ControlPlane, namespace: Namespace, mooncake: Mooncake, tmp_path: Path
) -> None:
    with OperatorProcess(plane, namespace.name, tmp_path) as operator:
        served(operator, namespace, mooncake, "Delete")
        namespace.bump("policy", 1)
        eventually(lambda: namespace.status("policy").get("epoch") == 1, f"published; log:\n{operator.tail()}")
        eventually(lambda: mooncake.keys() == [], f"swept; log:\n{operator.tail()}", 90)
        eventually(lambda: reclaimed(namespace) == ("True", "Reclaimed", 1), f"reported; log:\n{operator.tail()}", 60)
        found = namespace.status("policy")["reclaim"]
        assert (found["policy"], found["epoch"], found["keys"]) == ("Delete", 1, 5)


def test_delete_is_asked_of_an_engine(plane: ControlPlane, namespace: Namespace, mooncake: Mooncake, tmp_path: Path) -> None:
    with OperatorProcess(plane, namespace.name, tmp_path) as operator:
        served(operator, namespace, mooncake, "Delete", 2)
        with engine(operator, namespace) as remover:
            namespace.bump("policy", 1)
            eventually(lambda: namespace.status("policy").get("epoch") == 1, f"published; log:\n{operator.tail()}")
            eventually(lambda: reclaimed(namespace) == ("True", "Reclaimed", 1), f"reported; log:\n{operator.tail()}", 60)
            assert set(remover.removed) == {1}
            found = namespace.status("policy")["reclaim"]
            assert (found["policy"], found["epoch"], found["keys"], found["bytes"]) == ("Delete", 1, 3, 3 * 1000)
            assert len(mooncake.keys()) == 2, "this engine only says so; nobody else removes while it is there"
    mooncake.flush()


@pytest.mark.slow  # `tests/unit/fence/test_reclaim.py`, on a clock of its own
def test_retain_leaves_everything(plane: ControlPlane, namespace: Namespace, mooncake: Mooncake, tmp_path: Path) -> None:
    with OperatorProcess(plane, namespace.name, tmp_path) as operator:
        served(operator, namespace, mooncake, "Retain", 2)
        namespace.bump("policy", 1)
        eventually(lambda: namespace.status("policy").get("epoch") == 1, f"published; log:\n{operator.tail()}")
        time.sleep(8)  # a hold time and more
        assert len(mooncake.keys()) == 2
        assert reclaimed(namespace)[:2] == (None, None)
        assert namespace.status("policy")["reclaim"] == {"policy": "Retain"}
    mooncake.flush()
