"""The sandbox image, made here: registries that serve it are not needed (nor reached). A docker-archive (what `docker save` writes)."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

from hack.cluster.binaries import Binaries, cache_root
from hack.cluster.config import PAUSE_IMAGE

_EPOCH = "1970-01-01T00:00:00Z"


def ensure(binaries: Binaries) -> Path:
    """The docker-archive of the pause image, written unless cached."""
    program = binaries.path("pause").read_bytes()
    key = hashlib.sha256(program + PAUSE_IMAGE.encode()).hexdigest()[:12]
    target = cache_root() / "images" / f"pause-{key}.tar"
    if not target.exists():
        layer = _tar({"pause": program}, 0o755)
        digest = hashlib.sha256(layer).hexdigest()
        config = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "created": _EPOCH,
                "config": {"Entrypoint": ["/pause"], "User": "65535:65535"},
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
                "history": [{"created": _EPOCH, "created_by": "hack.images"}],
            }
        ).encode()
        name = f"{hashlib.sha256(config).hexdigest()}.json"
        manifest = json.dumps([{"Config": name, "RepoTags": [PAUSE_IMAGE], "Layers": [f"{digest}/layer.tar"]}]).encode()
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = target.with_name(f".{target.name}.tmp")
        staging.write_bytes(_tar({name: config, f"{digest}/layer.tar": layer, "manifest.json": manifest}, 0o644))
        staging.rename(target)
    return target


def _tar(files: Mapping[str, bytes], mode: int) -> bytes:
    """These regular files, owned by root, dated 1970."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), mode
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()
