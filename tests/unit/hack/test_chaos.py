"""What chaos draws and compares: edits by seed, valid ones; snapshots that show what differs, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from epochkv_operator.api import parse_engine, parse_pool
from hack.chaos.edits import Editor
from hack.chaos.manifests import ENGINE_NAMES, POOL_NAMES, Edit
from hack.chaos.snapshot import differences
from tests.cluster.operator_harness import ENGINES, POOLS


def drawn(seed: int, count: int = 400) -> list[Edit]:
    editor = Editor(seed)
    edits = editor.first()
    for _ in range(count):
        for edit in editor.next():
            edits.append(edit)
            editor.pause_seconds()
    return edits


def test_a_seed_gives_the_same_edits() -> None:
    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)


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


def test_everything_is_drawn() -> None:
    edits = drawn(1, 1500)
    assert {edit.verb for edit in edits} == {"apply", "delete", "delete child", "patch child"}
    assert {edit.name for edit in edits if edit.verb == "apply"} == {*POOL_NAMES, *ENGINE_NAMES}


def carried_out(edits: list[Edit]) -> dict[str, object]:
    """Pools and engines that are there, with their specs."""
    found: dict[str, object] = {}
    for edit in edits:
        if edit.collection not in (POOLS, ENGINES):
            continue
        if edit.verb == "delete":
            del found[edit.name]
        else:
            found[edit.name] = edit.body["spec"]
    return found


@pytest.mark.parametrize("seed", [7, 1115825973])
def test_the_manifests_are_what_the_edits_made(seed: int) -> None:
    editor = Editor(seed)
    edits, pairs = editor.first(), 0
    for _ in range(400):
        found = editor.next()
        pairs += len(found) == 2
        edits += found
        assert carried_out(edits) == editor.wanted.pools | editor.wanted.engines
    assert pairs


def test_differences_name_their_place() -> None:
    found = {"a": {"x": [1, {"y": 2}]}, "b": 1}
    assert list(differences(found, found)) == []
    assert list(differences(found, {"a": {"x": [1, {"y": 3}]}, "c": 1})) == [
        "a.x[1].y: 2, not 3",
        "b: there, and should not be: 1",
        "c: missing",
    ]
