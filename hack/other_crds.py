"""CRDs of other projects, from their own Go modules: the real thing admits what the operator and our samples write. Nothing is copied.

The modules are pinned in `cluster/tools`; the Go module cache keeps them.
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

_DOWNLOAD_SECONDS = 300
LWS: Final = ("lws", "sigs.k8s.io/lws")
#: CRD -> folder of `cluster/tools` that pins its module, the module, and the file in it.
CRDS: Final = {
    "leaderworkersets.leaderworkerset.x-k8s.io": (*LWS, "config/crd/bases/leaderworkerset.x-k8s.io_leaderworkersets.yaml"),
    "llminferenceservices.serving.kserve.io": (
        "crds",
        "github.com/kserve/kserve",
        "config/crd/full/llmisvc/serving.kserve.io_llminferenceservices.yaml",
    ),
    "rayclusters.ray.io": (
        "crds",
        "github.com/ray-project/kuberay/ray-operator",
        "config/crd/bases/ray.io_rayclusters.yaml",
    ),
    "podmonitors.monitoring.coreos.com": (
        "crds",
        "github.com/prometheus-operator/prometheus-operator",
        "example/prometheus-operator-crd/monitoring.coreos.com_podmonitors.yaml",
    ),
}


def read_crd(name: str) -> dict[str, Any]:
    """The CustomResourceDefinition of this name, one of `CRDS`. Raises as `module_folder`."""
    pins, module, file = CRDS[name]
    crd: dict[str, Any] = yaml.load((module_folder(pins, module) / file).read_text(), Loader=yaml.CSafeLoader)
    return crd


def module_folder(pins: str, module: str) -> Path:
    """Where a module's files lie, downloaded when the module cache lacks it. `pins`: folder of `cluster/tools` that says which version.

    Raises:
        ClusterError: no Go, or the module cannot be downloaded.
    """
    env = {**os.environ, "GOFLAGS": "-mod=readonly", "GOTOOLCHAIN": "local"}
    command = ["go", "mod", "download", "-json", module]
    try:
        done = subprocess.run(command, cwd=TOOLS / pins, env=env, capture_output=True, text=True, timeout=_DOWNLOAD_SECONDS, check=False)
        return Path(json.loads(done.stdout)["Dir"])
    except (OSError, ValueError, KeyError, subprocess.TimeoutExpired) as error:
        raise ClusterError(f"cannot download the Go module {module} ({error!r}): is a module proxy in reach?") from error
