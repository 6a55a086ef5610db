"""`epochkv doctor`: what is wrong with a pool or with a cluster, and what mends it.

The checks of a cluster come from another package, by the entry point `cluster` of the group `epochkv.doctor`: a function of
`ClusterScope` that returns checks. The fence imports nothing of it.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer
from rich.console import Console
from rich.text import Text

from epochkv_fence.cli import Exit
from epochkv_fence.cli.render import Output, show_json
from epochkv_fence.connection import CONFIG_ENV, ConfigurationError
from epochkv_fence.doctor.finding import Finding, Level, exit_status, folded, summary
from epochkv_fence.doctor.pool import pool_checks
from epochkv_fence.doctor.running import Examination, apart, run_checks
from epochkv_fence.doctor.scope import ClusterScope
from epochkv_fence.mooncake_admin import check_admin_url

GROUP: Final = "epochkv.doctor"
STYLE: Final = {Level.OK: "green", Level.WARNING: "yellow", Level.UNKNOWN: "magenta", Level.WRONG: "bold red"}
NO_CLUSTER: Final = (
    "epochkv doctor looks at one pool with --config PATH (or the variable EPOCHKV_CONFIG), or else at a cluster, which needs what is not "
    "installed: install epochkv[operator]"
)


def doctor(
    config: Annotated[
        str | None,
        typer.Option("--config", "-c", metavar="PATH", help="Look at this pool alone, by its connection.json or the directory of it."),
    ] = None,
    store_admin: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="With --config: also look at the admin port of a Mooncake master; repeatable.")
    ] = None,
    namespace: Annotated[
        str | None, typer.Option("--namespace", "-n", metavar="NAME", help="Only pools and engines of this namespace. Default: all.")
    ] = None,
    operator_namespace: Annotated[
        str | None, typer.Option(metavar="NAME", help="Where the operator runs. Default: wherever one is found.")
    ] = None,
    hub: Annotated[
        str | None,
        typer.Option(metavar="tcp://HOST:PORT", help="Dial the hub at this address, such as that of a port-forward. Default: the pools'."),
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="Lines for people, or JSON.")] = Output.TABLE,
) -> None:
    """Say what is wrong, and how to mend it. Nothing is changed.

    With --config or the variable EPOCHKV_CONFIG it looks at that pool, without Kubernetes. Otherwise, and with an option of clusters,
    it looks at the cluster of the kubeconfig (or of the pod it runs in).

    \b
      epochkv doctor --config policy/client
      epochkv doctor -n rl
      epochkv doctor -o json | jq -r '.findings[] | select(.level == "wrong") | .fix'

    Exit status: 0 nothing is wrong; 1 something is; 2 nothing is, as far as could be looked.
    """
    of_cluster = (namespace, operator_namespace, hub) != (None, None, None)
    if of_cluster and (config is not None or store_admin):
        raise typer.BadParameter("--config and --store-admin look at one pool; leave them out to look at a cluster")
    if config is not None or (CONFIG_ENV in os.environ and not of_cluster):
        try:
            admins = [check_admin_url(url) for url in store_admin or ()]
        except ValueError as error:
            raise ConfigurationError(f"--store-admin: {error}") from None
        end(pool_checks(config, admins), output)
    elif store_admin:
        raise typer.BadParameter("--store-admin needs --config: on Kubernetes, the store is looked at through its objects")
    else:
        end(_cluster(ClusterScope(namespace, operator_namespace, hub)), output)


def _cluster(scope: ClusterScope) -> Examination:
    """Checks that another package brings.

    Raises:
        ConfigurationError: none does.
    """
    for entry in importlib.metadata.entry_points(group=GROUP, name="cluster"):
        with contextlib.suppress(ModuleNotFoundError):
            make: Callable[[ClusterScope], Examination] = entry.load()
            return make(scope)
    raise ConfigurationError(NO_CLUSTER)


def end(examination: Examination, output: Output) -> None:
    """Make the checks, print what they found, and end with their exit status."""
    found, settled = apart(lambda: run_checks(examination))
    show(found, output)
    status = exit_status(found)
    if not settled:  # a look-up that cannot be ended would hold up the exit
        sys.stdout.flush()
        os._exit(status)
    raise typer.Exit(Exit(status))


def show(found: Sequence[Finding], output: Output) -> None:
    if output is Output.JSON:
        counts = {level.value: sum(finding.level is level for finding in found) for level in Level}
        show_json({"findings": [asdict(finding) for finding in found], **counts})
        return
    console = Console(soft_wrap=True)
    lines = folded(found)
    width = max((len(finding.check) for finding in lines), default=0)
    for finding in lines:
        _say(console, finding, width)
    console.print(summary(found), highlight=False, markup=False)


def _say(console: Any, finding: Finding, width: int) -> None:
    line = Text(f"{finding.level.value:<8}", style=STYLE[finding.level])
    about = f"{finding.about}: " if finding.about else ""
    line.append(f"{finding.check:<{width}}  {about}{finding.text}", style="default")
    console.print(line, highlight=False)
    if finding.fix:
        console.print(Text(f"{'':<8}{'':<{width}}  -> {finding.fix}"), highlight=False)
