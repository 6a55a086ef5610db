"""The soak's own judgement: what it counts as wrong or leaked."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hack.soak import checks
from hack.soak.answers import Prompt
from hack.soak.tally import Tally
from hack.soak.traffic import ask
from hack.soak.world import Rank

BASE, NEW = Path("base"), Path("new")
PROMPT = Prompt((5, 6, 7), {BASE: (1, 2, 3), NEW: (4, 5, 6)})


def rank_of(tokens: tuple[int, ...] = (1, 2, 3), metrics: str = "") -> Rank:
    """An engine that says this."""
    usage = {"prompt_tokens_details": {"cached_tokens": 0}}
    reply = {"choices": [{"token_ids": list(tokens), "finish_reason": "length"}], "usage": usage}
    answers: dict[str, Any] = {"post": lambda *_: reply, "complete": lambda *_, **__: None, "request": lambda *_, **__: metrics.encode()}
    engine: Any = SimpleNamespace(name="A1", model="A1", **answers)
    return Rank(0, engine, BASE)


@pytest.fixture
def tally(tmp_path: Path) -> Tally:
    return Tally(tmp_path / "log")


@pytest.mark.parametrize(("tokens", "wrong"), [((1, 9, 3), 1), ((4, 5, 6), 3), ((1, 2), 1), ((1, 2, 3, 4), 1)])
def test_every_wrong_token_is_counted_and_reported(tally: Tally, tokens: tuple[int, ...], wrong: int) -> None:
    ask(rank_of(tokens), PROMPT, tally)
    assert tally["wrong tokens"] == wrong
    (report,) = tally.problems
    assert report.startswith("wrong answers")
    assert ("new" in report) == (tokens == (4, 5, 6)), "the report names the weights that the answer belongs to"


def test_what_an_idle_engine_holds_is_a_leak(tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)

    def leaks(metrics: str) -> int:
        world: Any = SimpleNamespace(ranks=(rank_of(metrics=metrics),))
        return checks.leaks(world, tally, 0.2)

    clean = 'vllm:epochkv_slots{state="total",engine="0"} 60\nvllm:epochkv_jobs_open{engine="1"} 0.0\n'
    assert leaks(clean) == 0
    for held in (
        'vllm:kv_cache_usage_perc{engine="0"} 0.025',
        'vllm:epochkv_jobs_open{engine="0"} 1',
        'vllm:epochkv_slots{state="busy",engine="0"} 2',
        'vllm:epochkv_rank_open{what="copies",rank="1",engine="0"} 1',
    ):
        before = len(tally.problems)
        assert leaks(f"{clean}{held}\n") == 1
        assert len(tally.problems) == before + 1
    assert leaks("") == 1, "an engine without metrics of the connector"
