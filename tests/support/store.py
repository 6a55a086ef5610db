"""Registered memory, clients and relays to talk with a real Mooncake on loopback (`hack.standalone.mooncake`)."""

import ctypes
import mmap
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from epochkv_connector.naming.identity import object_key
from epochkv_connector.store.client import StoreClient, Transfer
from epochkv_connector.store.connection import StoreOutcome, StoreSettings

NAMESPACE = "0a1b2c3d/00112233445566ff/e7/w8899aabbccddeeff"
END_BYTES = 128
"""Header and trailer of a stored object, by the format's definition."""
_KEY = re.compile(
    r"(?P<uid>[0-9a-z]{1,8})/(?P<fingerprint>[0-9a-f]{16})/e(?P<epoch>0|[1-9][0-9]*)/w(?P<weights>[0-9a-f]{16})"
    r"/g(?P<group>0|[1-9][0-9]*)/r(?P<shard>0|[1-9][0-9]*)/(?P<hash>(?:[0-9a-f]{2})+)"
)


def settings(address: str, **changes: object) -> StoreSettings:
    here = {"local_hostname": "127.0.0.1", "max_backoff_seconds": 0.5, "setup_backoff_seconds": (0.5, 0.5)}
    return StoreSettings(master_address=address, **{**here, **changes})  # type: ignore[arg-type]


class Memory:
    """Memory of `slots` objects of `payload_bytes` each, to register with a client."""

    def __init__(self, slots: int, payload_bytes: int) -> None:
        self.payload_bytes = payload_bytes
        self.object_bytes = payload_bytes + 2 * END_BYTES
        self._map = mmap.mmap(-1, slots * self.object_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.region = (self.address, len(self._map))
        self._view = memoryview(self._map)

    def object(self, slot: int) -> memoryview:
        return self._view[slot * self.object_bytes : (slot + 1) * self.object_bytes]

    def payload(self, slot: int) -> memoryview:
        return self.object(slot)[END_BYTES:-END_BYTES]

    def fill(self, slot: int, seed: int) -> bytes:
        """Write bytes that differ at every position and for every seed; returns them."""
        value = pattern(seed, self.payload_bytes)
        self.payload(slot)[:] = value
        return value

    def clear(self) -> None:
        self._view[:] = bytes(len(self._map))

    def transfer(self, key: str, slot: int) -> Transfer:
        return Transfer(key, self.address + slot * self.object_bytes, self.object(slot))


def block_keys(count: int) -> list[str]:
    return [object_key(NAMESPACE, 0, 0, secrets.token_bytes(16)) for _ in range(count)]


def put(client: StoreClient, memory: Memory, keys: Sequence[str], timeout: float = 10) -> list[StoreOutcome]:
    return client.put([memory.transfer(key, slot) for slot, key in enumerate(keys)], timeout).done.result(timeout + 5)


def get(client: StoreClient, memory: Memory, keys: Sequence[str], timeout: float = 10) -> list[StoreOutcome]:
    return client.get([memory.transfer(key, slot) for slot, key in enumerate(keys)], timeout).done.result(timeout + 5)


def pattern(seed: int, num_bytes: int) -> bytes:
    import random

    return random.Random(seed).randbytes(num_bytes)


class RawClient:
    """Mooncake's own client, without our envelope: writes what an enemy, or another version, might write."""

    def __init__(self, address: str, num_bytes: int = 32 << 20) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._map = mmap.mmap(-1, num_bytes)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._client = MooncakeDistributedStore()
        assert self._client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", address) == 0
        assert self._client.register_buffer(self._address, num_bytes) == 0

    def put(self, key: str, value: bytes) -> None:
        self._map[: len(value)] = value
        assert self._client.batch_put_from([key], [self._address], [len(value)]) == [0]

    def get(self, key: str, num_bytes: int) -> bytes:
        assert self._client.batch_get_into([key], [self._address], [num_bytes]) == [num_bytes]
        return self._map[:num_bytes]

    def remove(self, key: str) -> bool:
        """By force, also what is being read; False if there was none."""
        code: int = self._client.remove(key, True)
        return code == 0

    def close(self) -> None:
        self._client.close()


@dataclass(frozen=True, slots=True)
class BlockKey:
    """The parts of one L2 key. `epoch` orders names; `fingerprint` and `weights` are the first 16 hex digits; `pool` the first 8 of
    the pool uid's digest."""

    pool: str
    fingerprint: str
    epoch: int
    weights: str
    group: int
    shard: int
    block_hash: bytes


def parse_key(key: str) -> BlockKey:
    """Inverse of `object_key(identity.namespace(...), ...)`; a `ValueError` where it is no block key."""
    match = _KEY.fullmatch(key)
    if match is None:
        raise ValueError(f"{key!r} is not a block key; expected <pool8>/<fingerprint16>/e<epoch>/w<weights16>/g<group>/r<shard>/<hash hex>")
    epoch, group, shard = (int(match[name]) for name in ("epoch", "group", "shard"))
    return BlockKey(match["uid"], match["fingerprint"], epoch, match["weights"], group, shard, bytes.fromhex(match["hash"]))
