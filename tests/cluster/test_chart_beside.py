"""Releases beside each other, on a real API server: what Helm refuses, with which sentence, and two that get along."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.cluster.binaries import build
from hack.cluster.controlplane import ControlPlane
from hack.waiting import eventually
from tests.cluster.chart_releases import CHART, Release
from tests.cluster.operator_harness import POOLS, Namespace

CRDS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
LOCAL = {"capacity": "64Mi"}


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """A control plane where nobody has applied our CRDs."""
    with ControlPlane(tmp_path_factory.mktemp("cp"), binaries=build()) as plane:
        for name in ("serve-a", "serve-b"):
            Namespace.create_in(plane, name)
        yield plane


def crds(plane: ControlPlane) -> dict[str, dict]:
    """Annotations of our CRDs by name."""
    items = Namespace(plane, "default").request("GET", CRDS)["items"]
    return {item["metadata"]["name"]: item["metadata"].get("annotations", {}) for item in items if item["spec"]["group"] == "epochkv.io"}


def drop_crds(plane: ControlPlane) -> None:
    for name in crds(plane):
        Namespace(plane, "default").request("DELETE", f"{CRDS}/{name}")
    eventually(lambda: not crds(plane), "CRDs gone")


def test_two_releases_that_share_nothing_get_along(bare: ControlPlane, tmp_path: Path) -> None:
    first, second = (Release(bare, name, f"home-{name}", tmp_path) for name in ("a", "b"))
    first.install("watchNamespaces={serve-a}")
    second.install("watchNamespaces={serve-b}", "crds.install=false")
    spaces = [Namespace(bare, name) for name in ("serve-a", "serve-b")]
    with first.operator() as one, second.operator() as two:
        for operator, space in ((one, spaces[0]), (two, spaces[1])):
            operator.wait_ready()
            space.create_pool("policy", local=LOCAL, resetEpoch=3)
        for operator, space in ((one, spaces[0]), (two, spaces[1])):
            eventually(lambda s=space: s.status("policy").get("epoch") == 3, "published")
            eventually(lambda s=space: "endpoints" in s.status("policy"), "a whole status")
            assert space.status("policy")["endpoints"]["hub"].endswith(f":{operator.hub_port}")
            assert 'code="403"' not in operator.http("/metrics")[1], operator.tail()
    # The release that has the CRDs goes, and the other one's pool stays.
    assert "kept" in first.uninstall()
    assert spaces[1].pool("policy")["status"]["epoch"] == 3
    second.uninstall()
    for space in spaces:
        space.delete(POOLS, "policy")
    drop_crds(bare)


def test_where_releases_would_fight_the_second_is_refused(bare: ControlPlane, tmp_path: Path) -> None:
    first = Release(bare, "a", "fight-a", tmp_path)
    first.install("watchNamespaces={serve-a}")
    other, same = Release(bare, "b", "fight-b", tmp_path), Release(bare, "b", "fight-a", tmp_path)
    told = other.refused("watchNamespaces={serve-b}")
    assert "belongs to release a in namespace fight-a. Set crds.install=false" in told
    assert "cannot be imported" not in told  # Helm's own words come later
    told = other.refused("watchNamespaces={serve-b,serve-a}", "crds.install=false")
    assert "namespace serve-a is served by release a in namespace fight-a already" in told
    assert "release a in namespace fight-a serves some of them: set watchNamespaces" in other.refused("crds.install=false")
    assert "install this one into a namespace of its own" in same.refused("watchNamespaces={serve-b}", "crds.install=false")
    # What was refused left nothing behind.
    assert first.helm("list", "--all-namespaces", "--all", "-q").stdout.split() == ["a"]
    first.upgrade("watchNamespaces={serve-a}")
    first.uninstall()


def test_a_release_that_serves_the_whole_cluster_is_alone(bare: ControlPlane, tmp_path: Path) -> None:
    drop_crds(bare)
    first, other = Release(bare, "all", "whole", tmp_path), Release(bare, "b", "beside", tmp_path)
    first.install()
    for values in ((), ("watchNamespaces={serve-b}",), ("crds.install=false",)):
        assert "release all in namespace whole serves every namespace of the cluster" in other.refused(*values)
    first.uninstall()


def test_crds_that_helm_does_not_own(bare: ControlPlane, tmp_path: Path) -> None:
    """Kept by a release of another name, or applied with kubectl: refused with the way to take over, which works as it is written."""
    drop_crds(bare)
    Release(bare, "old", "past", tmp_path).install()
    Release(bare, "old", "past", tmp_path).uninstall()
    new = Release(bare, "new", "present", tmp_path)
    told = new.refused()
    assert "belongs to release old in namespace past" in told
    kubectl = f"{bare.kubectl} --kubeconfig {bare.kubeconfig}"
    run(take_over(told).replace("kubectl", kubectl))
    new.install()
    assert {annotations["meta.helm.sh/release-name"] for annotations in crds(bare).values()} == {"new"}
    new.uninstall()

    for name in crds(bare):
        run(f"{kubectl} annotate crd {name} meta.helm.sh/release-name- meta.helm.sh/release-namespace-")
    told = new.refused()
    assert "no release of Helm owns it" in told
    run(take_over(told).replace("kubectl", kubectl))
    new.install()
    new.uninstall()


def test_crds_never_go_with_a_release_that_serves_only_some_namespaces(bare: ControlPlane, tmp_path: Path) -> None:
    drop_crds(bare)
    some = Release(bare, "some", "some-home", tmp_path)
    told = some.refused("watchNamespaces={serve-a}", "crds.keep=false")
    assert "crds.keep=false would delete the pools and engines of every namespace" in told
    some.install("watchNamespaces={serve-a}")
    assert "crds.keep=false would delete" in some.refused("watchNamespaces={serve-a}", "crds.keep=false", verb="upgrade")
    some.uninstall()
    drop_crds(bare)

    every = Release(bare, "every", "every-home", tmp_path)
    notes = every.install("crds.keep=false")
    assert "WARNING" in notes
    assert "deletes the CustomResourceDefinitions (crds.keep=false)" in notes
    # Taking the CRDs out of the release would delete them at once.
    assert "crds.install=false would delete CustomResourceDefinition" in every.refused("crds.install=false", verb="upgrade")
    assert len(crds(bare)) == 2
    every.uninstall()
    eventually(lambda: not crds(bare), "CRDs gone with the release")


def test_who_has_rights_in_two_namespaces_only_can_install(bare: ControlPlane, tmp_path: Path) -> None:
    """The refusals look at nothing that such an installer may not see: a lookup that is forbidden would end the installation."""
    drop_crds(bare)
    Release(bare, "crds", "has-the-crds", tmp_path).install("watchNamespaces={serve-a}")
    team = Release(bare, "team", "team-home", tmp_path)
    Namespace.create_in(bare, "team-home")
    for name in ("team-home", "serve-b"):
        run(f"{bare.kubectl} --kubeconfig {bare.kubeconfig} -n {name} create rolebinding owner --clusterrole=cluster-admin --user=owner")
    owner = bare.kubeconfig_for("owner")
    for verb in ("install", "upgrade"):
        values = ("--set", "watchNamespaces={serve-b},crds.install=false")
        done = team.helm(verb, "team", str(CHART), *values, kubeconfig=owner)
        assert done.returncode == 0, done.stderr
    # Without the namespaces it would need the whole cluster, and that is what the API server says then.
    assert "forbidden" in team.helm("upgrade", "team", str(CHART), "--set", "crds.install=false", kubeconfig=owner).stderr


def take_over(told: str) -> str:
    """The command at the end of a refusal."""
    return told[told.index("kubectl annotate") :].strip()


def run(command: str) -> None:
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
