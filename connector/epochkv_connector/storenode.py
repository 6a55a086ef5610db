"""Mooncake's store service on memory that has its pages before it is mounted: `python -m epochkv_connector.storenode`.

Mooncake maps its segment and mounts it in one call, so first use falls into the transfers of whoever puts first, and its one
TCP thread answers nobody meanwhile. Here the segment is an anonymous file in memory, filled by the kernel, and then mounted by
Mooncake's own call for such files. With RDMA nothing changes: registering memory with the device touches it. Arguments and
environment are those of `mooncake.mooncake_store_service`. Needs Mooncake only; the store image has nothing else of EpochKV.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from typing import Any

from mooncake import mooncake_store_service as service

logger = logging.getLogger("epochkv.storenode")

SLAB_BYTES = 4 << 20
"""Mooncake cuts segments into these."""
FILL_BYTES = 256 << 20
MEMORY_NAME = "epochkv-segment"
RETRY_SECONDS = 1.0
STOP_POLL_SECONDS = 0.2


class SegmentMemory:
    """An anonymous file in memory, as large as the segment."""

    def __init__(self, num_bytes: int) -> None:
        """Make the file; it has no pages yet. Raises OSError: there is no room for it."""
        self.num_bytes = -(-num_bytes // SLAB_BYTES) * SLAB_BYTES
        self._file = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC)
        os.ftruncate(self._file, self.num_bytes)
        self.stopped = False

    @property
    def path(self) -> str:
        """What this process, and nobody else, can open."""
        return f"/proc/self/fd/{self._file}"

    def fill(self) -> None:
        """Give it its pages, until it is `stopped`. Raises OSError: there is no memory."""
        for start in range(0, self.num_bytes, FILL_BYTES):
            if not self.stopped:
                os.posix_fallocate(self._file, start, min(FILL_BYTES, self.num_bytes - start))

    def close(self) -> None:
        os.close(self._file)


class FilledStoreService(service.MooncakeStoreService):
    """The service, with a segment of its own making where first use would matter."""

    async def start_store_service(self, max_wait_time: float = 60, shutdown_event: Any = None) -> bool:
        """Fill the segment, connect, mount it. False: shut down meanwhile, or not within `max_wait_time` seconds of trying."""
        size = self.config.global_segment_size
        if size == 0 or self.config.protocol != "tcp":
            return bool(await super().start_store_service(max_wait_time, shutdown_event))
        memory = SegmentMemory(size)
        filling = asyncio.ensure_future(asyncio.to_thread(memory.fill))
        while not (await asyncio.wait([filling], timeout=STOP_POLL_SECONDS))[0]:
            memory.stopped = shutdown_event is not None and shutdown_event.is_set()
        filling.result()
        deadline = time.monotonic() + max_wait_time
        self.config.global_segment_size = 0  # for the parent: connect, and mount nothing
        started = await super().start_store_service(max_wait_time, shutdown_event)
        return bool(started) and await self._mount(memory, deadline, shutdown_event)

    async def _mount(self, memory: SegmentMemory, deadline: float, shutdown_event: Any) -> bool:
        while True:
            result = self.store.mount_segment(memory.path, memory.num_bytes, 0, self.config.protocol, "*")
            if result["ret"] == 0:
                self.mounted_segment_ids = list(result["segment_ids"])
                memory.close()
                logger.info("mounted %d bytes of filled memory", memory.num_bytes)
                return True
            logger.warning("mounting the segment returned %s", result["ret"])
            if time.monotonic() + RETRY_SECONDS > deadline or (shutdown_event is not None and shutdown_event.is_set()):
                return False
            await asyncio.sleep(RETRY_SECONDS)


def main() -> None:
    service.MooncakeStoreService = FilledStoreService  # which its own `main` makes
    service.sync_main()


if __name__ == "__main__":
    main()
