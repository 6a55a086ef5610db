"""What routers read of vLLM's events, and cut prompts into."""

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

MODEL = "model"


def events_of(payload: bytes) -> list[dict[str, Any]]:
    """Of a message of vLLM's publisher: `[ts, events, rank]`, each event a map with its kind under `type`."""
    events: list[dict[str, Any]] = msgspec.msgpack.decode(payload)[1]
    return events


def blocks(tokens: Sequence[int], size: int) -> Iterable[Sequence[int]]:
    """The whole blocks of a prompt."""
    return (tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size))
