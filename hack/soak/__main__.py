"""Soak: three real vLLM engines, a Mooncake store and a hub under random faults, resets and weight changes.

Every answer is compared, token by token, with an engine without any cache. At the end everything is healed, and nothing
may be left: no wrong token, no failed request, no block, plan, job or slot that an idle engine still holds, no memory that
has grown. Exit status 0 if so, else 1.

A seed replays the same prompts, faults, resets and updates at the same times (how they meet requests differs):

    python -m hack.soak --minutes 20 --seed 7
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import tempfile
from pathlib import Path

from hack.soak.run import make_weights, soak, work_out_answers


def main() -> int:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(prog="hack.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=20.0, help="of faults (default: %(default)s); set-up and checks take about 3 more")
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    parser.add_argument("--directory", type=Path, default=None, help="for logs (default: a new temporary one)")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 31) if args.seed is None else args.seed
    folder = args.directory or Path(tempfile.mkdtemp(prefix="epochkv-soak-"))
    folder.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        print(text, flush=True)

    def end(number: int, frame: object) -> None:
        """End what was started, as after Ctrl-C; once, as a second signal would leave half of it running."""
        signal.signal(number, signal.SIG_IGN)
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
    say(f"seed {seed}, {args.minutes:g} minutes of faults, about {args.minutes + 3:g} in all, logs in {folder}")
    weights = make_weights(folder / "models")
    prompts = work_out_answers(folder, weights, seed, say)
    verdict = soak(folder, weights, prompts, args.minutes, seed, say)
    for line in verdict.lines:
        say(line)
    for problem in verdict.problems:
        say(f"PROBLEM {problem}")
    say(f"replay: python -m hack.soak --minutes {args.minutes:g} --seed {seed}")
    say(verdict.closing)
    return 1 if verdict.problems else 0


if __name__ == "__main__":
    sys.exit(main())
