"""Requests that hold blocks go on over a change of weights; what they compute from then on gets names that nobody finds.

Weights return (A, B, A); epochs never do. A request that went on naming under its root would put KV of B under a name of A. This
engine, and after a save every other one, would find it (4 of 36 answers wrong without this).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from epochkv_connector.naming.pins import plain_hasher

Hasher = Callable[[Any], list[bytes]]


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
    """Whether the request's further blocks get random names. Once it holds no block it is named anew; then also where its first name is
    right again, others of its names may not be."""
    return isinstance(getattr(request, "_block_hasher", None), StrandedHasher)
