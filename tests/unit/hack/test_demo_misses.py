"""The demo repeats what the connector counts as a miss, at most twice, and never what is wrong. The engines here answer as told."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from hack import engine_api
from hack.demo.journey import BLOCKS, CACHED, Journey, make_prompts
from hack.engine_api import EngineApi

LATE = 'vllm:epochkv_store_queries_total{event="late"}'
FAILED = "vllm:epochkv_loads_failed_total"
EXTERNAL = 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}'
RIGHT = 7


class Scripted(EngineApi):
    """Answers each long prompt by the next word of a script: `hit`, `late`, `failed`, `lost` (no count says why), `wrong`."""

    def __init__(self, *script: str) -> None:
        self.name, self.model = "scripted", "tiny"
        self._script = iter(script)
        self._counts: Counter[str] = Counter()
        self._unreported: Counter[str] = Counter()
        self.asked = 0

    def request(self, method: str, path: str, body: bytes | None = None, seconds: float = 120.0) -> bytes:
        if path == "/metrics":
            return "\n".join(f"{name} {count}" for name, count in self._counts.items()).encode()
        prompt = json.loads(body or b"")["prompt"]
        if len(prompt) < 10:  # a step that carries the connector's counts
            self._counts += self._unreported
            self._unreported.clear()
            return self._answer(0, RIGHT)
        self.asked += 1
        said = next(self._script)
        if said in ("late", "failed"):
            self._unreported[LATE if said == "late" else FAILED] += 1
        found = CACHED if said == "hit" else 0
        self._counts[EXTERNAL] += CACHED if said == "failed" else found
        return self._answer(found, RIGHT + (said == "wrong"))

    def _answer(self, cached: int, token: int) -> bytes:
        usage = {"prompt_tokens_details": {"cached_tokens": cached}}
        return json.dumps({"usage": usage, "choices": [{"token_ids": [token]}]}).encode()


class Told(Journey):
    """A journey without a cluster: the store holds what the writer was asked for."""

    writer: Scripted

    def epoch(self) -> int:
        return 1

    def stored_blocks(self, epoch: int) -> int:
        return BLOCKS * self.writer.asked


@pytest.mark.parametrize(
    ("script", "asked", "broken"),
    [
        (["hit"], 1, 0),
        (["late", "hit"], 2, 0),
        (["failed", "hit"], 2, 0),
        (["failed", "late", "hit"], 3, 0),
        (["failed", "late", "failed"], 3, 1),
        (["lost", "hit"], 1, 2),
        (["wrong", "hit"], 1, 3),
    ],
)
def test_a_counted_miss_is_repeated_and_nothing_else(script: list[str], asked: int, broken: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_api, "METRICS_SECONDS", 0.0)
    notes: list[str] = []
    journey = Told(kube=None, note=notes.append, seed=1)  # type: ignore[arg-type]
    journey.writer, reader = Scripted(*["lost"] * 9), Scripted(*script)
    journey.reference = Scripted(*["lost"] * 9)
    journey._reuse("test", make_prompts(1, 1), journey.writer, reader, [(RIGHT,)])
    assert reader.asked == asked
    assert len(journey.claims.broken) == broken, journey.claims.broken
    assert sum("once more" in note for note in notes) == asked - 1
