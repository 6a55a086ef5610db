"""What commands print: tables for people, JSON for programs, progress on stderr."""

from __future__ import annotations

import enum
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.console import Console
from rich.status import Status as Spinner
from rich.table import Table

from epochkv_fence.cli.report import counted
from epochkv_fence.client import Engine, OpenUpdate, PoolStatus, Reset, Standing

MAX_NAMES: Final = 10
FIRST_LINE_SECONDS: Final = 2.0
PROGRESS_SECONDS: Final = 10.0
WIDTH: Final = 140
SHOWN_SECONDS: Final = 1.0
"""Somebody who waited for less did not wait."""


class Output(enum.StrEnum):
    """`-o`."""

    TABLE = "table"
    JSON = "json"


def console() -> Console:
    """A file or a pipe has no width: tables get a readable one there."""
    return Console() if sys.stdout.isatty() else Console(width=WIDTH)


def say_error(text: str) -> None:
    """One message on stderr."""
    print(f"epochkv: {text}", file=sys.stderr)


def show_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2))


def show_status(status: PoolStatus, output: Output) -> None:
    """`epochkv status`."""
    if output is Output.JSON:
        content = asdict(status)
        show_json({**content, "converged": status.converged, "laggards": list(status.laggards)})
        return
    states = [engine.state for engine in status.engines]
    table = Table(show_header=False, box=None, pad_edge=False)
    rows = [
        ("pool", f"{status.name} ({status.uid})"),
        ("epoch", f"{status.published} published" + ("" if status.converged else f", {status.target} asked for: a reset is open")),
        ("weights", status.weights_version or "-"),
        ("asked by", status.origin or "-"),
        ("engines", f"{len(states)}: {_counted(states)}"),
        ("lease", f"{status.lease_seconds:g} s"),
        ("update", _update(status)),
    ]
    if status.laggards:
        rows.append(("behind", names(status.laggards)))
    alone = tuple(engine.name for engine in status.engines if engine.state == "private")
    if alone:
        rows.append(("private", f"{names(alone)}: caches reset alone; shared again after the next `epochkv reset`"))
    for row in rows:
        table.add_row(*row)
    console().print(table, highlight=False, markup=False)


def _update(status: PoolStatus) -> str:
    found = status.update
    if found is None:
        return "-"
    since, left = duration(found.since_seconds), duration(found.left_seconds)
    return f"to {found.version}, open for {since} by {found.holder}; ends in {left} unless that trainer goes on"


def _counted(states: Sequence[str]) -> str:
    words = (("use", "share"), ("bypass", "in bypass"), ("private", "private"), ("behind", "behind"))
    return ", ".join(f"{states.count(state)} {word}" for state, word in words)


