"""What `epochkv doctor` makes of two looks at a pool. Pure."""

from __future__ import annotations

from typing import Any

import pytest

from epochkv_fence.client import Engine, PoolStatus
from epochkv_fence.doctor import judging
from epochkv_fence.doctor.finding import Finding, Level, exit_status, summary
from epochkv_fence.doctor.looking import HubLook
from epochkv_fence.doctor.plugins import check_plugins
from epochkv_fence.doctor.store import AdminLook, judge_admins

A, B = "a" * 32, "b" * 32
RUNS = {"epochkv": "1.0.0", "vllm": "0.32.0", "mooncake": "0.3.13"}
WORDS = judging.standalone_words("policy/client")


def engine(name: str = "e0", **fields: Any) -> Engine:
    known: dict[str, Any] = {
        "boot": name.encode().hex(), "name": name, "engine": name, "pod": "", "rank": 0, "epoch": 4, "state": "use", "carried": 0,
        "age_seconds": 100.0, "silent_seconds": 1.0, "fingerprint": "f", "weights": A, "weights_since_s": 500.0, "versions": RUNS,
    }  # fmt: skip
    return Engine(**{**known, **fields})


def pool(*engines: Engine, **fields: Any) -> PoolStatus:
    known: dict[str, Any] = {"name": "policy", "uid": "u", "target": 4, "published": 4, "origin": "Spec", "lease_seconds": 30.0}
    return PoolStatus(**{**known, "engines": engines, "hub_version": "1.0.0", **fields})


def looks(first: PoolStatus, second: PoolStatus | None = None, seconds: float = 2.0) -> HubLook:
    return HubLook("tcp://hub:7700", first, 50.0, second or first, 50.0 + seconds, 0.001)


def levels(found: list[Finding]) -> list[Level]:
    return [finding.level for finding in found]


def said(found: list[Finding]) -> str:
    return "; ".join(finding.text for finding in found)


def test_a_pool_that_is_well_says_so_in_one_line_of_each_check() -> None:
    look = looks(
        pool(engine("e0"), engine("e1", state="private")), pool(engine("e0", silent_seconds=3.0), engine("e1", silent_seconds=3.0))
    )
    found = [
        *judging.judge_epoch(look, WORDS), *judging.judge_engines(look, WORDS), *judging.judge_weights(look), *judging.judge_tiers(look),
        *judging.judge_versions(look, "1.0.0"), *judging.judge_clocks(look),
    ]  # fmt: skip
    assert levels(found) == [Level.OK] * 6
    assert exit_status(found) == 0


def test_an_open_reset_names_who_it_waits_for_and_its_bound() -> None:
    look = looks(pool(engine(), engine("late", epoch=3, state="behind", silent_seconds=12.0), target=5, published=4))
    (found,) = judging.judge_epoch(look, WORDS)
    assert (found.level, found.fix) == (Level.WARNING, "epochkv wait 5 --config policy/client")
    assert "late (heard 12 s ago)" in found.text
    assert "33 s at most" in found.text


def test_an_engine_below_the_published_epoch_in_both_looks_stalls() -> None:
    stalled = engine("stalled", epoch=3, state="behind")
    joining = engine("joining", epoch=None, state="behind")
    (found,) = judging.judge_engines(looks(pool(engine(), stalled), pool(engine(), stalled, joining)), WORDS)
    assert (found.level, "stalled" in found.text, "epoch 3" in found.text) == (Level.WRONG, True, True)
    waits = looks(pool(engine(), stalled, target=4, published=3))
    assert levels(judging.judge_engines(waits, WORDS)) == [Level.OK], "while the reset is open, the epoch's check tells"
    caught_up = looks(pool(stalled), pool(engine("stalled")))
    assert levels(judging.judge_engines(caught_up, WORDS)) == [Level.OK]


def test_silent_doubled_and_ignorant_engines() -> None:
    (silent,) = judging.judge_engines(looks(pool(engine(silent_seconds=25.0))), WORDS)
    assert (silent.level, "ends in 5 s" in silent.text) == (Level.WARNING, True)
    twins = [engine("twin", boot="00"), engine("twin", boot="01")]
    (doubled,) = judging.judge_engines(looks(pool(*twins)), WORDS)
    assert (doubled.level, "2 live processes report as twin" in doubled.text) == (Level.WARNING, True)
    replaced = [engine("twin", boot="00", silent_seconds=21.0), engine("twin", boot="01")]
    assert "live processes" not in said(judging.judge_engines(looks(pool(*replaced)), WORDS)), "a lease that runs out is no twin"
    (ignorant,) = judging.judge_engines(looks(pool(engine(state="unknown", weights="", weights_note="it sleeps"))), WORDS)
    assert (ignorant.level, "it sleeps" in ignorant.text) == (Level.WARNING, True)
    assert levels(judging.judge_engines(looks(pool()), WORDS)) == [Level.WARNING]
    assert "has only begun to lead" in said(judging.judge_engines(looks(pool(settling_seconds=9.0)), WORDS))


