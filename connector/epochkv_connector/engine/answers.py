"""What vLLM's front end makes of our stamps (`scheduler.stamps`), in the process that serves requests.

vLLM hands `kv_transfer_params` on with the last output of a request, if the engine ended it. Three cases are left. The front end ends
answers by itself, at a stop string or when all are aborted: it keeps the newest stamp for that. Of `n` samples it keeps what the last one
brought: all of them are put together. And streamed answers have no such field: the chunk that says why an answer ended gets it.

Knows of vLLM 0.30 to 0.33: `RequestState.make_request_output`, `ParentRequest`, and the functions that stream answers (`_STREAMS`).
"""

from __future__ import annotations

import importlib
import inspect
import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from typing import Any

from epochkv_connector.engine.patches import wrap
from epochkv_fence.protocol.messages import STAMP_KEY

_KEPT = "epochkv_stamp"
"""Attribute of vLLM's state of a request (the newest stamp), and of its parent's (those of its samples)."""

_STREAMS = (
    ("vllm.entrypoints.openai.chat_completion.serving", "OpenAIServingChat", "chat_completion_stream_generator"),
    ("vllm.entrypoints.openai.completion.serving", "OpenAIServingCompletion", "completion_stream_generator"),
    ("vllm.entrypoints.scale_out.token_in_token_out.serving", "ServingTokens", "serve_tokens_stream_generator"),
)


def install() -> None:
    """In a process that makes an engine, and serves it over HTTP or not."""
    from vllm.v1.engine.output_processor import RequestState

    wrap(RequestState, "make_request_output", _make_output)
    if "uvicorn" in sys.modules:  # this process is, or will be, a server
        for module, owner, name in _STREAMS:
            with suppress(ImportError):
                wrap(getattr(importlib.import_module(module), owner, None), name, _stream)


def _make_output(
    function: Callable[..., Any],
    state: Any,
    new_token_ids: list[int],
    pooling_output: Any,
    finish_reason: Any,
    stop_reason: Any,
    kv_transfer_params: dict[str, Any] | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    params = kv_transfer_params
    if params is not None and STAMP_KEY in params:
        setattr(state, _KEPT, params[STAMP_KEY])
        params = {key: value for key, value in params.items() if key != STAMP_KEY} or None
    if finish_reason is not None and (stamp := getattr(state, _KEPT, None)) is not None:
        params = {**(params or {}), STAMP_KEY: _at_end(state, stamp)}
    return function(state, new_token_ids, pooling_output, finish_reason, stop_reason, params, *args, **kwargs)


def _at_end(state: Any, stamp: dict[str, Any]) -> dict[str, Any]:
    """Of tokens behind a stop string nobody hears."""
    num_tokens = state.detokenizer.num_output_tokens() if state.detokenizer is not None else 0
    stamp = {**stamp, "tokens": [one for one in stamp["tokens"] if one["from_token"] < num_tokens]}
    parent = state.parent_req
    if parent is None or not parent.output_aggregator:  # samples that are streamed have one each
        return stamp
    samples = parent.__dict__.setdefault(_KEPT, [None] * parent.n)
    samples[state.request_index] = stamp
    return {"samples": samples}


async def _stream(function: Callable[..., AsyncIterator[str]], *args: Any, **kwargs: Any) -> AsyncIterator[str]:
    """Each line that vLLM sends, with the stamp of the answer that it ends."""
    given = inspect.signature(function).bind(*args, **kwargs)
    newest: list[dict[str, Any]] = []

    async def results(outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for output in outputs:
            params = (output[1] if isinstance(output, tuple) else output).kv_transfer_params
            if params is not None and STAMP_KEY in params:
                newest[:] = [params[STAMP_KEY]]
            yield output

    given.arguments["result_generator"] = results(given.arguments["result_generator"])
    async for line in function(*given.args, **given.kwargs):
        if newest and line.startswith("data: {"):
            chunk = json.loads(line.removeprefix("data: "))
            if any(choice.get("finish_reason") for choice in chunk.get("choices", ())):
                chunk["kv_transfer_params"] = {STAMP_KEY: newest.pop()}
                yield f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
                continue
        yield line
