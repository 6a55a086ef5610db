"""`epochkv plan`: what the operator would do once manifests are applied."""

from __future__ import annotations

import enum
import sys
import traceback
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperCommand

if TYPE_CHECKING:
    from epochkv_operator.cli.preview import Outcome

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
NOTHING_ROLLS: Final = 0
FAILED: Final = 1
ROLLS: Final = 2


class Output(enum.StrEnum):
    """`-o`."""

    TEXT = "text"
    DIFF = "diff"
    JSON = "json"


class _Command(TyperCommand):
    """Status 2 says that pods would be replaced, so wrong usage ends with 1 here."""

    def make_context(self, *arguments: Any, **extra: Any) -> Any:
        try:
            return super().make_context(*arguments, **extra)
        except Exception as error:  # click's or typer's own UsageError, as typer's version has it
            if getattr(error, "exit_code", None) == ROLLS:
                error.exit_code = FAILED  # type: ignore[attr-defined]
            raise


@app.command(cls=_Command)
def plan(
    files: Annotated[
        list[str],
        typer.Option("--filename", "-f", metavar="PATH", help="A file or folder with manifests; - is standard input. Repeatable."),
    ],
    live: Annotated[bool, typer.Option("--live", help="Compare with the cluster of the kubeconfig. Nothing is written to it.")] = False,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace", "-n", help="Namespace of objects that name none. Default: that of the kubeconfig with --live, else default."
        ),
    ] = None,
    context: Annotated[str | None, typer.Option("--context", help="Context of the kubeconfig, with --live.")] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="Field by field, a unified diff of YAML, or JSON.")] = Output.TEXT,
    operator_namespace: Annotated[
        str, typer.Option(metavar="NAMESPACE", help="Where the operator runs: network policies let it in.")
    ] = "epochkv-system",
) -> None:
    """Show what the operator would create, change and delete for pools and engines, why, and which pods that replaces.

    Without --live, the files alone are judged and every object is new. With --live, the API server judges the files in a dry run, and
    engines that a changed pool restarts are shown, too, in whatever file they are.

    \b
      epochkv plan -f pool.yaml -f engine.yaml
      epochkv plan -f manifests/ --live -n rl
      helm template mine | epochkv plan -f - --live

    Exit status: 0 no pod would be replaced; 2 pods would be replaced; 1 an error: wrong usage, an object that would be refused, or no
    answer from the cluster.
    """
    from epochkv_operator.cli import show
    from epochkv_operator.cli.files import FilesError
    from epochkv_operator.cli.run import NoCluster, Unanswered, planned

    if context is not None and not live:
        _fail(["--context needs --live: without it no cluster is asked"])
    try:
        outcomes, warnings = planned(files, live, namespace, context, operator_namespace)
    except (FilesError, NoCluster, Unanswered) as error:
        _fail(str(error).splitlines())
    except Exception:  # a defect, which the command line could take for wrong usage and end with 2
        traceback.print_exc()
        raise typer.Exit(FAILED) from None
    for line in warnings:
        print(f"epochkv: {line}", file=sys.stderr)
    print({Output.TEXT: show.text, Output.DIFF: show.diff, Output.JSON: show.as_json}[output](outcomes))
    raise typer.Exit(_status(outcomes))


def _status(outcomes: Sequence[Outcome]) -> int:
    if any(outcome.problem is not None for outcome in outcomes):
        return FAILED
    return ROLLS if any(outcome.rolls for outcome in outcomes) else NOTHING_ROLLS


def _fail(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"epochkv: {line}", file=sys.stderr)
    raise typer.Exit(FAILED)
