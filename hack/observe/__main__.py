"""`python -m hack.observe [--check]`: write the tables of the metrics' page and the boards of Grafana, or fail when they differ."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

from hack.observe.boards import BOARDS
from hack.observe.catalog import catalog
from hack.observe.panels import as_json
from hack.observe.queries import BadQuery
from hack.observe.reference import PAGE, ROOT, page

FOLDER = Path("charts/epochkv/dashboards")


def generated() -> Iterator[tuple[Path, str]]:
    """Every generated file, with what belongs into it."""
    known = catalog()
    for board in BOARDS:
        yield FOLDER / f"{board.uid}.json", as_json(board, known)
    yield PAGE, page((ROOT / PAGE).read_text())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hack.observe", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file differs")
    check = parser.parse_args().check
    try:
        files = dict(generated())
    except BadQuery as error:
        print(error, file=sys.stderr)
        return 1
    extra = {path.relative_to(ROOT) for path in (ROOT / FOLDER).glob("*")} - files.keys()
    stale = [path for path, text in files.items() if not (ROOT / path).exists() or (ROOT / path).read_text() != text]
    for path in sorted({*stale, *extra}):
        if check:
            print(f"{path} differs from what hack/observe makes: run 'make generate'", file=sys.stderr)
        elif path in files:
            (ROOT / path).parent.mkdir(parents=True, exist_ok=True)
            (ROOT / path).write_text(files[path])
            print(f"wrote {path}")
        else:
            (ROOT / path).unlink()
            print(f"removed {path}")
    return 1 if check and (stale or extra) else 0


if __name__ == "__main__":
    sys.exit(main())
