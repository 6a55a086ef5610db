"""What an engine tells of itself: tokens by tier, in vLLM's statistics and in ours; tiers that an error turned off."""

from typing import Any

from tests.scheduler.rigs import MakeRig
from tests.support.scheduler import BLOCK, SharedStore, prompt


def quiet(rig: Any) -> Any:
    """Nothing is reported while it serves."""
    rig.connector._reporter._at = float("inf")
    return rig


def report(rig: Any) -> dict[str, Any]:
    """What the connector reports now; nothing afterwards until it is asked again."""
    rig.connector._reporter._at = float("-inf")
    stats = rig.connector.get_kv_connector_stats()
    assert stats is not None
    quiet(rig)
    return stats.to_dict()


def hits_by_source(rig: Any) -> dict[str, int]:
    """vLLM's own count of external hits since the last call; its label is the value of the source."""
    stats = rig.scheduler.connector_prefix_cache_stats
    found = {source.value: tokens for source, tokens in stats.hits_by_source.items()}
    stats.hits_by_source.clear()
    return found


def has_hit_sources() -> bool:
    from epochkv_connector.engine import blocks

    return blocks.CacheHitSource is not None  # type: ignore[attr-defined]  # vLLM 0.32 and later


def test_a_hit_from_both_tiers_is_split(make_rig: MakeRig, store: SharedStore) -> None:
    """L1 has the first half of a prompt, L2 all of it."""
    writer = quiet(make_rig(store=store))
    writer.adopt(0)
    tokens = prompt(1, 8 * BLOCK + 3)
    writer.serve(tokens)
    assert report(writer)["counters"]["tokens_saved"] == 8 * BLOCK
    reader = quiet(make_rig(store=store))  # after the first: they share vLLM's global
    reader.adopt(0)
    reader.serve(tokens[: 4 * BLOCK + 1])
    report(reader)
    reader.block_pool.reset_prefix_cache()
    reader.scheduler.make_stats = lambda *args, **kwargs: None
    reader.scheduler.connector_prefix_cache_stats = type(reader.scheduler.connector_prefix_cache_stats)()
    reader.serve(tokens)
    if has_hit_sources():
        assert hits_by_source(reader) == {"host": 4 * BLOCK, "external_unspecified": 4 * BLOCK}
    counters = report(reader)["counters"]
    assert (counters["tokens_hit_host"], counters["tokens_hit_store"]) == (4 * BLOCK, 4 * BLOCK)


def test_what_is_not_looked_up_counts_in_vllms_series_and_not_in_ours(make_rig: MakeRig) -> None:
    """The page of metrics says so, and whom to read."""
    rig = quiet(make_rig(epoch=0))
    tokens = prompt(1, 8 * BLOCK + 3)

    def counted(**options: Any) -> tuple[int, int]:
        rig.scheduler.connector_prefix_cache_stats = type(rig.scheduler.connector_prefix_cache_stats)()
        rig.scheduler.make_stats = lambda *args, **kwargs: None
        report(rig)
        rig.serve(tokens, **options)
        return rig.scheduler.connector_prefix_cache_stats.queries, int(report(rig)["counters"].get("lookups", 0))

    assert counted(prompt_logprobs=1) == (len(tokens), 0)
    rig.lease_until = 0.0  # bypass
    assert counted() == (len(tokens), 0)
    rig.lease_until = float("inf")
    rig.block_pool.reset_prefix_cache()
    queries, lookups = counted()
    assert queries == len(tokens)
    assert lookups > 0


def test_everything_that_is_reported_has_a_series(make_rig: MakeRig, store: SharedStore) -> None:
    from epochkv_connector import metrics

    rig = quiet(make_rig(store=store))
    rig.adopt(0)
    tokens = prompt(1, 8 * BLOCK)
    rig.serve(tokens)
    rig.adopt(1, weights="w1")
    rig.serve(tokens)
    rig.connector.reset_cache()
    told = report(rig)
    assert {name for name in told["counters"] if metrics.COUNTER_OF.find(name) is None} <= {"errors"}, "their sum is for heartbeats"
    assert {name for name in told["gauges"] if metrics.GAUGE_OF.find(name) is None} == set()
    assert told["ranks"]["scheduler"]["store_state"] == 2.0
    assert told["counters"]["store_exists_calls"] > 0
    assert {"epoch", "bypass", "broken", "lease_remaining_seconds", "plans_open", "slots"} <= told["gauges"].keys()
