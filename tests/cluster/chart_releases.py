"""Releases of the chart, made by the real Helm on a real API server, with their operators as processes in place of pods.

There is no kubelet. What the operator's container would be told, and may do, comes from the objects that Helm made: its arguments,
and its service account.
"""

import subprocess
from pathlib import Path
from typing import Any

from hack.cluster.controlplane import ControlPlane
from tests.cluster.operator_harness import LEASE_SECONDS, ROOT, Namespace, OperatorProcess

CHART = ROOT / "charts" / "epochkv"
#: Chosen for a process on loopback, not by the chart.
_OWN = {"namespace", "hub-endpoint", "lease-duration-seconds"}


class Release:
    """One release: a name and a namespace. A failing command returns, and `refused` shows what it said."""

    def __init__(self, plane: ControlPlane, name: str, namespace: str, directory: Path) -> None:
        self.plane, self.name, self.namespace, self.directory = plane, name, namespace, directory
        self.space = Namespace(plane, namespace)

    def helm(self, *arguments: str, kubeconfig: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Run as admin, or as whom a kubeconfig is for."""
        config = str(kubeconfig or self.plane.kubeconfig)
        command = [str(self.plane.helm), *arguments, "--namespace", self.namespace, "--kubeconfig", config]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    def _done(self, *arguments: str) -> str:
        result = self.helm(*arguments)
        assert result.returncode == 0, f"helm {' '.join(arguments)}: {result.stderr}"
        return result.stdout + result.stderr

    def install(self, *values: str, chart: Path = CHART) -> str:
        return self._done("install", self.name, str(chart), "--create-namespace", *_set(values))

    def upgrade(self, *values: str, chart: Path = CHART) -> str:
        return self._done("upgrade", self.name, str(chart), *_set(values))

    def rollback(self, revision: int) -> str:
        return self._done("rollback", self.name, str(revision))

    def uninstall(self) -> str:
        return self._done("uninstall", self.name)

    def refused(self, *values: str, verb: str = "install") -> str:
        """What Helm says where it refuses."""
        result = self.helm(verb, self.name, str(CHART), *(["--create-namespace"] if verb == "install" else []), *_set(values))
        assert result.returncode != 0, f"helm {verb} was accepted: {result.stdout}"
        return result.stderr

    def deployment(self) -> dict[str, Any]:
        found = self.space.get("/apis/apps/v1/namespaces/{}/deployments", "epochkv-operator")
        assert found is not None
        return dict(found)

    def operator(self, **changed: Any) -> OperatorProcess:
        """What the Deployment would run, with the rights of its service account. `changed`: flags that it would not have."""
        (container,) = self.deployment()["spec"]["template"]["spec"]["containers"]
        pairs = [argument.removeprefix("--").partition("=") for argument in container["args"][1:]]
        flags: dict[str, Any] = {name.replace("-", "_"): value for name, _, value in pairs if name not in _OWN}
        assert [name for name, _, _ in pairs].count("watch-namespace") <= 1, "OperatorProcess takes one"
        flags.setdefault("watch_namespace", None)
        account = self.kubeconfig("epochkv-operator")
        flags |= {"lease_duration_seconds": LEASE_SECONDS, **changed}
        return OperatorProcess(self.plane, self.namespace, self.directory, kubeconfig=account, **flags)

    def kubeconfig(self, account: str) -> Path:
        """Of a service account of the release's namespace."""
        groups = ("system:serviceaccounts", "system:authenticated")
        return self.plane.kubeconfig_for(f"system:serviceaccount:{self.namespace}:{account}", groups)


def _set(values: tuple[str, ...]) -> list[str]:
    return [part for value in values for part in ("--set", value)]
