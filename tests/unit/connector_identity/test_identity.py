"""Names: computed by hand from the protocol's text, and different whenever anything they are made of differs."""

import hashlib
import hmac
from types import SimpleNamespace
from typing import Any

import pytest

from epochkv_connector.naming import identity
from epochkv_connector.naming import identity as keys
from epochkv_connector.naming.root import detach
from tests.support.store import parse_key

SECRET = bytes(range(32))
UID = "6f1c2d3e-0000-4000-8000-000000000001"
FINGERPRINT = "ab" * 32
WEIGHTS = b"\x07" * 32


def by_hand(secret: bytes, *fields: bytes) -> bytes:
    """HMAC-SHA256 over length-prefixed fields."""
    return hmac.new(secret, b"".join(len(f).to_bytes(8, "big") + f for f in fields), hashlib.sha256).digest()


def test_the_shared_root_is_what_the_protocol_says() -> None:
    expected = by_hand(SECRET, b"epochkv", UID.encode(), (7).to_bytes(8, "big"), FINGERPRINT.encode(), WEIGHTS)
    assert identity.shared_root(SECRET, UID, 7, FINGERPRINT, WEIGHTS) == expected


def test_a_root_needs_every_part() -> None:
    good = (SECRET, UID, 0, FINGERPRINT, WEIGHTS)
    for index, bad in enumerate((b"", "", -1, "", b"")):
        arguments: Any = (*good[:index], bad, *good[index + 1 :])
        with pytest.raises((AssertionError, OverflowError)):
            identity.shared_root(*arguments)


def test_an_adapters_root_is_what_the_protocol_says() -> None:
    root = identity.shared_root(SECRET, UID, 1, FINGERPRINT, WEIGHTS)
    assert identity.adapter_root(root, b"a", "p") == by_hand(root, b"adapter", b"a", b"p")


def test_the_fingerprint_ignores_order_and_notices_everything_else() -> None:
    fields = {"model": "m", "groups": [{"block_size": 16}], "layout": None}
    same = {"layout": None, "groups": [{"block_size": 16}], "model": "m"}
    assert identity.fingerprint(fields) == identity.fingerprint(same)
    assert len(identity.fingerprint(fields)) == 64
    for other in ({**fields, "model": "n"}, {**fields, "groups": [{"block_size": 32}]}, {**fields, "new": None}):
        assert identity.fingerprint(other) != identity.fingerprint(fields)


def test_a_fingerprint_of_an_object_is_refused() -> None:
    with pytest.raises(TypeError, match="not JSON"):
        identity.fingerprint({"model": object()})


def test_the_namespace_is_one_that_the_key_codec_reads() -> None:
    uid8 = hashlib.sha256(UID.encode()).hexdigest()[:8]
    space = identity.namespace(UID, FINGERPRINT, 12, WEIGHTS)
    assert space == f"{uid8}/{'ab' * 8}/e12/w{'07' * 8}"
    assert keys.epoch_of(space) == 12
    parsed = parse_key(keys.object_key(space, 1, 0, b"\x01\x02"))
    assert parsed.weights == "07" * 8
    assert (parsed.pool, parsed.epoch, parsed.group, parsed.block_hash) == (uid8, 12, 1, b"\x01\x02")
    assert identity.pool_prefix("any text / with ümlauts") != identity.pool_prefix(UID)
    assert keys.epoch_of(identity.namespace("any text / with ümlauts", FINGERPRINT, 0, WEIGHTS)) == 0


def test_a_detached_request_keeps_the_names_of_named_blocks_and_gets_random_ones_for_the_others() -> None:
    before = [b"hash0000", b"hash0001", b"hash0002"]
    request: Any = SimpleNamespace(block_hashes=before, _block_hasher=lambda request: [b"hash0003", b"hash0004"])
    detach(request, 1)
    later = request._block_hasher(request)
    assert before == [b"hash0000", b"hash0001", b"hash0002"], "it may sit in metadata that was sent"
    assert request.block_hashes[0] == before[0]
    assert len({*before, b"hash0003", b"hash0004", *request.block_hashes[1:], *later}) == 9
    assert {len(name) for name in (*request.block_hashes, *later)} == {8}
