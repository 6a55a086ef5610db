"""The control plane of this layer: of the pinned version, with admission and rights on, and gone afterwards."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from hack.cluster.binaries import KUBERNETES_VERSION
from hack.cluster.controlplane import COMPONENTS, ControlPlane
from hack.cluster.process import start_time
from hack.waiting import poll


def kubectl(plane: ControlPlane, *args: str, kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(plane.kubectl), f"--kubeconfig={kubeconfig or plane.kubeconfig}", *args]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_serves_the_pinned_version_and_runs_controllers(control_plane: ControlPlane) -> None:
    version = json.loads(kubectl(control_plane, "version", "-o", "json").stdout)
    assert version["serverVersion"]["gitVersion"] == KUBERNETES_VERSION
    assert version["clientVersion"]["gitVersion"] == KUBERNETES_VERSION
    assert kubectl(control_plane, "create", "namespace", "controllers").returncode == 0
    # The root CA ConfigMap is made by a controller, not by the API server.
    assert poll(lambda: kubectl(control_plane, "-n", "controllers", "get", "cm", "kube-root-ca.crt").returncode == 0, 30)


def test_a_user_certificate_has_no_right_of_its_own(control_plane: ControlPlane) -> None:
    config = control_plane.kubeconfig_for("somebody")
    refused = kubectl(control_plane, "get", "pods", kubeconfig=config)
    assert refused.returncode != 0
    assert 'User "somebody" cannot list resource "pods"' in refused.stderr


def test_close_leaves_neither_process_nor_folder(tmp_path: Path) -> None:
    with ControlPlane(tmp_path / "cp") as plane:
        components = [plane.component(name) for name in COMPONENTS]
        assert all(component.alive() for component in components)
    assert [component.name for component in components if start_time(component.pid) == component.start] == []
    assert not (tmp_path / "cp").exists()
