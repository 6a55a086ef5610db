"""Progress of a long job: which step, how long it has run, how long it usually takes on this machine, and what is left."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from hack.durations import Durations, clock


class Progress:
    """Shows steps one after the other: a live line on a terminal, plain lines elsewhere."""

    def __init__(self, console: Console, durations: Durations, total: int, plan: Mapping[str, float] | None = None) -> None:
        """`plan`: all steps in their order, with about how many seconds each takes; then the time that is left is shown."""
        self.console = console
        self._durations = durations
        self._total = total
        self._plan = dict(plan or {})
        self._number = 0
        self._started = time.monotonic()
        self._notes: dict[str, str] = {}

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self._started

    def note(self, text: str, part: str = "") -> None:
        """What the present step, or a part of it, is doing; shown behind it, and as a line of its own where there is no terminal."""
        text = text.strip()
        if text and text != self._notes.get(part):
            self._notes[part] = text
            if not self.console.is_terminal:
                self.console.print(f"        {_said(part, text)}", markup=False, highlight=False, soft_wrap=True)

    @contextmanager
    def step(self, name: str, expected: float | None = None) -> Iterator[None]:
        """Run the body as one step of about `expected` seconds, or as planned."""
        self._number += 1
        self._notes.clear()
        usual = self._durations.expected(name, self._plan.pop(name) if expected is None else expected)
        started = time.monotonic()
        head = f"[{self._number}/{self._total}] {name}"

        def line() -> Text:
            seconds = time.monotonic() - started
            text = Text(f"{clock(self.elapsed)}  {head}  {self._left(seconds, usual)}", no_wrap=True, overflow="ellipsis")
            notes = " | ".join(_said(part, note) for part, note in list(self._notes.items()))
            text.append(f"  {notes}", style="dim")
            return text

        if self.console.is_terminal:
            with Live(get_renderable=line, console=self.console, refresh_per_second=4, transient=True):
                yield
        else:
            self.console.print(f"{clock(self.elapsed)}  {head}: {self._left(0.0, usual)}", markup=False, highlight=False)
            with self._heartbeat(head, started, usual):
                yield
        seconds = time.monotonic() - started
        self._durations.record(name, seconds)
        self.console.print(Text(f"{clock(self.elapsed)}  {head}: done in {seconds:.1f} s", style="green"))

    def _left(self, seconds: float, usual: float) -> str:
        """What is left of a step after `seconds` of `usual`, and of all steps."""
        left = usual - seconds
        text = f"about {clock(left)} left" if left > 0 else f"longer than the usual {clock(usual)}"
        if self._plan:
            later = sum(self._durations.expected(name, default) for name, default in self._plan.items())
            text += f", {clock(max(left, 0.0) + later)} to the end"
        return text

    @contextmanager
    def _heartbeat(self, head: str, started: float, usual: float) -> Iterator[None]:
        """A line every 30 seconds, so that a log shows that the job lives."""
        done = threading.Event()

        def beat() -> None:
            while not done.wait(30.0):
                seconds = time.monotonic() - started
                text = f"        {head}: {clock(seconds)}, {self._left(seconds, usual)}"
                self.console.print(text, markup=False, highlight=False)

        thread = threading.Thread(target=beat, daemon=True, name="progress")
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def _said(part: str, text: str) -> str:
    return f"{part}: {text}" if part else text
