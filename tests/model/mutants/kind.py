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
