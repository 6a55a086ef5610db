"""Soak: three real vLLM engines, a Mooncake store and a hub under random faults, resets and weight changes.

Every answer that ran wholly under one state of weights is compared, token by token, with an engine of exactly these weights that
has no cache. At the end everything is healed, and nothing may be left: no wrong token, no failed request, no memory that has
grown. An idle engine must hold no block, plan, job or slot. Exit status 0 if so, else 1.

A seed replays the same prompts, faults, resets and updates at the same times (how they meet requests differs):

    python -m hack.soak --minutes 20 --seed 7
    python -m hack.soak --minutes 20 --model hybrid    # layers with recurrent states beside attention
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from pathlib import Path

from hack.durations import minutes
from hack.soak.run import make_weights, soak, work_out_answers
from hack.soak.states import KINDS, States
from hack.standalone.process import nothing_left

SET_UP_MINUTES, CHECK_MINUTES = (2, 5), (1, 4)
"""Beside the faults, on two cores that are idle or busy: answers and engines before them, healing and judgement after them."""
BESIDES = "set-up (answers of an engine without caches, then 3 engines) {} to {} minutes on 2 cores, healing and checks {} to {}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="hack.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    besides = BESIDES.format(*SET_UP_MINUTES, *CHECK_MINUTES)
    parser.add_argument("--minutes", type=minutes, default=20.0, help=f"of faults (default: %(default)s); besides: {besides}")
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    parser.add_argument("--model", choices=sorted(KINDS), default="attention", help="what its layers are (default: %(default)s)")
    parser.add_argument("--directory", type=Path, default=None, help="for logs (default: a new temporary one)")
    args = parser.parse_args()
    seed = random.SystemRandom().randrange(1 << 31) if args.seed is None else args.seed
    folder = args.directory or Path(tempfile.mkdtemp(prefix="epochkv-soak-"))
    folder.mkdir(parents=True, exist_ok=True)

    def say(text: str) -> None:
        print(text, flush=True)

    kind = KINDS[args.model]
    say(f"seed {seed}, logs in {folder}")
    least, most = (args.minutes + set_up + checks for set_up, checks in zip(SET_UP_MINUTES, CHECK_MINUTES, strict=True))
    say(f"{args.minutes:g} minutes of faults; besides: {besides}; {least:g} to {most:g} in all")
    with nothing_left(say):
        states = States.make(folder / "models", make_weights(folder / "models", kind))
        prompts = work_out_answers(folder, states, seed, say)
        verdict = soak(folder, states, prompts, args.minutes, seed, say, kind)
    for line in verdict.lines:
        say(line)
    for problem in verdict.problems:
        say(f"PROBLEM {problem}")
    say(f"replay: python -m hack.soak --minutes {args.minutes:g} --seed {seed} --model {args.model}")
    say(verdict.closing)
    return 1 if verdict.problems else 0


if __name__ == "__main__":
    sys.exit(main())
