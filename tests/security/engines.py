"""Engines in a process of their own, and how long any of them was without a lease: `python -m tests.security.engines`.

Reads one JSON object from standard input (`endpoint`, `keys`, `count`), says `joined` when all have a lease, and when standard
input is closed prints one JSON object: `looks`, `gaps` (looks that saw an engine without a live lease), `renewed` (how often
the engine with the fewest got a longer lease).
"""

from __future__ import annotations

import json
import secrets
import select
import sys
import time
from contextlib import AbstractContextManager

from epochkv_fence.net.agent import AgentThread, EngineIdentity
from epochkv_fence.net.keys import ClientKeys
from hack.waiting import eventually
from tests.security.wire import beside
from tests.support.fence import FakeEngine


def engines(endpoint: str, keys: ClientKeys, count: int) -> AbstractContextManager[dict[str, int]]:
    """Have engines while the block runs, all with a lease at its start. What is yielded is filled with the counts at its end."""
    asked = {"endpoint": endpoint, "keys": [keys.hub_public, keys.public, keys.secret], "count": count}
    return beside("tests.security.engines", asked, "joined")


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    keys = ClientKeys(*asked["keys"])
    agents = [
        AgentThread(asked["endpoint"], keys, secrets.token_bytes(16), EngineIdentity(f"engine-{number}"), FakeEngine())
        for number in range(asked["count"])
    ]
    for agent in agents:
        agent.start()
    eventually(lambda: all(time.monotonic() < agent.view.lease_until for agent in agents), "everyone has a lease")
    print("joined", flush=True)
    looks = gaps = 0
    until, renewed = [agent.view.lease_until for agent in agents], [0] * len(agents)
    while not select.select([sys.stdin], [], [], 0.01)[0]:
        now = time.monotonic()
        for number, agent in enumerate(agents):
            lease = agent.view.lease_until
            looks += 1
            gaps += now >= lease
            renewed[number] += lease > until[number]
            until[number] = lease
    print(json.dumps({"looks": looks, "gaps": gaps, "renewed": min(renewed)}), flush=True)
    for agent in agents:
        agent.stop()


if __name__ == "__main__":
    main()
