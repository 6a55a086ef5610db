"""Routers that follow KV events: Dynamo's own indexer as a process, and the rules of llm-d and AIBrix written anew.

Dynamo's comes from its package on PyPI. Neither Go module is to be had in a version that could be built here: llm-d's in the module
proxy (`llm-d-kv-cache-manager` 0.8.0) reads events as arrays only and forgets nothing at `AllBlocksCleared`; AIBrix's is not there.
"""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import xxhash

from hack.loopback import free_port
from hack.standalone.process import Process

DYNAMO = Path(__file__).parents[2] / ".build/dynamo"
MODEL = "model"


def events_of(payload: bytes) -> list[dict[str, Any]]:
    """Of a message of vLLM's publisher: `[ts, events, rank]`, each event a map with its kind under `type`."""
    events: list[dict[str, Any]] = msgspec.msgpack.decode(payload)[1]
    return events


def _blocks(tokens: Sequence[int], size: int) -> Iterable[Sequence[int]]:
    return (tokens[start : start + size] for start in range(0, len(tokens) - size + 1, size))


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
        for block in _blocks(event["token_ids"], self._size):
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
        for number, block in enumerate(_blocks(tokens, self._size)):
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


class AibrixIndex:
    """AIBrix at e3e10f9e (2026-08-22): `pkg/kvevent/handler.go`, `pkg/cache/kvcache/msgpack_decoder.go`,
    `pkg/utils/syncprefixcacheindexer/sync_hash.go`.

    Its decoder takes positional events alone, and vLLM 0.30 to 0.33 send maps: these are its rules for what is in them. All blocks of
    one event get the event's parent, so of a chain that came in one event it finds the first block alone.

    Attributes:
        dropped: events that it could not place, and why.
    """

    SEED = 7

    def __init__(self, block_size: int) -> None:
        self.dropped: list[str] = []
        self._size = block_size
        self._pods: dict[int, set[str]] = {}
        self._keys: dict[int, int] = {}

    def read(self, pod: str, payload: bytes) -> None:
        """One message of an engine."""
        for event in events_of(payload):
            match event["type"]:
                case "BlockStored":
                    self._store(pod, event)
                case "BlockRemoved":  # whatever the medium, and of every pod
                    for name in event["block_hashes"]:
                        self._pods.pop(self._keys.pop(name, -1), None)
                case "AllBlocksCleared":
                    self._pods = {key: kept for key, pods in self._pods.items() if (kept := pods - {pod})}

    def _store(self, pod: str, event: dict[str, Any]) -> None:
        blocks = list(_blocks(event["token_ids"], event["block_size"])) if event["token_ids"] else []
        if len(blocks) != len(event["block_hashes"]):
            self.dropped.append("block hashes and tokens length mismatch")
            return
        for name, block in zip(event["block_hashes"], blocks, strict=True):
            if name not in self._keys:
                self._keys[name] = self._key(self._keys.get(event["parent_block_hash"], self.SEED), block)
            self._pods.setdefault(self._keys[name], set()).add(pod)

    def _key(self, parent: int, block: Sequence[int]) -> int:
        data = parent.to_bytes(8, "little") + b"".join(token.to_bytes(4, "big") for token in block)
        return xxhash.xxh64_intdigest(data, self.SEED)

    def blocks(self, pod: str) -> int:
        """Entries for a pod."""
        return sum(pod in pods for pods in self._pods.values())

    def find(self, tokens: Sequence[int]) -> dict[str, int]:
        """Pods, and how many blocks from the first on each holds."""
        key, found = self.SEED, dict[str, int]()
        for number, block in enumerate(_blocks(tokens, self._size)):
            key = self._key(key, block)
            if not (pods := self._pods.get(key)):
                break
            found |= dict.fromkeys(pods, number + 1)
        return found


class DynamoIndexer:
    """Dynamo's standalone indexer: it subscribes to engines by itself, and answers over HTTP. Use as a context manager."""

    def __init__(self, directory: Path, block_size: int) -> None:
        if not (DYNAMO / "dynamo").is_dir():
            raise RuntimeError("Dynamo's indexer is not there: run 'make setup-engine'")
        self._size, self._port = block_size, free_port()
        self.log = directory / "dynamo.log"
        command = [sys.executable, "-m", "dynamo.indexer", "--port", str(self._port), "--threads", "1"]
        self.process = Process("dynamo", command, self.log, {**os.environ, "PYTHONPATH": str(DYNAMO), "NO_COLOR": "1"})

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"http://127.0.0.1:{self._port}{path}", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def _is_up(self) -> bool:
        try:
            self._ask("/health")
        except OSError:
            return False
        return True

    def follow(self, pod: int, endpoint: str) -> None:
        """Subscribe to an engine's events."""
        self._ask("/register", {"instance_id": pod, "endpoint": endpoint, "model_name": MODEL, "block_size": self._size})

    def blocks(self, pod: int) -> int:
        """What it believes that a pod holds, tiers apart."""
        (index,) = self._ask("/dump").values()
        stored = [entry["event"]["data"]["stored"]["blocks"] for entry in index["events"] if entry["worker_id"] == pod]
        return sum(map(len, stored))

    def find(self, tokens: Sequence[int]) -> dict[int, int]:
        """Pods, and how many blocks from the first on each holds, on the device or in host memory."""
        answer = self._ask("/query", {"token_ids": list(tokens), "model_name": MODEL})
        found = {int(pod): told["longest_matched"] // self._size for pod, told in answer["instances"].items()}
        return {pod: count for pod, count in found.items() if count}

    @property
    def dropped(self) -> list[str]:
        """Events that it could not place, as its log has them."""
        return [line for line in self.log.read_text(errors="replace").splitlines() if "WARN" in line or "ERROR" in line]

    def __enter__(self) -> Self:
        try:
            self.process.wait_until(self._is_up, 60.0, "answering")
        except BaseException:  # no `__exit__` follows
            self.process.end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.process.end()
