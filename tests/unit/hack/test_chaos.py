"""What chaos draws and compares: edits by seed, valid ones; snapshots that show what differs, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from epochkv_operator.api import parse_engine, parse_pool
from hack.chaos.edits import Editor
from hack.chaos.manifests import Edit
from hack.chaos.snapshot import differences
from tests.cluster.operator_harness import POOLS


def drawn(seed: int, count: int = 400) -> list[Edit]:
    editor = Editor(seed)
    edits = editor.first()
    for _ in range(count):
        for edit in editor.next():
            edits.append(edit)
            editor.pause_seconds()
    return edits


@pytest.mark.parametrize("seed", range(5))
def test_every_edit_is_valid_and_no_counter_goes_down(seed: int) -> None:
    lives: dict[str, Any] = {}
    for edit in drawn(seed):
        if edit.verb == "delete":
            assert lives.pop(edit.name, None) is not None
        if edit.verb != "apply":
            continue
        obj = {**edit.body, "metadata": {"name": edit.name, "namespace": "n", "uid": "u", "resourceVersion": "1"}}
        if edit.collection != POOLS:
            parse_engine(obj)
            lives[edit.name] = True
            continue
        pool = parse_pool(obj)
        counters = (pool.spec.reset_epoch, pool.spec.keys.generation, pool.spec.reset.lease_seconds)
        before = lives.get(edit.name, (0, 0, 0))
        assert all(now >= then for now, then in zip(counters, before, strict=True)), edit
        lives[edit.name] = counters


def test_differences_name_their_place() -> None:
    found = {"a": {"x": [1, {"y": 2}]}, "b": 1}
    assert list(differences(found, found)) == []
    assert list(differences(found, {"a": {"x": [1, {"y": 3}]}, "c": 1})) == [
        "a.x[1].y: 2, not 3",
        "b: there, and should not be: 1",
        "c: missing",
    ]
