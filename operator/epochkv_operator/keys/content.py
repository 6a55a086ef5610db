"""What a pool's Secret holds, as text and as keys. Pure."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from epochkv_fence.net import KeyPair

Json = dict[str, Any]
Fields = Mapping[str, str]
"""Decoded fields of a Secret. A field that is no text is empty here."""

HUB: Final = "hub.pub"
PUBLIC: Final = "client.pub"
KEY: Final = "client.key"
ROOT: Final = "root.secret"
CHECK: Final = "root.check"
GENERATION: Final = "generation"
FIRST: Final = "first.pub"
PREVIOUS: Final = "previous.pub"
_ROOT: Final = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class FenceKeys:
    """What the Secret `<pool>-fence` holds. `root_secret` is hex text of 32 bytes."""

    hub_public: str
    client: KeyPair
    root_secret: str = field(repr=False)
    generation: int = 0
    previous: str | None = None
    """Public key of the pair before, while it is accepted."""
    first: str = ""
    """A public key that was new when the root secret was made. It tells whether engines have the Secret's root secret."""

    @property
    def accepted(self) -> tuple[str, ...]:
        """Public keys, the newest first."""
        return (self.client.public,) if self.previous is None else (self.client.public, self.previous)


def content(keys: FenceKeys, pool_uid: str) -> dict[str, str]:
    """The fields of a pool's Secret; `hub.pub`, `client.*` and `root.secret` are what engines and trainers read."""
    fields = {
        HUB: keys.hub_public,
        PUBLIC: keys.client.public,
        KEY: keys.client.secret,
        ROOT: keys.root_secret,
        CHECK: root_check(keys.root_secret, keys.first, pool_uid),
        GENERATION: str(keys.generation),
        FIRST: keys.first,
    }
    return fields if keys.previous is None else {**fields, PREVIOUS: keys.previous}


def root_check(root_secret: str, first: str, pool_uid: str) -> str:
    """Shows an operator that remembers nothing whether a root secret is the one that was made for this pool. It tells nothing about
    the secret.
    """
    said = f"epochkv root check|{pool_uid}|{first}".encode()
    return hmac.new(bytes.fromhex(root_secret), said, hashlib.sha256).hexdigest()[:32]


def is_root(text: str) -> bool:
    """32 bytes in hex."""
    return _ROOT.fullmatch(text) is not None


def encoded(fields: Fields) -> dict[str, str]:
    """As `data` of a Secret."""
    return {name: base64.b64encode(value.encode()).decode() for name, value in fields.items()}


def decoded(secret: Json) -> dict[str, str]:
    """The fields of a Secret."""
    return {name: _text(value) for name, value in (secret.get("data") or {}).items()}


def _text(value: str | None) -> str:
    try:
        return base64.b64decode(value or "", validate=True).decode()
    except (binascii.Error, UnicodeError):
        return ""
