"""The processes of a benchmark, the trainer that bumps, and what /proc says about the hub."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import zmq

from epochkv_fence.net.keys import ClientKeys, generate_keypair
from epochkv_fence.protocol.messages import Bump, BumpStatus, Message, Status, decode, encode

ROOT = Path(__file__).resolve().parents[2]
TICKS = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
START_SECONDS = 60.0


class Child:
    """A process that takes a line of JSON and prints lines of JSON."""

    def __init__(self, module: str, settings: dict[str, object], python: str = sys.executable, **environ: str) -> None:
        self.lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self.process = subprocess.Popen(
            [python, "-m", module],
            cwd=ROOT,
            env={**os.environ, **environ},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self.say(json.dumps(settings))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.put(json.loads(line))

    def say(self, text: str) -> None:
        """Send it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")
        self.process.stdin.flush()

    def hear(self, seconds: float = START_SECONDS) -> dict[str, Any]:
        """Its next line. Raises queue.Empty when there is none in time."""
        return self.lines.get(timeout=seconds)

    def ask(self, text: str, seconds: float = START_SECONDS) -> dict[str, Any]:
        self.say(text)
        return self.hear(seconds)

    def close(self, seconds: float = 20.0) -> None:
        """Let it end by itself; kill it when it does not."""
        if self.process.poll() is None:
            assert self.process.stdin is not None
            self.process.stdin.close()
            try:
                self.process.wait(seconds)
            except subprocess.TimeoutExpired:
                self.kill()
        self._reader.join(5)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Fence:
    """Keys, state directory and hub process of one pool."""

    def __init__(self, directory: Path, lease_seconds: float) -> None:
        hub, client = generate_keypair(), generate_keypair()
        self.keys = ClientKeys(hub.public, client.public, client.secret)
        self.lease_seconds = lease_seconds
        self.endpoint = "tcp://127.0.0.1:0"
        self._settings: dict[str, object] = {
            "state": str(directory / "state"),
            "lease_seconds": lease_seconds,
            "hub_public": hub.public,
            "hub_secret": hub.secret,
            "client_public": client.public,
        }
        self.published: dict[int, float] = {}
        self._counters: dict[str, int] = {}
        self.hub: Child | None = None

    @property
    def fence_timeout_seconds(self) -> float:
        """Lease and margin."""
        return self.lease_seconds + max(1.0, 0.1 * self.lease_seconds)

    def start_hub(self, **environ: str) -> Child:
        """Start the hub, again at the same address; returns when it listens."""
        self.hub = Child("bench.fence.hub_process", {**self._settings, "bind": self.endpoint}, **environ)
        self.endpoint = str(self.hub.hear()["endpoint"])
        return self.hub

    def swarm(self, num_engines: int) -> Child:
        """Start engines; returns before they are granted anything."""
        settings: dict[str, object] = {
            "endpoint": self.endpoint,
            "keys": [self.keys.hub_public, self.keys.public, self.keys.secret],
            "engines": num_engines,
        }
        child = Child("bench.fence.swarm", settings)
        child.hear()
        return child

    def publications(self) -> dict[int, float]:
        """When the hub asked for each publication to be written."""
        self._look()
        return self.published

    def hub_counters(self) -> dict[str, int]:
        """What the hub counted; after its end."""
        self._look()
        return self._counters

    def _look(self) -> None:
        assert self.hub is not None
        while not self.hub.lines.empty():
            line = self.hub.lines.get()
            if "published" in line:
                self.published[line["published"]] = line["at"]
            self._counters.update(line.get("counters", {}))


class Trainer:
    """A trainer's connection: bumps and waits, as the client library does, and nothing else."""

    def __init__(self, endpoint: str, keys: ClientKeys) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        keys.apply(self._socket)
        self._socket.connect(endpoint)
        self._number = 0

    def status(self) -> Status:
        """The pool, as the hub knows it."""
        self._number += 1
        number = self._number
        answer = self._wait(Status(number), lambda m: isinstance(m, Status) and m.request == number, 10.0)
        assert isinstance(answer, Status)
        return answer

    def target(self) -> int:
        return self.status().target

    def bump(self, epoch: int, seconds: float) -> float:
        """Seconds from sending the bump until the hub said that it is published."""
        self._number += 1
        began = time.monotonic()
        self._wait(Bump(self._number, epoch), lambda m: isinstance(m, BumpStatus) and m.published >= epoch, seconds)
        return time.monotonic() - began

    def _wait(self, message: Message, done: Callable[[Message], bool], seconds: float) -> Message:
        end = time.monotonic() + seconds
        self._socket.send_multipart(encode(message))
        again = time.monotonic() + 1.0
        while time.monotonic() < end:
            if self._socket.poll(100):
                answer = decode(self._socket.recv_multipart())
                if done(answer):
                    return answer
            if time.monotonic() > again:
                self._socket.send_multipart(encode(message))
                again = time.monotonic() + 1.0
        raise TimeoutError(f"no answer to {type(message).__name__} within {seconds:.0f} s")

    def close(self) -> None:
        self._context.destroy(linger=0)


def cpu_seconds(pid: int) -> float:
    """CPU time a process has used so far, all threads."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
