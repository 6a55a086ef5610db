"""The hub's signature under the epoch that it published, so that a status which somebody edited is not believed.

`status.epoch` never goes down, for nobody: what a person wrote there cannot be taken back, only made true. So a hub that finds an
epoch without its proof does not take it for published. It proves it, as it proves every epoch.

The proof also says whether any hub of the pool may have granted. `status.granting` could be removed, and the next hub would publish
without waiting for the grants before it.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import NamedTuple


class Proof(NamedTuple):
    """What a hub has signed."""

    epoch: int
    granted: bool
    """Some hub of the pool had granted, or may have."""


class Proofs:
    """Makes and reads proofs. Only hubs know the key: it comes from the hub's secret key, which no engine has."""

    def __init__(self, hub_secret: str) -> None:
        self._key = hashlib.sha256(f"epochkv proof|{hub_secret}".encode()).digest()

    def of(self, pool_uid: str, epoch: int, granted: bool) -> str:
        said = f"{epoch}:{granted:d}"
        mac = hmac.new(self._key, f"{pool_uid}|{said}".encode(), hashlib.sha256).hexdigest()
        return f"{said}:{mac[:32]}"

    def read(self, pool_uid: str, text: object) -> Proof | None:
        """None: this hub's predecessors did not sign that for this pool."""
        epoch, _, rest = str(text or "").partition(":")
        if not (epoch.isascii() and epoch.isdigit() and len(epoch) <= 19):
            return None
        proof = Proof(int(epoch), rest.startswith("1"))
        return proof if hmac.compare_digest(str(text).encode(), self.of(pool_uid, *proof).encode()) else None
