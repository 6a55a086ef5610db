"""What decides whether an image is built again, and the archives written here."""

from __future__ import annotations

import hashlib
import json
import subprocess
import tarfile
from pathlib import Path

import pytest

from hack.cluster.provider import ClusterError
from hack.images import archive, pause, recipe

DOCKERFILE = """ARG BASE_IMAGE=x
FROM ${BASE_IMAGE} AS build  # comment
COPY hack/requirements/a.txt \\
     hack/requirements/b.txt hack/requirements/
COPY --chown=1:1 fence fence
COPY fence again
FROM x
COPY --from=build /opt /opt
RUN echo COPY nothing
"""


def test_copied_paths_are_those_of_the_context_only() -> None:
    assert recipe.copied_paths(DOCKERFILE) == ["hack/requirements/a.txt", "hack/requirements/b.txt", "fence"]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker/x.Dockerfile").write_text("FROM a\nCOPY src src\n")
    (tmp_path / "src/__pycache__").mkdir(parents=True)
    (tmp_path / "src/a.py").write_text("1")
    (tmp_path / "other.py").write_text("1")
    return tmp_path


def test_key_follows_what_is_copied_and_nothing_else(tree: Path) -> None:
    image = recipe.Image("x", "docker/x.Dockerfile", None, 1)
    before = recipe.image_key(image, "x86_64", tree)
    (tree / "other.py").write_text("2")
    (tree / "src/__pycache__/a.cpython-311.pyc").write_bytes(b"bytecode")
    assert recipe.image_key(image, "x86_64", tree) == before
    (tree / "src/a.py").write_text("2")
    changed = recipe.image_key(image, "x86_64", tree)
    (tree / "src/a.py").write_text("1")
    (tree / "src/b.py").write_text("")
    added = recipe.image_key(image, "x86_64", tree)
    (tree / "src/b.py").unlink()
    (tree / "docker/x.Dockerfile").write_text("FROM a\nCOPY src src\nUSER 1\n")
    recipe_changed = recipe.image_key(image, "x86_64", tree)
    target = recipe.image_key(recipe.Image("x", "docker/x.Dockerfile", "t", 1), "x86_64", tree)
    assert len({before, changed, added, recipe_changed, target, recipe.image_key(image, "aarch64", tree)}) == 6


def test_a_missing_source_is_named(tree: Path) -> None:
    (tree / "docker/x.Dockerfile").write_text("COPY absent here\n")
    with pytest.raises(ClusterError, match="'absent'"):
        recipe.image_key(recipe.Image("x", "docker/x.Dockerfile", None, 1), "x86_64", tree)


def test_unknown_images_are_refused() -> None:
    with pytest.raises(ClusterError, match="operator, store, engine"):
        recipe.image("nope")


def test_the_dockerfiles_of_this_repository_can_be_hashed() -> None:
    assert len({recipe.image_key(image, "x86_64") for image in recipe.IMAGES}) == 3


def test_pip_conf_carries_settings_and_names_host_paths(tmp_path: Path) -> None:
    certificate = tmp_path / "ca.crt"
    certificate.touch()
    text, paths = recipe.pip_conf(
        {
            "PIP_CERT": str(certificate),
            "PIP_DEFAULT_TIMEOUT": "180",
            "PIP_FIND_LINKS": "/absent/wheels",
            "PIP_REQUIRE_VIRTUALENV": "1",
            "HOME": "/root",
        }
    )
    assert text == f"[global]\ncert = {certificate}\ndefault-timeout = 180\n"
    assert paths == [certificate]


def test_archive_is_a_loadable_reproducible_image(tmp_path: Path) -> None:
    layer = archive.layer({"bin/tool": b"data"})
    for name in ("one.tar", "two.tar"):
        archive.write(tmp_path / name, "epochkv/x:dev", layer, ["/bin/tool"], "1:1")
    assert (tmp_path / "one.tar").read_bytes() == (tmp_path / "two.tar").read_bytes()
    with tarfile.open(tmp_path / "one.tar") as tar:

        def content(name: str) -> bytes:
            member = tar.extractfile(name)
            assert member is not None
            return member.read()

        (manifest,) = json.loads(content("manifest.json"))
        assert manifest["RepoTags"] == ["epochkv/x:dev"]
        config = json.loads(content(manifest["Config"]))
        (layer_name,) = manifest["Layers"]
        assert config["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(content(layer_name)).hexdigest()]
        assert config["config"]["Entrypoint"] == ["/bin/tool"]


def test_pause_compiles_static_and_ends_on_sigterm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EPOCHKV_CACHE", str(tmp_path))
    path = pause.ensure()
    assert pause.ensure() == path
    with tarfile.open(path) as tar:
        layer = next(member for member in tar if member.name.endswith("layer.tar"))
        inner = tar.extractfile(layer)
        assert inner is not None
        with tarfile.open(fileobj=inner) as files:
            files.extract("pause", tmp_path, filter="data")
    binary = tmp_path / "pause"
    assert b"INTERP" not in subprocess.run(["readelf", "-lW", str(binary)], check=True, capture_output=True).stdout
    binary.chmod(0o755)
    with subprocess.Popen([str(binary)]) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.3)
        process.terminate()
        assert process.wait(timeout=10) == 0
