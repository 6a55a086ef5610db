"""Who may share which KV: fingerprint, roots and the snapshot that every operation reads once.

Roots and namespaces are made here, and `object_keys` turns a namespace into the names of objects in L2. So a wrong name can only
come from these two files. Pure: no clock, no I/O, no vLLM.

Source: `fence.md` sections 1 to 3. Names are made of lengths and bytes, never of joined strings, so that no two
different inputs give one name.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ROOT_BYTES = 32
CODEC_VERSION = 2
"""Bump when the bytes of an L2 object or the order of layers inside it change."""


class IdentityError(ValueError):
    """The identity cannot be formed; the message names the file or field and the remedy."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What holds now, read once per operation.

    Attributes:
        epoch: highest epoch adopted in this boot; -1 before the first.
        in_use: False (bypass): no load, no save, and every request gets a random root of its own.
        root: first parent of the block hashes of requests pinned under this snapshot.
        namespace: prefix of L2 keys; None: nothing may leave this engine (private root, or L2 refused).
        shared: True when other engines of the pool use the same root.
        generation: new with every root; a pin is current iff its generation is this one.
        weights: digest of the weights that names are made of; None: unknown.
    """

    epoch: int
    in_use: bool
    root: bytes
    namespace: str | None
    shared: bool
    generation: int = 0
    weights: bytes | None = None


@dataclass(slots=True)
class Pin:
    """The root one request's block hashes are made with.

    Attributes:
        root: 32 bytes; equals `Snapshot.root`, is derived from it (adapters), or random.
        generation: of the snapshot it was made under.
        saveable: False when blocks under this pin must never be offered to a tier (a random root, a stranded request).
        alone: the root is random: no other request has these names, or will.
        admitted: the request holds, or was answered, KV under this pin: it is carried when the pin is not current.
        loading: an asynchronous load of ours is in flight.
        session: a streaming-input session.
        adapter: vLLM's id of the request's adapter; 0, which vLLM gives to none: there is none.
        turn: of what that id stood for (`weights.adapters`).
    """

    root: bytes
    generation: int
    saveable: bool = True
    admitted: bool = False
    loading: bool = False
    session: bool = False
    alone: bool = False
    adapter: int = 0
    turn: int = 0


def _packed(*fields: bytes) -> bytes:
    return b"".join(len(field).to_bytes(8, "big") + field for field in fields)


def shared_root(secret: bytes, pool_uid: str, epoch: int, fingerprint: str, weights: bytes) -> bytes:
    """Root of one epoch of one pool: HMAC-SHA256(secret, "epochkv" | pool_uid | epoch | fingerprint | weights), length-prefixed.

    Keyed, so that names cannot be guessed (block hashes may be non-cryptographic).

    Args:
        weights: digest of what the ranks hold (`weights.watch`).

    Raises:
        IdentityError: negative epoch or empty secret, pool uid, fingerprint or weights.
    """
    if epoch < 0:
        raise IdentityError(f"epoch is {epoch}; a shared root exists for epochs from 0 on")
    if not secret or not pool_uid or not fingerprint or not weights:
        raise IdentityError("secret, pool uid, fingerprint and weights must not be empty; a shared root names all four")
    message = _packed(b"epochkv", pool_uid.encode(), epoch.to_bytes(8, "big"), fingerprint.encode(), weights)
    return hmac.new(secret, message, hashlib.sha256).digest()


def adapter_root(root: bytes, adapter: bytes, applied: str) -> bytes:
    """Root for requests that use an adapter.

    Args:
        adapter: digest of the tensors that the ranks hold of it (`weights.adapters`).
        applied: how this engine applies adapters (`describe.describe_adapters`).
    """
    return hmac.new(root, _packed(b"adapter", adapter, applied.encode()), hashlib.sha256).digest()


def fingerprint(fields: Mapping[str, Any]) -> str:
    """Digest (64 hex digits) of everything that changes KV bytes or their layout (`describe.describe_engine`).

    `fields` must be JSON: an object that JSON cannot represent is an error rather than a digest of its address.

    Raises:
        IdentityError: a value is not JSON.
    """
    try:
        canonical = json.dumps({"codec": CODEC_VERSION, **fields}, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise IdentityError(f"fingerprint fields are not JSON: {error}") from error
    return hashlib.sha256(canonical.encode()).hexdigest()


def pool_prefix(pool_uid: str) -> str:
    """First part of every L2 key of the pool: 8 hex digits of the uid's SHA-256 (uids are free text outside Kubernetes)."""
    return hashlib.sha256(pool_uid.encode()).hexdigest()[:8]


def namespace(pool_uid: str, fingerprint_hex: str, epoch: int, weights: bytes) -> str:
    """Prefix of every L2 key of this pool, layout, epoch and weights; `object_keys` shows its form."""
    return f"{pool_prefix(pool_uid)}/{fingerprint_hex[:16]}/e{epoch}/w{weights.hex()[:16]}"


def transfer_tag(pool_uid: str, epoch: int, fingerprint_hex: str, weights: bytes) -> dict[str, Any]:
    """What a producer puts into `kv_transfer_params["epochkv"]`, so that a consumer may keep its shared root."""
    return {"pool": pool_uid, "epoch": epoch, "fingerprint": fingerprint_hex, "weights": weights.hex()}
