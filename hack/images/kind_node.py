"""A node image of kind where none can be pulled, from packages and Go modules alone (`docker/kind-node.Dockerfile`)."""

from __future__ import annotations

from pathlib import Path

from hack.cluster import binaries
from hack.cluster.binaries import Report
from hack.images import static
from hack.images.builder import Builder
from hack.images.recipe import Image
from hack.other_crds import module_folder

_DOCKERFILE = "docker/kind-node.Dockerfile"
_PAUSE = "registry.k8s.io/pause:3.10"
"""The one that kind's configuration of containerd names."""


def ensure(report: Report) -> tuple[Path, str]:
    """The docker-archive of the node image, built unless cached, and the image's name."""
    found, builder = binaries.build(report, also=["kind"]), Builder(report)
    contexts = {"cluster": found.path("kubectl").parent, "kind": found.path("kind").parent}
    components = builder.ensure([Image("kind-components", _DOCKERFILE, "components", 60, contexts)])[0]
    pause = static.ensure(found.path("pause"), "pause", _PAUSE)
    contexts |= {"source": module_folder("kind", "sigs.k8s.io/kind"), "archives": builder.folder}
    node = Image("kind-node", _DOCKERFILE, "node", 120, contexts, {"COMPONENTS": components.name, "PAUSE": pause.name})
    return builder.ensure([node])[0], node.reference
