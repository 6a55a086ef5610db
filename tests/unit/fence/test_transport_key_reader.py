"""Credentials on a file system that hangs: leases go on, stopping waits for nothing, and the keys are read when it is back."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from epochkv_fence.net.keys import ClientKeys, KeyReader, generate_keypair
from hack.waiting import eventually
from tests.support.fence import FenceWorld

LEASE = 3.0


class HangingFiles:
    """Answers, or hangs until `back` is set; each read has the keys that were there when it began."""

    def __init__(self, keys: ClientKeys) -> None:
        self.keys = keys
        self.back = threading.Event()
        self.back.set()
        self.num_hanging = 0
        self._all = [self.back]

    def __call__(self) -> ClientKeys:
        keys, back = self.keys, self.back
        if not back.is_set():
            self.num_hanging += 1
            assert back.wait(60)
            self.num_hanging -= 1
        return keys

    def hang(self) -> threading.Event:
        """From now on; set what is returned to let those that hang go on."""
        self.back = threading.Event()
        self._all.append(self.back)
        return self.back

    def close(self) -> None:
        for event in self._all:
            event.set()


@pytest.fixture
def files() -> Iterator[HangingFiles]:
    pair = generate_keypair()
    made = HangingFiles(ClientKeys(pair.public, *generate_keypair()))
    yield made
    made.close()


def test_a_file_system_that_hangs_costs_no_lease_and_stopping_does_not_wait_for_it(
    files: HangingFiles, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(KeyReader.__init__, "__defaults__", (0.5,))
    world = FenceWorld(lease_seconds=LEASE)
    try:
        hub = world.hub()
        world.lead(hub)
        files.keys = world.client_keys
        agent, _ = world.agent(hub.endpoint, credentials=files)
        eventually(lambda: agent.view.epoch == 0)
        files.hang()
        eventually(lambda: files.num_hanging >= 1, "a read hangs")
        lease, gaps = agent.view.lease_until, 0
        while agent.view.lease_until < lease + LEASE:
            gaps += time.monotonic() >= agent.view.lease_until
            assert gaps == 0, "the lease was lost"
            time.sleep(0.01)
        eventually(lambda: agent.counters["credentials_errors"] >= 1)
        assert caplog.text.count("the file system hangs") == 1
        assert files.num_hanging == 1
        world.request(hub, 1)
        eventually(lambda: agent.view.epoch == 1, "resets go on, too")
        assert agent.stop()
        assert files.num_hanging >= 1  # it hangs still
    finally:
        world.close()
