"""`epochkv keys rotate|retire`: replace the key that speaks for a pool, without an engine losing its lease."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from epochkv_fence.standalone.credentials import CLIENT_FOLDER, KEEP_SECONDS, accepted_for, retire_previous, rotate_keys

HELP: Final = "Replace the key that speaks for a pool, without an engine losing its lease."

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

State = Annotated[Path, typer.Option("--state", metavar="DIR", help="The hub's state directory.")]


@app.command("rotate")
def rotate(
    state: State,
    grace: Annotated[
        float, typer.Option(min=0, max=365 * 86_400, metavar="SECONDS", help="How long the key before is accepted at most.")
    ] = 86_400.0,
) -> None:
    """Make a new client key. The running hub accepts it within a second, and the one before as well.

    Engines and trainers on this machine read the new key from STATE/client by themselves; elsewhere replace their copy of that
    folder. The key before goes when no engine uses it any more, at the latest after --grace. Trainers are not counted: for them it
    stays 10 minutes at least (or --grace, if that is less). One that has its key in its environment needs the new one by then.

    \b
      epochkv keys rotate --state /var/lib/epochkv/policy
      epochkv keys rotate --state DIR --grace 0 && epochkv keys retire --state DIR   # it leaked: out with it now
    """
    rotate_keys(state, grace)
    before = (
        f"is accepted {accepted_for(grace, KEEP_SECONDS)}" if grace else "is not accepted any more: a running hub notices within a second"
    )
    print(f"new client key in {state / CLIENT_FOLDER}; the one before {before}")


@app.command("retire")
def retire(state: State) -> None:
    """Accept the newest client key alone, from now on: whoever still has the one before is refused and serves in bypass.

    \b
      epochkv keys retire --state /var/lib/epochkv/policy
    """
    retire_previous(state)
    print("only the newest client key is accepted; a running hub notices within a second")
