"""`python -m hack.observe [--check]`: write the tables of the metrics' page, and check that the boards of Grafana ask for what exists.

`--check` writes nothing, and fails when the page differs, too.
"""

from __future__ import annotations

import argparse
import sys

from hack.observe.boards import check_all
from hack.observe.catalog import catalog
from hack.observe.queries import BadQuery
from hack.observe.reference import PAGE, ROOT, page


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hack.observe", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page differs")
    check = parser.parse_args().check
    text = (ROOT / PAGE).read_text()
    if (made := page(text)) != text:
        if check:
            print(f"{PAGE} differs from what hack/observe makes: run 'make generate'", file=sys.stderr)
            return 1
        (ROOT / PAGE).write_text(made)
        print(f"wrote {PAGE}")
    try:
        check_all(ROOT, catalog())
    except BadQuery as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