@pytest.mark.parametrize(("since", "level"), [(5.0, Level.WARNING), (61.0, Level.WRONG)])
def test_different_weights_are_wrong_when_no_push_explains_them(since: float, level: Level) -> None:
    look = looks(pool(engine("e0"), engine("e1", weights=B, weights_since_s=since)))
    (found,) = judging.judge_weights(look)
    assert found.level is level
    assert "e1" in found.text
    kinds = looks(pool(engine("e0"), engine("e1", weights=B, fingerprint="g")))
    assert levels(judging.judge_weights(kinds)) == [Level.OK], "engines of two kinds need not be equal"


def test_engines_without_tiers_are_told_by_their_reason() -> None:
    first = engine("e0", tiers_off="TiersBroken", tiers_note="rank 0 cannot copy")
    others = [engine(name, tiers_off="L1Only", tiers_note="hashes have a random seed") for name in ("e1", "e2")]
    found = judging.judge_tiers(looks(pool(first, *others, engine("e3"))))
    assert sorted(levels(found)) == sorted([Level.WRONG, Level.WARNING])
    assert "e1, e2: L1Only: hashes have a random seed" in said(found)


def test_versions_that_differ() -> None:
    def versions(*engines: Engine, here: str = "1.0.0", hub: str = "1.0.0") -> list[Finding]:
        return judging.judge_versions(looks(pool(*engines, hub_version=hub)), here)

    assert "pip install 'epochkv[trainer]==1.0.0'" in [finding.fix for finding in versions(engine(), here="1.1.0")]
    assert levels(versions(engine(), hub="")) == [Level.WARNING]
    assert "older than this" in said(versions(engine(versions={})))
    mixed = versions(engine("e0"), engine("e1", versions={**RUNS, "mooncake": "0.3.12"}))
    assert (levels(mixed), "0.3.12: e1; 0.3.13: e0" in said(mixed)) == ([Level.WRONG], True)
    assert levels(versions(engine("e0"), engine("e1", versions={**RUNS, "vllm": "0.31.0"}))) == [Level.WARNING]
    assert "the hub runs EpochKV 1.0.0, and the engines 2.0.0" in said(versions(engine(versions={**RUNS, "epochkv": "2.0.0"})))
    assert levels(versions(engine(), here="")) == [Level.OK], "a command that runs from its source has no version"


def beats(engine_seconds: float, hub_seconds: float, lease: float = 30.0) -> HubLook:
    """An engine whose two newest heartbeats were so far apart by its own clock and by the hub's."""
    first = engine("slow", age_seconds=100.0, silent_seconds=hub_seconds - 1.0)
    second = engine("slow", age_seconds=100.0 + engine_seconds, silent_seconds=1.0)
    return looks(pool(first, lease_seconds=lease), pool(second, lease_seconds=lease))


def test_a_clock_that_runs_slower_than_the_fence_allows() -> None:
    (found,) = judging.judge_clocks(beats(8.5, 10.0))
    assert (found.level, "lost 1.5 s in 10.0 s" in found.text) == (Level.WARNING, True)
    for well in ((9.8, 10.0), (9.3, 10.0), (12.0, 10.0), (1.5, 1.9)):  # in time; within the margin; fast is safe; one late message
        assert levels(judging.judge_clocks(beats(*well))) == [Level.OK], well
    assert levels(judging.judge_clocks(beats(8.5, 10.0, lease=2.0))) == [Level.OK], "the margin is a second, half of this lease"


def test_the_hubs_clock_against_ours() -> None:
    def silence(grown: float) -> list[Finding]:
        return judging.judge_clocks(looks(pool(engine()), pool(engine(silent_seconds=1.0 + grown))))

    assert levels(silence(1.0)) == [Level.WARNING]
    assert "50%" in said(silence(1.0))
    assert levels(silence(2.01)) == [Level.OK]
    assert "not measured" in said(judging.judge_clocks(looks(pool())))


