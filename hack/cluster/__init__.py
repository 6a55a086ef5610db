"""Real Kubernetes clusters on one machine without Docker (`local`), or through kind where Docker is (`kind`)."""

from __future__ import annotations

import os

from hack.cluster.provider import ClusterError, Provider


def choose_provider(name: str, kind: str | None = None) -> Provider:
    """The provider that `kind`, else `$CLUSTER`, else `local` names."""
    chosen = kind or os.environ.get("CLUSTER") or "local"
    if chosen in ("local", "local-ipv6"):
        from hack.cluster.local import LocalCluster

        return LocalCluster(name, ipv6=chosen == "local-ipv6")
    if chosen == "kind":
        from hack.cluster.kind import KindCluster

        return KindCluster(name)
    raise ClusterError(f"unknown cluster provider {chosen!r}: use 'local', 'local-ipv6' or 'kind' (option --provider or $CLUSTER)")
