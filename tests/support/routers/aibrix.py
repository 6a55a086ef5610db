"""The rules by which AIBrix's gateway follows engines."""

from collections.abc import Sequence
from typing import Any

import xxhash

from tests.support.routers.wire import blocks, events_of


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
        parts = list(blocks(event["token_ids"], event["block_size"])) if event["token_ids"] else []
        if len(parts) != len(event["block_hashes"]):
            self.dropped.append("block hashes and tokens length mismatch")
            return
        for name, block in zip(event["block_hashes"], parts, strict=True):
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
        for number, block in enumerate(blocks(tokens, self._size)):
            key = self._key(key, block)
            if not (pods := self._pods.get(key)):
                break
            found |= dict.fromkeys(pods, number + 1)
        return found
