"""The sandbox image, compiled here: registries that serve it are not needed (nor reached)."""

from __future__ import annotations

import hashlib
import subprocess
import tempfile
from pathlib import Path

from hack.cluster.binaries import cache_root
from hack.cluster.nodeconfig import PAUSE_IMAGE
from hack.cluster.provider import ClusterError
from hack.images import archive

SOURCE = Path(__file__).with_name("pause.c")


def ensure() -> Path:
    """The docker-archive of the pause image, compiled unless cached."""
    key = hashlib.sha256(SOURCE.read_bytes() + PAUSE_IMAGE.encode()).hexdigest()[:12]
    target = cache_root() / "images" / f"pause-{key}.tar"
    if target.exists():
        return target
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "pause"
        command = ["gcc", "-Os", "-static", "-Wall", "-Werror", "-s", "-o", str(binary), str(SOURCE)]
        try:
            subprocess.run(command, check=True, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise ClusterError("gcc is not installed: it compiles the pause image (apt-get install gcc libc6-dev)") from error
        except subprocess.CalledProcessError as error:
            raise ClusterError(f"cannot compile {SOURCE}: {error.stderr.strip()}") from error
        archive.write(target, PAUSE_IMAGE, archive.layer({"pause": binary.read_bytes()}), ["/pause"], "65535:65535")
    return target
