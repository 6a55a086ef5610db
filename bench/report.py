"""What a row of a benchmark is, and how rows are shown. Shared by all benchmarks that print figures beside their aims."""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PLAIN_WIDTH = 140
"""Of tables that go to a file or a pipe."""


@dataclass(frozen=True)
class Figure:
    """One figure and its aim. `unit` is written after both.

    Attributes:
        at_least: the aim is a lower bound; otherwise an upper one.
        spread: smallest and largest of the repetitions whose median `value` is; None: it was measured once.
    """

    name: str
    value: float
    aim: float | None
    unit: str = "ms"
    at_least: bool = False
    spread: tuple[float, float] | None = None

    @property
    def met(self) -> bool | None:
        """None: there is no aim for it."""
        if self.aim is None:
            return None
        return self.value >= self.aim if self.at_least else self.value <= self.aim

    @property
    def verdict(self) -> str:
        return "" if self.met is None else "met" if self.met else "missed"


@dataclass(frozen=True)
class Row:
    """One measurement: its figures, and whatever explains them."""

    name: str
    figures: list[Figure]
    details: dict[str, Any] = field(default_factory=dict)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of all are not above."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def latency_figures(seconds: Sequence[float], aim_p99_ms: float) -> list[Figure]:
    """Median, p99 and maximum in milliseconds."""
    return [
        Figure("median", statistics.median(seconds) * 1e3, None),
        Figure("p99", percentile(seconds, 0.99) * 1e3, aim_p99_ms),
        Figure("max", max(seconds) * 1e3, None),
    ]


def repeated(name: str, values: Sequence[float], aim: float | None, unit: str = "", *, at_least: bool = False) -> Figure:
    return Figure(name, statistics.median(values), aim, unit, at_least, (min(values), max(values)))


def shown(value: float) -> str:
    """Three digits that count."""
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def print_table(rows: Sequence[Row], title: str) -> None:
    """One line for each figure; a row's details are in the JSON file."""
    try:  # a GPU machine may have torch and nothing else
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        for row in rows:
            for figure in row.figures:
                print(f"{row.name}: {figure.name}: {shown(figure.value)} {figure.unit} {figure.verdict}".rstrip())
        return
    table = Table(title=f"{title}: figure beside aim")
    spread = any(figure.spread for row in rows for figure in row.figures)
    columns = [
        ("what", "left"),
        ("figure", "left"),
        ("measured", "right"),
        *([("min .. max", "right")] if spread else []),
        ("aim", "right"),
    ]
    for column, justify in (*columns, ("", "left")):
        table.add_column(column, justify=justify)  # type: ignore[arg-type]
    for row in rows:
        for index, figure in enumerate(row.figures):
            aim = "" if figure.aim is None else f"{'>=' if figure.at_least else '<='} {shown(figure.aim)} {figure.unit}".rstrip()
            cells = [row.name if index == 0 else "", figure.name, f"{shown(figure.value)} {figure.unit}".rstrip()]
            if spread:
                cells.append(" .. ".join(shown(value) for value in figure.spread or ()))
            table.add_row(*cells, aim, figure.verdict)
        table.add_section()
    Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH).print(table)


def machine() -> dict[str, Any]:
    return {"cpus": os.cpu_count(), "load": os.getloadavg(), "python": platform.python_version(), "system": platform.platform()}


def write_json(rows: Sequence[Row], path: Path, benchmark: str) -> None:
    """Everything, samples included."""
    body = {
        "benchmark": benchmark,
        "machine": machine(),
        "rows": [{**asdict(row), "figures": [{**asdict(f), "met": f.met} for f in row.figures]} for row in rows],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(body, indent=1) + "\n", encoding="utf-8")


class Progress:
    """Says what is being done and how long it may take."""

    def __init__(self, say: Callable[[str], None] | None = None) -> None:
        self._say = say or (lambda text: print(text, file=sys.stderr, flush=True))
        self._told = -math.inf

    def row(self, index: int, total: int, name: str, seconds: float, left: float) -> None:
        self._say(f"==> {index + 1}/{total} {name}: about {seconds:.0f} s; about {left / 60:.0f} min left in all")

    def step(self, done: int, total: int, began: float) -> None:
        """One of many repetitions is done; tells every 5 s."""
        now = time.monotonic()
        if now < self._told + 5 or not done:
            return
        self._told = now
        left = (now - began) / done * (total - done)
        self._say(f"    {done}/{total}, about {left:.0f} s left")
