"""What the images are made from, and the hash that decides whether one must be built again. Pure apart from reading files."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hack.cluster.provider import ClusterError

ROOT = Path(__file__).resolve().parents[2]
SUITE = "bookworm"
# What the Dockerfiles install anyway, so that the pieces they share are fetched once.
BASE_PACKAGES = (
    "ca-certificates", "ibverbs-providers", "libcurl4", "libgomp1", "libibverbs1", "libncursesw6", "libnuma1",
    "libreadline8", "librdmacm1", "libsqlite3-0", "liburing2", "python3", "python3-venv", "tini",
)  # fmt: skip


@dataclass(frozen=True)
class Image:
    """One image: `epochkv/<name>:dev` from a Dockerfile, optionally one target of it.

    `contexts`: more folders that it copies from; their names change with what is in them. `arguments`: of the build.
    """

    name: str
    dockerfile: str
    target: str | None
    expected_seconds: int
    contexts: Mapping[str, Path] = field(default_factory=dict)
    arguments: Mapping[str, str] = field(default_factory=dict)

    @property
    def reference(self) -> str:
        """Name that pods use."""
        return f"epochkv/{self.name}:dev"


IMAGES = (
    Image("operator", "Dockerfile", None, 60),
    Image("store", "docker/store.Dockerfile", None, 60),
    Image("engine", "docker/engine.Dockerfile", "engine-hostenv", 60),
)
JOINING = (
    Image("connector", "docker/engine.Dockerfile", "connector", 60),
    Image("vllm", "docker/engine.Dockerfile", "vllm-hostenv", 30),
)
"""For pods that join a pool by their label: the init container, and an image that has vLLM and nothing of ours."""


def image(name: str) -> Image:
    """The image of this name, or an error that lists them."""
    for found in (*IMAGES, *JOINING):
        if found.name == name:
            return found
    raise ClusterError(f"no image {name!r}: one of {', '.join(found.name for found in (*IMAGES, *JOINING))}")


def copied_paths(dockerfile: str) -> list[str]:
    """Paths that a Dockerfile's text copies from the build context, in order, without repetition."""
    found: list[str] = []
    for line in dockerfile.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        if not words or words[0].upper() not in ("COPY", "ADD"):
            continue
        flags = [word for word in words[1:] if word.startswith("--")]
        if any(flag.startswith("--from=") for flag in flags):
            continue
        sources = [word for word in words[1:] if not word.startswith("--")][:-1]
        found += [source for source in sources if source not in found]
    return found


def context_files(root: Path, paths: Iterable[str]) -> list[Path]:
    """Every file below these paths, sorted, without bytecode; an error names what is missing."""
    found: set[Path] = set()
    for name in paths:
        path = root / name
        if path.is_dir():
            found |= {file for file in path.rglob("*") if file.is_file() and "__pycache__" not in file.parts and file.suffix != ".pyc"}
        elif path.is_file():
            found.add(path)
        else:
            raise ClusterError(f"the build context lacks {name!r}, which a Dockerfile copies: restore it in {root}")
    return sorted(found)


def content_key(parts: Mapping[str, str], root: Path, files: Iterable[Path]) -> str:
    """Twelve hex digits over named strings and over the names, modes and bytes of files."""
    digest = hashlib.sha256()

    def feed(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "big") + data)

    for key, value in sorted(parts.items()):
        feed(key.encode())
        feed(value.encode())
    for file in files:
        feed(str(file.relative_to(root)).encode())
        feed(str(file.stat().st_mode & 0o111).encode())
        feed(file.read_bytes())
    return digest.hexdigest()[:12]


def base_key(architecture: str) -> str:
    return content_key({"suite": SUITE, "packages": " ".join(BASE_PACKAGES), "arch": architecture, "v": "3"}, ROOT, [])


def image_key(wanted: Image, architecture: str, root: Path = ROOT) -> str:
    """Key of an image: its base, Dockerfile, target and every file that it copies."""
    dockerfile = root / wanted.dockerfile
    if not dockerfile.is_file():
        raise ClusterError(f"{dockerfile} is missing: it builds {wanted.reference}")
    files = context_files(root, copied_paths(dockerfile.read_text()))
    parts = {"base": base_key(architecture), "target": wanted.target or "", "name": wanted.name}
    parts |= {f"context {name}": folder.name for name, folder in wanted.contexts.items()}
    parts |= {f"argument {name}": value for name, value in wanted.arguments.items()}
    return content_key(parts, root, [dockerfile, *files])


def pip_conf(environment: Mapping[str, str]) -> tuple[str, list[Path]]:
    """A pip.conf with the caller's PIP_* settings, and the host paths it names (to be mounted at the same place).

    Image builds see neither the caller's environment nor its files, but must reach the same package index.
    """
    lines, paths = ["[global]"], []
    for key, value in sorted(environment.items()):
        if not key.startswith("PIP_") or key in ("PIP_REQUIRE_VIRTUALENV", "PIP_TARGET", "PIP_PREFIX", "PIP_USER"):
            continue
        if value.startswith("/"):
            if not Path(value).exists():
                continue
            paths.append(Path(value))
        name = key.removeprefix("PIP_").lower().replace("_", "-")
        lines.append(f"{name} = {value}")
    return "\n".join(lines) + "\n", paths
