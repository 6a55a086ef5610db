"""Who may share which KV, and what it is called: fingerprint, roots, the snapshot that every operation reads once, and keys in L2.

Every name of a tier is made here, of a root and a block hash (`root`, `engine.blocks`). Pure: no clock, no I/O, no vLLM, no torch.
Source: `fence.md` sections 1 to 3. Names are made of lengths and bytes, never of joined strings: no two different inputs give one name.

An object in L2 is one block of one group of one KV shard: `<pool8>/<fingerprint16>/e<epoch>/w<weights16>/g<group>/r<shard>/<block hash>`.
A number says how many characters a part has: `pool8` is of a hash of the pool's uid, and all hashes are in hex. The first four parts
are the *namespace*, which the scheduler role freezes into every job. Names, not deletes, make old KV unreachable.
"""

import hashlib
import hmac
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ROOT_BYTES = 32
CODEC_VERSION = 2
"""Bump when the bytes of an L2 object or the order of layers inside it change."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What holds now, read once per operation."""

    epoch: int  # highest epoch adopted in this engine instance; -1 before the first
    in_use: bool  # False (bypass): no load, no save, and every request gets a random root of its own
    root: bytes  # first parent of the block hashes of requests pinned under this snapshot
    namespace: str | None  # prefix of L2 keys; None: nothing may leave this engine (private root, or L2 refused)
    shared: bool  # True when other engines of the pool use the same root
    generation: int = 0  # new with every root; a pin is current iff its generation is this one
    weights: bytes | None = None  # digest of the weights that names are made of; None: unknown


@dataclass(slots=True)
class Pin:
    """The root one request's block hashes are made with."""

    root: bytes  # 32 bytes; equals `Snapshot.root`, is derived from it (adapters, embeddings), or random
    generation: int  # of the snapshot it was made under
    saveable: bool = True  # False when blocks under this pin must never be offered to a tier (a random root, a detached request)
    admitted: bool = False  # the request holds, or was answered, KV under this pin: it runs on, on an old epoch when the pin is not current
    loading: bool = False  # an asynchronous load of ours is in flight
    session: bool = False  # a streaming-input session
    alone: bool = False  # the root is random: no other request has these names, or will
    adapter: int = 0  # vLLM's id of the request's adapter; 0, which vLLM gives to none: there is none
    version: int = 0  # of what that id stood for (`weights.adapters`)
    epoch: int = -1  # of the snapshot it was made under


def _packed(*fields: bytes) -> bytes:
    return b"".join(len(field).to_bytes(8, "big") + field for field in fields)


def shared_root(secret: bytes, pool_uid: str, epoch: int, fingerprint: str, weights: bytes) -> bytes:
    """Root of one epoch of one pool: HMAC-SHA256(secret, "epochkv" | pool_uid | epoch | fingerprint | weights), length-prefixed.

    Keyed, so that names cannot be guessed (block hashes may be non-cryptographic). `weights`: digest of what the ranks hold.
    """
    assert all((secret, pool_uid, fingerprint, weights)), "a shared root names all four"
    message = _packed(b"epochkv", pool_uid.encode(), epoch.to_bytes(8, "big"), fingerprint.encode(), weights)
    return hmac.new(secret, message, hashlib.sha256).digest()


def adapter_root(root: bytes, adapter: bytes, applied: str) -> bytes:
    """Root for requests that use an adapter: by the digest of the tensors that the ranks hold of it (`weights.adapters`), and by how this
    engine applies adapters (`describe.describe_adapters`)."""
    return hmac.new(root, _packed(b"adapter", adapter, applied.encode()), hashlib.sha256).digest()


def embeddings_root(root: bytes, row_type: str, has_tokens: bool, is_token: bytes) -> bytes:
    """Root for requests whose prompt has rows of embeddings. vLLM hashes the bytes of the rows, and neither their type nor the mask.

    Args:
        row_type: what the bytes of a row are, such as `torch.float16`.
        has_tokens: the prompt has token ids, too.
        is_token: 1 for each position whose token id counts, 0 where its row does; empty without such a mask.
    """
    return hmac.new(root, _packed(b"embeddings", row_type.encode(), bytes([has_tokens]), is_token), hashlib.sha256).digest()


def engine_root(root: bytes, engine: bytes) -> bytes:
    """Root for requests whose KV one engine alone may find. `engine`: what no other one knows."""
    return hmac.new(root, _packed(b"engine", engine), hashlib.sha256).digest()


