"""Rules of the fence, each taken away: the check of the checker.

The hub goes by rules that a mutant replaces one by one (`kind.without`); what else a state machine does is replaced part by
part, or event by event. Rules that belong to the authority, the drivers, the connector or the trainer are flags of the
simulated world.
"""

from __future__ import annotations

from tests.model.mutants.agent import AGENT_MUTANTS, OUTSIDE_MUTANTS
from tests.model.mutants.hub import HUB_MUTANTS
from tests.model.mutants.kind import Mutant
from tests.model.mutants.store import STORE_MUTANTS
from tests.model.mutants.weights import WEIGHTS_MUTANTS

RARE = (
    "a new leader learns a longer lease late",
    "an engine forgets its epoch with its lease",
    "what an older term evaluated is published",
    "the read compares the holder, not the term",
)
"""Rules that stand behind others: taking one away shows only when several rare things meet, in one of many thousand schedules.
Not among those that every test run has to catch; `python -m hack.simulate mutants --rare` looks for them."""

ALL_MUTANTS: dict[str, Mutant] = {**AGENT_MUTANTS, **HUB_MUTANTS, **STORE_MUTANTS, **WEIGHTS_MUTANTS, **OUTSIDE_MUTANTS}
"""Rule taken away -> the mutant."""
MUTANTS = {name: mutant for name, mutant in ALL_MUTANTS.items() if name not in RARE}
RARE_MUTANTS = {name: ALL_MUTANTS[name] for name in RARE}
SEEN_AT = {
    "an engine instance leaves inside schedule()": 159,
    "an engine instance that leaves keeps its lease": 384,
    "a change of weights waits for the next heartbeat": 27,
    "a failed Publish is not tried again": 86,
    "a failed Record is not tried again": 31,
    "a failed adoption is never tried again": 138,
    "a new leader claims to know every engine": 193,
    "a new leader keeps the target it remembers": 52,
    "a new leader reads the record from a cache": 145,
    "a proposal is sent once": 232,
    "a target seen late leaves older grants uncounted": 119,
    "a trainer is told a target without a leadership read": 252,
    "a trainer is told of a target that the leader may not know": 596,
    "acknowledged before adopted": 53,
    "acknowledged inside schedule()": 656,
    "an answer to an older sweep counts": 989,
    "an engine above the record raises nothing": 29,
    "an engine takes a lower epoch": 110,
    "any answer ends a sweep": 23,
    "granting before the note is durable": 450,
    "grants not bound to instances": 31,
    "grants without a leadership read": 47,
    "loads are never invalidated": 28,
    "no margin for slow clocks": 47,
    "no second read before publishing": 101,
    "nudges that never end": 22,
    "the epoch taken before the read": 40,
    "the lease is not checked after a load": 121,
    "the read before the heartbeats are collected": 111,
    "weights are never swept": 23,
    "weights are swept once a leadership": 44,
    "what may not be swept yet is forgotten": 261,
}
"""Rule taken away -> the first seed whose schedule notices it, for those that take a while. A hunt begins with it. When a change of
the simulator or of the fence gives that seed another schedule, the hunt goes through all seeds from 0, as for the others."""

__all__ = ["ALL_MUTANTS", "MUTANTS", "RARE_MUTANTS", "SEEN_AT", "Mutant"]
