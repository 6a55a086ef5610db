"""The link to the hub: credentials, the agent's thread, and a reason in words when there is none.

The engine serves whatever is wrong: no hub in the configuration, unreadable credentials, an agent that does not start.
The root then stays in bypass, and the reason is kept for status and logged once.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from epochkv_connector.config import ConnectorConfig
from epochkv_connector.engine.interface import running
from epochkv_fence.connection import read_client_keys, read_root_secret
from epochkv_fence.net.agent import AgentThread, EngineIdentity
from epochkv_fence.net.keys import ClientKeys
from epochkv_fence.protocol.messages import INSTANCE_BYTES

logger = logging.getLogger("vllm.epochkv.link")

STOP_SECONDS = 2.0


@dataclass(frozen=True)
class FenceHooks:
    """What the agent's thread may ask of this engine; `epochkv_fence.net.AgentHooks` says what each answer means."""

    ready: Callable[[], bool]
    adopt: Callable[[int], None]
    busy: Callable[[], bool]
    old_epoch_requests: Callable[[], int]
    isolated: Callable[[], bool]
    weights: Callable[[], tuple[bytes | None, str]]
    tiers: Callable[[], tuple[str, str]]
    stats: Callable[[], dict[str, float]]
    reclaim: Callable[[int, tuple[bytes, ...]], tuple[int, int]]


class HubLink:
    """The agent's thread, or its absence.

    Attributes:
        secret: of the pool; None: there is no hub that can be used.
        problem: why a hub that is configured cannot be used; None: it can, or there is none.
    """

    def __init__(self, config: ConnectorConfig) -> None:
        self._config = config
        self._keys: ClientKeys | None = None
        self._thread: AgentThread | None = None
        self.secret: bytes | None = None
        self.problem: str | None = None
        if config.hub is None:
            return
        try:
            secret = read_root_secret(config.hub)
            self._keys = read_client_keys(config.hub)
            self.secret = secret
        except Exception as error:  # anything unreadable is the same: no hub
            self.problem = f"the hub at {config.hub.endpoint} cannot be used: {error}"

    def start(self, hooks: FenceHooks, fingerprint: str, rank: int) -> None:
        """Start the agent if there is a hub; a failure is kept in `problem` and logged."""
        hub = self._config.hub
        if hub is None:
            return
        if self._keys is not None:
            keys_again = partial(read_client_keys, hub)  # they may be rotated
            try:
                identity = EngineIdentity(
                    engine=os.environ.get("EPOCHKV_ENGINE_NAME") or f"{socket.gethostname()}:{os.getpid()}",
                    pod=os.environ.get("POD_NAME", ""),
                    rank=rank,
                    fingerprint=fingerprint,
                    versions=running(),
                    pool=self._config.pool.uid,
                    removes=self._config.distributed is not None,
                )
                instance = secrets.token_bytes(INSTANCE_BYTES)
                self._thread = AgentThread(hub.endpoint, self._keys, instance, identity, hooks, credentials=keys_again)
                self._thread.start()
            except Exception as error:
                self._thread = None
                self.problem = f"the agent cannot start: {error}"
        if self.problem is not None:
            logger.warning("EpochKV serves without the pool's caches: %s", self.problem)

    def lease_until(self) -> float:
        """End of the lease on the monotonic clock; 0.0 without one."""
        return self._thread.view.lease_until if self._thread is not None else 0.0

    def propose(self, epoch: int) -> None:
        """Ask the hub for an epoch; best effort."""
        if self._thread is not None:
            self._thread.propose(epoch)

    def poke(self) -> None:
        """Something the hub waits for has changed: heartbeat now."""
        if self._thread is not None:
            self._thread.poke()

    def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop(STOP_SECONDS)
