"""Whether the boards of Grafana ask for what exists: every query, the labels of its legend, and the variables."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from hack.observe.catalog import Metric
from hack.observe.queries import BadQuery, check

FOLDER: Final = Path("charts/epochkv/dashboards")
_LABEL_VALUES: Final = re.compile(r"label_values\((?P<selector>.+), (?P<label>\w+)\)")


def check_board(board: Mapping[str, Any], catalog: Mapping[str, Metric]) -> None:
    """Raise BadQuery where a board, as Grafana takes it, asks for what nothing serves."""
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            _check_variable(variable["name"], variable["query"]["query"], catalog)
    variables = {variable["name"] for variable in board["templating"]["list"]} | {"__rate_interval"}
    for panel in board["panels"]:
        for target in panel.get("targets", ()):
            expression, legend = target["expr"], target["legendFormat"]
            if unknown := set(re.findall(r"\$(\w+)", expression)) - variables:
                raise BadQuery(f"{panel['title']}: {expression!r} names ${', $'.join(sorted(unknown))}, which the board has not")
            if unknown := set(re.findall(r"{{\s*(\w+)\s*}}", legend)) - check(expression, catalog):
                raise BadQuery(f"{panel['title']}: no series of {expression!r} has the label {', '.join(sorted(unknown))} of its legend")


def _check_variable(name: str, query: str, catalog: Mapping[str, Metric]) -> None:
    found = _LABEL_VALUES.fullmatch(query)
    if found is None:
        raise BadQuery(f"variable {name}: {query!r} is not label_values(series, label)")
    if found["label"] not in check(found["selector"], catalog):
        raise BadQuery(f"variable {name}: {found['selector']} has no label {found['label']}")


def check_all(root: Path, catalog: Mapping[str, Metric]) -> None:
    """Raise BadQuery for the first board that is wrong."""
    for path in sorted((root / FOLDER).glob("*.json")):
        try:
            check_board(json.loads(path.read_text()), catalog)
        except BadQuery as error:
            raise BadQuery(f"{path.relative_to(root)}: {error}") from error
