"""kind's provider: `up` mends what was stopped or interrupted, says what it cannot mend, and `down` takes everything back."""

import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hack.cluster import config
from hack.cluster.kind import KindCluster
from hack.cluster.node import CGROUPS
from hack.cluster.provider import ClusterError
from hack.demo.setup import ROOT
from hack.waiting import eventually

ON_KIND = pytest.mark.skipif(os.environ.get("CLUSTER") != "kind", reason="of kind's provider alone: CLUSTER=kind")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500), ON_KIND]
NAME = "faults-" + hashlib.sha256(str(ROOT).encode()).hexdigest()[:6]
NODE = f"{NAME}-control-plane"


@pytest.fixture(scope="module")
def cluster() -> Iterator[KindCluster]:
    made = KindCluster(NAME)
    made.down(print)
    yield made
    made.down(print)


def states(cluster: KindCluster) -> dict[str, bool]:
    return {line.name: line.alive for line in cluster.status()}


def test_an_interrupted_up_is_made_anew(cluster: KindCluster) -> None:
    command = [sys.executable, "-m", "hack.cluster", "up", "--provider", "kind", "--name", NAME]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as interrupted:
        try:
            eventually(lambda: cluster.folder.exists() and states(cluster).get(NODE), "the node is there", 600, 1.0)
        finally:
            os.killpg(interrupted.pid, signal.SIGKILL)
    first = cluster.docker("inspect", "--format", "{{.Id}}", NODE)
    cluster.up(print)
    assert cluster.docker("inspect", "--format", "{{.Id}}", NODE) != first
    assert all(states(cluster).values())


@pytest.mark.parametrize("how", ["pause", "stop"])
def test_a_node_that_does_not_run_is_shown_and_started(cluster: KindCluster, how: str) -> None:
    cluster.up(print)
    cluster.docker(how, NODE)
    assert not states(cluster)[NODE]
    cluster.up(print)
    assert all(states(cluster).values())


def test_a_folder_that_the_nodes_do_not_show_is_named(cluster: KindCluster, tmp_path: Path) -> None:
    cluster.up(print)
    with pytest.raises(ClusterError, match=f"do not show {tmp_path}.*remove the cluster"):
        cluster.up(print, [tmp_path])


def test_down_takes_everything_back(cluster: KindCluster) -> None:
    cluster.up(print)
    own = config.load(f"kind-{NAME}")
    cluster.down(print)
    assert cluster.status() == []
    assert not cluster.folder.exists()
    if own:  # with a Docker daemon of its own
        assert not own.data.exists()
        assert not Path(f"/sys/class/net/{own.network.device}").exists()
        assert not list(CGROUPS.glob(f"**{own.cgroup}"))
