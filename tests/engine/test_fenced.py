"""vLLM's own Mooncake connector on real engines, with our fence and nothing else of ours (the third act of `make demo-stock`)."""

from pathlib import Path

from rich.console import Console

from hack.demo import stock
from hack.demo.claims import Claims
from hack.demo.journey import make_prompts
from hack.demo.progress import Progress
from hack.durations import Durations
from tests.engine.conftest import Reference, Weights
from tests.support.nursery import Nursery


def test_one_engine_is_late_and_finds_nothing_old_under_vllms_own_connector(
    tmp_path: Path, weights: Weights, reference: Reference, servers: Nursery
) -> None:
    """The weights of A change, and A resets; B is late. Names keep them apart, the store stays as it is, and then they share again."""
    prompt, second = make_prompts(11, 2)
    folders, bare = stock.Weights(weights.base, weights.new), reference.lend()
    bare.reload_weights(weights.base)
    right = stock.ask_reference(bare, folders, prompt, second)
    assert right.old != right.new, "the new weights change nothing, so nothing stale could show"
    progress, claims = Progress(Console(width=120), Durations(tmp_path / "durations.json"), 3), Claims()
    stock.act_of_fence(stock.Stage(tmp_path, folders, prompt, second, right, progress, claims, servers.popen))
    assert len(claims.items) == 5
    assert [claim.what for claim in claims.broken] == []
