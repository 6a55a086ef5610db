"""Where a kubeconfig is looked for. The client library prints what it does not find, and says something else in its error."""

from __future__ import annotations

import os
from pathlib import Path


def missing_kubeconfig() -> str | None:
    """Which files are looked for, when none of them is there; None when one is, and in a pod, which needs none."""
    if os.environ.get("KUBERNETES_SERVICE_HOST") and not os.environ.get("KUBECONFIG"):
        return None
    paths = (os.environ.get("KUBECONFIG") or "~/.kube/config").split(os.pathsep)
    if any(Path(path).expanduser().exists() for path in paths):
        return None
    return f"{' and '.join(paths)} not found"
