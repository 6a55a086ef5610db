"""What a user reads about engines that lack tiers: the condition of the engine and of its pool, and that it never hides readiness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from epochkv_operator.planning.conditions import engine_conditions, pool_conditions
from epochkv_operator.planning.context import HubEngine, HubView, Observed
from epochkv_operator.planning.status import engine_status, pool_status
from tests.support.planning import CONTEXT, engine, pool

Json = dict[str, Any]
NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
POOL, ROLLOUT = pool("l1"), engine()
LABELS = {"epochkv.io/engine": "rollout", "app.kubernetes.io/component": "engine"}
PODS = [{"kind": "Pod", "metadata": {"name": name, "namespace": "rl", "labels": LABELS}, "status": {}} for name in ("p0", "p1")]
MAMBA, POLICY = "no tier is used: KV cache group 0", "loads are off: kv_load_failure_policy is 'fail'"


def heard(name: str, reason: str = "", note: str = "", **extra: Any) -> HubEngine:
    return HubEngine("rollout", name, epoch=7, weights="a" * 32, tiers_off=reason, tiers_note=note, **{"rank": 0, **extra})


def view(*engines: HubEngine, **more: Any) -> HubView:
    return HubView(7, 7, engines, **more)


def of_engine(hub: HubView | None, pods: Sequence[Json] = PODS, **changes: Any) -> tuple[str, str, str]:
    found = {item.type: item for item in engine_conditions(engine(**changes), POOL, Observed((), pods, hub))}
    return found["TiersUsable"].status, found["TiersUsable"].reason, found["TiersUsable"].message


def of_pool(hub: HubView | None) -> tuple[str, str, str]:
    found = {item.type: item for item in pool_conditions(POOL, Observed(hub=hub))}
    if hub is not None:
        assert found["Ready"].status == "True", "whoever lacks tiers serves correctly"
    return found["TiersUsable"].status, found["TiersUsable"].reason, found["TiersUsable"].message


@pytest.mark.parametrize(
    ("engines", "reason", "says"),
    [
        ([heard("p0"), heard("p1")], "Usable", ""),
        ([heard("p0"), heard("p1", "LayoutUnsupported", MAMBA)], "LayoutUnsupported", f"p1: {MAMBA}"),
        ([heard("p1", "LayoutUnsupported", MAMBA), heard("p0", "LayoutUnsupported", MAMBA)], "LayoutUnsupported", f"p0, p1: {MAMBA}"),
        ([heard("p0", "SavesOnly", POLICY), heard("p1", "TiersOff", "why")], "TiersOff", f"p0: {POLICY}; p1: why"),
        ([heard("p0", "TiersOff", "why"), heard("p1", "TiersBroken", "an error")], "TiersBroken", "p0: why; p1: an error"),
        ([heard("p0", "L1Only", "L2 is off"), heard("p0", "L1Only", "L2 is off", rank=1)], "L1Only", "p0, p0/1: L2 is off"),
        ([heard("p0", "SomethingNewer", "why")], "TiersOff", "p0: why"),
        ([heard("p0", "TiersOff")], "TiersOff", "p0: it does not say why"),
        ([heard("p0"), heard("p1", "TiersOff", "why", live=False)], "Usable", ""),
    ],
)
def test_engines_that_lack_tiers_are_named_with_what_to_change(engines: list[HubEngine], reason: str, says: str) -> None:
    for status, found, message in (of_engine(view(*engines)), of_pool(view(*engines))):
        assert (status, found) == ("True" if reason == "Usable" else "False", reason)
        assert message == says or not says


def test_nobody_knows_before_a_replica_was_heard_from() -> None:
    assert of_engine(None)[:2] == of_pool(None)[:2] == ("Unknown", "HubUnavailable")
    silent = heard("p0", live=False)
    for hub in (view(), view(silent), view(heard("elsewhere", "TiersOff", "why"))):
        assert of_engine(hub)[:2] == ("Unknown", "NotReporting")
    assert of_pool(view(silent))[:2] == ("True", "Usable")
    idle = {"model": {"name": "tiny"}, "poolRef": {"name": "policy"}, "replicas": 0}
    assert of_engine(view(), (), spec=idle)[:2] == ("True", "ScaledToZero")


def test_an_engine_without_a_pool_has_no_tiers_to_speak_of() -> None:
    for spec, target in (("no-pool", None), ("minimal", None), ("minimal", pool("l1", deletionTimestamp="2026-01-01T00:00:00Z"))):
        kinds = {item.type for item in engine_conditions(engine(spec), target, Observed((), PODS, view(heard("p0", "TiersOff", "why"))))}
        assert "TiersUsable" not in kinds


def test_it_leaves_an_engines_readiness_alone() -> None:
    hub = view(heard("p0", "TiersOff", "why"), heard("p1"))
    ready, *others = engine_conditions(ROLLOUT, POOL, Observed((), PODS, hub))
    plain = engine_conditions(ROLLOUT, POOL, Observed((), PODS, view(heard("p0"), heard("p1"))))
    assert [ready, *others[:-1]] == plain[:-1]


def test_many_reasons_and_long_ones_fit_into_a_status() -> None:
    hub = view(*(heard(f"e{number}", "TiersOff", f"{number} " + "x" * 1000) for number in range(20)))
    assert of_pool(hub)[2].count("; ") == 4
    status = engine_status(ROLLOUT, POOL, Observed((), PODS, view(heard("p0", "TiersOff", "x" * 9000))), {}, NOW)
    assert {item["type"]: len(item["message"]) for item in status["conditions"]}["TiersUsable"] == 4096


def test_a_hub_that_has_not_heard_from_everybody_takes_nothing_back() -> None:
    told = engine_status(ROLLOUT, POOL, Observed((), PODS, view(heard("p0"), heard("p1", "TiersOff", "why"))), {}, NOW)
    young = replace(view(heard("p0")), complete=False)
    again = engine_status(ROLLOUT, POOL, Observed((), PODS, young), told, NOW)
    assert {item["type"]: item["message"] for item in again["conditions"]}["TiersUsable"] == "p1: why"
    told = pool_status(POOL, Observed(hub=view(heard("p0"), heard("p1", "TiersOff", "why"))), CONTEXT, {}, NOW)
    again = pool_status(POOL, Observed(hub=young), CONTEXT, told, NOW)
    assert {item["type"]: item["message"] for item in again["conditions"]}["TiersUsable"] == "p1: why"
