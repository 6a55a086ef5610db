"""From a board as it is written in `boards/` to Grafana's JSON, by Grafana's own library.

Every query is checked against the table of metrics on the way, so that no panel asks for what nothing serves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, Literal

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, statetimeline, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as shared
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from hack.observe.catalog import Metric
from hack.observe.queries import BadQuery, check

Look = Literal["lines", "stack", "number", "states", "table"]
_WIDTH: Final[Mapping[Look, int]] = {"lines": 8, "stack": 8, "number": 4, "states": 12, "table": 12}
_HEIGHT: Final[Mapping[Look, int]] = {"lines": 8, "stack": 8, "number": 4, "states": 8, "table": 8}
SOURCE: Final = model.DataSourceRef("prometheus", "${datasource}")
TAG: Final = "epochkv"
_LABEL_VALUES: Final = re.compile(r"label_values\((?P<selector>.+), (?P<label>\w+)\)")


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        about: its description: what a person reads from it, in a sentence or two.
        unit: as Grafana names it.
        queries: PromQL by the legend of its series. In a table, the name of the column.
        bad_from: of a number or states: red from here on; None: never red.
        bad_below: of a number: red below this.
    """

    title: str
    about: str
    unit: str
    queries: Mapping[str, str]
    look: Look = "lines"
    width: int = 0
    bad_from: float | None = None
    bad_below: float | None = None


@dataclass(frozen=True, slots=True)
class Board:
    """One board: `variables` (name -> label_values(...)) beside the data source, and rows of panels by their title."""

    uid: str
    title: str
    about: str
    variables: Mapping[str, str]
    rows: Mapping[str, tuple[Panel, ...]]


def as_json(board: Board, catalog: Mapping[str, Metric]) -> str:
    """The board as Grafana takes it; raises BadQuery."""
    built = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.about)
        .tags([TAG])
        .refresh("30s")
        .time("now-1h", "now")
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .readonly()
        .link(_links())
        .with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    )
    for name, query in board.variables.items():
        built.with_variable(_variable(name, query, catalog))
    number = count(1)
    for title, panels in board.rows.items():
        built.with_row(dashboard.Row(title).id(next(number)))
        for panel in panels:
            built.with_panel(_panel(panel, catalog).id(next(number)))
    return json.dumps(built.build(), cls=JSONEncoder, indent=1, sort_keys=True) + "\n"


def _links() -> dashboard.DashboardLink:
    """To the other boards, with the same variables and time."""
    link = dashboard.DashboardLink("EpochKV").type(model.DashboardLinkType.DASHBOARDS).tags([TAG])
    return link.as_dropdown(True).include_vars(True).keep_time(True)


def _variable(name: str, query: str, catalog: Mapping[str, Metric]) -> dashboard.QueryVariable:
    """All is `.*`, which also finds series without the label, as those of a hub without Kubernetes."""
    found = _LABEL_VALUES.fullmatch(query)
    if found is None:
        raise BadQuery(f"variable {name}: {query!r} is not label_values(series, label)")
    if found["label"] not in check(found["selector"], catalog):
        raise BadQuery(f"variable {name}: {found['selector']} has no label {found['label']}")
    return (
        dashboard.QueryVariable(name)
        .label(name.capitalize())
        .datasource(SOURCE)
        .query({"query": query, "refId": name})
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(model.VariableOption(selected=True, text="All", value="$__all"))
    )


def _panel(panel: Panel, catalog: Mapping[str, Metric]) -> Any:
    builder: Any = _LOOKS[panel.look](panel)
    builder.title(panel.title).description(panel.about).unit(panel.unit).datasource(SOURCE)
    builder.span(panel.width or _WIDTH[panel.look]).height(_HEIGHT[panel.look])
    for place, (legend, expression) in enumerate(panel.queries.items()):
        labels = check(expression, catalog)
        if unknown := set(re.findall(r"{{\s*(\w+)\s*}}", legend)) - labels:
            raise BadQuery(f"{panel.title}: no series of {expression!r} has the label {', '.join(sorted(unknown))} of its legend")
        query = prometheus.Dataquery().expr(expression).legend_format(legend).ref_id(chr(ord("A") + place)).datasource(SOURCE)
        if panel.look in {"number", "table"}:
            query.instant()
        if panel.look == "table":
            query.format(PromQueryFormat.TABLE)
        builder.with_target(query)
    return builder


def _lines(panel: Panel) -> timeseries.Panel:
    legend = common.VizLegendOptions().display_mode(shared.LegendDisplayMode.LIST).placement(shared.LegendPlacement.BOTTOM)
    tooltip = common.VizTooltipOptions().mode(shared.TooltipDisplayMode.MULTI).sort(shared.SortOrder.DESCENDING)
    return (
        timeseries.Panel()
        .legend(legend.show_legend(True))
        .tooltip(tooltip)
        .fill_opacity(10)
        .show_points(shared.VisibilityMode.NEVER)
        .min(0)
    )


def _stack(panel: Panel) -> timeseries.Panel:
    return _lines(panel).stacking(common.StackingConfig().mode(shared.StackingMode.NORMAL)).fill_opacity(40)


def _number(panel: Panel) -> stat.Panel:
    values = common.ReduceDataOptions().calcs(["lastNotNull"])
    return stat.Panel().reduce_options(values).graph_mode(shared.BigValueGraphMode.NONE).thresholds(_thresholds(panel))


def _states(panel: Panel) -> statetimeline.Panel:
    return statetimeline.Panel().thresholds(_thresholds(panel)).show_value(shared.VisibilityMode.NEVER).merge_values(True)


def _table(panel: Panel) -> table.Panel:
    """One line for the series of all queries that have the same labels, one column for each query."""
    names = {f"Value #{chr(ord('A') + place)}": name for place, name in enumerate(panel.queries)}
    organize = {"excludeByName": {"Time": True, "__name__": True}, "renameByName": names}
    merged = table.Panel().with_transformation(model.DataTransformerConfig(id_val="merge", options={}))
    return merged.with_transformation(model.DataTransformerConfig(id_val="organize", options=organize))


def _thresholds(panel: Panel) -> dashboard.ThresholdsConfig:
    steps = [model.Threshold(value=None, color="red" if panel.bad_below is not None else "green")]
    if panel.bad_below is not None:
        steps.append(model.Threshold(value=panel.bad_below, color="green"))
    if panel.bad_from is not None:
        steps.append(model.Threshold(value=panel.bad_from, color="red"))
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)


_LOOKS: Final = {"lines": _lines, "stack": _stack, "number": _number, "states": _states, "table": _table}
