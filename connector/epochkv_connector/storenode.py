"""Mooncake's store service on memory that was touched before it is mounted: `python -m epochkv_connector.storenode`.

Mooncake maps its segment and mounts it in one call, so first use falls into the transfers of whoever puts first, and its one
TCP thread answers nobody meanwhile. Here the segment is an anonymous file in memory, touched, and then mounted by Mooncake's
own call for such files. With RDMA nothing changes: registering memory with the device touches it. Arguments and environment
are those of `mooncake.mooncake_store_service`. Needs Mooncake and `touch` only; the store image has nothing else of EpochKV.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import mmap
import os
import time
from collections.abc import Callable
from typing import Any

from mooncake import mooncake_store_service as service

from epochkv_connector.touch import TOUCH_SECONDS, Touch, advise

logger = logging.getLogger("epochkv.storenode")

SLAB_BYTES = 4 << 20
"""Mooncake cuts segments into these."""
MEMORY_NAME = "epochkv-segment"
RETRY_SECONDS = 1.0
STOP_POLL_SECONDS = 0.2


class SegmentMemory:
    """An anonymous file in memory, as large as the segment, and its first use."""

    def __init__(self, num_bytes: int) -> None:
        """Make the file; nothing is touched yet. Raises OSError: there is no room for it."""
        self.num_bytes = -(-num_bytes // SLAB_BYTES) * SLAB_BYTES
        self._file = os.memfd_create(MEMORY_NAME, os.MFD_CLOEXEC)
        os.ftruncate(self._file, self.num_bytes)
        self._stop: Callable[[], None] = lambda: None

    @property
    def path(self) -> str:
        """What this process, and nobody else, can open."""
        return f"/proc/self/fd/{self._file}"

    def touch(self) -> int:
        """Give it its pages; bytes that have them. Raises OSError: there is no memory."""
        memory = mmap.mmap(self._file, self.num_bytes)
        start = ctypes.c_char.from_buffer(memory)
        try:
            advise(ctypes.addressof(start), self.num_bytes)
            touch = Touch(ctypes.addressof(start), self.num_bytes, "store segment", seconds=TOUCH_SECONDS, say=logger.info)
            self._stop = touch.stop
            return touch.run()
        finally:
            del start  # or the map could not be closed
            memory.close()

    def stop(self) -> None:
        self._stop()

    def close(self) -> None:
        os.close(self._file)


class TouchedStoreService(service.MooncakeStoreService):
    """The service, with a segment of its own making where first use would matter."""

    async def start_store_service(self, max_wait_time: float = 60, shutdown_event: Any = None) -> bool:
        """Touch the segment, connect, mount it. False: shut down meanwhile, or not within `max_wait_time` seconds of trying."""
        size = self.config.global_segment_size
        if size == 0 or self.config.protocol != "tcp":
            return bool(await super().start_store_service(max_wait_time, shutdown_event))
        memory = SegmentMemory(size)
        touching = asyncio.ensure_future(asyncio.to_thread(memory.touch))
        while not (await asyncio.wait([touching], timeout=STOP_POLL_SECONDS))[0]:
            if shutdown_event is not None and shutdown_event.is_set():
                memory.stop()
        touching.result()
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
                logger.info("mounted %d bytes, touched before", memory.num_bytes)
                return True
            logger.warning("mounting the segment returned %s", result["ret"])
            if time.monotonic() + RETRY_SECONDS > deadline or (shutdown_event is not None and shutdown_event.is_set()):
                return False
            await asyncio.sleep(RETRY_SECONDS)


def main() -> None:
    service.MooncakeStoreService = TouchedStoreService  # which its own `main` makes
    service.sync_main()


if __name__ == "__main__":
    main()
