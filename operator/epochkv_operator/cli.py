"""`epochkv plan`: what the operator would do once manifests are applied. The fence finds the command by an entry point.

At its top this module imports nothing of the operator: the commands of a trainer start beside it.
"""

import json
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, Final, Literal

import typer
from typer.core import TyperCommand

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
NOTHING_ROLLS: Final = 0
FAILED: Final = 1
ROLLS: Final = 2


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
    output: Annotated[Literal["text", "json"], typer.Option("--output", "-o", help="Lines for people, or JSON.")] = "text",
    operator_namespace: Annotated[
        str, typer.Option(metavar="NAMESPACE", help="Where the operator runs: network policies let it in.")
    ] = "epochkv-system",
) -> None:
    """Show what the operator would apply and delete for pools and engines, why, and which pods that replaces.

    Without --live, every object is new, and the rules of the CRDs judge it. With --live, kubectl has the API server judge the
    files in a dry run, and engines that a changed pool restarts are shown, too, in whatever file they are.

    \b
      epochkv plan -f pool.yaml -f engine.yaml
      epochkv plan -f manifests/ --live -n rl
      helm template mine | epochkv plan -f - --live

    Exit status: 0 no pod would be replaced; 2 pods would be replaced; 1 an error: wrong usage, an object that would be refused, or no
    answer from the cluster.
    """
    from epochkv_operator import preview

    if context is not None and not live:
        _fail(["--context needs --live: without it no cluster is asked"])
    try:
        outcomes, skipped = preview.planned(files, live, namespace, context, operator_namespace)
    except preview.CannotPlan as error:
        _fail(error.problems)
    except Exception:  # a defect, which the command line could take for wrong usage and end with 2
        traceback.print_exc()
        raise typer.Exit(FAILED) from None
    for line in skipped:
        print(f"epochkv: {line}", file=sys.stderr)
    replaced = sum(outcome.pods for outcome in outcomes)
    if output == "json":
        print(json.dumps({"podsReplaced": replaced, "objects": [outcome.as_json() for outcome in outcomes]}, indent=2))
    else:
        pods = f"{replaced} pod{'s' if replaced > 1 else ''}" if replaced else "no pod"
        print("\n".join([*map(str, outcomes), f"Plan: {pods} would be replaced."]))
    if any(outcome.problem for outcome in outcomes):
        raise typer.Exit(FAILED)
    raise typer.Exit(ROLLS if replaced else NOTHING_ROLLS)


def _fail(lines: Sequence[str]) -> None:
    for line in lines:
        print(f"epochkv: {line}", file=sys.stderr)
    raise typer.Exit(FAILED)
