"""One engine in a process of its own: the production `AgentThread`, to be frozen, killed or cut off.

Reads its settings as one line of JSON. Prints its lease each time it changes, with the time of looking: what is printed
holds until the next line, also while this process is stopped. Ends when standard input does.
"""

from __future__ import annotations

import json
import secrets
import sys
import threading
import time

from epochkv_fence.common import lease_clock
from epochkv_fence.net.agent import AgentThread, EngineIdentity
from epochkv_fence.net.keys import ClientKeys

LOOK_SECONDS = 0.002


class Hooks:
    """An engine that does nothing and is always ready."""

    def ready(self) -> bool:
        return True

    def adopt(self, epoch: int) -> None:
        return None

    def busy(self) -> bool:
        return False

    def old_epoch_requests(self) -> int:
        return 0

    def isolated(self) -> bool:
        return False

    def weights(self) -> tuple[bytes | None, str]:
        return b"w" * 16, ""

    def labelled(self, weights: bytes, label: str) -> None:
        """Answers would say it."""

    def tiers(self) -> tuple[str, str]:
        return "", ""

    def stats(self) -> dict[str, float]:
        return {"hit_tokens": 1.0}

    def reclaim(self, below: int, keep: tuple[bytes, ...]) -> int:
        return 0


def main() -> None:
    settings = json.loads(sys.stdin.readline())
    identity = EngineIdentity("bench", "victim", 0, "f" * 64)
    agent = AgentThread(settings["endpoint"], ClientKeys(*settings["keys"]), secrets.token_bytes(16), identity, Hooks())
    agent.start()
    ended = threading.Event()

    def wait_for_end() -> None:
        sys.stdin.read()
        ended.set()

    threading.Thread(target=wait_for_end, daemon=True).start()
    told: object = None
    while not ended.wait(LOOK_SECONDS):
        view = agent.view
        if view != told:
            told = view
            until = view.lease_until and view.lease_until - lease_clock() + time.monotonic()  # on the clock of other processes
            print(json.dumps({"epoch": view.epoch, "lease_until": until, "at": time.monotonic()}), flush=True)
    agent.stop()


if __name__ == "__main__":
    main()
