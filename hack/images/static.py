"""Images of one static program, made here: registries that serve them are not needed (nor reached). docker-archives (`docker save`)."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping
from pathlib import Path

from hack.cluster.binaries import cache_root

_EPOCH = "1970-01-01T00:00:00Z"


def ensure(program: Path, name: str, reference: str) -> Path:
    """The docker-archive of the image `reference`, whose entry point is this program as `/name`, written unless cached."""
    data = program.read_bytes()
    key = hashlib.sha256(data + f"{name} {reference}".encode()).hexdigest()[:12]
    target = cache_root() / "images" / f"{program.name}-{key}.tar"
    if not target.exists():
        layer = _tar({name: data}, 0o755)
        digest = hashlib.sha256(layer).hexdigest()
        config = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "created": _EPOCH,
                "config": {"Entrypoint": [f"/{name}"], "User": "65535:65535"},
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
                "history": [{"created": _EPOCH, "created_by": "hack.images"}],
            }
        ).encode()
        file = f"{hashlib.sha256(config).hexdigest()}.json"
        manifest = json.dumps([{"Config": file, "RepoTags": [reference], "Layers": [f"{digest}/layer.tar"]}]).encode()
        target.parent.mkdir(parents=True, exist_ok=True)
        staging = target.with_name(f".{target.name}.tmp")
        staging.write_bytes(_tar({file: config, f"{digest}/layer.tar": layer, "manifest.json": manifest}, 0o644))
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
