"""Mooncake's store service on memory that has its pages before it is mounted: `python -m epochkv_connector.storenode`.

Mooncake maps its segment and mounts it in one call, so first use falls into the transfers of whoever puts first, and its one
TCP thread answers nobody meanwhile. Here the segment is an anonymous file in memory, filled by the kernel, and then mounted by
Mooncake's own call for such files. With RDMA nothing changes: registering memory with the device touches it. Mooncake's two HTTP
servers listen on IPv4 alone, so this module listens for them where the machine has IPv6, too. Arguments and environment are
those of `mooncake.mooncake_store_service`. Needs Mooncake only; the store image has nothing else of EpochKV.
"""

import asyncio
import contextlib
import logging
import os
import socket
import time
from typing import Any

from mooncake import mooncake_store_service as service

logger = logging.getLogger("epochkv.storenode")

SLAB_BYTES = 4 << 20
"""Mooncake cuts segments into these."""
FILL_BYTES = 256 << 20
RETRY_SECONDS = 1.0
STOP_POLL_SECONDS = 0.2
RELAY_BYTES = 1 << 16


class SegmentMemory:
    """An anonymous file in memory, as large as the segment."""

    def __init__(self, num_bytes: int) -> None:
        """Make the file; it has no pages yet. Raises OSError: there is no room for it."""
        self.num_bytes = -(-num_bytes // SLAB_BYTES) * SLAB_BYTES
        self._file = os.memfd_create("epochkv-segment", os.MFD_CLOEXEC)
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

    async def start_http_service(self, port: int = 8080) -> bool:
        """Serve requests at this port, and those of the client's own HTTP server, on both families."""
        started = bool(await super().start_http_service(port))
        health = [self.config.client_http_port] if self.config.enable_client_http_server else []
        self.relays = [await listen_on_ipv6(number) for number in (port, *health)]
        return started

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


async def listen_on_ipv6(port: int) -> asyncio.Server | None:
    """Relay what comes to this port by IPv6 to the same port of 127.0.0.1; None where there is no IPv6."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))
        writer.close()

    try:
        listener = socket.create_server(("::", port), family=socket.AF_INET6)
    except OSError as error:
        logger.info("port %d answers by IPv4 alone (%s)", port, error)
        return None
    return await asyncio.start_server(relay, sock=listener)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(RELAY_BYTES):
            writer.write(data)
            await writer.drain()
    writer.close()


def main() -> None:
    service.MooncakeStoreService = FilledStoreService  # which its own `main` makes
    service.sync_main()


if __name__ == "__main__":
    main()
