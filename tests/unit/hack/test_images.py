"""What decides whether an image is built again, and the archives written here."""

from pathlib import Path

import pytest

from hack.images import recipe

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
    context = recipe.image_key(recipe.Image("x", "docker/x.Dockerfile", None, 1, {"more": tree / "programs-0123"}), "x86_64", tree)
    argument = recipe.image_key(recipe.Image("x", "docker/x.Dockerfile", None, 1, {}, {"FILE": "a.tar"}), "x86_64", tree)
    other = recipe.image_key(image, "aarch64", tree)
    assert len({before, changed, added, recipe_changed, target, context, argument, other}) == 8
