"""What a hub needs from a pool's store to empty it as a whole; the pool's engines need none of this.

Used by the reclaim policy `RemoveAll`, and to sweep a store when no engine is left to do it. Only for a store that no
other pool shares: whatever is there is removed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class StoreAdminError(Exception):
    """The store did not answer or refused. What was removed is then unknown; the hub tries again."""


@dataclass(frozen=True, slots=True)
class Removed:
    """What one call removed.

    Attributes:
        keys: as the store counted them; 0 means that there were none.
        num_bytes: memory given back; None when the store does not say.
    """

    keys: int
    num_bytes: int | None = None


class StoreAdmin(Protocol):
    """All calls are made with a deadline by the caller; a call that is cancelled may still take effect later."""

    async def remove_all(self, pool_uid: str) -> Removed:
        """Remove every key of this pool's store that nobody reads now.

        Raises:
            StoreAdminError: no answer, or a refusal; what was removed is then unknown.
        """
