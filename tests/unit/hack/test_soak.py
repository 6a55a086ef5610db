"""The soak's own judgement: what it counts as wrong or leaked."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hack.soak import checks
from hack.soak.answers import Prompt
from hack.soak.tally import Tally
from hack.soak.traffic import ask
from hack.soak.world import Rank

BASE, NEW = Path("base"), Path("new")
PROMPT = Prompt((5, 6, 7), {BASE: (1, 2, 3), NEW: (4, 5, 6)})


class Server:
    """An engine's HTTP side with a made-up reply."""

    name = model = "A1"

    def __init__(self, tokens: tuple[int, ...] = (1, 2, 3)) -> None:
        usage = {"prompt_tokens_details": {"cached_tokens": 0}}
        self.reply: Any = {"choices": [{"token_ids": list(tokens), "finish_reason": "length"}], "usage": usage}
        self.metrics = ""

    def post(self, path: str, body: Mapping[str, Any], seconds: float = 0.0) -> Any:
        return self.reply

    def complete(self, prompt: object, max_tokens: int = 8) -> None:
        return None

    def request(self, method: str, path: str, seconds: float = 0.0) -> bytes:
        return self.metrics.encode()


def rank_of(server: Server) -> Rank:
    return Rank(0, server, BASE)  # type: ignore[arg-type]


@pytest.fixture
def tally(tmp_path: Path) -> Tally:
    return Tally(tmp_path / "log")


@pytest.mark.parametrize(("tokens", "wrong"), [((1, 9, 3), 1), ((4, 5, 6), 3), ((1, 2), 1), ((1, 2, 3, 4), 1)])
def test_every_wrong_token_is_counted_and_reported(tally: Tally, tokens: tuple[int, ...], wrong: int) -> None:
    ask(rank_of(Server(tokens)), PROMPT, tally)
    assert tally["wrong tokens"] == wrong
    (report,) = tally.problems
    assert report.startswith("wrong answers")
    assert ("new" in report) == (tokens == (4, 5, 6)), "the report names the weights that the answer belongs to"


def test_what_an_idle_engine_holds_is_a_leak(tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    server = Server()

    class World:
        ranks = (rank_of(server),)

    clean = 'vllm:epochkv_slots{state="total",engine="0"} 60\nvllm:epochkv_jobs_open{engine="1"} 0.0\n'
    server.metrics = clean
    assert checks.leaks(World(), tally, 0.2) == 0  # type: ignore[arg-type]
    for held in (
        'vllm:kv_cache_usage_perc{engine="0"} 0.025',
        'vllm:epochkv_jobs_open{engine="0"} 1',
        'vllm:epochkv_slots{state="busy",engine="0"} 2',
        'vllm:epochkv_rank_open{what="copies",rank="1",engine="0"} 1',
    ):
        server.metrics = f"{clean}{held}\n"
        before = len(tally.problems)
        assert checks.leaks(World(), tally, 0.2) == 1  # type: ignore[arg-type]
        assert len(tally.problems) == before + 1
    server.metrics = ""
    assert checks.leaks(World(), tally, 0.2) == 1, "an engine without metrics of the connector"  # type: ignore[arg-type]
