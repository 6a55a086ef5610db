"""Progress of a long job: which step, how long it has run, how long it usually takes on this machine."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from hack.durations import Durations, clock


class Progress:
    """Shows steps one after the other: a live line on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, durations: Durations, total: int) -> None:
        self.console = console
        self._durations = durations
        self._total = total
        self._number = 0
        self._started = time.monotonic()
        self._note = ""

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def note(self, text: str) -> None:
        """What the present step is doing; shown behind it, and as a line of its own where there is no terminal."""
        text = text.strip()
        if text and text != self._note:
            self._note = text
            if not self.console.is_terminal:
                self.console.print(f"        {text}", markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def step(self, name: str, expected: float) -> Iterator[None]:
        """Run the body as one step of about `expected` seconds."""
        self._number += 1
        self._note = ""
        usual = self._durations.expected(name, expected)
        started = time.monotonic()
        head = f"[{self._number}/{self._total}] {name}"

        def line() -> Text:
            seconds = time.monotonic() - started
            text = Text(f"{clock(self.elapsed)}  {head}  {clock(seconds)} of about {clock(usual)}{_late(seconds, usual)}", no_wrap=True)
            text.append(f"  {self._note[:90]}" if self._note else "", style="dim")
            return text

        if self.console.is_terminal:
            with Live(get_renderable=line, console=self.console, refresh_per_second=4, transient=True):
                yield
        else:
            self.console.print(f"{clock(self.elapsed)}  {head}, about {clock(usual)}", markup=False, highlight=False)
            with self._heartbeat(head, started, usual):
                yield
        seconds = time.monotonic() - started
        self._durations.record(name, seconds)
        self.console.print(Text(f"{clock(self.elapsed)}  {head}: done in {seconds:.1f} s", style="green"))

    @contextmanager
    def _heartbeat(self, head: str, started: float, usual: float) -> Iterator[None]:
        """A line every 30 seconds, so that a log shows that the job lives."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(30.0):
                seconds = time.monotonic() - started
                text = f"        {head}: {clock(seconds)}{_late(seconds, usual)}"
                self.console.print(text, markup=False, highlight=False)

        thread = threading.Thread(target=beat, daemon=True, name="progress")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _late(seconds: float, usual: float) -> str:
    """Said of a step that goes on for longer than was told."""
    return ", longer than expected" if seconds > 1.2 * usual else ""
