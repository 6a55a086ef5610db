"""Which client keys a standalone hub accepts: it notices a rotation, and lets the key before go when nobody uses it any more."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from epochkv_fence.net import HubServer
from epochkv_fence.protocol.pool import PoolConfig
from epochkv_fence.standalone.credentials import Keys, read_keys, repair_client, retire_previous
from epochkv_fence.standalone.database import StateError

logger = logging.getLogger("epochkv.hub")

LOOK_SECONDS: Final = 1.0


class KeyWatch:
    """Owns the pool's configuration, because the keys in it change while the hub serves.

    Attributes:
        config: what the hub serves now.
    """

    def __init__(self, directory: Path, server: HubServer, config: PoolConfig) -> None:
        self.config = config
        self._directory = directory
        self._server = server

    def configure(self, **changes: Any) -> None:
        """Serve with other values from now on.

        Raises:
            ValueError: a value is impossible.
        """
        self.config = replace(self.config, **changes)
        self._server.set_pool(self.config)

    async def run(self) -> None:
        """Look at the keys once a second. A problem is logged once."""
        problem = ""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self._look()
                problem = ""
            except (StateError, OSError, ValueError) as error:
                if str(error) != problem:
                    problem = str(error)
                    logger.error("keys: %s", error)

    async def _look(self) -> None:
        keys = await asyncio.to_thread(read_keys, self._directory)
        if keys is None or keys.pool_uid != self.config.uid:
            raise StateError(f"{self._directory}: the keys are missing; the hub goes on with those in use, and a restart makes new keys")
        before = self.config
        self._accept(keys)
        if await asyncio.to_thread(repair_client, self._directory, keys):  # or the only key that is accepted could be nobody's
            logger.warning(
                "the client folder did not have the pool's keys (removed, changed, or a rotation was killed); they are written again"
            )
        if keys.previous is not None and (why := self._retired(keys, before)):
            self._accept(await asyncio.to_thread(retire_previous, self._directory, keys.previous.public), why)

    def _accept(self, keys: Keys, why: str = "`epochkv keys retire`") -> None:
        """`why`: what ended the key before, if one has ended."""
        before = self.config.client_public_keys
        if keys.accepted == before:
            return
        self.configure(client_public_keys=keys.accepted)
        if keys.accepted[0] != before[0]:
            logger.info(
                "a new client key is accepted"
                + ("; the one before as well, until no engine uses it or its grace is over" if keys.previous else "")
            )
        if set(before) - set(keys.accepted):
            logger.info(
                "the client key before is not accepted any more: %s. Who still has it is refused, and needs the client folder again", why
            )

    def _retired(self, keys: Keys, config: PoolConfig) -> str:
        """Why the previous key may go; empty: it may not yet, or the hub did not serve with these keys before this look.

        It stays for two leases at least, for some minutes for the sake of trainers, whose keys are not known, and as long
        as a live engine uses it. An engine reads its keys again when their files change. One that cannot (keys in its
        environment) needs a restart.
        """
        assert keys.previous is not None
        now = time.time()
        if now >= keys.previous.retire_at:
            return "its grace is over"
        keep_until = max(keys.previous.keep_until, keys.previous.rotated_at + 2 * config.hold_seconds)
        if keys.accepted != config.client_public_keys or now < keep_until:
            return ""
        engines = self._server.snapshot(config.uid).engines
        return "" if any(view.alive and view.key_index > 0 for view in engines) else "no engine uses it"
