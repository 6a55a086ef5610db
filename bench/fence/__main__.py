"""Benchmarks of the fence: `make bench-fence`, or `python -m bench.fence [ROW ...]`.

Real hub, agents and trainers in processes of their own, over real sockets with CURVE. Prints a table with the aim beside
each figure and writes everything, samples included, to a JSON file.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bench.fence import kubernetes, rows, scheduler
from bench.fence.report import Progress, Row, print_table, write_json


@dataclass(frozen=True)
class Entry:
    """A row one can ask for. `seconds`: about how long it takes with 200 bumps."""

    about: str
    seconds: float
    run: Callable[[argparse.Namespace, Progress], Row]


ROWS: dict[str, Entry] = {
    "bump-16": Entry("bump -> published, 16 agents, file authority", 15, lambda a, p: rows.bump_latency(16, 100, a.bumps, p)),
    "bump-256": Entry("the same with 256 agents", 30, lambda a, p: rows.bump_latency(256, 500, a.bumps, p)),
    "bump-5000": Entry("the same with 5,000 agents", 420, lambda a, p: rows.bump_latency(5_000, 3_000, a.bumps, p)),
    "kubernetes": Entry(
        "patch of the pool object -> status visible in a watch, 16 agents", 120, lambda a, p: kubernetes.bump_latency(a.bumps, p)
    ),
    "flood": Entry(
        "bump -> published, 16 agents, 10,000 garbage frames a second", 20, lambda a, p: rows.flooded_latency(16, 100, a.bumps, p)
    ),
    "steady-5000": Entry("CPU of the hub with 5,000 agents, nothing happening", 70, lambda a, p: rows.steady_state(5_000, a.seconds, p)),
    "frozen": Entry("one engine stopped (SIGSTOP) before a bump", 50, lambda a, p: rows.fault("frozen", a.faults, p)),
    "killed": Entry("one engine killed before a bump", 50, lambda a, p: rows.fault("killed", a.faults, p)),
    "cut-off": Entry("one engine's connection gone silent before a bump", 50, lambda a, p: rows.fault("cut off", a.faults, p)),
    "scheduler": Entry("agent cost on the scheduler thread (needs the engine environment)", 40, lambda a, p: scheduler.cost(p)),
    "hub-restart": Entry("hub killed and started again at once, 256 agents", 15, lambda a, p: rows.hub_restart(256, 0, p)),
    "hub-restart-5000": Entry("the same with 5,000 agents", 45, lambda a, p: rows.hub_restart(5_000, 0, p)),
    "hub-outage": Entry("hub away for longer than a lease, 256 agents", 60, lambda a, p: rows.hub_restart(256, 40, p)),
}


def machine() -> dict[str, object]:
    """Where it was measured."""
    return {"cpus": os.cpu_count(), "load": os.getloadavg(), "python": platform.python_version(), "system": platform.platform()}


def main() -> int:
    listing = "\n".join(f"  {name:12} {entry.about}" for name, entry in ROWS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench.fence", description=f"{__doc__}\nrows:\n{listing}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows to measure (default: all)")
    parser.add_argument("--bumps", type=int, default=200, help="bumps for each latency (default 200)")
    parser.add_argument("--faults", type=int, default=10, help="repetitions of each fault (default 10)")
    parser.add_argument("--seconds", type=float, default=40.0, help="length of the steady state (default 40)")
    parser.add_argument(
        "--json", type=Path, default=Path(".build/bench-fence.json"), help="where everything is written (default %(default)s)"
    )
    arguments = parser.parse_args()
    names = arguments.rows or list(ROWS)
    if unknown := [name for name in names if name not in ROWS]:
        parser.error(f"unknown row {', '.join(unknown)}; there are: {', '.join(ROWS)}")
    progress, done, failed = Progress(), [], []
    began = time.monotonic()
    for index, name in enumerate(names):
        left = sum(ROWS[later].seconds for later in names[index:])
        progress.row(index, len(names), ROWS[name].about, ROWS[name].seconds, left)
        try:
            done.append(ROWS[name].run(arguments, progress))
        except Exception as error:
            failed.append(f"{name}: {error!r}")
            print(f"    {name} could not be measured: {error!r}", file=sys.stderr, flush=True)
        write_json(done, arguments.json, machine())
    print_table(done)
    print(f"{len(done)} of {len(names)} rows measured in {time.monotonic() - began:.0f} s; written to {arguments.json}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
