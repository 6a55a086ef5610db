"""The way to the hub: credentials, the agent's thread, and a reason in words when there is none.

The engine serves whatever is wrong: no hub in the configuration, unreadable credentials, a bad endpoint, a library that fails.
The root then stays in bypass, and the reason is kept for status and logged once.
"""

from __future__ import annotations

import logging
import os
import secrets
import socket
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from epochkv_connector.config.connector_config import ConnectorConfig
from epochkv_connector.naming.pins import Pins
from epochkv_fence.connection import check_endpoint, read_client_keys, read_root_secret
from epochkv_fence.protocol.messages import BOOT_BYTES, WEIGHTS_BYTES

logger = logging.getLogger("vllm.epochkv.link")

STOP_SECONDS = 2.0


class Credentials:
    """What `credentials_dir` or the environment holds, or why it cannot be used."""

    def __init__(self, config: ConnectorConfig) -> None:
        self.secret: bytes | None = None
        self.keys: Any = None
        self.problem: str | None = None
        self.read_keys: Callable[[], Any] | None = None  # again, as they may be rotated
        if config.hub is None:
            self.problem = "no hub is configured"
            return
        try:
            check_endpoint(config.hub.endpoint, "hub.endpoint")
            self.secret = read_root_secret(config.hub)
            self.keys = read_client_keys(config.hub)
            self.read_keys = partial(read_client_keys, config.hub)
        except Exception as error:  # anything unreadable is the same: no hub
            self.secret = None
            self.problem = f"the hub at {config.hub.endpoint} cannot be used: {error}"


class FenceHooks:
    """What the agent's thread may ask of this engine (`epochkv_fence.net.AgentHooks`)."""

    def __init__(
        self,
        pins: Pins,
        stats: Callable[[], dict[str, float]],
        reclaim: Callable[[int, tuple[bytes, ...]], tuple[int, int]],
        weights: Callable[[], tuple[bytes | None, str]],
    ) -> None:
        self._pins = pins
        self._stats = stats
        self._reclaim = reclaim
        self._weights = weights

    def ready(self) -> bool:
        """vLLM has set its own global; epochs may be adopted."""
        return self._pins.root.ready()

    def adopt(self, epoch: int) -> None:
        """Bind the epoch's root; returns when it is bound."""
        self._pins.root.adopt(epoch)

    def busy(self) -> bool:
        """The scheduler is inside `schedule()`: hold the acknowledgement."""
        return self._pins.busy()

    def carried(self) -> int:
        """Requests that go on under an older root."""
        return self._pins.carried()

    def private(self) -> bool:
        """The caches of this engine alone were reset: it shares nothing before the pool's next epoch."""
        return self._pins.root.waiting_after_reset

    def weights(self) -> tuple[bytes | None, str]:
        """What names are made of, as the hub knows it, or why nobody can say."""
        value, note = self._weights()
        return (None if value is None else value[:WEIGHTS_BYTES]), note

    def stats(self) -> dict[str, float]:
        """Numbers for status and metrics."""
        return self._stats()

    def reclaim(self, below: int, keep: tuple[bytes, ...]) -> tuple[int, int]:
        """Remove L2 keys of epochs below `below`, and of weights that are not in `keep` if there are any; how many went, and their
        bytes as far as known. On a thread of its own."""
        return self._reclaim(below, keep)


class HubLink:
    """The agent's thread, or its absence."""

    def __init__(self, config: ConnectorConfig, credentials: Credentials, environ: Mapping[str, str] | None = None) -> None:
        self._config = config
        self._credentials = credentials
        self._environ = os.environ if environ is None else environ
        self._thread: Any = None
        self.problem = credentials.problem if config.hub is not None else None
        self.boot = secrets.token_bytes(BOOT_BYTES)

    def start(self, hooks: FenceHooks, fingerprint: str, rank: int) -> None:
        """Start the agent if there is a hub; a failure is kept in `problem` and logged."""
        if self._config.hub is None:
            return
        if self.problem is None:
            try:
                self._thread = self._make_thread(hooks, fingerprint, rank)
                self._thread.start()
            except Exception as error:
                self._thread = None
                self.problem = f"the agent cannot start: {error}"
        if self.problem is not None:
            logger.warning("EpochKV serves without the pool's caches: %s", self.problem)

    def _make_thread(self, hooks: FenceHooks, fingerprint: str, rank: int) -> Any:
        from epochkv_fence.net import AgentThread, EngineIdentity

        assert self._config.hub is not None
        identity = EngineIdentity(
            engine=self._environ.get("EPOCHKV_ENGINE_NAME") or f"{socket.gethostname()}:{os.getpid()}",
            pod=self._environ.get("POD_NAME", ""),
            rank=rank,
            fingerprint=fingerprint,
        )
        return AgentThread(
            self._config.hub.endpoint, self._credentials.keys, self.boot, identity, hooks, credentials=self._credentials.read_keys
        )

    def lease_until(self) -> float:
        """End of the lease on the monotonic clock; 0.0 without one."""
        return float(self._thread.view.lease_until) if self._thread is not None else 0.0

    def propose(self, epoch: int) -> None:
        """Ask the hub for an epoch; best effort."""
        if self._thread is not None:
            self._thread.propose(epoch)

    def poke(self) -> None:
        """Something the hub waits for has changed: heartbeat now."""
        if self._thread is not None:
            self._thread.poke()

    def stop(self) -> None:
        """End the thread within `STOP_SECONDS`."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop(STOP_SECONDS)
