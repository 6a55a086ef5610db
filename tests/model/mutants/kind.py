"""What a mutant is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from tests.model.parts import Rules


@dataclass(frozen=True)
class Mutant:
    """A rule taken away.

    Attributes:
        rules: the world without it.
        focus: fields of the profile under which it matters; every one of them is also drawn at random without it.
        section: of the design page.
    """

    rules: Rules
    section: str
    focus: dict[str, Any] = field(default_factory=dict)


DUEL: dict[str, Any] = {
    "pushes": 0.0,
    "policy": "Retain",
    "orders": ("spec, reset",),
    "idle": 0.0,
    "restores": False,
    "reconfigures": False,
    "told_late": 0.1,
    "watch": 0.1,
    "pace": 0.4,
}
"""Two hubs, and one reset after the other."""

CALM: dict[str, Any] = {"takeovers": 0.02, "trouble": 0.03, "freezes": 0.03, "ambush": 0.0, "restores": False, "reconfigures": False}
"""Hardly any trouble, so that there is time for several resets."""
