"""State directories as the file authority finds them."""

from __future__ import annotations

import asyncio
from pathlib import Path

from epochkv_fence.protocol.authority import PoolRecord, Term
from epochkv_fence.standalone.authority import SqliteAuthority


async def opened(directory: Path, name: str = "policy", lease_seconds: float = 1.0) -> tuple[SqliteAuthority, str]:
    authority = await SqliteAuthority.open(directory)
    try:
        return authority, await authority.ensure_pool(name, lease_seconds)
    except BaseException:
        await authority.close()
        raise


def record_of(directory: Path) -> tuple[PoolRecord, Term]:
    """Open as the next process would, and look."""

    async def look() -> tuple[PoolRecord, Term]:
        authority, uid = await opened(directory)
        try:
            return await authority.load(uid), await authority.acquire()
        finally:
            await authority.close()

    return asyncio.run(look())
