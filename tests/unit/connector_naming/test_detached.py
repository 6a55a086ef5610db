"""Names that nobody finds, for requests that go on over a change of weights."""

from collections.abc import Callable
from itertools import count
from typing import Any

from epochkv_connector.naming.pins import DetachedHasher, detach, is_detached, plain_hasher


class Request:
    """As far as names go."""

    def __init__(self, hashes: list[bytes], hasher: Callable[[Any], list[bytes]] | None) -> None:
        self.block_hashes = hashes
        self._block_hasher = hasher


def numbers() -> Callable[[int], bytes]:
    """Never the same twice."""
    given = count(1)
    return lambda length: next(given).to_bytes(length, "big")


def two_more(request: Request) -> list[bytes]:
    known = len(request.block_hashes)
    return [b"hash%04d" % (known + more) for more in range(2)]


def test_named_blocks_keep_their_names_and_later_ones_get_random_ones() -> None:
    before = [b"hash0000", b"hash0001", b"hash0002"]
    request = Request(before, two_more)
    detach(request, 1, numbers())
    assert request.block_hashes == [b"hash0000", (1).to_bytes(8, "big"), (2).to_bytes(8, "big")]
    assert before == [b"hash0000", b"hash0001", b"hash0002"]  # it may sit in metadata that was sent
    assert isinstance(request._block_hasher, DetachedHasher)
    assert request._block_hasher(request) == [(3).to_bytes(8, "big"), (4).to_bytes(8, "big")]


def test_a_second_change_detaches_again_and_wraps_once() -> None:
    request = Request([b"hash0000", b"hash0001"], two_more)
    random = numbers()
    detach(request, 2, random)
    request.block_hashes = [*request.block_hashes, *request._block_hasher(request)]  # type: ignore[misc]
    named = list(request.block_hashes)
    detach(request, 3, random)
    assert request.block_hashes[:3] == named[:3]
    assert request.block_hashes[3] != named[3]
    assert isinstance(request._block_hasher, DetachedHasher)
    assert request._block_hasher.inner is two_more


def test_it_ends_when_the_request_holds_no_block_any_more() -> None:
    request = Request([b"hash0000"], two_more)
    assert not is_detached(request)
    detach(request, 0, numbers())
    assert is_detached(request)
    request._block_hasher = plain_hasher(request)  # as the next pin does
    assert request._block_hasher is two_more
    assert not is_detached(request)


def test_random_names_are_random() -> None:
    first, second = Request([b"x" * 32] * 4, two_more), Request([b"x" * 32] * 4, two_more)
    detach(first, 0)
    detach(second, 0)
    assert len({*first.block_hashes, *second.block_hashes, b"x" * 32}) == 9
