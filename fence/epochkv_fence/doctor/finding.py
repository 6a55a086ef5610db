"""What a check says: all is well, or what is wrong and how to mend it."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace


class Level(enum.StrEnum):
    """How bad it is, best first."""

    OK = "ok"
    WARNING = "warning"  # it works, with fewer hits, or not for long
    UNKNOWN = "unknown"  # this could not be looked at
    WRONG = "wrong"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line.

    Attributes:
        check: the name of the check that says it.
        text: what is so; where it is not well, what is wrong.
        fix: what to do about it, as a command to paste where there is one; empty where `text` is enough.
        about: the object that it is about, such as `pool rl/policy`; empty: the whole.
    """

    check: str
    level: Level
    text: str
    fix: str = ""
    about: str = ""


class CannotLook(Exception):
    """A check cannot be made; the text says why, and `fix` how it can be.

    Attributes:
        fix: what lets it be made.
    """

    def __init__(self, text: str, fix: str = "") -> None:
        super().__init__(text)
        self.fix = fix


@dataclass(frozen=True, slots=True)
class Say:
    """Makes the findings of one check about one object."""

    check: str
    about: str = ""

    def ok(self, text: str) -> Finding:
        return Finding(self.check, Level.OK, text, "", self.about)

    def warning(self, text: str, fix: str = "") -> Finding:
        return Finding(self.check, Level.WARNING, text, fix, self.about)

    def wrong(self, text: str, fix: str = "") -> Finding:
        return Finding(self.check, Level.WRONG, text, fix, self.about)

    def unknown(self, text: str, fix: str = "") -> Finding:
        return Finding(self.check, Level.UNKNOWN, text, fix, self.about)


def exit_status(findings: Iterable[Finding]) -> int:
    """1: something is wrong. 2: nothing is, as far as could be looked. 0: all could be looked at; there may be warnings."""
    levels = {finding.level for finding in findings}
    if Level.WRONG in levels:
        return 1
    return 2 if Level.UNKNOWN in levels else 0


def summary(findings: Sequence[Finding]) -> str:
    """Such as `2 wrong, 1 warning, 9 ok`."""
    counts = [(sum(finding.level is level for finding in findings), level.value) for level in reversed(Level)]
    words = [f"{number} {word}{'s' if word == 'warning' and number > 1 else ''}" for number, word in counts if number]
    return ", ".join(words) or "nothing was looked at"


def folded(findings: Sequence[Finding]) -> list[Finding]:
    """For people: checks that could not be made for one reason are one line, at the place of the first."""
    checks: dict[tuple[str, str, str], list[str]] = {}
    for finding in findings:
        if finding.level is Level.UNKNOWN:
            checks.setdefault((finding.text, finding.fix, finding.about), []).append(finding.check)
    shown = []
    for finding in findings:
        key = (finding.text, finding.fix, finding.about)
        if finding.level is not Level.UNKNOWN:
            shown.append(finding)
        elif others := checks.pop(key, []):
            rest = list(dict.fromkeys(check for check in others if check != finding.check))
            text = f"{finding.text}; so nothing is known of {', '.join(rest)}" if rest else finding.text
            shown.append(replace(finding, text=text))
    return shown
