"""What other threads leave for the agent's thread."""

from __future__ import annotations

import contextlib
import os
import threading

from epochkv_fence.protocol.agent import Event
from epochkv_fence.protocol.messages import Message


class Mailbox:
    """Events for the state machine and messages for the hub. Any thread may leave one, and wakes the thread that polls `fd`."""

    def __init__(self) -> None:
        self.fd, self._write = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._write, False)
        self._lock = threading.Lock()
        self._events: list[Event] = []
        self._messages: list[Message] = []

    def post(self, event: Event) -> None:
        """Leave an event, unless the same one waits already."""
        with self._lock:
            if event not in self._events:
                self._events.append(event)
        self.wake()

    def send(self, message: Message) -> None:
        with self._lock:
            self._messages.append(message)
        self.wake()

    def wake(self) -> None:
        with contextlib.suppress(OSError):  # full (it will wake anyhow)
            os.write(self._write, b"x")

    def take(self, woken: bool) -> tuple[list[Event], list[Message]]:
        """Everything that waits; `woken`: `fd` has input."""
        if woken:
            with contextlib.suppress(OSError):
                while os.read(self.fd, 4096):
                    pass
        with self._lock:
            events, self._events = self._events, []
            messages, self._messages = self._messages, []
        return events, messages
