"""Clients of a pool with more engines than fit into a message."""

from __future__ import annotations

import secrets
import threading
import time
from pathlib import Path

import pytest
import zmq

from epochkv_fence.client import WeightsDiverged
from epochkv_fence.connection import Connection
from epochkv_fence.protocol.messages import Grant, Heartbeat, WireError, decode, encode
from hack.waiting import eventually
from tests.support.fence import NEW, OLD, OTHER
from tests.support.hub import HubWorld


class Crowd:
    """Many instances over one socket, each of which adopts whatever it is granted."""

    def __init__(self, folder: Path, num_instances: int) -> None:
        connection = Connection.load(folder, {})
        keys = connection.client_keys()
        self.epochs: dict[bytes, int | None] = {secrets.token_bytes(16): None for _ in range(num_instances)}
        self.weights = dict.fromkeys(self.epochs, OLD)
        self._beat_at = 0.0
        self._seqs = dict.fromkeys(self.epochs, 0)
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.sndhwm = self._dealer.rcvhwm = 100_000
        keys.apply(self._dealer)
        self._dealer.connect(connection.hub.endpoint)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def push(self, weights: bytes, leave_out: int = 0) -> list[str]:
        """To all but some, whose names are returned."""
        instances = list(self.weights)
        for instance in instances[leave_out:]:
            self.weights[instance] = weights
        self._beat_at = 0.0
        return sorted(name_of(instance) for instance in instances[:leave_out])

    def _beat(self, instance: bytes) -> None:
        self._seqs[instance] += 1
        beat = Heartbeat(
            instance,
            self._seqs[instance],
            self.epochs[instance],
            engine=name_of(instance),
            fingerprint="fp",
            weights=self.weights[instance],
        )
        self._dealer.send_multipart(encode(beat))

    def _run(self) -> None:
        while not self._stopping.is_set():
            if time.monotonic() >= self._beat_at:
                self._beat_at = time.monotonic() + 8.0
                for instance in self.epochs:
                    self._beat(instance)
            while self._dealer.poll(20):
                try:
                    message = decode(self._dealer.recv_multipart())
                except WireError:
                    continue
                if isinstance(message, Grant) and self.epochs[message.instance] != message.epoch:
                    self.epochs[message.instance] = message.epoch
                    self._beat(message.instance)
                elif not isinstance(message, Grant) and hasattr(message, "instance"):
                    self._beat(message.instance)
        self._dealer.close(linger=0)

    def close(self) -> None:
        self._stopping.set()
        self._thread.join(10)
        self._context.destroy(linger=0)


def name_of(instance: bytes) -> str:
    return f"e-{instance.hex()[:6]}"


def test_a_pool_with_more_engines_than_fit_into_a_message(world: HubWorld) -> None:
    crowd = Crowd(world.folder, 200)
    try:
        eventually(lambda: all(epoch == 0 for epoch in crowd.epochs.values()), "everyone is granted", 60)
        pool = world.connect()
        eventually(lambda: len(pool.engines()) == 200, seconds=60)
        assert {engine.instance for engine in pool.engines()} == {instance.hex() for instance in crowd.epochs}
        with pool.weight_update("step-1", timeout_s=60) as update:
            crowd.push(NEW)
        assert update.report is not None
        (group,) = update.report.groups
        assert (group.id, group.label, len(group.engines)) == (NEW.hex(), "step-1", 200)
        with pytest.raises(WeightsDiverged) as caught, pool.weight_update("step-2", timeout_s=3.0):
            missed = crowd.push(OTHER, leave_out=12)
        assert list(caught.value.engines) == missed
        assert f"{missed[9]} and 2 more do not. Now 77777777: " in str(caught.value)
        reset = pool.reset(timeout_s=60)
        assert (reset.published, reset.engines) == (True, 200)
        assert set(crowd.epochs.values()) == {1}
    finally:
        crowd.close()
