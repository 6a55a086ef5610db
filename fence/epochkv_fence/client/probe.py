"""Whether what a connection file names answers: the hub, dialled and asked with the pool's key, and the Mooncake master.

For `epochkv doctor`, and for engines and trainers that want to know before they start.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from epochkv_fence.client.results import HubUnreachable, KeyRefused, PoolStatus, WrongPool
from epochkv_fence.client.session import Session, resolve
from epochkv_fence.connection import Connection, check_endpoint

DIAL_SECONDS: Final = 3.0
HUB_SECONDS: Final = 8.0
"""More than a hub that starts refuses keys for, and one redial."""
ETCD: Final = "etcd://"

Dialled = Literal["open", "refused", "silent", "unresolved", "unroutable"]
Trouble = Literal["", "key", "pool"]
"""Why the hub rejects a connection that it takes: our key (or its own, as we have it), or the pool that we name."""


@dataclass(frozen=True, slots=True)
class HubAnswer:
    """What a hub that answers says of the pool."""

    status: PoolStatus
    round_trip_seconds: float


@dataclass(frozen=True, slots=True)
class NoHub:
    """Why no hub answers: what dialling its address gave, and what the client makes of it."""

    endpoint: str
    dialled: Dialled
    text: str
    trouble: Trouble = ""


async def probe_hub(connection: Connection) -> HubAnswer | NoHub:
    """The pool as its hub shows it, or why there is none, within `HUB_SECONDS`."""
    endpoint = connection.hub.endpoint
    dialled, why = await dial(*check_endpoint(endpoint, "the hub's endpoint"))
    if dialled != "open":
        return NoHub(endpoint, dialled, why)
    session = Session(connection)
    try:
        await session.greet(HUB_SECONDS)
        before = time.monotonic()
        return HubAnswer(await session.status(HUB_SECONDS), time.monotonic() - before)
    except WrongPool as error:
        return NoHub(endpoint, dialled, str(error), "pool")
    except HubUnreachable as error:
        return NoHub(endpoint, dialled, str(error), "key" if isinstance(error, KeyRefused) else "")
    finally:
        await session.close()


async def probe_master(address: str) -> tuple[Dialled, str]:
    """Whether the master of a connection file lives, or one of the etcd through which masters are found takes connections."""
    outcomes = []
    for endpoint in address.removeprefix(ETCD).split(";"):
        host, _, port = endpoint.rpartition(":")
        if not host or not port.isdecimal():
            return "unresolved", f"{endpoint!r} is no host:port: correct distributed.master_address in the connection file"
        outcomes.append(await dial(host.strip("[]"), int(port), hangs_up=not address.startswith(ETCD)))
    return _best(outcomes)


def is_inside(host: str) -> bool:
    """A name that only a cluster's own DNS knows."""
    return host.endswith(".svc") or ".svc." in host


async def dial(host: str, port: int, *, hangs_up: bool = False) -> tuple[Dialled, str]:
    """What a TCP connection to this address gives, as a word and in words. `hangs_up`: the listener lives only if it
    closes when we do. For a stopped one, the kernel accepts and says nothing.
    """
    where = f"{host}:{port}"
    try:
        addresses = await resolve(host, port, DIAL_SECONDS)
    except OSError as error:
        return "unresolved", str(error)
    return _best([await _connect(address, DIAL_SECONDS / len(addresses), where, hangs_up) for address in addresses])


def _best(outcomes: Sequence[tuple[Dialled, str]]) -> tuple[Dialled, str]:
    return min(outcomes, key=lambda outcome: ("open", "refused", "silent", "unroutable", "unresolved").index(outcome[0]))


async def _connect(address: tuple[object, ...], seconds: float, where: str, hangs_up: bool) -> tuple[Dialled, str]:
    try:
        async with asyncio.timeout(seconds):
            reader, writer = await asyncio.open_connection(str(address[0]), int(str(address[1])))
            if hangs_up:
                with contextlib.closing(writer), contextlib.suppress(ConnectionError):
                    writer.write_eof()
                    await reader.read(1)
    except TimeoutError:
        return (
            "silent",
            f"{where} does not answer within {seconds:g} s: no such machine, something on the way drops it, or its process stands still",
        )
    except ConnectionRefusedError:
        return "refused", f"nobody listens on {where}"
    except OSError as error:
        return "unroutable", f"{where} cannot be reached ({error.strerror or error})"
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return "open", f"{where} takes connections"
