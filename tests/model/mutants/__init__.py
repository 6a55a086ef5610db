"""Rules of the fence, each taken away: the check of the checker.

The hub goes by rules that a mutant replaces one by one (`kind.without`); what else a state machine does is replaced part by
part, or event by event. Rules that belong to the authority, the drivers, the connector or the trainer are flags of the
simulated world.
"""

from __future__ import annotations

from tests.model.mutants.agent import AGENT_MUTANTS
from tests.model.mutants.hub import HUB_MUTANTS
from tests.model.mutants.kind import Mutant
from tests.model.mutants.outside import OUTSIDE_MUTANTS
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

__all__ = ["ALL_MUTANTS", "MUTANTS", "RARE_MUTANTS", "Mutant"]
