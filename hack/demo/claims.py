"""Claims: what was promised, what was seen, and whether it held. The demo prints them as one table, tests assert each."""

from __future__ import annotations

from dataclasses import dataclass, field

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True)
class Claim:
    """One checked promise."""

    what: str
    expected: str
    seen: str
    held: bool


@dataclass
class Claims:
    """Claims in the order in which they were checked."""

    items: list[Claim] = field(default_factory=list)

    def equal(self, what: str, seen: object, expected: object) -> None:
        self.items.append(Claim(what, str(expected), str(seen), seen == expected))

    def check(self, what: str, held: bool, expected: str, seen: str) -> None:
        """A promise that is not an equality."""
        self.items.append(Claim(what, expected, seen, held))

    @property
    def broken(self) -> list[Claim]:
        return [claim for claim in self.items if not claim.held]

    def show(self, console: Console, title: str) -> None:
        table = Table("", "claim", "expected", "seen", title=title, title_justify="left")
        for claim in self.items:
            mark = "[green]✓[/]" if claim.held else "[bold red]✗[/]"
            table.add_row(mark, claim.what, claim.expected, claim.seen if claim.held else f"[bold red]{claim.seen}[/]")
        console.print(table)
