"""The rules by which llm-d's router follows engines."""

from collections.abc import Sequence
from typing import Any

from tests.support.routers.wire import MODEL, blocks, events_of


class LlmdIndex:
    """llm-d-router at ebab6879 (2026-08-22), with its in-memory index and its default hash, for prompts of text without a salt.

    `pkg/kvevents/engineadapter/vllm_adapter.go` (fields), `pkg/kvevents/pool.go` (`processEventBatch`),
    `pkg/kvevents/event_dedup_filter.go`, `pkg/kvcache/kvblock/token_processor.go` (keys), `pkg/kvcache/kvblock/in_memory.go`,
    `pkg/kvcache/kvblock_scorer.go` (`LongestPrefixScorer`).

    Attributes:
        dropped: events that it could not place, and why.
    """

    INDEXED = ("full_attention", "mla_attention", "sink_full_attention")

    def __init__(self, block_size: int) -> None:
        self.dropped: list[str] = []
        self._size = block_size
        self._pods: dict[int, set[tuple[str, str, int | None]]] = {}  # request key -> (pod, tier, group)
        self._keys: dict[int, list[int]] = {}  # engine key -> request keys; a clearing leaves them
        self._references: dict[tuple[str, str, int | None, int], int] = {}
        self._kinds: dict[tuple[str, int], str] = {}

    def read(self, pod: str, payload: bytes) -> None:
        """One message of an engine."""
        for event in events_of(payload):
            match event["type"]:
                case "BlockStored":
                    self._store(pod, event)
                case "BlockRemoved":
                    self._remove(pod, event)
                case "AllBlocksCleared":
                    self._pods = {key: kept for key, pods in self._pods.items() if (kept := {one for one in pods if one[0] != pod})}
                    self._references = {key: count for key, count in self._references.items() if key[0] != pod}

    def _store(self, pod: str, event: dict[str, Any]) -> None:
        if not self._is_indexed(pod, event):
            return
        names, tier, group = event["block_hashes"], (event.get("medium") or "gpu").lower(), event.get("group_idx")
        keys = self._keys_of(event)
        if keys is None:
            self.dropped.append("unknown parent")
            return
        if keys:
            longest = max(len(names), len(keys))
            self._keys |= {name: [] for name in names}
            for number in range(longest):
                self._keys[names[number * len(names) // longest]].append(keys[number * len(keys) // longest])
        else:  # a tier alone: the blocks have to be known
            keys = [self._keys[name][-1] for name in names if name in self._keys]
            if not keys:
                self.dropped.append("unknown block")
                return
        for key in keys:
            self._pods.setdefault(key, set()).add((pod, tier, group))
        for name in names:
            reference = (pod, tier, group, name)
            self._references[reference] = self._references.get(reference, 0) + 1

    def _is_indexed(self, pod: str, event: dict[str, Any]) -> bool:
        group, kind, tokens = event.get("group_idx"), event.get("kv_cache_spec_kind"), event["token_ids"]
        if group is None:
            return True
        if kind is not None:
            self._kinds[pod, group] = kind
        if self._kinds.get((pod, group)) not in self.INDEXED:
            return False
        dense = not tokens or len(tokens) == event["block_size"] * len(event["block_hashes"])
        if not dense:
            self.dropped.append("non_dense_block_span")
        return dense

    def _keys_of(self, event: dict[str, Any]) -> list[int] | None:
        key, keys = self._root(event.get("lora_name") or MODEL), []
        if event["parent_block_hash"] is not None:
            parents = self._keys.get(event["parent_block_hash"])
            if parents is None:
                return None
            key = parents[-1]
        for block in blocks(event["token_ids"], self._size):
            key = _fnv(_cbor([key, block, None]))
            keys.append(key)
        return keys

    def _remove(self, pod: str, event: dict[str, Any]) -> None:
        group, tier = event.get("group_idx"), (event.get("medium") or "gpu").lower()
        if group is not None and self._kinds.get((pod, group)) not in self.INDEXED:
            return
        for name in event["block_hashes"]:
            reference = (pod, tier, group, name)
            left = self._references.pop(reference, 1) - 1
            if left > 0:
                self._references[reference] = left
                continue
            keys = self._keys.get(name, [])
            for key in keys:
                pods = self._pods.get(key, set())
                pods.discard((pod, tier, group))
                if not pods:
                    self._pods.pop(key, None)
            if not any(key in self._pods for key in keys):
                self._keys.pop(name, None)

    def _root(self, model: str) -> int:
        return _fnv(_cbor([_fnv(b""), None, model]))

    def blocks(self, pod: str) -> int:
        """Entries for a pod, whatever the tier."""
        return sum(one[0] == pod for pods in self._pods.values() for one in pods)

    def find(self, tokens: Sequence[int]) -> dict[str, int]:
        """Pods, and how many blocks from the first on each holds."""
        key, found = self._root(MODEL), dict[str, int]()
        for number, block in enumerate(blocks(tokens, self._size)):
            key = _fnv(_cbor([key, block, None]))
            pods = {pod for pod, _, _ in self._pods.get(key, ())}
            found |= {pod: number + 1 for pod in pods if found.get(pod, 0) == number}
        return found


def _fnv(data: bytes) -> int:
    digest = 0xCBF29CE484222325
    for byte in data:
        digest = ((digest ^ byte) * 0x100000001B3) % (1 << 64)
    return digest


def _cbor(value: Any) -> bytes:
    """Canonical, of what keys are made of."""

    def head(major: int, number: int) -> bytes:
        if number < 24:
            return bytes([major << 5 | number])
        size = next(size for size in (1, 2, 4, 8) if number < 1 << 8 * size)
        return bytes([major << 5 | 23 + size.bit_length()]) + number.to_bytes(size, "big")

    match value:
        case None:
            return b"\xf6"
        case int():
            return head(0, value)
        case str():
            return head(3, len(value.encode())) + value.encode()
        case _:
            return head(4, len(value)) + b"".join(map(_cbor, value))
