"""Simulate the fence: seeded random schedules over the production state machines, with every fault there is.

  run       SCHEDULES schedules from SEED on; ends with "n schedules, 0 violations"
  mutants   each rule of the protocol taken away; ends with "m of m mutants caught"
  replay    one seed, with the whole trace

Exit status: 0 when all is well, 1 when an invariant was violated (run, replay) or a mutant was missed (mutants).
"""

from __future__ import annotations

import argparse
import random
import sys
import time

from hack.durations import clock
from tests.model import parts, schedules, world
from tests.model.mutants import ALL_MUTANTS, MUTANTS, RARE_MUTANTS

PROGRESS_SECONDS = 5.0
CI_SCHEDULES = 20_000
RARE_BUDGET = 100_000


def main() -> int:
    parser = argparse.ArgumentParser(prog="hack.simulate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="random schedules")
    run.add_argument("--schedules", type=_positive, default=CI_SCHEDULES, help="how many (default: %(default)s)")
    run.add_argument("--seed", type=int, default=None, help="the first seed (default: a random one, which is printed)")
    run.add_argument(
        "--focus", choices=sorted(ALL_MUTANTS), default="", help="schedules as they are drawn for this mutant, nothing mutated"
    )
    mutants = commands.add_parser("mutants", help="every rule taken away")
    mutants.add_argument("--only", choices=sorted(ALL_MUTANTS), metavar="NAME", default=None, help="one of them")
    mutants.add_argument("--rare", action="store_true", help=f"those that need up to {RARE_BUDGET:,} schedules")
    replay = commands.add_parser("replay", help="one seed")
    replay.add_argument("seed", type=int)
    replay.add_argument("--focus", choices=sorted(ALL_MUTANTS), default="", help="as it is drawn for this mutant")
    replay.add_argument("--mutant", choices=sorted(ALL_MUTANTS), metavar="NAME", default="", help="without this rule")
    for command in (run, replay):
        command.add_argument("--steps", type=_positive, default=None, help="of every schedule (default: drawn)")
    for command in (run, mutants):
        command.add_argument("--processes", type=_positive, default=None, help="worker processes (default: one per core)")
    args = parser.parse_args()
    if args.command == "run":
        return _run(args)
    if args.command == "mutants":
        names = [args.only] if args.only else list(RARE_MUTANTS if args.rare else MUTANTS)
        return _mutants(names, RARE_BUDGET if args.rare else schedules.MUTANT_BUDGET, args.processes)
    return _replay(args)


def _positive(text: str) -> int:
    number = int(text.replace(",", "").replace("_", ""))
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not above 0")
    return number


def _run(args: argparse.Namespace) -> int:
    count = args.schedules
    first = random.SystemRandom().randrange(10**6, 10**9) if args.seed is None else args.seed
    print(f"seeds {first}..{first + count - 1}", flush=True)
    said, told = time.monotonic(), 0

    def progress(report: schedules.Report, seconds: float) -> None:
        nonlocal said, told
        for failure in report.failures[told:]:
            print(f"\n{failure}", flush=True)
        told = len(report.failures)
        if time.monotonic() - said >= PROGRESS_SECONDS:
            said = time.monotonic()
            left = seconds / max(1, report.schedules) * (count - report.schedules)
            print(f"{report.schedules:,} of {count:,} schedules, {len(report.failures)} violations, about {clock(left)} left", flush=True)

    report = schedules.run(first, count, focus=args.focus, steps=args.steps, processes=args.processes, progress=progress)
    print(", ".join(f"{number:,} {what}" for what, number in sorted(report.counts.items())))
    print(f"{report.steps:,} steps and the calm after them")
    print(f"{report.schedules:,} schedules, {len(report.failures)} violations")
    return 1 if report.failures else 0


def _mutants(names: list[str], budget: int, processes: int | None) -> int:
    print(f"{'seed':>6} {'schedules':>9}  rule taken away: what was violated", flush=True)

    def caught(catch: schedules.Catch) -> None:
        seed = "-" if catch.seed is None else str(catch.seed)
        print(f"{seed:>6} {catch.schedules:>9,}  {catch.name}: {catch.violation[:90] or 'NOT CAUGHT'}", flush=True)

    found = schedules.hunt_all(names, budget=budget, processes=processes, caught=caught)
    number = sum(catch.seed is not None for catch in found.values())
    print(f"{number} of {len(names)} mutants caught")
    return 0 if number == len(names) else 1


def _replay(args: argparse.Namespace) -> int:
    rules = ALL_MUTANTS[args.mutant].rules if args.mutant else None
    one = world.World(args.seed, rules, schedules.focused(args.focus or args.mutant, args.steps))
    try:
        one.run()
    except parts.Violation as violation:
        print("\n".join(one.trace))
        print(str(violation).splitlines()[0])
        return 1
    print("\n".join(one.trace))
    print("1 schedule, 0 violations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
