"""vLLM's own Mooncake connector on real engines, with our fence and nothing else of ours (the third act of `make demo-stock`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from hack import models
from hack.demo import stock
from hack.demo.claims import Claims
from hack.demo.journey import make_prompts
from hack.demo.progress import Progress
from hack.durations import Durations


@pytest.mark.timeout(900)  # three engines
def test_one_engine_is_late_and_finds_nothing_old_under_vllms_own_connector(tmp_path: Path) -> None:
    """The weights of A change, and A resets; B is late. Names keep them apart, the store stays as it is, and then they share again."""
    weights = stock.Weights(models.make(tmp_path / "base", 1), models.make(tmp_path / "new", 2))
    prompt, second = make_prompts(11, 2)
    progress = Progress(Console(width=120), Durations(tmp_path / "durations.json"), 3)
    reference = stock.ask_reference(tmp_path, weights, prompt, second)
    assert reference.old != reference.new, "the new weights change nothing, so nothing stale could show"
    claims = Claims()
    stock.act_of_fence(stock.Stage(tmp_path, weights, prompt, second, reference, progress, claims))
    assert len(claims.items) == 5
    assert [claim.what for claim in claims.broken] == []
