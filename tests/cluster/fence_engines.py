"""Engines as the hub sees them: the production agent on real sockets, with hooks that do what a connector would."""

from __future__ import annotations

import base64
import secrets
from collections.abc import Callable
from typing import Any

from epochkv_fence.common import lease_clock
from epochkv_fence.net.agent import AgentThread, EngineIdentity
from epochkv_fence.net.keys import ClientKeys
from tests.support.fence import FakeEngine
from tests.support.hub import Switch

FIRST_WEIGHTS = bytes.fromhex("3f2a9c1e" + "0" * 24)


def client_keys(secret: dict[str, Any]) -> ClientKeys:
    """The keys in a pool's Secret."""
    data = {name: base64.b64decode(value).decode() for name, value in secret["data"].items()}
    return ClientKeys(data["hub.pub"], data["client.pub"], data["client.key"])


class FenceEngine(FakeEngine):
    """One engine instance, in a `with` block.

    `pod` None: the engine's name is its pod's, too. `credentials` reads the keys again, as from a mounted Secret.
    `gives_back`: keys and bytes that it finds below each epoch.
    """

    def __init__(
        self,
        endpoint: str,
        keys: ClientKeys,
        name: str,
        *,
        pod: str | None = None,
        rank: int = 0,
        credentials: Callable[[], ClientKeys] | None = None,
        versions: dict[str, str] | None = None,
        pool: str = "",
        gives_back: tuple[int, int] = (3, 3000),
    ) -> None:
        super().__init__()
        self._gives_back = gives_back
        self.holds = FIRST_WEIGHTS
        who = ("external", name) if pod is None else (name, pod)
        identity = EngineIdentity(*who, rank, versions=versions or {}, pool=pool)
        self.agent = AgentThread(endpoint, keys, secrets.token_bytes(16), identity, self, credentials=credentials)

    def __enter__(self) -> FenceEngine:
        self.agent.start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self.agent.stop(5.0)

    @property
    def epoch(self) -> int | None:
        return self.agent.view.epoch

    @property
    def leased(self) -> bool:
        """Whether it may use its epoch right now."""
        return lease_clock() < self.agent.view.lease_until

    def push(self, holds: bytes | str) -> None:
        """Other weights, or why nobody knows them; the hub is told at once."""
        self.holds = holds
        self.agent.poke()

    def reclaim(self, below: int, keep: tuple[bytes, ...]) -> tuple[int, int]:
        """Says how many keys and bytes it removed, once for each epoch."""
        first = below not in dict(self.reclaims)
        self.reclaims.append((below, keep))
        return self._gives_back if first else (0, 0)


Service = Switch
"""A Kubernetes Service: sends each *new* connection to the endpoint that is ready now, and cuts no old one."""
