"""Real Kubernetes clusters on one machine without Docker (`local`), or through kind where Docker is (`kind`)."""

from __future__ import annotations

import os

from hack.cluster.provider import ClusterError, Provider


def choose_provider(name: str, kind: str | None = None) -> Provider:
    """The provider that `kind`, else `$CLUSTER`, else `local` names."""
    chosen = kind or os.environ.get("CLUSTER") or "local"
    if chosen == "local":
        from hack.cluster.local import LocalCluster

        return LocalCluster(name)
    if chosen == "kind":
        from hack.cluster.kind import KindCluster

        return KindCluster(name)
    raise ClusterError(f"unknown cluster provider {chosen!r}: use 'local' or 'kind' (option --provider or $CLUSTER)")
