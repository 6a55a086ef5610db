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
        float, typer.Option(min=0, max=365 * 86_400, metavar="SECONDS", help="How long the hub accepts the old key at most.")
    ] = 86_400.0,
) -> None:
    """Make a new client key. The running hub accepts it within a second, and the one before as well.

    Engines and trainers on this machine read the new key from STATE/client by themselves; elsewhere replace their copy of that
    folder. The hub drops the old key when no engine uses it: after 10 minutes at the earliest, after --grace at the latest. Trainers do
    not count. A trainer that has its key in its environment needs the new key by then.

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
    """Accept only the newest client key. The hub rejects the old one, and engines that still have it serve in bypass.

    \b
      epochkv keys retire --state /var/lib/epochkv/policy
    """
    retire_previous(state)
    print("only the newest client key is accepted; a running hub notices within a second")
