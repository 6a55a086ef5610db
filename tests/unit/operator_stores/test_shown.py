"""What a scale-in shows in the status of its pool, and what a later process reads there."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from epochkv_operator.planning.conditions import pool_conditions
from epochkv_operator.planning.context import HubView, Observed, ScaleIn
from epochkv_operator.planning.plan import plan_pool
from epochkv_operator.planning.status import pool_status
from epochkv_operator.stores.keeper import remembered
from tests.support.planning import CONTEXT, one, pool

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
POOL = pool({"distributed": {"mooncake": {"store": {"segmentSize": "1Gi", "replicas": 2}}}})
MIB = 2**20
LEAVING = ScaleIn(
    high=4, low=2, hold=4, wanted=2, started=NOW, deadline=NOW + timedelta(seconds=600), job="7-8", moved=40 * MIB, bytes=100 * MIB
)


def shown(state: ScaleIn) -> dict[str, Any]:
    status = pool_status(POOL, Observed(hub=HubView(target=0, published=0), scale_in=state), CONTEXT, {}, NOW)
    return status


@pytest.mark.parametrize(
    ("change", "status", "reason", "says"),
    [
        ({}, "False", "Draining", ("policy-store-2, policy-store-3", "40 of 100 MiB", "at 2026-03-01T12:10:00Z")),
        ({"blocked": 3}, "False", "Draining", ("3 blocks are being read, or fit on no other store",)),
        ({"silent": "http://10.0.0.1:9003: refused"}, "False", "MasterSilent", ("http://10.0.0.1:9003: refused", "12:10:00Z")),
        ({"failed": True}, "False", "DrainFailed", ("gave up", "asked again")),
        ({"lossy": True, "hold": 2}, "False", "TimedOut", ("40 of 100 MiB", "the time was over")),
        ({"wanted": 4}, "False", "WantedBack", ("policy-store-2, policy-store-3",)),
        ({"completed": NOW, "moved": 100 * MIB}, "True", "Scaled", ("2 of 4 stores are left", "100 of 100 MiB")),
        ({"completed": NOW, "lossy": True}, "True", "ScaledWithLoss", ("40 of 100 MiB", "engines recompute")),
    ],
)
def test_the_condition(change: dict[str, Any], status: str, reason: str, says: tuple[str, ...]) -> None:
    found = next(item for item in shown(replace(LEAVING, **change))["conditions"] if item["type"] == "StoreScaled")
    assert (found["status"], found["reason"]) == (status, reason)
    for fragment in says:
        assert fragment in found["message"]


def test_without_a_scale_in_there_is_no_such_condition() -> None:
    assert "StoreScaled" not in {item.type for item in pool_conditions(POOL, Observed(hub=HubView(target=0, published=0)))}


@pytest.mark.parametrize(("change", "replicas"), [({}, 4), ({"hold": 3}, 3), ({"completed": NOW}, 2)])
def test_the_stateful_set_keeps_what_still_holds_blocks(change: dict[str, Any], replicas: int) -> None:
    plan = plan_pool(POOL, Observed(scale_in=replace(LEAVING, **change)), CONTEXT)
    assert one(list(plan.apply), "StatefulSet")["spec"]["replicas"] == replicas


def test_a_later_process_goes_on() -> None:
    found = remembered(shown(LEAVING), live=4, now=NOW + timedelta(seconds=60))
    assert found is not None
    assert (found.high, found.low, found.hold, found.started, found.job) == (4, 2, 4, NOW, "7-8")
    assert (found.moved, found.bytes, found.completed) == (40 * MIB, 100 * MIB, None)
    over = remembered(shown(replace(LEAVING, completed=NOW, lossy=True)), live=2, now=NOW)
    assert over is not None
    assert (over.completed, over.lossy) == (NOW, True)


@pytest.mark.parametrize(
    "written",
    [
        {},
        {"store": {"scaleIn": {}}},
        {"store": {"scaleIn": {"from": "many", "to": 1, "startTime": "2026-03-01T12:00:00Z"}}},
        {"store": {"scaleIn": {"from": 3, "to": 1, "startTime": "soon"}}},
    ],
)
def test_nothing_is_remembered_of_what_cannot_be_read(written: dict[str, Any]) -> None:
    assert remembered(written, live=3, now=NOW) is None


def test_what_a_person_writes_gives_neither_pods_nor_time() -> None:
    found = remembered({"store": {"scaleIn": {"from": 900, "to": 1, "startTime": "2036-01-01T00:00:00Z"}}}, live=3, now=NOW)
    assert found is not None
    assert (found.hold, found.started) == (3, NOW)
