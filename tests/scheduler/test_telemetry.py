"""What an engine tells of itself: tokens by tier, in vLLM's statistics and in ours, and a line of its log for each change of its standing
with the pool, with the remedy.
"""

from typing import Any

import pytest

from epochkv_connector.engine import blocks
from epochkv_connector.scheduler.role import SchedulerRole
from tests.scheduler.rigs import TOKENS, MakeRig
from tests.support.scheduler import BLOCK, SharedStore


@pytest.fixture(autouse=True)
def never_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reports when it is asked."""
    monkeypatch.setattr(SchedulerRole, "is_idle", False)


def quiet(rig: Any) -> Any:
    rig.connector._reporter._at = float("inf")
    return rig


def report(rig: Any) -> dict[str, Any]:
    """What the connector reports now; nothing afterwards until it is asked again."""
    rig.connector._reporter._at = float("-inf")
    stats = rig.connector.get_kv_connector_stats()
    assert stats is not None
    quiet(rig)
    return stats.to_dict()


def counting(rig: Any) -> Any:
    """vLLM's own statistics of external hits, from now on; nobody takes them."""
    rig.scheduler.make_stats = lambda *args, **kwargs: None
    rig.scheduler.connector_prefix_cache_stats = type(rig.scheduler.connector_prefix_cache_stats)()
    return rig.scheduler.connector_prefix_cache_stats


def test_a_hit_from_both_tiers_is_split(make_rig: MakeRig, store: SharedStore) -> None:
    """L1 has the first half of a prompt, L2 all of it."""
    writer = quiet(make_rig(store=store, epoch=0))
    writer.serve(TOKENS)
    reader = quiet(make_rig(store=store, epoch=0))  # after the first: they share vLLM's global
    reader.serve(TOKENS[: 4 * BLOCK + 1])
    report(reader)
    reader.block_pool.reset_prefix_cache()
    stats = counting(reader)
    reader.serve(TOKENS)
    if blocks.CacheHitSource is not None:  # type: ignore[attr-defined]  # vLLM 0.32 and later
        hits = {source.value: tokens for source, tokens in stats.hits_by_source.items()}
        assert hits == {"host": 4 * BLOCK, "external_unspecified": 4 * BLOCK}
    counters = report(reader)["counters"]
    assert (counters["tokens_hit_host"], counters["tokens_hit_store"]) == (4 * BLOCK, 4 * BLOCK)


def test_an_engine_that_is_about_to_idle_has_told_all(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM asks in each step, and nobody asks an engine that idles."""
    monkeypatch.undo()
    rig = quiet(make_rig(epoch=0))
    told, ask = list[dict[str, Any]](), rig.connector.get_kv_connector_stats
    monkeypatch.setattr(rig.connector, "get_kv_connector_stats", lambda: told.append(stats.to_dict()) if (stats := ask()) else None)
    rig.serve(TOKENS)
    assert sum(one["counters"].get("blocks_saved", 0) for one in told) == len(TOKENS) // BLOCK


def test_what_is_not_looked_up_counts_in_vllms_series_and_not_in_ours(make_rig: MakeRig) -> None:
    """The page of metrics says so, and whom to read."""
    rig = quiet(make_rig(epoch=0))

    def counted(**options: Any) -> tuple[int, int]:
        stats = counting(rig)
        report(rig)
        rig.serve(TOKENS, **options)
        return stats.queries, int(report(rig)["counters"].get("lookups", 0))

    assert counted(prompt_logprobs=1) == (len(TOKENS), 0)
    rig.lease_until = 0.0  # bypass
    assert counted() == (len(TOKENS), 0)
    rig.lease_until = float("inf")
    rig.block_pool.reset_prefix_cache()
    queries, lookups = counted()
    assert queries == len(TOKENS)
    assert lookups > 0


# ---------------------------------------------------------------------------------------------- the log
class Lines:
    """The fence's lines since the last look."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        caplog.set_level("INFO", logger="vllm.epochkv.fence")

    def new(self) -> list[str]:
        found = [f"{r.levelname} {r.getMessage()}" for r in self._caplog.records if r.name == "vllm.epochkv.fence"]
        self._caplog.clear()
        return found

    def one(self, *words: str) -> None:
        """Exactly one line came, and it has these words."""
        lines = self.new()
        assert len(lines) == 1, lines
        for word in words:
            assert word in lines[0]


def test_a_life_in_one_line_for_each_change(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    rig, lines = make_rig(store=SharedStore()), Lines(caplog)
    rig.serve(TOKENS)
    assert lines.new() == [], "nothing was granted yet; the agent tells of the hub"
    rig.adopt(3)
    lines.one("INFO", "epoch 3 in use")
    for _ in range(3):
        rig.adopt(3)
        rig.serve(TOKENS)
    assert lines.new() == []
    rig.adopt(4)
    lines.one("INFO", "epoch 4 in use")
    rig.lease_until = 0.0
    rig.connector.scheduler.gauges()  # as a heartbeat does, without any request
    lines.one("WARNING", "lease on epoch 4 is over")
    rig.serve(TOKENS)
    assert lines.new() == []
    rig.lease_until = float("inf")
    rig.serve(TOKENS)
    lines.one("INFO", "epoch 4 in use, back from bypass")
    rig.adopt(5)
    lines.one("INFO", "epoch 5 in use")


def test_an_adoption_whose_lease_is_yet_to_begin_is_no_loss(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    """The agent binds the root first and moves the lease then: at the first grant, and at the first one after a hub was away."""
    rig, lines = make_rig(), Lines(caplog)
    rig.lease_until = 0.0
    for epoch, said in ((3, "epoch 3 in use"), (4, "epoch 4 in use, back from bypass")):
        rig.adopt(epoch)
        rig.connector.scheduler.gauges()
        assert lines.new() == []
        rig.lease_until = float("inf")
        rig.connector.scheduler.gauges()
        lines.one("INFO", said)
        rig.lease_until = 0.0
        rig.connector.scheduler.gauges()
        lines.one("WARNING", f"lease on epoch {epoch} is over")


def test_an_engine_that_ends_does_not_warn_of_the_lease_that_it_gives_back(make_rig: MakeRig, caplog: pytest.LogCaptureFixture) -> None:
    rig, lines = make_rig(), Lines(caplog)
    rig.adopt(3)
    rig.serve(TOKENS)
    lines.new()
    rig.connector.scheduler.stop()
    rig.lease_until = 0.0
    rig.connector.scheduler.gauges()
    assert lines.new() == []
