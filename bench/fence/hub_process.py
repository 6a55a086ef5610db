"""The hub under test in a process of its own: production `HubServer` over the SQLite authority.

Reads its settings as one line of JSON. Prints one line of JSON when it listens and one for each publication, with the time
at which it asked for the write: `time.monotonic`, which all processes of a machine share. Ends when standard input does.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import os
import sys
import threading
import time
from pathlib import Path

from epochkv_fence.net.keys import KeyPair
from epochkv_fence.net.server import HubServer
from epochkv_fence.protocol.pool import PoolConfig
from epochkv_fence.standalone.authority import SqliteAuthority


class TimedAuthority(SqliteAuthority):
    """Says when it was asked to record and to publish."""

    async def publish(self, pool_uid: str, epoch: int) -> None:
        at = time.monotonic()
        await super().publish(pool_uid, epoch)
        print(json.dumps({"published": epoch, "at": at}), flush=True)


async def serve(settings: dict[str, object]) -> None:
    """Run the hub until standard input ends."""
    authority = await TimedAuthority.open(Path(str(settings["state"])))
    uid = await authority.ensure_pool("bench", float(str(settings["lease_seconds"])))
    server = HubServer(str(settings["bind"]), KeyPair(str(settings["hub_public"]), str(settings["hub_secret"])), authority)
    await server.start()
    server.set_pool(
        PoolConfig(
            uid,
            "bench",
            (str(settings["client_public"]),),
            lease_seconds=float(str(settings["lease_seconds"])),
            reclaim="Retain",
        )
    )
    server.lead(await authority.acquire())
    print(json.dumps({"endpoint": server.endpoint, "at": time.monotonic()}), flush=True)
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=wait_for_end, daemon=True).start()
    await ended.wait()
    print(json.dumps({"counters": dict(server.counters)}), flush=True)
    await server.stop()
    await authority.close()


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    profile = os.environ.get("EPOCHKV_BENCH_PROFILE")
    if profile:
        profiler = cProfile.Profile()
        profiler.runcall(asyncio.run, serve(settings))
        profiler.dump_stats(profile)
    else:
        asyncio.run(serve(settings))


if __name__ == "__main__":
    main()
