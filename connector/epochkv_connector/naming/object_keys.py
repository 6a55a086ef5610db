"""Names of KV blocks in L2: one object is one block of one group of one KV shard.

`<pool8>/<fingerprint16>/e<epoch>/w<weights16>/g<group>/r<shard>/<block hash>`. A number says how many characters a part has:
`pool8` is of a hash of the pool's uid, and all hashes are in hex. The first four parts are the *namespace*. `identity.namespace`
makes it, and the scheduler role freezes it into every job. Names, not deletes, make old KV unreachable (design: fence.md), so only
this module turns a namespace into object names. Pure: no clock, no I/O, no torch.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence

KEY_DIGEST_BYTES = 16

_NAMESPACE = re.compile(r"[0-9a-z]{1,8}/[0-9a-f]{16}/e(?P<epoch>0|[1-9][0-9]*)/w[0-9a-f]{16}")
_HEX16 = "[0-9a-f]{16}"
_ECMASCRIPT_SPECIAL = re.compile(r"([\^$\\.*+?()\[\]{}|/])")


class KeyCodecError(ValueError):
    """A namespace or key that this codec did not write; the message shows it and the expected form."""


def epoch_of(namespace: str) -> int:
    """The epoch a namespace was born in.

    Raises:
        KeyCodecError: not a namespace.
    """
    match = _NAMESPACE.fullmatch(namespace)
    if match is None:
        raise KeyCodecError(f"{namespace!r} is not a namespace; expected <pool8>/<fingerprint16>/e<epoch>/w<weights16>")
    return int(match["epoch"])


def object_key(namespace: str, group: int, shard: int, block_hash: bytes) -> str:
    """The L2 name of one block of one group of one shard (`block_hash`: vLLM's bytes, any length)."""
    return f"{namespace}/g{group}/r{shard}/{block_hash.hex()}"


def key_digest(key: str) -> bytes:
    """16 bytes that every stored object carries at both ends, so that bytes of another object are never taken for this one."""
    return hashlib.blake2b(key.encode(), digest_size=KEY_DIGEST_BYTES).digest()


def prefix_pattern(prefix: str) -> str:
    """Regular expression for Mooncake's `remove_by_regex` (ECMAScript, search) that matches the keys starting with `prefix`."""
    return "^" + _ECMASCRIPT_SPECIAL.sub(r"\\\1", prefix)


def older_pattern(pool: str, epoch: int, fingerprint: str | None = None, group: int | None = None, *, others: bool = False) -> str:
    """Regular expression (as `prefix_pattern`) that matches the keys of this pool with an epoch below `epoch`.

    One pattern instead of one call per epoch: a reclaim costs one walk of the master for each pattern.

    Args:
        pool: the first part of a namespace.
        fingerprint: only keys of this one (first 16 hex digits or more); None: of any.
        group: only keys of this KV cache group; None: of any.
        others: only keys of other fingerprints than `fingerprint`.

    Raises:
        KeyCodecError: there is no epoch below 0, or `pool` or `fingerprint` is not that part of a namespace.
    """
    if epoch <= 0 or not re.fullmatch(r"[0-9a-z]{1,8}", pool):
        raise KeyCodecError(f"no keys of pool {pool!r} are older than epoch {epoch}; expected [0-9a-z]{{1,8}} and an epoch above 0")
    digits = str(epoch)
    below = [r"[0-9]"] if len(digits) > 1 else []
    below += [rf"[1-9][0-9]{{{length - 1}}}" for length in range(2, len(digits))]
    for place, digit in enumerate(digits):
        lowest = 1 if place == 0 and len(digits) > 1 else 0
        if int(digit) > lowest:
            below.append(f"{digits[:place]}[{lowest}-{int(digit) - 1}][0-9]{{{len(digits) - place - 1}}}")
    return rf"^{pool}\/{_fingerprint_part(fingerprint, others)}\/e({'|'.join(below)})\/" + _group(rf"w{_HEX16}\/", group)


def other_weights_pattern(
    pool: str, keep: Sequence[bytes], fingerprint: str | None = None, group: int | None = None, *, others: bool = False
) -> str:
    """Regular expression (as `prefix_pattern`) that matches the keys of this pool, of any epoch, whose weights are not in `keep`.

    Args:
        keep: digests of weights, at least 8 bytes each; at least one of them.
        pool, fingerprint, group, others: as of `older_pattern`.

    Raises:
        KeyCodecError: `keep` is empty, or something is not that part of a namespace.
    """
    if not keep or any(len(weights) < 8 for weights in keep) or not re.fullmatch(r"[0-9a-z]{1,8}", pool):
        raise KeyCodecError(f"weights to keep of pool {pool!r} are {list(keep)!r}; expected at least one digest of at least 8 bytes")
    kept = "|".join(sorted({weights.hex()[:16] for weights in keep}))
    return rf"^{pool}\/{_fingerprint_part(fingerprint, others)}\/e[0-9]+\/w(?!({kept})\/)" + _group(rf"{_HEX16}\/", group)


def _fingerprint_part(fingerprint: str | None, others: bool) -> str:
    if fingerprint is None:
        return _HEX16
    if not re.fullmatch(r"[0-9a-f]{16,}", fingerprint):
        raise KeyCodecError(f"{fingerprint!r} is not a fingerprint; expected at least 16 hex digits")
    return rf"(?!{fingerprint[:16]}\/){_HEX16}" if others else fingerprint[:16]


def _group(weights: str, group: int | None) -> str:
    return weights + ("" if group is None else rf"g{group}\/")


def replica_owner(block_hash: bytes, replicas: int) -> int:
    """Which of `replicas` ranks that hold the same KV shard puts this block (replicated heads are stored once, striped over ranks)."""
    return int.from_bytes(hashlib.blake2b(block_hash, digest_size=8).digest(), "little") % replicas
