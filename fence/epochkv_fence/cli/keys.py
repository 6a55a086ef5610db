"""`epochkv keys rotate|retire`: replace the key that speaks for a pool, without an engine losing its lease."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from epochkv_fence.standalone.hub import DEFAULT_GRACE_SECONDS
from epochkv_fence.standalone.state import CLIENT_FOLDER, KEEP_SECONDS, accepted_for, retire_previous, rotate_keys

HELP: Final = "Replace the key that speaks for a pool, without an engine losing its lease."
ROTATE_HELP: Final = """Make a new client key. A running hub accepts it within a second, beside the old one.

Engines and trainers on this machine read the new key from STATE/client. On other machines, replace the copy of that folder. The hub
drops the old key when no engine uses it any more, and at the latest after --grace. It cannot count trainers, so it keeps the old key
for at least 10 minutes (or --grace, if that is less). A trainer with its key in its environment needs the new key by then.

\b
  epochkv keys rotate --state /var/lib/epochkv/policy
  epochkv keys rotate --state DIR --grace 0 && epochkv keys retire --state DIR   # the old key leaked
"""
RETIRE_HELP: Final = """Accept only the newest client key. The hub rejects the old one, and engines that still have it serve in bypass.

\b
  epochkv keys retire --state /var/lib/epochkv/policy
"""

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode=None)

State = Annotated[Path, typer.Option("--state", metavar="DIR", help="The hub's state directory.")]


@app.command("rotate", help=ROTATE_HELP)
def rotate(
    state: State,
    grace: Annotated[
        float, typer.Option(min=0, max=365 * 86_400, metavar="SECONDS", help="How long the hub accepts the old key at most.")
    ] = (DEFAULT_GRACE_SECONDS),
) -> None:
    """See ROTATE_HELP."""
    rotate_keys(state, grace)
    before = (
        f"is accepted {accepted_for(grace, KEEP_SECONDS)}" if grace else "is not accepted any more: a running hub notices within a second"
    )
    print(f"new client key in {state / CLIENT_FOLDER}; the one before {before}")


@app.command("retire", help=RETIRE_HELP)
def retire(state: State) -> None:
    """See RETIRE_HELP."""
    retire_previous(state)
    print("only the newest client key is accepted; a running hub notices within a second")
