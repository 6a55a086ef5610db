"""Whether a PromQL expression asks for what exists: its series, their labels, and the values of labels that are all known."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

import promql_parser as promql

from hack.observe.catalog import Metric

_DURATION: Final = re.compile(r"\$__(?:rate_interval|interval|range)\b")
_BELOW: Final = ("lhs", "rhs", "expr", "vector_selector", "args")


class BadQuery(ValueError):
    """The expression does not parse, or names what does not exist; the message says what."""


def parse(expression: str) -> Any:
    """The parsed expression; Grafana's durations count as five minutes."""
    try:
        return promql.parse(_DURATION.sub("5m", expression))
    except ValueError as error:
        raise BadQuery(f"{expression!r} does not parse: {error}") from error


def parts(node: Any) -> Iterator[Any]:
    """The node and all below it."""
    yield node
    for name in _BELOW:
        below = getattr(node, name, None)
        for part in below if isinstance(below, list) else [below] if below is not None else []:
            yield from parts(part)


def selectors(expression: str) -> list[Any]:
    """Everything that the expression selects."""
    return [node for node in parts(parse(expression)) if isinstance(node, promql.VectorSelector)]


def check(expression: str, catalog: Mapping[str, Metric]) -> set[str]:
    """Raise BadQuery, or return the labels that the selected series may have."""
    labels: set[str] = set()
    for selector in selectors(expression):
        series = str(selector.name)
        metric = catalog.get(series)
        if metric is None:
            raise BadQuery(f"{expression!r} asks for {series}, which nothing serves: see hack/observe/catalog.py")
        labels |= metric.allowed(series)
        for matcher in selector.matchers.matchers:
            _check_matcher(expression, matcher.name, matcher.value, series, metric)
    for node in parts(parse(expression)):
        modifier = getattr(node, "modifier", None)
        named = getattr(modifier, "labels", None) or getattr(getattr(modifier, "matching", None), "labels", None) or ()
        if unknown := set(named) - labels:
            raise BadQuery(f"{expression!r} goes by {', '.join(sorted(unknown))}, which none of its series has")
    return labels


def _check_matcher(expression: str, label: str, value: str, series: str, metric: Metric) -> None:
    if label not in metric.allowed(series):
        raise BadQuery(f"{expression!r}: {series} has no label {label}")
    known = metric.labels.get(label, ())
    if known and not value.startswith("$") and (unknown := set(value.split("|")) - set(known)):
        raise BadQuery(f"{expression!r}: {label} of {series} is never {', '.join(sorted(unknown))}; it is one of {', '.join(known)}")
