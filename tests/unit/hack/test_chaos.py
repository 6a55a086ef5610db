"""What chaos draws and compares: edits by seed, valid ones; snapshots that show what differs, and nothing else."""

from __future__ import annotations

from hack.chaos.snapshot import differences


def test_differences_name_their_place() -> None:
    found = {"a": {"x": [1, {"y": 2}]}, "b": 1}
    assert list(differences(found, found)) == []
    assert list(differences(found, {"a": {"x": [1, {"y": 3}]}, "c": 1})) == [
        "a.x[1].y: 2, not 3",
        "b: there, and should not be: 1",
        "c: missing",
    ]
