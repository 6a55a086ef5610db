"""What must hold in an index of host slots after every operation."""

from __future__ import annotations

from epochkv_connector.tiers.state import HostIndex


def check_index(index: HostIndex) -> None:
    """Every slot has exactly one owner, and the index's maps and counts say so."""
    held = [slot for slot, refs in enumerate(index._refs) if refs]
    assert sorted([*index._free, *index._dead, *index._idle, *held]) == list(range(index.num_slots)), "a slot has two owners, or none"
    assert index.num_available >= 0, "more slots are promised than exist"
    named = {slot: (group, name) for group, names in enumerate(index._maps) for name, slot in names.items()}
    assert named == {slot: name for slot, name in enumerate(index._names) if name is not None}
    for slot in named:
        kept = index._idle if index._roots[slot] == index._root else index._dead
        assert index._refs[slot] or slot in kept, f"slot {slot} is found but not kept"
    assert index.num_held == len(held)
