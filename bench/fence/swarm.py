"""Many engines in one process: for each the production state machine `Agent` and a DEALER with CURVE of its own.

What `AgentThread` does with a thread per engine is done here by one loop over `epoll`, so that thousands of engines fit on
a machine that also runs the hub. Everything an engine would have to do takes no time here: what is measured is the fence.

Reads its settings as one line of JSON (`endpoint`, `keys`, `engines`), then commands, one a line. The answer to each is one line
of JSON: engines with a live lease, the lowest epoch, and the longest time that any of them was without a lease. `state` only asks
for it; `forget` begins to look for the longest time anew. Ends when standard input does.
"""

from __future__ import annotations

import contextlib
import heapq
import json
import os
import resource
import secrets
import select
import time

import zmq

from epochkv_fence.net.keys import ClientKeys
from epochkv_fence.protocol import agent as ag
from epochkv_fence.protocol.messages import Heartbeat, decode, encode

STDIN = 0
MAX_WAIT_SECONDS = 1.0
REDIAL_SECONDS = 5.0


class Engine:
    """One engine. `longest_gap` is the longest time between the end of a lease and the next one."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str, keys: ClientKeys, number: int) -> None:
        self.agent = ag.Agent(secrets.token_bytes(16))
        self.name = f"engine-{number}"
        self.born = time.monotonic()
        self.longest_gap = 0.0
        self._lease = ag.NO_LEASE
        self._up = False
        self.socket = context.socket(zmq.DEALER)
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.IMMEDIATE, 1),
            (zmq.RECONNECT_IVL, 100),
            (zmq.RECONNECT_IVL_MAX, 500),
            (zmq.CONNECT_TIMEOUT, 1000),
            (zmq.HANDSHAKE_IVL, 10_000),
        ):
            self.socket.setsockopt(option, value)
        keys.apply(self.socket)
        self.socket.connect(endpoint)

    def read(self) -> None:
        """Take everything that is there; heartbeat when a connection has come up."""
        while True:
            events = int(self.socket.getsockopt(zmq.EVENTS))
            up = bool(events & zmq.POLLOUT)
            if up and not self._up:
                self._up = up
                self.step(ag.Poked())
                continue
            self._up = up
            if not events & zmq.POLLIN:
                return
            self.step(ag.Received(decode(self.socket.recv_multipart(zmq.NOBLOCK))))

    def step(self, event: ag.Event) -> None:
        for action in self.agent.step(event, time.monotonic()):
            match action:
                case ag.Beat(seq, epoch):
                    self._beat(seq, epoch)
                case ag.Adopt(epoch):
                    self.step(ag.Adopted(epoch))
                case ag.Settle():
                    self.step(ag.Settled())
        if self.agent.lease_until != self._lease:
            if self._lease != ag.NO_LEASE:
                self.longest_gap = max(self.longest_gap, time.monotonic() - self._lease)
            self._lease = self.agent.lease_until

    def _beat(self, seq: int, epoch: int | None) -> None:
        stats = {"hit_tokens": 1000.0 + seq, "queried_tokens": 2000.0, "l1_bytes": 1e9, "saved_blocks": 17.0}
        age = time.monotonic() - self.born
        beat = Heartbeat(
            *(self.agent.instance, seq, epoch, age, stats), engine="bench", pod=self.name, fingerprint="f" * 64, weights=b"w" * 16
        )
        with contextlib.suppress(zmq.Again):  # no connection: the next heartbeat says it all
            self.socket.send_multipart(encode(beat), zmq.NOBLOCK)

    def gap(self, now: float) -> float:
        """The longest time without a lease so far, the present one included."""
        return max(self.longest_gap, now - self._lease if self._lease != ag.NO_LEASE else 0.0)


class Swarm:
    def __init__(self, endpoint: str, keys: ClientKeys, num_engines: int) -> None:
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        self._context = zmq.Context()
        self._context.max_sockets = num_engines + 16
        self._epoll = select.epoll()
        self._epoll.register(STDIN, select.EPOLLIN)
        os.set_blocking(STDIN, False)
        self._commands = b""
        self._engines: dict[int, Engine] = {}
        self._due: list[tuple[float, int]] = []
        self._next: dict[int, float] = {}
        for number in range(num_engines):
            engine = Engine(self._context, endpoint, keys, number)
            fd = int(engine.socket.getsockopt(zmq.FD))
            self._engines[fd] = engine
            self._epoll.register(fd, select.EPOLLIN)
            engine.step(ag.Started())
            self._note(fd, engine.agent.deadline())

    def _note(self, fd: int, at: float) -> None:
        self._next[fd] = at
        heapq.heappush(self._due, (at, fd))

    def run(self) -> None:
        while True:
            now = time.monotonic()
            while self._due and self._due[0][0] <= now:
                at, fd = heapq.heappop(self._due)
                if self._next[fd] != at:
                    continue  # an earlier time was noted since
                engine = self._engines[fd]
                if engine.agent.deadline() <= now:
                    engine.step(ag.Tick())
                    engine.read()  # sending may have swallowed the sign that something had come
                self._note(fd, max(engine.agent.deadline(), now + 0.001))
            wait = min(self._due[0][0] - now, MAX_WAIT_SECONDS) if self._due else MAX_WAIT_SECONDS
            for fd, _ in self._epoll.poll(max(0.0, wait)):
                if fd == STDIN:
                    if not self._command():
                        return
                else:
                    self._engines[fd].read()
                    deadline = self._engines[fd].agent.deadline()
                    if deadline < self._next[fd]:
                        self._note(fd, deadline)

    def _command(self) -> bool:
        chunk = os.read(STDIN, 65536)
        self._commands += chunk
        *lines, self._commands = self._commands.split(b"\n")
        for line in lines:
            print(json.dumps(self._answer(line)), flush=True)
        return bool(chunk)

    def _answer(self, command: bytes) -> dict[str, object]:
        now = time.monotonic()
        engines = self._engines.values()
        if command == b"forget":
            for engine in engines:
                engine.longest_gap = 0.0
        refused: dict[str, int] = {}
        for engine in engines:
            for reason, count in engine.agent.refused.items():
                refused[reason] = refused.get(reason, 0) + count
        return {
            "live": sum(now < engine.agent.lease_until for engine in engines),
            "epoch": min(-1 if engine.agent.epoch is None else engine.agent.epoch for engine in engines),
            "longest_gap": max(engine.gap(now) for engine in engines),
            "refused": refused,
        }


def main() -> None:
    line = b""
    while not line.endswith(b"\n"):
        line += os.read(STDIN, 1)
    settings = json.loads(line)
    swarm = Swarm(settings["endpoint"], ClientKeys(*settings["keys"]), settings["engines"])
    print(json.dumps({"started": settings["engines"]}), flush=True)
    swarm.run()


if __name__ == "__main__":
    main()
