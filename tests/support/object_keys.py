"""The parts of an L2 key, for tests that look into a store."""

from __future__ import annotations

import re
from dataclasses import dataclass

from epochkv_connector.naming.object_keys import KeyCodecError

_KEY = re.compile(
    r"(?P<uid>[0-9a-z]{1,8})/(?P<fingerprint>[0-9a-f]{16})/e(?P<epoch>0|[1-9][0-9]*)/w(?P<weights>[0-9a-f]{16})"
    r"/g(?P<group>0|[1-9][0-9]*)/r(?P<shard>0|[1-9][0-9]*)/(?P<hash>(?:[0-9a-f]{2})+)"
)


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
    """Inverse of `object_key(identity.namespace(...), ...)`.

    Raises:
        KeyCodecError: not a block key.
    """
    match = _KEY.fullmatch(key)
    if match is None:
        raise KeyCodecError(f"{key!r} is not a block key; expected <uid8>/<fp16>/e<epoch>/w<weights16>/g<group>/r<shard>/<hash hex>")
    return BlockKey(
        pool=match["uid"],
        fingerprint=match["fingerprint"],
        epoch=int(match["epoch"]),
        weights=match["weights"],
        group=int(match["group"]),
        shard=int(match["shard"]),
        block_hash=bytes.fromhex(match["hash"]),
    )
