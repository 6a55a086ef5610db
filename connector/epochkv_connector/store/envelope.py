"""Header and trailer around every payload in the store, so that foreign or torn bytes are a failed load and never KV.

The store is not trusted to return the bytes that were put: a forced flush while a reader is active hands out another
object's bytes with a success code (measured: 5 % of 16 MiB reads), a client of another version may lay bytes out
differently, keys can be written by anybody who reaches the port. Both ends carry the digest of the key, the digest of
the layout that the writer's KV tensors have (`worker.layout.layout_digest`: engines may have one name and still read the
same bytes as other heads or layers), and the length; with `verify: full` the payload's xxh3-128 decides.

Layout of either end, 128 bytes, little endian:
`magic 8 | codec u16 | flags u16 | zero u32 | key digest 16 | layout digest 16 | payload bytes u64 | payload xxh3-128 16 |
zero 48 | xxh3-64 of the 120 bytes before`.
"""

from __future__ import annotations

import enum
import struct

import xxhash

from epochkv_connector.naming.identity import CODEC_VERSION
from epochkv_connector.worker.layout import HEADER_BYTES as END_BYTES

LAYOUT_BYTES = 16
NO_LAYOUT = bytes(LAYOUT_BYTES)
"""Layout digest of a client that has no KV tensors."""

_HEADER_MAGIC = b"EPOCHKV<"
_TRAILER_MAGIC = b">EPOCHKV"
_END = struct.Struct("<8sHHI16s16sQ16s48x")
_SEAL = struct.Struct("<Q")
_HAS_CHECKSUM = 1
_NO_CHECKSUM = bytes(16)


class Defect(enum.StrEnum):
    """Why bytes are not the object that was asked for."""

    MAGIC = "magic"  # not one of our objects
    SEALED = "sealed"  # header or trailer damaged
    CODEC = "codec"  # written by another codec version
    DIGEST = "digest"  # another key's object
    LAYOUT = "layout"  # written from KV tensors that are laid out otherwise
    LENGTH = "length"  # another payload size
    NO_CHECKSUM = "no_checksum"  # written with verify=header, read with verify=full
    CHECKSUM = "checksum"  # payload differs from what was sealed
    TORN = "torn"  # header and trailer belong to different writes


def seal(obj: memoryview, digest: bytes, layout: bytes, *, checksum: bool) -> None:
    """Write header and trailer in place around the payload.

    Args:
        obj: writable, `END_BYTES + payload + END_BYTES` bytes.
        digest: `naming.identity.key_digest` of the object's key.
        layout: 16 bytes that say how the payload was cut from KV tensors.
        checksum: also store the payload's xxh3-128.
    """
    payload = obj[END_BYTES : len(obj) - END_BYTES]
    digest_of_payload = xxhash.xxh3_128_digest(payload) if checksum else _NO_CHECKSUM
    flags = _HAS_CHECKSUM if checksum else 0
    obj[:END_BYTES] = _end(_HEADER_MAGIC, flags, digest, layout, len(payload), digest_of_payload)
    obj[len(obj) - END_BYTES :] = _end(_TRAILER_MAGIC, flags, digest, layout, len(payload), digest_of_payload)


def find_defect(obj: memoryview, digest: bytes, layout: bytes, *, checksum: bool) -> Defect | None:
    """Check both ends (and with `checksum` the payload) of an object read for the key with this digest; None: it is that object."""
    payload = obj[END_BYTES : len(obj) - END_BYTES]
    header, trailer = bytes(obj[:END_BYTES]), bytes(obj[len(obj) - END_BYTES :])
    for raw, magic in ((header, _HEADER_MAGIC), (trailer, _TRAILER_MAGIC)):
        defect = _end_defect(raw, magic, digest, layout, len(payload))
        if defect is not None:
            return defect
    fields = _END.unpack_from(header)
    if fields[1:] != _END.unpack_from(trailer)[1:]:
        return Defect.TORN
    if not checksum:
        return None
    if not fields[2] & _HAS_CHECKSUM:
        return Defect.NO_CHECKSUM
    return None if xxhash.xxh3_128_digest(payload) == fields[7] else Defect.CHECKSUM


def _end(magic: bytes, flags: int, digest: bytes, layout: bytes, payload_bytes: int, checksum: bytes) -> bytes:
    body = _END.pack(magic, CODEC_VERSION, flags, 0, digest, layout, payload_bytes, checksum)
    return body + _SEAL.pack(xxhash.xxh3_64_intdigest(body))


def _end_defect(raw: bytes, magic: bytes, digest: bytes, layout: bytes, payload_bytes: int) -> Defect | None:
    found_magic, codec, _flags, _zero, found_digest, found_layout, length, _checksum = _END.unpack_from(raw)
    if found_magic != magic:
        return Defect.MAGIC
    if xxhash.xxh3_64_intdigest(raw[: _END.size]) != _SEAL.unpack_from(raw, _END.size)[0]:
        return Defect.SEALED
    if codec != CODEC_VERSION:
        return Defect.CODEC
    if found_digest != digest:
        return Defect.DIGEST
    if found_layout != layout:
        return Defect.LAYOUT
    return Defect.LENGTH if length != payload_bytes else None
