"""Upgrade from the chart of before, rollback, and reinstall over living objects: what rolls, and what must not."""

import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hack.cluster.controlplane import ControlPlane
from hack.loopback import free_ports
from hack.waiting import eventually
from tests.cluster.chart_releases import CHART, Release
from tests.cluster.operator_harness import CHILDREN, ENGINES, POOLS, Namespace, OperatorProcess

PREVIOUS = Path(__file__).parent / "charts" / "epochkv-0.1.0.tgz"
STORE_IMAGE, ENGINE_IMAGE = "mirror.example/store@sha256:" + "5" * 64, "mirror.example/engine:1"
REPLICA_SETS = "/apis/apps/v1/namespaces/{}/replicasets"
CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
WORK = "work"
MODEL = {"name": "facebook/opt-125m"}
VERSION = "epochkv.io/operator-version"


@pytest.fixture
def release(fresh_control_plane: ControlPlane, tmp_path: Path) -> Release:
    Namespace.create_in(fresh_control_plane, WORK)
    return Release(fresh_control_plane, "epochkv", "epochkv-system", tmp_path)


@pytest.fixture
def work(release: Release) -> Namespace:
    return Namespace(release.plane, WORK)


@pytest.fixture
def following(release: Release, tmp_path: Path) -> Path:
    """This chart, as the next version would be packaged."""
    command = [str(release.plane.helm), "package", str(CHART), "--version", "0.2.0", "--app-version", "0.2.0", "-d", str(tmp_path)]
    subprocess.run(command, capture_output=True, timeout=60, check=True)
    return tmp_path / "epochkv-0.2.0.tgz"


@pytest.fixture
def operator(release: Release, tmp_path: Path) -> Iterator[Callable[[str], OperatorProcess]]:
    """Ends the operator that runs, and starts the one that the release's Deployment has now, as a version of its own."""
    running: list[OperatorProcess] = []
    (port,) = free_ports(1)  # one address of the hub, as its Service has: engines are configured with it

    def start(version: str) -> OperatorProcess:
        stop()
        made = release.operator(resync_seconds=5, hub_port=port)
        # What `importlib.metadata` finds first.
        found = tmp_path / f"v{version}" / f"epochkv-{version}.dist-info"
        found.mkdir(parents=True, exist_ok=True)
        (found / "METADATA").write_text(f"Metadata-Version: 2.1\nName: epochkv\nVersion: {version}\n")
        made.env["PYTHONPATH"] = f"{found.parent}:{made.env['PYTHONPATH']}"
        running.append(made.start())
        return made.wait_ready()

    def stop() -> None:
        for process in running:
            process.terminate()
        running.clear()

    yield start
    stop()


def objects(work: Namespace) -> dict[str, tuple[str, Any, str]]:
    """Everything that the operator made in the namespace: its uid, what a change of it would change, and which version wrote last."""
    found = {}
    for kind, path in CHILDREN.items():
        for name in work.names(kind):
            item = work.get(path, name)
            assert item is not None
            metadata = item["metadata"]
            content = item.get("data") or metadata.get("generation")
            found[f"{kind}/{name}"] = (metadata["uid"], content, metadata.get("annotations", {}).get(VERSION, ""))
    return found


def rolls(work: Namespace) -> dict[str, int]:
    """How many pod templates each Deployment and StatefulSet has had."""
    paths = (REPLICA_SETS, "/apis/apps/v1/namespaces/{}/controllerrevisions")
    items = [item for path in paths for item in work.request("GET", path.format(WORK))["items"]]
    return dict(Counter(item["metadata"]["ownerReferences"][0]["name"] for item in items))


def users(work: Namespace) -> dict[str, Any]:
    """uid of pools and engines, and the epoch of pools."""
    items = [item for path in (POOLS, ENGINES) for item in work.request("GET", path.format(WORK))["items"]]
    return {f"{item['kind']}/{item['metadata']['name']}": (item["metadata"]["uid"], item["status"].get("epoch")) for item in items}


def bump(work: Namespace, epoch: int, operator: OperatorProcess) -> None:
    for pool in ("named", "follows"):
        work.bump(pool, epoch)
    for pool in ("named", "follows"):
        # The CRDs of the earlier chart have no room for the proof of an epoch, so the hub proves it first: that takes a lease.
        eventually(lambda p=pool: work.status(p).get("epoch") == epoch, lambda p=pool: f"{p} published", 120.0)


