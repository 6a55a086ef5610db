"""The control plane of this layer: real, restartable, breakable, and gone afterwards."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

from hack.cluster.controlplane import COMPONENTS, ControlPlane
from hack.cluster.process import start_time
from hack.waiting import poll


def kubectl(plane: ControlPlane, *args: str, kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [str(plane.kubectl), f"--kubeconfig={kubeconfig or plane.kubeconfig}", *args]
    return subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)


def test_serves_the_pinned_version_and_runs_controllers(control_plane: ControlPlane) -> None:
    version = json.loads(kubectl(control_plane, "version", "-o", "json").stdout)
    assert version["serverVersion"]["gitVersion"] == "v1.34.4"
    assert version["clientVersion"]["gitVersion"] == "v1.34.4"
    assert kubectl(control_plane, "create", "namespace", "controllers").returncode == 0
    # The root CA ConfigMap is made by a controller, not by the API server.
    assert poll(lambda: kubectl(control_plane, "-n", "controllers", "get", "cm", "kube-root-ca.crt").returncode == 0, 30)


def test_pod_security_admission_is_on(control_plane: ControlPlane) -> None:
    assert kubectl(control_plane, "create", "namespace", "locked").returncode == 0
    label = "pod-security.kubernetes.io/enforce=restricted"
    assert kubectl(control_plane, "label", "namespace", "locked", label).returncode == 0
    assert poll(lambda: kubectl(control_plane, "-n", "locked", "get", "sa", "default").returncode == 0, 30)
    refused = kubectl(control_plane, "-n", "locked", "run", "bad", "--image=any", "--privileged=true")
    assert refused.returncode != 0
    assert "violates PodSecurity" in refused.stderr


def test_a_user_certificate_has_no_right_of_its_own(control_plane: ControlPlane) -> None:
    config = control_plane.kubeconfig_for("somebody")
    refused = kubectl(control_plane, "get", "pods", kubeconfig=config)
    assert refused.returncode != 0
    assert 'User "somebody" cannot list resource "pods"' in refused.stderr


def test_restart_keeps_address_and_data(fresh_control_plane: ControlPlane) -> None:
    plane = fresh_control_plane
    assert kubectl(plane, "create", "configmap", "kept", "--from-literal=a=1").returncode == 0
    before, url = plane.component("kube-apiserver"), plane.url
    plane.restart("kube-apiserver")
    assert start_time(before.pid) != before.start
    assert plane.component("kube-apiserver").pid != before.pid
    assert plane.url == url
    assert kubectl(plane, "get", "configmap", "kept").returncode == 0


def test_a_stopped_api_server_answers_nothing_until_continued(fresh_control_plane: ControlPlane) -> None:
    plane = fresh_control_plane
    plane.signal("kube-apiserver", signal.SIGSTOP)
    stat = Path(f"/proc/{plane.component('kube-apiserver').pid}/stat")
    assert poll(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", 10)
    silent = kubectl(plane, "get", "--raw", "/readyz", "--request-timeout=1s")
    assert silent.returncode != 0
    plane.signal("kube-apiserver", signal.SIGCONT)
    plane.wait_ready()
    assert kubectl(plane, "get", "--raw", "/readyz").stdout == "ok"


def test_close_leaves_neither_process_nor_folder(tmp_path: Path) -> None:
    with ControlPlane(tmp_path / "cp") as plane:
        components = [plane.component(name) for name in COMPONENTS]
        assert all(component.alive() for component in components)
    assert [component.name for component in components if start_time(component.pid) == component.start] == []
    assert not (tmp_path / "cp").exists()


def test_starting_again_repairs_a_dead_component(fresh_control_plane: ControlPlane) -> None:
    plane = fresh_control_plane
    kept = plane.component("kube-apiserver").pid
    plane.kill("kube-controller-manager")
    assert not plane.component("kube-controller-manager").alive()
    plane.start()
    assert plane.component("kube-controller-manager").alive()
    assert plane.component("kube-apiserver").pid == kept
