"""`python -m hack.observe [--check]`: write the tables of the metrics' page. Check that its queries and the boards of Grafana ask for what
exists.

`--check` writes nothing, and fails when the page differs, too.
"""

from __future__ import annotations

import sys

from hack.generated import ROOT, keep
from hack.observe.boards import check_all
from hack.observe.catalog import catalog
from hack.observe.queries import BadQuery, check
from hack.observe.reference import PAGE, page, queries


def main() -> int:
    status = keep("hack.observe", __doc__, {PAGE: page((ROOT / PAGE).read_text(encoding="utf-8"))})
    try:
        known = catalog()
        check_all(ROOT, known)
        for query in queries((ROOT / PAGE).read_text(encoding="utf-8")):
            check(query, known)
    except BadQuery as error:
        print(error, file=sys.stderr)
        return 1
    return status


if __name__ == "__main__":
    sys.exit(main())
