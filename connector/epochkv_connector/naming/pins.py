"""The pin as explicit first parent of a request's block hashes, and what of vLLM that needs.

Apart from the fence because it is the only part that runs inside vLLM's own hashing calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from epochkv_connector.naming.identity import Pin

PIN_ATTRIBUTE = "epochkv_pin"


def brings_kv(params: Mapping[str, Any]) -> bool:
    """Whether `kv_transfer_params` name KV that another engine brings in (P/D)."""
    named = (str(key).startswith("remote_") and value is not None for key, value in params.items())
    return bool(params.get("do_remote_prefill")) or any(named)


class RootPort(Protocol):
    """vLLM's module global (`hashing.GlobalRoot`)."""

    def ready(self) -> bool: ...
    def bind(self, root: bytes) -> None: ...
    def is_bound(self, root: bytes) -> bool: ...


class HashPort(Protocol):
    """vLLM's block hashing (`hashing.BlockHashing`)."""

    hash_block_size: int

    def first(self, request: Any, root: bytes) -> bytes | None: ...
    def chain(self, request: Any, root: bytes, inner: Callable[[Any], list[bytes]]) -> list[bytes]: ...


def plain_hasher(request: Any) -> Callable[[Any], list[bytes]] | None:
    """vLLM's own hasher of this request, beneath one of ours (which names it `inner`); None: prefix hashing is off for it."""
    hasher = getattr(request, "_block_hasher", None)
    plain: Callable[[Any], list[bytes]] | None = getattr(hasher, "inner", hasher)
    return plain


def awaits_first_hash(request: Any) -> bool:
    """Whether the request's first block may yet be hashed, by vLLM and at any time.

    A session's first hash can come twice: vLLM cuts tokens off its end, and their hashes with them.
    """
    return not request.block_hashes or bool(getattr(request, "resumable", False))


class FencedHasher:
    """vLLM's request hasher with the pin as explicit first parent.

    One object for all requests, reading the pin from the request: a closure per request would make a reference cycle.
    A prompt below the hash block size gets its first hash during decode, long after admission. With vLLM's global, KV of the old
    epoch would get a name of the new one (128 stale tokens). With the pin, none does.

    vLLM calls a hasher for every token, and later blocks continue from the hash before them. So it stands before vLLM's own
    only while the first hash is awaited, and then takes itself away.
    """

    __slots__ = ("_hashing", "inner")

    def __init__(self, inner: Callable[[Any], list[bytes]], hashing: HashPort) -> None:
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
