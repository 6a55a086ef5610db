"""What vLLM's front end makes of stamps: answers that it ends itself, and streams."""

import asyncio
import json
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

from epochkv_connector.engine.answers import _make_output, _stream
from epochkv_fence.protocol.messages import STAMP_KEY as KEY

STAMP: Any = {"tokens": [{"from_token": 0, "weights": "aa"}, {"from_token": 5, "weights": "bb"}], "epoch": 1, "cached_tokens": {}}


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
    assert made(one, "stop", None) == {KEY: {**STAMP, "tokens": STAMP["tokens"][:1]}}


def test_an_answer_without_a_stamp_stays_as_it_is() -> None:
    assert made(state(1), "stop", None) is None
    assert made(state(1), "stop", {"other": 1}) == {"other": 1}


def lines(*chunks: Any) -> list[str]:
    return [f"data: {json.dumps(chunk)}\n\n" for chunk in chunks]


def test_the_chunk_that_ends_an_answer_carries_its_stamp() -> None:
    chunks = [("ä", None), ("b", "stop")]
    sent = lines(*({"choices": [{"text": text, "finish_reason": reason}]} for text, reason in chunks), {"choices": []})

    async def generator(result_generator: AsyncIterator[Any]) -> AsyncIterator[str]:
        yield sent[0]
        async for _ in result_generator:
            yield sent[1]
        yield sent[2]
        yield "data: [DONE]\n\n"

    async def results() -> AsyncIterator[Any]:
        yield 0, SimpleNamespace(kv_transfer_params={KEY: STAMP})

    async def collect() -> list[str]:
        return [line async for line in _stream(generator, results())]

    got = asyncio.run(collect())
    assert [got[0], *got[2:]] == [sent[0], sent[2], "data: [DONE]\n\n"]
    assert json.loads(got[1].removeprefix("data: "))["kv_transfer_params"] == {KEY: STAMP}
