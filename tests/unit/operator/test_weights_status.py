"""What a user reads about weights: the condition, the column, the list; and that reading it twice writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from epochkv_operator.planning.conditions import pool_conditions
from epochkv_operator.planning.context import HubEngine, HubView, Observed, Outlier, WeightsGroup
from epochkv_operator.planning.status import engine_status, pool_status, weights_summary
from tests.support.planning import CONTEXT, engine, pool

Json = dict[str, Any]
NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
A, B = "3f2a9c1e" + "0" * 24, "77aa00ff" + "1" * 24
POOL, ROLLOUT = pool("l1"), engine()


def held(name: str, weights: str | None = A, **extra: Any) -> HubEngine:
    return HubEngine("rollout", name, 0, 7, weights=weights, **extra)


def group(id: str, engines: int, seconds_ago: float = 0.0, label: str = "") -> WeightsGroup:
    return WeightsGroup(id, engines, NOW - timedelta(seconds=seconds_ago), label)


def view(engines: Sequence[HubEngine], groups: Sequence[WeightsGroup] = (), **more: Any) -> HubView:
    return HubView(7, 7, engines, weights=groups, **more)


EQUAL = view([held("p0"), held("p1")], [group(A, 2, 10)])
LATE = view([held("p0"), held("p1", B)], [group(A, 1, 5, "step-42"), group(B, 1, 900)], outliers=[Outlier("p1", B, A)])


def converged(hub: HubView | None) -> tuple[str, str, str]:
    found = next(item for item in pool_conditions(POOL, Observed(hub=hub)) if item.type == "WeightsConverged")
    return found.status, found.reason, found.message


@pytest.mark.parametrize(
    ("hub", "status", "reason", "says"),
    [
        (None, "Unknown", "HubUnavailable", "no hub leads this pool"),
        (view([]), "True", "Converged", "no engine is connected"),
        (EQUAL, "True", "Converged", "all engines hold 3f2a9c1e"),
        (replace(EQUAL, weights=[group(A, 2, label="step-42")]), "True", "Converged", "all engines hold 3f2a9c1e (step-42)"),
        # Two kinds of engines: their digests are never equal, and need not be.
        (view([held("p0"), held("p1", B, fingerprint="tp4")]), "True", "Converged", "all engines hold 3f2a9c1e, 77aa00ff"),
        (
            LATE,
            "False",
            "Updating",
            "engines have held different weights for less than 60 s: p1 holds 77aa00ff instead of 3f2a9c1e (step-42)",
        ),
        (
            replace(LATE, overdue=True),
            "False",
            "Diverged",
            "not all engines hold the weights that most hold: p1 holds 77aa00ff instead of 3f2a9c1e (step-42); push to them again;",
        ),
        (
            view([held("p0", None, weights_note="rank 1: no answer"), held("p1", None), held("dead", None, live=False)]),
            "Unknown",
            "Unknown",
            "the weights of these engines are not known, and they share nothing: p0 (rank 1: no answer), p1 (it has not said yet)",
        ),
        # That some are apart is known, whatever the others hold.
        (
            replace(LATE, engines=[*LATE.engines, held("p2", None, weights_note="asleep")], overdue=True),
            "False",
            "Diverged",
            "equal weights; the weights of these engines are not known, and they share nothing: p2 (asleep)",
        ),
        (replace(LATE, engines=[*LATE.engines, held("p2", None, weights_note="asleep")]), "Unknown", "Unknown", "p2 (asleep)"),
    ],
)
def test_weights_converged(hub: HubView | None, status: str, reason: str, says: str) -> None:
    found = converged(hub)
    assert found[:2] == (status, reason)
    assert says in found[2]
    if hub is not None:  # whoever holds what serves correctly
        assert next(item for item in pool_conditions(POOL, Observed(hub=hub)) if item.type == "Ready").status == "True"


def test_five_outliers_are_named_and_the_others_counted() -> None:
    outliers = [Outlier(f"p{number}", B, A) for number in range(9)]
    text = converged(replace(LATE, outliers=outliers, overdue=True))[2]
    assert "p4 holds" in text
    assert "p5 holds" not in text
    assert "and 4 more" in text


@pytest.mark.parametrize(
    ("engines", "outliers", "column"),
    [
        ([], [], ""),
        ([held(f"p{n}") for n in range(16)], [], "3f2a9c1e 16/16"),
        ([*[held(f"p{n}") for n in range(15)], held("late", B)], [Outlier("late", B, A)], "3f2a9c1e 15/16"),
        ([held("p0"), held("p1", None)], [], "3f2a9c1e 1/2"),
        ([held("p0", None), held("p1", None)], [], "unknown 0/2"),
        ([held("p0"), held("dead", B, live=False)], [], "3f2a9c1e 1/1"),
        # Of as many, the hub has chosen the newer.
        ([held("p0"), held("p1", B)], [Outlier("p1", B, A)], "3f2a9c1e 1/2"),
        ([held("p0"), held("p1", B)], [Outlier("p0", A, B)], "77aa00ff 1/2"),
        ([held("p0"), held("p1", B, fingerprint="tp4"), held("p2", B, fingerprint="tp4")], [], "3f2a9c1e 1/1, 77aa00ff 2/2"),
    ],
)
def test_the_column(engines: list[HubEngine], outliers: list[Outlier], column: str) -> None:
    assert weights_summary(engines, view(engines, outliers=outliers)) == column


def status(hub: HubView | None, previous: Json, now: datetime = NOW) -> Json:
    return pool_status(POOL, Observed(hub=hub), CONTEXT, previous, now)


def test_the_list_and_the_column_are_in_the_status() -> None:
    found = status(LATE, {})
    assert found["weights"] == [
        {"id": A, "label": "step-42", "engines": 1, "since": "2026-03-01T11:59:55Z"},
        {"id": B, "engines": 1, "since": "2026-03-01T11:45:00Z"},
    ]
    assert found["weightsSummary"] == "3f2a9c1e 1/2"
    many = [group(f"{number:032x}", 1) for number in range(20)]
    assert len(status(replace(LATE, weights=many), {})["weights"]) == 8


def test_times_are_written_once_whatever_clock_and_hub_come_after() -> None:
    """Ages are told anew with every look; a pool in which nothing changes is not written to."""
    first = status(LATE, {})
    later = NOW + timedelta(hours=1)
    drifted = [replace(found, since=found.since + timedelta(seconds=2)) for found in LATE.weights]
    assert status(replace(LATE, weights=drifted), first, later) == first
    successor = [replace(found, since=later) for found in LATE.weights]  # a new hub has known them since it began
    assert status(replace(LATE, weights=successor), first, later) == first
    rolled_back = status(replace(LATE, weights=[group(A, 2)]), first, later)
    assert [found["id"] for found in rolled_back["weights"]] == [A]
    back = status(replace(LATE, weights=successor), rolled_back, later)
    assert [found["since"] for found in back["weights"]] == ["2026-03-01T11:59:55Z", "2026-03-01T13:00:00Z"]


def reason(found: Json) -> tuple[str, str]:
    condition = next(item for item in found["conditions"] if item["type"] == "WeightsConverged")
    return condition["status"], condition["reason"]


def test_a_hub_that_has_not_heard_from_everybody_takes_nothing_back() -> None:
    told = status(replace(LATE, overdue=True), {})
    for known in ([], LATE.engines[:1]):
        young = replace(LATE, engines=known, weights=LATE.weights[: len(known)], outliers=(), complete=False)
        assert status(young, told) == told
    assert status(None, told)["weights"] == told["weights"]
    assert status(None, told)["weightsSummary"] == told["weightsSummary"]


def test_the_engine_object_shows_what_its_own_pods_hold() -> None:
    pods = [{"kind": "Pod", "metadata": {"name": name, "namespace": "rl", "labels": LABELS}, "status": {}} for name in ("p0", "p1")]
    hub = replace(LATE, engines=[*LATE.engines, held("elsewhere", B)])
    assert engine_status(ROLLOUT, POOL, Observed((), pods, hub), {}, NOW)["weights"] == "3f2a9c1e 1/2"
    assert "weights" not in engine_status(ROLLOUT, None, Observed((), pods), {}, NOW)


LABELS = {"epochkv.io/engine": "rollout", "app.kubernetes.io/component": "engine"}
