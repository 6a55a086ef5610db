"""Chaos: pools and engines are edited at random while the API server fails and operators are killed, frozen and replaced.

Afterwards, with all faults off, the namespace must equal a fresh install of the final manifests, field by field: every child, every
condition, every status (without uids, times and random names). An operator that starts then must have nothing to write. Epochs never
go down, none is published unasked, or while an engine may still use an older one. Exit status 0 if so, else 1.

A seed repeats the edits, and draws the same faults; how they meet requests differs. Needs the control plane of `make test-cluster`:

    python -m hack.chaos --minutes 15
    python -m hack.chaos --minutes 2 --seed 7
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
import tempfile
from pathlib import Path

from hack.chaos.run import chaos
from hack.cluster.binaries import build
from hack.cluster.controlplane import ControlPlane
from hack.durations import minutes
from hack.standalone.process import nothing_left
from tests.cluster.operator_harness import install_crds


def main() -> int:
    parser = argparse.ArgumentParser(prog="hack.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=minutes, default=15.0, help="of faults (default: %(default)g); start and comparison: 1 to 3 more")
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    parser.add_argument("--directory", type=Path, default=None, help="for logs (default: a new temporary one)")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 31) if args.seed is None else args.seed
    folder = args.directory or Path(tempfile.mkdtemp(prefix="epochkv-chaos-"))

    def say(text: str) -> None:
        print(text, flush=True)

    folder.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(filename=folder / "engines-and-proxies.log")
    say(f"seed {seed}, logs in {folder}")
    say(f"{args.minutes:g} minutes of faults; start and comparison take 1 to 3 minutes more")
    with nothing_left(say), ControlPlane(folder / "cp", binaries=build(say)) as plane:
        install_crds(plane)
        verdict = chaos(plane, folder, "chaos", args.minutes * 60, seed, say)
    for line in verdict.lines:
        say(line)
    for problem in verdict.problems:
        say(f"PROBLEM {problem}")
    say(f"replay: python -m hack.chaos --minutes {args.minutes:g} --seed {seed}")
    say(f"{len(verdict.problems)} problems" if verdict.problems else "equal to a fresh install, and nothing left to do")
    return 1 if verdict.problems else 0


if __name__ == "__main__":
    sys.exit(main())