def fingerprint(fields: Mapping[str, Any]) -> str:
    """Digest (64 hex digits) of everything that changes KV bytes or their layout (`describe.describe_engine`).

    `fields` must be JSON: an object that JSON cannot represent is an error (`TypeError`) rather than a digest of its address.
    """
    canonical = json.dumps({"codec": CODEC_VERSION, **fields}, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def pool_prefix(pool_uid: str) -> str:
    """First part of every L2 key of the pool: 8 hex digits of the uid's SHA-256 (uids are free text outside Kubernetes)."""
    return hashlib.sha256(pool_uid.encode()).hexdigest()[:8]


def namespace(pool_uid: str, fingerprint_hex: str, epoch: int, weights: bytes) -> str:
    """Prefix of every L2 key of this pool, layout, epoch and weights; `object_key` shows its form."""
    return f"{pool_prefix(pool_uid)}/{fingerprint_hex[:16]}/e{epoch}/w{weights.hex()[:16]}"


KEY_DIGEST_BYTES = 16

_NAMESPACE = re.compile(r"[0-9a-z]{1,8}/[0-9a-f]{16}/e(?P<epoch>0|[1-9][0-9]*)/w[0-9a-f]{16}")
_HEX16 = "[0-9a-f]{16}"


def epoch_of(namespace: str) -> int:
    """The epoch a namespace was born in; `ValueError`: it is none."""
    match = _NAMESPACE.fullmatch(namespace)
    if match is None:
        raise ValueError(f"{namespace!r} is not a namespace; expected <pool8>/<fingerprint16>/e<epoch>/w<weights16>")
    return int(match["epoch"])


def object_key(namespace: str, group: int, shard: int, block_hash: bytes) -> str:
    """The L2 name of one block of one group of one shard (`block_hash`: vLLM's bytes, any length)."""
    return f"{namespace}/g{group}/r{shard}/{block_hash.hex()}"


def key_digest(key: str) -> bytes:
    """16 bytes that every stored object carries at both ends, so that bytes of another object are never taken for this one."""
    return hashlib.blake2b(key.encode(), digest_size=KEY_DIGEST_BYTES).digest()


def older_pattern(pool: str, epoch: int, fingerprint: str, group: int | None) -> str:
    """Regular expression for Mooncake's `remove_by_regex` (ECMAScript, search): the keys of this pool with an epoch below `epoch`.

    One pattern instead of one call per epoch: a reclaim costs one walk of the master for each pattern.

    Args:
        pool: the first part of a namespace.
        fingerprint: of the engine that asks (first 16 hex digits or more).
        group: only keys of this fingerprint and KV cache group; None: those of every other fingerprint.
    """
    assert epoch > 0, "no keys are older than epoch 0"
    digits = str(epoch)
    below = [r"[0-9]"] if len(digits) > 1 else []
    below += [rf"[1-9][0-9]{{{length - 1}}}" for length in range(2, len(digits))]
    for place, digit in enumerate(digits):
        lowest = 1 if place == 0 and len(digits) > 1 else 0
        if int(digit) > lowest:
            below.append(f"{digits[:place]}[{lowest}-{int(digit) - 1}][0-9]{{{len(digits) - place - 1}}}")
    layout, rest = _of_layout(fingerprint, group)
    return rf"^{pool}\/{layout}\/e({'|'.join(below)})\/w{_HEX16}\/{rest}"


def other_weights_pattern(pool: str, keep: Sequence[bytes], fingerprint: str, group: int | None) -> str:
    """As `older_pattern`: the keys of this pool, of any epoch, whose weights are not in `keep` (digests of at least 8 bytes)."""
    assert keep, "a pattern that keeps no weights"
    assert all(len(weights) >= 8 for weights in keep)
    kept = "|".join(sorted({weights.hex()[:16] for weights in keep}))
    layout, rest = _of_layout(fingerprint, group)
    return rf"^{pool}\/{layout}\/e[0-9]+\/w(?!({kept})\/){_HEX16}\/{rest}"


def _of_layout(fingerprint: str, group: int | None) -> tuple[str, str]:
    """The fingerprint's part of a pattern, and what follows the weights."""
    own = fingerprint[:16]
    return (rf"(?!{own}\/){_HEX16}", "") if group is None else (own, rf"g{group}\/")


def replica_owner(block_hash: bytes, replicas: int) -> int:
    """Which of `replicas` ranks that hold the same KV shard puts this block (replicated heads are stored once, striped over ranks)."""
    return int.from_bytes(hashlib.blake2b(block_hash, digest_size=8).digest(), "little") % replicas
