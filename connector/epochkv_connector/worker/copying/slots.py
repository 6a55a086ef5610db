"""The geometry of a host slot: the scheduler role counts slots, the worker role lays them out.

A slot is `[128 B header][payload][128 B trailer]`: the very bytes that go to the store as one object (`store.envelope`). All slots of
a region have the same stride.
"""

from __future__ import annotations

from collections.abc import Sequence

HEADER_BYTES = 128
TRAILER_BYTES = 128
SLOT_ALIGNMENT_BYTES = 256


def object_bytes(payload_bytes: int) -> int:
    """Size of a block in the store: header, payload, trailer."""
    return HEADER_BYTES + payload_bytes + TRAILER_BYTES


def slot_stride(payload_bytes: Sequence[int]) -> int:
    """Bytes from one slot to the next for groups with these payload sizes (the largest decides), aligned to 256."""
    if not payload_bytes or max(payload_bytes) <= 0:
        raise ValueError(f"payload_bytes is {list(payload_bytes)}; one KV cache group at least must have layers here")
    needed = object_bytes(max(payload_bytes))
    return -(-needed // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES
