"""What commands print: tables for people, JSON for programs, progress on stderr."""

import enum
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from epochkv_fence.client import Engine, PoolStatus, Reset, Standing, WeightsReport, WeightsStanding
from epochkv_fence.client.results import report
from epochkv_fence.common import duration
from epochkv_fence.protocol.pool import SHOWN_DIGITS, called, listed
from epochkv_fence.standalone.report import counted

ALONE: Final = "its names of this epoch are given up; it has asked for the next epoch"
FIRST_LINE_SECONDS: Final = 2.0
PROGRESS_SECONDS: Final = 10.0
WIDTH: Final = 140
SHOWN_SECONDS: Final = 1.0
"""Somebody who waited for less did not wait."""


class Exit(enum.IntEnum):
    """What the command `epochkv` ends with."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    NOT_IN_TIME = 3  # an epoch is recorded, not published; engines do not hold the same, new weights
    UNREACHABLE = 4
    STATE = 5
    LOST = 6
    NOT_EXECUTABLE = 126  # as a shell says it, and the next one
    NO_COMMAND = 127
    INTERRUPTED = 130


class Output(enum.StrEnum):
    """`-o`."""

    TABLE = "table"
    JSON = "json"


def console() -> Console:
    """A file or a pipe has no width: tables get a readable one there."""
    return Console(width=None if sys.stdout and sys.stdout.isatty() else WIDTH, emoji=False)


def say_error(text: str) -> None:
    print(f"epochkv: {text}", file=sys.stderr)


def show_json(value: Any) -> None:
    print(json.dumps(value, indent=2))


def show_status(status: PoolStatus, output: Output) -> None:
    if output is Output.JSON:
        content = asdict(status)
        show_json({**content, "converged": status.converged, "laggards": list(status.laggards)})
        return
    states = [engine.state for engine in status.engines]
    table = Table(show_header=False, box=None, pad_edge=False)
    rows = [
        ("pool", f"{status.name} ({status.uid})"),
        ("epoch", f"{status.published} published" + ("" if status.converged else f", {status.target} asked for: a reset is open")),
        ("weights", _weights(report(status.engines, status.labels))),
        ("asked by", status.origin or "-"),
        ("engines", f"{len(states)}: {_counted(states)}"),
        ("lease", f"{status.lease_seconds:g} s"),
    ]
    if status.laggards:
        rows.append(("behind", listed(status.laggards)))
    alone = tuple(engine.name for engine in status.engines if engine.state == "isolated")
    if alone:
        rows.append(("isolated", f"{listed(alone)}: {ALONE}"))
    limited = [f"{engine.name}: {engine.tiers_note or engine.tiers_off}" for engine in status.engines if engine.tiers_off]
    if limited:
        rows.append(("tiers", listed(limited)))
    if status.settling_seconds:
        rows.append(("hub", f"became leader just now; the list of engines is complete in {status.settling_seconds:.0f} s"))
    for row in rows:
        table.add_row(*row)
    console().print(table, highlight=False, markup=False)


def _weights(found: WeightsReport) -> str:
    parts = [f"{called(group.id, group.label)} {counted(len(group.engines), 'engine')}" for group in found.groups]
    parts += [f"unknown {counted(len(found.unknown), 'engine')}"] if found.unknown else []
    return "; ".join(parts) or "-"


def _counted(states: Sequence[str]) -> str:
    shown = ["sharing", "isolated", "unknown", "behind", *(state for state in ("asleep", "own") if state in states)]
    return ", ".join(f"{states.count(state)} {state}" for state in shown)


def show_engines(status: PoolStatus, output: Output) -> None:
    if output is Output.JSON:
        show_json([asdict(engine) for engine in status.engines])
        return
    columns = ("ENGINE", "STATE", "WEIGHTS", "EPOCH>", "OLD-REQ>", "AGE>", "HEARD>", "INSTANCE", "NOTE")
    _show_table(columns, [_row(engine) for engine in status.engines])


def _show_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns that end in `>` are flush right; the last one may take several lines."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        right = column.endswith(">")
        table.add_column(column.removesuffix(">"), justify="right" if right else "left", no_wrap=column != columns[-1])
    for row in rows:
        table.add_row(*row)
    # A terminal that is too narrow breaks lines itself. Otherwise columns are cut or left out, the last one first.
    wide = console()
    wide.width = max(WIDTH, wide.width)
    with wide.capture() as shown:
        wide.print(table, highlight=False, markup=False)
    print("\n".join(line.rstrip() for line in shown.get().splitlines()))


def _row(engine: Engine) -> tuple[str, ...]:
    return (
        engine.name,
        engine.state,
        engine.weights[:SHOWN_DIGITS] or "-",
        "-" if engine.epoch is None else str(engine.epoch),
        str(engine.old_epoch_requests),
        duration(engine.age_seconds),
        f"{duration(engine.silent_seconds)} ago",
        engine.instance[:8],
        "; ".join(_notes(engine)),
    )


def _notes(engine: Engine) -> list[str]:
    """What hinders the engine. Weights that it cannot know also turn its tiers off, and are said once."""
    weights = engine.weights_note if not engine.weights and engine.weights_note not in engine.tiers_note else ""
    alone = ALONE if engine.state == "isolated" and not weights else ""
    return [note for note in (weights, alone, engine.tiers_note or engine.tiers_off) if note]


def show_weights(found: WeightsReport, output: Output) -> None:
    """`epochkv weights`; as JSON also the outcome of `update`."""
    if output is Output.JSON:
        show_json({**asdict(found), "equal": found.equal})
        return
    fingerprints = sorted({group.fingerprint for group in found.groups})
    columns = ["WEIGHTS", "LABEL", "ENGINES>", "SINCE>", *(["FINGERPRINT"] if len(fingerprints) > 1 else []), "NAMES"]
    rows = [
        (group.id[:SHOWN_DIGITS], group.label or "-", str(len(group.engines)), duration(group.since_s), group.fingerprint[:SHOWN_DIGITS],
         listed(group.engines))
        for group in found.groups
    ]  # fmt: skip
    rows += [("unknown", "-", "1", "-", "-", f"{one.name}: {one.note}" if one.note else one.name) for one in found.unknown]
    _show_table(columns, [row if len(fingerprints) > 1 else (*row[:4], row[5]) for row in rows])


def shown_weights(found: WeightsReport) -> str:
    """The outcome of `update`: one line for each fingerprint."""
    who = [f"all {len(group.engines)} engines hold" if len(group.engines) > 1 else "the only engine holds" for group in found.groups]
    return "\n".join(f"{one} {called(group.id, group.label)}" for one, group in zip(who, found.groups, strict=True))


def show_reset(reset: Reset, output: Output, wait: bool = True) -> None:
    if reset.noop:
        text = f"epoch {reset.epoch} was published before, so nothing was reset; without --epoch the next one is raised"
    elif reset.published:
        text = f"epoch {reset.epoch} published in {reset.duration_s:.3f} s: {proved(reset.engines)}"
    elif not wait:
        text = f"epoch {reset.epoch} recorded in {reset.duration_s:.3f} s; `epochkv wait {reset.epoch}` waits until it is published"
    else:
        text = f"epoch {reset.epoch} recorded, not published in {reset.duration_s:.1f} s; who does not answer is fenced by its lease"
    _show_outcome(reset, output, text)


def show_wait(reset: Reset, output: Output) -> None:
    """The outcome of `wait`, which is published: otherwise it is an error."""
    waited = "" if reset.duration_s < SHOWN_SECONDS else f" (waited {reset.duration_s:.1f} s)"
    _show_outcome(reset, output, f"epoch {reset.epoch} is published: {proved(reset.engines)}{waited}")


def _show_outcome(reset: Reset, output: Output, text: str) -> None:
    if output is Output.JSON:
        show_json(asdict(reset))
        return
    print(text)
    if reset.old_epoch_requests:
        go = "request continues with what it" if reset.old_epoch_requests == 1 else "requests continue with what they"
        print(f"{reset.old_epoch_requests} running {go} held")
    if reset.laggards and not reset.noop:
        lease = "its lease" if len(reset.laggards) == 1 else "their leases"
        print(f"{f'fenced by {lease}' if reset.published else 'not acknowledged by'}: {listed(reset.laggards)}")


def proved(num_engines: int) -> str:
    """What it means that an epoch is published."""
    if num_engines == 0:
        return "no engine is connected"
    if num_engines == 1:
        return "the only engine does not use an older one"
    return f"no engine of {num_engines} uses an older one"


class StatusLine:
    """What is waited for, a line on stderr every few seconds; `text` says it in words. Called from the client's thread."""

    def __init__(self, text: Callable[[Any], str]) -> None:
        self._text = text
        self._say_at: float | None = None

    def __call__(self, standing: Standing | WeightsStanding) -> None:
        """Show this now, or later if it is too early to bother anybody."""
        if self._say_at is None:  # not from when this was made: the command of an update runs in between
            self._say_at = time.monotonic() + FIRST_LINE_SECONDS
        elif time.monotonic() >= self._say_at:
            self._say_at = time.monotonic() + PROGRESS_SECONDS
            say_error(self._text(standing))


def reset_waits_for(standing: Standing, recorder: str = "a hub to record it") -> str:
    """`recorder`: what a reset, or a wait for one, waits for that is not recorded yet."""
    if not standing.recorded:
        return f"epoch {standing.epoch}: waiting for {recorder}"
    late = f"{standing.laggards} of {counted(standing.engines, 'engine')}" if standing.laggards else "the proof"
    return f"epoch {standing.epoch}: waiting for {listed(standing.names) if standing.names else late}"


def push_waits_for(standing: WeightsStanding) -> str:
    if not standing.waits_for:
        return f"waiting: {standing.why}"
    return f"waiting for the new weights of {listed(standing.waits_for)}"
