"""Looks at a hub: dials its address, connects with the pool's key, and asks for the pool twice, some time apart."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from dataclasses import dataclass
from typing import Final, Literal

from epochkv_fence.client.results import HubUnreachable, KeyRefused, PoolStatus, WrongPool
from epochkv_fence.client.session import NO_HANDSHAKE, Looks, Session
from epochkv_fence.common import on_daemon_thread
from epochkv_fence.connection import Connection, check_endpoint

DIAL_SECONDS: Final = 3.0
HUB_SECONDS: Final = 8.0
"""More than a hub that starts refuses keys for, and one redial."""
APART_SECONDS: Final = 2.0
ROUND_TRIPS: Final = 5

Dialled = Literal["open", "refused", "silent", "unresolved", "unroutable"]
Trouble = Literal["", "key", "handshake", "pool"]
"""What the hub takes ill, where a connection is taken at all: our key, its own key as we have it, or the pool that we name."""


@dataclass(frozen=True, slots=True)
class HubLook:
    """What a hub that answers says.

    Attributes:
        first, second: the pool, when they were answered at `first_at` and `second_at` on this machine's monotonic clock.
        round_trip_seconds: the shortest of a few questions.
    """

    endpoint: str
    first: PoolStatus
    first_at: float
    second: PoolStatus
    second_at: float
    round_trip_seconds: float


@dataclass(frozen=True, slots=True)
class NoHub:
    """Why no hub answers: what dialling its address gave, and what the client makes of it."""

    endpoint: str
    dialled: Dialled
    text: str
    trouble: Trouble = ""


async def look_at_hub(connection: Connection, apart_seconds: float = APART_SECONDS) -> HubLook | NoHub:
    """Two looks at the pool, or why there is none. Takes at most `HUB_SECONDS` and `apart_seconds` more."""
    endpoint = connection.hub.endpoint
    dialled, why = await dial(*check_endpoint(endpoint, "the hub's endpoint"))
    if dialled != "open":
        return NoHub(endpoint, dialled, why)
    session = Session(connection)
    looks = Looks(session)
    await session.start()
    try:
        await looks.greet(HUB_SECONDS)
        trips = []
        for _ in range(ROUND_TRIPS):
            before = time.monotonic()
            first = await looks.status(HUB_SECONDS)
            first_at = time.monotonic()
            trips.append(first_at - before)
        await asyncio.sleep(apart_seconds)
        second = await looks.status(HUB_SECONDS)
        return HubLook(endpoint, first, first_at, second, time.monotonic(), min(trips))
    except WrongPool as error:
        return NoHub(endpoint, dialled, str(error), "pool")
    except HubUnreachable as error:
        return NoHub(endpoint, dialled, str(error), _trouble(session, error))
    finally:
        await session.close()


def _trouble(session: Session, error: HubUnreachable) -> Trouble:
    if session.problem == NO_HANDSHAKE:
        return "handshake"
    return "key" if isinstance(error, KeyRefused) else ""


def is_inside(host: str) -> bool:
    """A name that only a cluster's own DNS knows."""
    return host.endswith(".svc") or ".svc." in host


async def dial(host: str, port: int, seconds: float = DIAL_SECONDS) -> tuple[Dialled, str]:
    """What a TCP connection to this address gives, as a word and in words. The look-up of its name is done on a thread of its own."""
    where = f"{host}:{port}"
    try:
        async with asyncio.timeout(seconds):
            look_up = on_daemon_thread(lambda: socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM), "epochkv-resolve")
            addresses = await asyncio.wrap_future(look_up)
    except (OSError, UnicodeError) as error:
        if isinstance(error, TimeoutError):
            return "unresolved", f"the name {host} was not resolved within {seconds:g} s"
        return "unresolved", f"the name {host} cannot be resolved ({getattr(error, 'strerror', None) or error})"
    outcomes = [await _connect(address[4][:2], seconds / len(addresses), where) for address in addresses]
    return min(outcomes, key=lambda outcome: ("open", "refused", "silent", "unroutable").index(outcome[0]))


async def _connect(address: tuple[object, ...], seconds: float, where: str) -> tuple[Dialled, str]:
    try:
        async with asyncio.timeout(seconds):
            _, writer = await asyncio.open_connection(str(address[0]), int(str(address[1])))
    except TimeoutError:
        return "silent", f"{where} does not answer within {seconds:g} s: no such machine, or something on the way drops it"
    except ConnectionRefusedError:
        return "refused", f"nobody listens on {where}"
    except OSError as error:
        return "unroutable", f"{where} cannot be reached ({error.strerror or error})"
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return "open", f"{where} takes connections"
