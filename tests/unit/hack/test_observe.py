"""Boards and the metrics' page: what the table of metrics lacks cannot be asked for."""

import re

from hack.generated import ROOT
from hack.observe.catalog import catalog
from hack.observe.queries import check
from hack.observe.reference import PAGE


def test_queries_of_the_documentation_ask_for_what_exists() -> None:
    asked = [cell for line in (ROOT / PAGE).read_text().splitlines() if line.count("|") == 3 for cell in re.findall(r"\| `(.+)` \|$", line)]
    queries = [text for text in asked if re.search(r"==|rate|increase", text)]
    assert len(queries) >= 7
    known = catalog()
    for query in queries:
        check(query, known)
