"""Rules of the fence, each taken away: the check of the checker.

The hub goes by rules that a mutant replaces one by one (`kind.without`); what else a state machine does is replaced part by
part, or event by event. Rules that belong to the authority, the drivers, the connector or the trainer are flags of the
simulated world.
"""

from tests.model.mutants.agent import AGENT_MUTANTS, OUTSIDE_MUTANTS
from tests.model.mutants.hub import HUB_MUTANTS
from tests.model.mutants.kind import Mutant
from tests.model.mutants.store import STORE_MUTANTS
from tests.model.mutants.weights import WEIGHTS_MUTANTS

ALL_MUTANTS: dict[str, Mutant] = {**AGENT_MUTANTS, **HUB_MUTANTS, **STORE_MUTANTS, **WEIGHTS_MUTANTS, **OUTSIDE_MUTANTS}
"""Rule taken away -> the mutant."""
MUTANTS = {name: mutant for name, mutant in ALL_MUTANTS.items() if not mutant.rare}
RARE_MUTANTS = {name: mutant for name, mutant in ALL_MUTANTS.items() if mutant.rare}

__all__ = ["ALL_MUTANTS", "MUTANTS", "RARE_MUTANTS", "Mutant"]
