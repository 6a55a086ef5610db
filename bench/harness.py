"""The command line of a benchmark with named rows: choose rows, say how long is left, write JSON after each, print the table."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from bench.report import Progress, Row, print_table, write_json
from hack.standalone.process import nothing_left


@dataclass(frozen=True)
class Entry:
    """A row one can ask for. `seconds`: about how long it takes with the default options."""

    about: str
    seconds: float
    run: Callable[[argparse.Namespace, Progress], Row]


def run(benchmark: str, doc: str | None, entries: Mapping[str, Entry], add_arguments: Callable[[argparse.ArgumentParser], None]) -> int:
    """Measure the rows named on the command line (none: all). The exit status is 1 if one could not be measured."""
    width = max(len(name) for name in entries)
    listing = "\n".join(f"  {name:{width}} {entry.about}" for name, entry in entries.items())
    parser = argparse.ArgumentParser(
        prog=f"python -m bench.{benchmark}", description=f"{doc}\nrows:\n{listing}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="*", metavar="ROW", help="rows to measure (default: all)")
    add_arguments(parser)
    parser.add_argument(
        "--json", type=Path, default=Path(f".build/bench-{benchmark}.json"), help="where everything is written (default %(default)s)"
    )
    arguments = parser.parse_args()
    names = arguments.rows or list(entries)
    if unknown := [name for name in names if name not in entries]:
        parser.error(f"unknown row {', '.join(unknown)}; there are: {', '.join(entries)}")
    with nothing_left(lambda line: print(line, file=sys.stderr, flush=True)):
        done = measure(names, entries, arguments, benchmark)
    return 0 if len(done) == len(names) else 1


def measure(names: Sequence[str], entries: Mapping[str, Entry], arguments: argparse.Namespace, benchmark: str) -> list[Row]:
    """The rows that could be measured, printed and written."""
    progress = Progress()
    done: list[Row] = []
    began = time.monotonic()
    for index, name in enumerate(names):
        left = sum(entries[later].seconds for later in names[index:])
        progress.row(index, len(names), entries[name].about, entries[name].seconds, left)
        load = os.getloadavg()[0]
        try:
            row = entries[name].run(arguments, progress)
            done.append(replace(row, details={**row.details, "load before and after": [load, os.getloadavg()[0]]}))
        except Exception as error:
            print(f"    {name} could not be measured: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        write_json(done, arguments.json, benchmark)
    print_table(done, benchmark)
    print(f"{len(done)} of {len(names)} rows measured in {time.monotonic() - began:.0f} s; written to {arguments.json}")
    return done