def show_engines(status: PoolStatus, output: Output) -> None:
    """`epochkv engines`."""
    if output is Output.JSON:
        show_json([asdict(engine) for engine in status.engines])
        return
    table = Table(box=None, pad_edge=False)
    for column, justify in (("ENGINE", "left"), ("STATE", "left"), ("EPOCH", "right"), ("CARRIED", "right"), ("LOADING", "right"),
                            ("AGE", "right"), ("HEARD", "right"), ("BOOT", "left")):  # fmt: skip
        table.add_column(column, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for engine in status.engines:
        table.add_row(*_row(engine))
    console().print(table, highlight=False, markup=False)


def _row(engine: Engine) -> tuple[str, ...]:
    return (
        engine.name,
        engine.state,
        "-" if engine.epoch is None else str(engine.epoch),
        str(engine.carried),
        "-" if engine.loading is None else str(engine.loading),
        duration(engine.age_seconds),
        f"{duration(engine.silent_seconds)} ago",
        engine.boot[:8],
    )


def show_reset(reset: Reset, output: Output, wait: bool = True) -> None:
    """The outcome of `reset` and `update`."""
    if output is Output.JSON:
        show_json(asdict(reset))
        return
    if reset.noop:
        text = f"epoch {reset.epoch} was published before, so nothing was reset; without --epoch the next one is raised"
    elif reset.published:
        text = f"epoch {reset.epoch} published in {reset.duration_s:.3f} s: {proved(reset.engines)}"
    elif not wait:
        text = f"epoch {reset.epoch} recorded in {reset.duration_s:.3f} s; `epochkv wait {reset.epoch}` waits until it is published"
    else:
        text = f"epoch {reset.epoch} recorded, not published in {reset.duration_s:.1f} s; who does not answer is fenced by its lease"
    print(text)
    _show_engines_of(reset)


def show_wait(reset: Reset, output: Output) -> None:
    """The outcome of `wait`, which is published: otherwise it is an error."""
    if output is Output.JSON:
        show_json(asdict(reset))
        return
    waited = "" if reset.duration_s < SHOWN_SECONDS else f" (waited {reset.duration_s:.1f} s)"
    print(f"epoch {reset.epoch} is published: {proved(reset.engines)}{waited}")
    _show_engines_of(reset)


def _show_engines_of(reset: Reset) -> None:
    if reset.carried:
        go = "request goes on with what it" if reset.carried == 1 else "requests go on with what they"
        print(f"{reset.carried} running {go} held")
    if reset.laggards and not reset.noop:
        lease = "its lease" if len(reset.laggards) == 1 else "their leases"
        print(f"{f'fenced by {lease}' if reset.published else 'not acknowledged by'}: {names(reset.laggards)}")
    if reset.bypassed and reset.published:
        serve, they = ("engine serves", "it has") if reset.bypassed == 1 else ("engines serve", "they have")
        why = f"nobody said that {they} the weights of epoch {reset.epoch}"
        print(f"{reset.bypassed} {serve} without reuse: {why}; `epochkv update` does")


def proved(num_engines: int) -> str:
    """What it means that an epoch is published."""
    if num_engines == 0:
        return "no engine is there that could use an older one"
    if num_engines == 1:
        return "the only engine does not use an older one"
    return f"no engine of {num_engines} uses an older one"


def names(found: tuple[str, ...]) -> str:
    """A list that stays readable."""
    more = f" and {len(found) - MAX_NAMES} more" if len(found) > MAX_NAMES else ""
    return ", ".join(found[:MAX_NAMES]) + more


def duration(seconds: float) -> str:
    """Short: 4s, 3m12s, 5h07m, 2d3h."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600}h"


class Progress:
    """Says on stderr what is waited for: a line that changes on a terminal, a line every few seconds elsewhere.

    Called from the client's thread.

    Args:
        asks: the epoch is asked for by this command. False: it is waited for, and somebody else asks.
        on_update: told once of somebody's weight update in whose middle the epoch is asked for.
    """

    def __init__(self, quiet: bool, asks: bool = True, on_update: Callable[[OpenUpdate], None] | None = None) -> None:
        self._quiet = quiet
        self._on_update = on_update
        self._asks = asks
        self._console = Console(stderr=True)
        self._spinner: Spinner | None = None
        self._say_at: float | None = None

    def __call__(self, standing: Standing) -> None:
        if standing.update is not None and self._on_update is not None:
            on_update, self._on_update = self._on_update, None
            on_update(standing.update)
        if self._quiet:
            return
        text = self._text(standing)
        if self._say_at is None:  # not from when this was made: the command of an update runs in between
            self._say_at = time.monotonic() + FIRST_LINE_SECONDS
        if self._console.is_terminal:
            if self._spinner is None:
                self._spinner = self._console.status(text)
                self._spinner.start()
            self._spinner.update(text)
        elif time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + PROGRESS_SECONDS
            print(f"epochkv: {text}", file=sys.stderr)

    def stop(self) -> None:
        """Leave the terminal as it was."""
        if self._spinner is not None:
            self._spinner.stop()
            self._spinner = None

    def _text(self, standing: Standing) -> str:
        if not standing.recorded:
            return f"epoch {standing.epoch}: waiting for " + ("a hub to record it" if self._asks else "somebody to ask for it")
        if not standing.published:
            late = f"{standing.laggards} of {counted(standing.engines, 'engine')}" if standing.laggards else "the proof"
            return f"epoch {standing.epoch}: waiting for {names(standing.names) if standing.names else late}"
        return f"epoch {standing.epoch} published; waiting for {counted(standing.pending, 'engine')} to share it"
