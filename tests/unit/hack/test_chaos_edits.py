"""What chaos compares with: the manifests after every edit that was carried out, wherever the storm ends."""

from __future__ import annotations

import pytest

from hack.chaos.edits import Editor
from hack.chaos.manifests import Edit
from tests.cluster.operator_harness import ENGINES, POOLS


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
    edits, halves = editor.first(), 0
    for _ in range(400):
        edits.append(editor.next())
        rest = editor.last()
        halves += bool(rest)
        edits += rest
        assert carried_out(edits) == editor.wanted.pools | editor.wanted.engines
    assert halves
