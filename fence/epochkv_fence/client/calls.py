"""Everything that a client may ask of a hub. The synchronous and the asyncio pool share it."""

from __future__ import annotations

from epochkv_fence.client.looks import Looks
from epochkv_fence.client.resets import Resets
from epochkv_fence.client.session import Session
from epochkv_fence.client.waiting import Pushes
from epochkv_fence.connection import Connection


class Calls:
    """The calls on one session, by subject."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.looks = Looks(session)
        self.resets = Resets(self.looks)
        self.pushes = Pushes(self.looks)


async def open_calls(connection: Connection, timeout_s: float) -> Calls:
    """Connect, on the background loop, and prove that a hub answers and serves the right pool."""
    session = Session(connection)
    await session.start()
    calls = Calls(session)
    try:
        await calls.looks.greet(timeout_s)
    except BaseException:
        await session.close()
        raise
    return calls
