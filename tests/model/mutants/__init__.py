"""Rules of the fence, each taken away: the check of the checker.

The state machines have one small method per rule; a mutant overrides it. Rules that belong to the authority, the drivers,
the connector or the trainer are flags of the simulated world.
"""

from __future__ import annotations

from tests.model.mutants.agent import AGENT_MUTANTS
from tests.model.mutants.hub import HUB_MUTANTS
from tests.model.mutants.kind import Mutant
from tests.model.mutants.outside import OUTSIDE_MUTANTS
from tests.model.mutants.weights import WEIGHTS_MUTANTS
from tests.model.mutants.wipe import WIPE_MUTANTS

MUTANTS: dict[str, Mutant] = {**AGENT_MUTANTS, **HUB_MUTANTS, **WEIGHTS_MUTANTS, **WIPE_MUTANTS, **OUTSIDE_MUTANTS}
"""Rule taken away -> the mutant."""

__all__ = ["MUTANTS", "Mutant"]
