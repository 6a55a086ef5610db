"""Benchmarks of the operator: `make bench-operator`, or `python -m bench.operator [ROW ...]`.

`planning` needs no cluster. The fleet rows start a real API server with its controller manager and the operator as a process, make
engines of five pods each, and read what the operator did from its metrics and from /proc. Pods get no node and stay pending.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module

from bench import harness
from bench.harness import Entry
from bench.report import Progress, Row

SIZES = {100: 280, 300: 400, 1000: 1000, 2000: 2100}


def planning(arguments: argparse.Namespace, progress: Progress) -> Row:
    return import_module("bench.operator.planning").row(progress)


def fleet(size: int) -> Callable[[argparse.Namespace, Progress], Row]:
    def measure(arguments: argparse.Namespace, progress: Progress) -> Row:
        row: Row = import_module("bench.operator.fleet").row(size, arguments, progress)
        return row

    return measure


ROWS = {
    "planning": Entry("CPU of a look at an engine that needs nothing, among 10 to 10,000 objects", 30, planning),
    **{f"fleet-{size}": Entry(f"{size:,} engines of 5 pods each", seconds, fleet(size)) for size, seconds in SIZES.items()},
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--resync", type=float, default=60.0, help="seconds between LISTs of each kind while the fleet idles (default 60)")
    parser.add_argument("--bumps", type=int, default=50, help="epochs asked for while the fleet is there (default 50)")
    parser.add_argument(
        "--gates", action="store_true", help="with spec.serve: the containers of each pod get ready, and its gate is written"
    )


if __name__ == "__main__":
    sys.exit(harness.run("operator", __doc__, ROWS, add_arguments))
