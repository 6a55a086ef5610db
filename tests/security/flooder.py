"""Floods a hub from a process of its own, so that it takes no time from the hub under test: `python -m tests.security.flooder`.

Reads one JSON object from standard input (`kind`, `endpoint`, `rate` a second, and `keys` as a list of three or none),
floods until standard input is closed, and prints one JSON object with what it did.

Kinds: `garbage` (frames that are no message, from an authenticated client), `frames` (messages of 20,000 frames),
`messages` (well-formed heartbeats of ever new instances), `bumps` (of epoch 1, over 600 connections), `strangers` (CURVE
handshakes with keys that nobody knows), `connections` (plain TCP connections that are left open with garbage in them).
"""

import itertools
import json
import secrets
import select
import socket
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import zmq

from epochkv_fence.net.keys import ClientKeys, generate_keypair
from epochkv_fence.protocol.messages import VERSION_FRAME, Bump, Heartbeat, encode

MAX_OPEN = 500
CONNECTIONS = 600
BUMPS_AT_ONCE = 50
FRAMES = 20_000
HALF_A_GREETING = b"\xff" + 8 * b"\0" + b"\x7f\x03"
BUMP = encode(Bump(1, 1))
GARBAGE = [VERSION_FRAME, b"\xc1garbage"]


class Flood:
    """One kind of flood; `step` does one unit of it and returns whether it was done."""

    def __init__(self, endpoint: str, keys: ClientKeys | None) -> None:
        self.counts: Counter[str] = Counter()
        self._endpoint = endpoint
        self._keys = keys
        self._context = zmq.Context()
        self._context.max_sockets = 4 * MAX_OPEN
        self._socket = self._dealer(keys) if keys is not None else None
        self._dealers: list[zmq.Socket[bytes]] = []
        self._turns = itertools.cycle(self._dealers)
        self._open: deque[zmq.Socket[bytes] | socket.socket] = deque()

    def _dealer(self, keys: ClientKeys) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        dealer.linger = 0
        keys.apply(dealer)
        dealer.connect(self._endpoint)
        return dealer

    def garbage(self) -> bool:
        return self._send(GARBAGE)

    def frames(self) -> bool:
        return self._send([VERSION_FRAME] * FRAMES)

    def messages(self) -> bool:
        return self._send(encode(Heartbeat(secrets.token_bytes(16), 0, weights=secrets.token_bytes(16))))

    def bumps(self) -> bool:
        """Connect once more, or, when there are connections enough, one on some of them."""
        assert self._keys is not None
        if len(self._dealers) < CONNECTIONS:
            self._dealers.append(self._dealer(self._keys))
            return True
        for _ in range(BUMPS_AT_ONCE):
            self._send(BUMP, next(self._turns))
        return False  # as fast as the connections take them, and no rate is to be caught up with

    def _send(self, frames: list[bytes], dealer: zmq.Socket[bytes] | None = None) -> bool:
        dealer = dealer or self._socket
        assert dealer is not None
        try:
            dealer.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        self.counts["sent"] += 1
        with suppress(zmq.Again):
            dealer.recv_multipart(zmq.NOBLOCK)
            self.counts["answers"] += 1
        return True

    def strangers(self) -> bool:
        assert self._keys is not None
        self._keep(self._dealer(ClientKeys(self._keys.hub_public, *generate_keypair())))
        self.counts["sent"] += 1
        return True

    def connections(self) -> bool:
        host, port = self._endpoint.removeprefix("tcp://").split(":")
        plain = socket.create_connection((host, int(port)), timeout=5)
        plain.sendall(secrets.token_bytes(40) if self.counts["sent"] % 2 else HALF_A_GREETING)
        self.counts["sent"] += 1
        self._keep(plain)
        return True

    def _keep(self, connection: zmq.Socket[bytes] | socket.socket) -> None:
        self._open.append(connection)
        if len(self._open) > MAX_OPEN:
            self._open.popleft().close()

    def close(self) -> None:
        while self._open:
            self._open.popleft().close()
        self._context.destroy(linger=0)


def run(step: Callable[[], bool], rate: float) -> None:
    """Call `step` at the given rate until standard input is closed."""
    began, done = time.monotonic(), 0
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        due = int((time.monotonic() - began) * rate)
        while done < due:
            if not step():
                done = due  # the hub makes us wait: what is missed is not made up for
                break
            done += 1


@contextmanager
def flooding(kind: str, endpoint: str, rate: float, keys: ClientKeys | None = None) -> Iterator[dict[str, int]]:
    """Flood while the block runs. What is yielded is filled with the counts at its end."""
    asked = {"kind": kind, "endpoint": endpoint, "rate": rate, "keys": keys and [keys.hub_public, keys.public, keys.secret]}
    counts: dict[str, int] = {}
    command, root = [sys.executable, "-m", "tests.security.flooder"], Path(__file__).resolve().parents[2]
    with subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        try:
            assert process.stdout.readline() == "flooding\n"
            yield counts
        finally:
            with suppress(BrokenPipeError):
                process.stdin.close()
            counts.update(json.loads(process.stdout.readline()))


def main() -> None:
    asked = json.loads(sys.stdin.readline())
    flood = Flood(asked["endpoint"], ClientKeys(*asked["keys"]) if asked["keys"] else None)
    print("flooding", flush=True)
    try:
        run(getattr(flood, asked["kind"]), float(asked["rate"]))
    finally:
        print(json.dumps(flood.counts), flush=True)
        flood.close()


if __name__ == "__main__":
    main()
