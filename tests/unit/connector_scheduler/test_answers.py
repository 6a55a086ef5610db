"""What vLLM's front end makes of stamps: answers that it ends itself, and streams."""

import asyncio
import importlib
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from epochkv_connector.engine.answers import _COMPLETION, _STREAMS, _batch, _make_output, _stream
from epochkv_fence.protocol.messages import STAMP_KEY as KEY

STAMP: Any = {"tokens": [{"from_token": 0, "weights": "aa"}, {"from_token": 5, "weights": "bb"}], "epoch": 1, "cached_tokens": {}}
FIVE: Any = {**STAMP, "tokens": STAMP["tokens"][:1]}  # of the first five tokens


def state(num_tokens: int) -> Any:
    return SimpleNamespace(detokenizer=SimpleNamespace(num_output_tokens=lambda: num_tokens), parent_req=None)


def made(of: Any, finish_reason: Any, params: Any) -> Any:
    return _make_output(lambda _state, *args, **kwargs: args[4], of, [1], None, finish_reason, None, params, None, error=None)


def test_a_stamp_on_the_way_is_kept_and_not_shown() -> None:
    one = state(2)
    assert made(one, None, {KEY: STAMP}) is None
    assert made(one, None, {KEY: STAMP, "other": 1}) == {"other": 1}
    assert made(one, None, None) is None


def test_an_answer_that_ends_at_a_stop_string_has_the_stamp_of_its_tokens() -> None:
    one = state(5)
    made(one, None, {KEY: STAMP})
    assert made(one, "stop", None) == {KEY: FIVE}


def test_vllm_has_what_streams_come_from() -> None:
    for module, owner, name in (*_STREAMS[:2], (*_COMPLETION, "request_output_to_completion_response")):
        assert callable(getattr(getattr(importlib.import_module(module), owner), name))


def test_an_answer_without_a_stamp_stays_as_it_is() -> None:
    assert made(state(1), "stop", None) is None
    assert made(state(1), "stop", {"other": 1}) == {"other": 1}


def test_each_output_of_samples_brings_the_stamps_of_those_that_have_ended() -> None:
    """vLLM merges outputs that nobody has taken, and keeps the params of the last one."""
    samples = [state(5), state(6), state(0)]
    for index, parent in enumerate([SimpleNamespace(n=3)] * 3):
        samples[index].parent_req, samples[index].request_index = parent, index
    assert made(samples[1], None, {KEY: STAMP}) is None
    assert made(samples[0], "stop", {KEY: STAMP}) == {KEY: {"samples": [FIVE, None, None]}}
    assert made(samples[1], None, None) == {KEY: {"samples": [FIVE, None, None]}}
    made(samples[1], "abort", None)
    assert made(samples[2], "abort", None) == {KEY: {"samples": [FIVE, STAMP, None]}}, "it had no token yet"


def answer(*stamps: Any) -> Any:
    return SimpleNamespace(outputs=list(stamps), kv_transfer_params={KEY: stamps[0] if len(stamps) == 1 else {"samples": list(stamps)}})


def test_the_answer_to_several_prompts_has_the_stamps_of_all() -> None:
    def params(*answers: Any) -> Any:
        return _batch(lambda serving, outputs: outputs[0].kv_transfer_params, None, list(answers))

    nothing = SimpleNamespace(outputs=[1, 2], kv_transfer_params=None)
    assert params(nothing, nothing) is None
    assert params(answer(STAMP), answer(FIVE)) == {KEY: {"samples": [STAMP, FIVE]}}
    assert params(nothing, answer(FIVE, STAMP)) == {KEY: {"samples": [None, None, FIVE, STAMP]}}
    assert params(answer(STAMP)) == {KEY: STAMP}


def test_the_chunk_that_ends_a_choice_carries_its_stamp_and_that_of_the_usage_all_of_them() -> None:
    chunks = [(0, "ä", None), (3, "b", "stop"), (0, "c", None), (2, "d", "stop"), (0, "e", "length")]
    sent = [*({"choices": [dict(zip(("index", "text", "finish_reason"), one, strict=True))]} for one in chunks), {"choices": []}]
    lines = [*(f"data: {json.dumps(chunk, separators=(',', ':'))}\n\n" for chunk in sent), "data: [DONE]\n\n"]

    async def generator(request: Any, result_generator: AsyncIterator[Any]) -> AsyncIterator[str]:
        yield lines[0]
        assert len([one async for one in result_generator]) == 2
        for line in lines[1:]:
            yield line

    async def results() -> AsyncIterator[Any]:
        yield 1, answer(FIVE, STAMP)
        yield 2, SimpleNamespace(outputs=[1], kv_transfer_params=None)

    async def collect() -> list[str]:
        return [line async for line in _stream(generator, SimpleNamespace(n=2), results())]

    got = asyncio.run(collect())
    assert [got[0], got[2], got[4], got[6]] == [lines[0], lines[2], lines[4], lines[6]]
    said = [json.loads(got[at].removeprefix("data: "))["kv_transfer_params"][KEY] for at in (1, 3, 5)]
    assert said == [STAMP, FIVE, {"samples": [None, None, FIVE, STAMP, None, None]}]