def test_masters_of_a_store() -> None:
    serving, standby = AdminLook("http://a:9003", allocated_bytes=2**30, capacity_bytes=2**31), AdminLook("http://b:9003", standby=True)
    assert levels(judge_admins([serving, standby])) == [Level.OK, Level.OK]
    assert "1.0 of 2.0 GiB" in said(judge_admins([serving]))
    assert levels(judge_admins([standby])) == [Level.WRONG]
    assert levels(judge_admins([AdminLook("http://a:9003", allocated_bytes=0.0, capacity_bytes=0.0)])) == [Level.WRONG]


def test_the_exit_status_prefers_what_is_wrong() -> None:
    ok, warning, unknown, wrong = (Finding("x", level, "") for level in (Level.OK, Level.WARNING, Level.UNKNOWN, Level.WRONG))
    assert exit_status([ok, warning]) == 0
    assert exit_status([ok, unknown]) == 2
    assert exit_status([wrong, unknown]) == 1
    assert summary([ok, ok, warning, warning, wrong]) == "1 wrong, 2 warnings, 2 ok"


@pytest.mark.parametrize(
    ("environ", "there", "level", "said", "fix"),
    [
        ({"EPOCHKV_ATTACH": "1"}, ["epochkv"], Level.OK, "no variable keeps", ""),
        ({"EPOCHKV_ATTACH": "1"}, ["other"], Level.WRONG, "the connector is not installed here", "pip install"),
        ({"EPOCHKV_ATTACH": "yes"}, ["epochkv"], Level.WRONG, "EPOCHKV_ATTACH is 'yes'; it must be 1", "export EPOCHKV_ATTACH=1"),
        ({"EPOCHKV_ATTACH": "1", "VLLM_PLUGINS": "a,epochkv"}, ["epochkv"], Level.OK, "no variable keeps", ""),
        (
            {"EPOCHKV_ATTACH": "1", "VLLM_PLUGINS": "a,b"},
            ["epochkv"],
            Level.WRONG,
            "VLLM_PLUGINS is 'a,b', so vLLM does not load epochkv: EPOCHKV_ATTACH does nothing",
            "export VLLM_PLUGINS=a,b,epochkv",
        ),
        ({"EPOCHKV_LOCAL_CAPACITY": "abc"}, ["epochkv"], Level.WRONG, "EPOCHKV_LOCAL_CAPACITY is 'abc'; it must be a size", "=64Gi"),
        ({"EPOCHKV_LOCAL_CAPACITY": "64Gi"}, ["epochkv"], Level.OK, "no variable keeps", ""),
        ({"EPOCHKV_FENCE": "yes"}, ["epochkv"], Level.WRONG, "EPOCHKV_FENCE is 'yes'; it must be 1", "export EPOCHKV_FENCE=1"),
        (
            {"EPOCHKV_FENCE": "1", "VLLM_PLUGINS": "foo"},
            ["epochkv"],
            Level.WRONG,
            "EPOCHKV_FENCE does nothing, and engines with connectors of vLLM find KV of older weights",
            "export VLLM_PLUGINS=foo,epochkv",
        ),
        ({"VLLM_PLUGINS": ""}, ["epochkv"], Level.WRONG, "engines do not know their weights", "export VLLM_PLUGINS=epochkv"),
        ({"VERL_USE_EXTERNAL_PLUGINS": "auto"}, [], Level.OK, "no variable keeps", ""),
        ({"VERL_USE_EXTERNAL_PLUGINS": "x, EpochKV"}, [], Level.OK, "no variable keeps", ""),
        ({"VERL_USE_EXTERNAL_PLUGINS": "x"}, [], Level.WARNING, "refuses the block kv_store", "export VERL_USE_EXTERNAL_PLUGINS=x,epochkv"),
        ({"VERL_USE_EXTERNAL_PLUGINS": ""}, [], Level.WARNING, "verl does not load epochkv", "=epochkv"),
        ({"VERL_USE_EXTERNAL_PLUGINS": "none"}, [], Level.WARNING, "verl does not load epochkv", "=epochkv"),
    ],
)
def test_plugins_that_the_environment_leaves_out(environ: dict[str, str], there: list[str], level: Level, said: str, fix: str) -> None:
    (found,) = check_plugins(environ, lambda group: there)
    assert (found.check, found.level) == ("plugins", level)
    assert said in found.text
    assert fix in found.fix