def scale(work: Namespace, replicas: int, operator: OperatorProcess) -> dict[str, str]:
    """Scale both engines, so that this operator has written to them; the version in each annotation."""
    found = {}
    for name in ("named", "follows"):
        work.patch(ENGINES, name, {"spec": {"replicas": replicas}})
    for name in ("named", "follows"):

        def done(name: str = name) -> bool:
            found[name] = work.get(CHILDREN["deployments"], name) or {}
            return bool(found[name]) and found[name]["spec"]["replicas"] == replicas

        eventually(done, f"{name} scaled to {replicas}")
    return {name: deployment["metadata"]["annotations"][VERSION] for name, deployment in found.items()}


def chart_of_crds(work: Namespace) -> set[str]:
    ours = [item for item in work.request("GET", CRDS)["items"] if item["spec"]["group"] == "epochkv.io"]
    return {item["metadata"]["annotations"]["epochkv.io/chart"] for item in ours}


def fill(work: Namespace, operator: OperatorProcess) -> None:
    """Two pools with stores and an engine in each: `named` names its images, `follows` leaves them to the operator."""
    for name, image in (("named", {"image": STORE_IMAGE}), ("follows", {})):
        store = {"replicas": 1, "segmentSize": "1Gi"}
        l2 = {"mooncake": {"store": store, **image}}
        work.create_pool(name, local={"capacity": "1Gi"}, distributed=l2, reset={"leaseSeconds": 2})
    for name, image in (("named", {"image": ENGINE_IMAGE}), ("follows", {})):
        work.create_engine(name, poolRef={"name": name}, model=MODEL, **image)
    wanted = {"named": 1, "follows": 1, "named-master": 1, "follows-master": 1, "named-store": 1, "follows-store": 1}
    eventually(lambda: rolls(work) == wanted, lambda: f"{rolls(work)}, wanted {wanted}", 60)


def test_upgrade_rollback_and_reinstall(
    release: Release, work: Namespace, following: Path, operator: Callable[[str], OperatorProcess]
) -> None:
    release.install(chart=PREVIOUS)
    first = operator("0.1.0")
    fill(work, first)
    bump(work, 2, first)
    lives = {name: uid for name, (uid, _) in users(work).items()}
    secrets = {name: value for name, value in objects(work).items() if name.startswith("secrets/")}
    assert len(secrets) == 2

    # Upgrade: the CRDs come along, what names its images stays as it is, and what follows the operator rolls once.
    release.upgrade(chart=following)
    assert chart_of_crds(work) == {"epochkv-0.2.0"}
    second = operator("0.2.0")
    bump(work, 3, second)
    assert scale(work, 2, second) == {"named": "0.2.0", "follows": "0.2.0"}
    upgraded = {"named": 1, "named-master": 1, "named-store": 1, "follows": 2, "follows-master": 2, "follows-store": 2}
    eventually(lambda: rolls(work) == upgraded, lambda: f"{rolls(work)}, wanted {upgraded}")
    assert 'code="403"' not in second.http("/metrics")[1], "the chart's rights are all that it needs"

    # Rollback: the earlier templates come back, so no new ones are made.
    release.rollback(1)
    assert chart_of_crds(work) == {"epochkv-0.1.0"}
    third = operator("0.1.0")
    bump(work, 4, third)
    assert scale(work, 3, third) == {"named": "0.1.0", "follows": "0.1.0"}
    assert rolls(work) == upgraded

    # Reinstall: pools, engines, keys and pods outlive the release, and the next release changes nothing of them.
    before = objects(work)
    told = release.uninstall()
    assert "[CustomResourceDefinition] kvcachepools.epochkv.io" in told
    third.terminate()
    assert objects(work) == before
    release.install()
    fourth = operator("0.1.0")
    bump(work, 5, fourth)
    assert objects(work) == before
    assert {name: uid for name, (uid, _) in users(work).items()} == lives
    assert {name: value for name, value in objects(work).items() if name.startswith("secrets/")} == secrets
