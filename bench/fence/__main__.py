"""Benchmarks of the fence: `make bench-fence`, or `python -m bench.fence [ROW ...]`.

Real hub, agents and trainers in processes of their own, over real sockets with CURVE. Prints a table with the aim beside
each figure and writes everything, samples included, to a JSON file.
"""

from __future__ import annotations

import argparse
import sys

from bench import harness
from bench.fence import kubernetes, rows, scheduler
from bench.harness import Entry

ROWS: dict[str, Entry] = {
    "bump-16": Entry("bump -> published, 16 agents, SQLite authority", 15, lambda a, p: rows.bump_latency(16, 100, a.bumps, p)),
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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--bumps", type=int, default=200, help="bumps for each latency (default 200)")
    parser.add_argument("--faults", type=int, default=10, help="repetitions of each fault (default 10)")
    parser.add_argument("--seconds", type=float, default=40.0, help="length of the steady state (default 40)")


if __name__ == "__main__":
    sys.exit(harness.run("fence", __doc__, ROWS, add_arguments))
