"""Write a one-layer docker-archive (what `docker save` writes) with the standard library, byte for byte reproducible."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

EPOCH = "1970-01-01T00:00:00Z"


def layer(files: Mapping[str, bytes], mode: int = 0o755) -> bytes:
    """A tar with these regular files, owned by root, dated 1970."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in sorted(files.items()):
            info = tarfile.TarInfo(name)
            info.size, info.mode = len(data), mode
            tar.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


def write(path: Path, image: str, layer_tar: bytes, entrypoint: Sequence[str], user: str) -> None:
    """Write `path` (atomically) as a docker-archive of `image` for linux/amd64."""
    digest = hashlib.sha256(layer_tar).hexdigest()
    config = json.dumps(
        {
            "architecture": "amd64",
            "os": "linux",
            "created": EPOCH,
            "config": {"Entrypoint": list(entrypoint), "User": user},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            "history": [{"created": EPOCH, "created_by": "hack.images"}],
        },
        sort_keys=True,
    ).encode()
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = json.dumps([{"Config": config_name, "RepoTags": [image], "Layers": [f"{digest}/layer.tar"]}]).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    staging = path.with_name(f".{path.name}.tmp")
    members = {config_name: config, f"{digest}/layer.tar": layer_tar, "manifest.json": manifest}
    staging.write_bytes(layer(members, mode=0o644))
    staging.rename(path)
