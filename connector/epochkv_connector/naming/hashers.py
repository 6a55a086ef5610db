"""What runs inside vLLM's own hashing calls: the pin as first parent of a request's block hashes, and names that nobody finds.

Requests that hold blocks go on over a change of weights. Weights return (A, B, A); epochs never do. A request that went on naming
under its root would put KV of B under a name of A. This engine, and after a save every other one, would find it (4 of 36 answers
wrong without this). So such a request is *stranded*: its further blocks get random names.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from epochkv_connector.naming.identity import Pin

if TYPE_CHECKING:
    from epochkv_connector.engine.blocks import BlockHashing

PIN_ATTRIBUTE = "epochkv_pin"

Hasher = Callable[[Any], list[bytes]]


def plain_hasher(request: Any) -> Hasher | None:
    """vLLM's own hasher of this request, beneath one of ours (which names it `inner`); None: prefix hashing is off for it."""
    hasher = getattr(request, "_block_hasher", None)
    plain: Hasher | None = getattr(hasher, "inner", hasher)
    return plain


def awaits_first_hash(request: Any) -> bool:
    """Whether the request's first block may yet be hashed, by vLLM and at any time.

    A session's first hash can come twice: vLLM cuts tokens off its end, and their hashes with them.
    """
    return not request.block_hashes or bool(getattr(request, "resumable", False))


class PinnedHasher:
    """vLLM's request hasher with the pin as explicit first parent.

    One object for all requests, reading the pin from the request: a closure per request would make a reference cycle.
    A prompt below the hash block size gets its first hash during decode, long after admission. With vLLM's global, KV of the old
    epoch would get a name of the new one (128 stale tokens). With the pin, none does.

    vLLM calls a hasher for every token, and later blocks continue from the hash before them. So it stands before vLLM's own
    only while the first hash is awaited, and then takes itself away.
    """

    __slots__ = ("_hashing", "inner")

    def __init__(self, inner: Hasher, hashing: BlockHashing) -> None:
        self.inner = inner
        self._hashing = hashing

    def __call__(self, request: Any) -> list[bytes]:
        pin: Pin | None = getattr(request, PIN_ATTRIBUTE, None)
        session = bool(getattr(request, "resumable", False))
        if session:
            self._cut_off(request)
        if request.block_hashes or pin is None:
            return self.inner(request)
        hashes = self._hashing.chain(request, pin.root, self.inner)
        if hashes and not session:
            request._block_hasher = self.inner
        return hashes

    def _cut_off(self, request: Any) -> None:
        """A session's next input replaces the last token that it sampled. vLLM 0.30 keeps the hash of a block that the token
        completed, so other tokens would get its name. Later versions cut it off themselves."""
        size = self._hashing.hash_block_size
        if size > 0 and not request.num_output_tokens:
            del request.block_hashes[request.num_computed_tokens // size :]


class StrandedHasher:
    """Names blocks of one request at random, as many as its own hasher would."""

    __slots__ = ("_random", "inner")

    def __init__(self, inner: Hasher, random: Callable[[int], bytes] = os.urandom) -> None:
        self.inner = inner
        self._random = random

    def __call__(self, request: Any) -> list[bytes]:
        return [self._random(len(name)) for name in self.inner(request)]


def strand(request: Any, num_named: int, random: Callable[[int], bytes] = os.urandom) -> None:
    """Give every block of the request but its first `num_named` (hash blocks) a random name, now and later."""
    hashes = request.block_hashes
    if len(hashes) > num_named:  # a new list, never in place: the old one may sit in metadata already sent
        request.block_hashes = [*hashes[:num_named], *(random(len(name)) for name in hashes[num_named:])]
    plain = plain_hasher(request)
    if plain is not None:
        request._block_hasher = StrandedHasher(plain, random)


def is_stranded(request: Any) -> bool:
    """Whether the request's further blocks get random names. Once it holds no block it is named anew, also where its first name is
    right again: others of its names may not be."""
    return isinstance(getattr(request, "_block_hasher", None), StrandedHasher)
