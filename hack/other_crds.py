"""CRDs of other projects, from their own Go modules: the real thing admits what the operator and our samples write. Nothing is copied.

The modules are pinned in `cluster/tools/crds`; the Go module cache keeps them.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any, Final

import yaml

from hack.cluster.binaries import TOOLS
from hack.cluster.provider import ClusterError

_FOLDER = TOOLS / "crds"
_DOWNLOAD_SECONDS = 300
#: CRD -> module, and file in it.
CRDS: Final = {
    "leaderworkersets.leaderworkerset.x-k8s.io": (
        "sigs.k8s.io/lws",
        "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml",
    ),
    "rayclusters.ray.io": (
        "github.com/ray-project/kuberay/ray-operator",
        "config/crd/bases/ray.io_rayclusters.yaml",
    ),
    "podmonitors.monitoring.coreos.com": (
        "github.com/prometheus-operator/prometheus-operator",
        "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
    ),
}


def read_crd(name: str) -> dict[str, Any]:
    """The CustomResourceDefinition of this name, one of `CRDS`, downloaded when the module cache lacks it.

    Raises:
        ClusterError: no Go, or the module cannot be downloaded.
    """
    module, file = CRDS[name]
    env = {**os.environ, "GOFLAGS": "-mod=readonly", "GOTOOLCHAIN": "local"}
    command = ["go", "mod", "download", "-json", module]
    try:
        done = subprocess.run(command, cwd=_FOLDER, env=env, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False)
        folder = json.loads(done.stdout)["Dir"]
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"cannot download the Go module {module} for the CRD {name} ({error!r}): is a module proxy in reach?") from error
    crd: dict[str, Any] = yaml.safe_load((Path(folder) / file).read_text())
    return crd
