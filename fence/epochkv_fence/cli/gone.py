"""Options of before: hidden from help, refused with what replaced them."""

from __future__ import annotations

from typing import Any

import typer


def gone(option: str, instead: str) -> Any:
    """A `typer.Option` that may not be given.

    Args:
        instead: what to do now, after "is gone: ".
    """

    def refuse(ctx: typer.Context, value: str | None) -> None:
        if value is not None:
            raise typer.BadParameter(f"it is gone: {instead}", ctx, param_hint=option)

    return typer.Option(option, hidden=True, callback=refuse, metavar="GONE")
