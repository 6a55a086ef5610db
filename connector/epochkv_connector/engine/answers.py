"""What vLLM's front end makes of our stamps (`scheduler.stamps`), in the process that serves requests.

vLLM hands `kv_transfer_params` on with the last output of a request, if the engine ended it. Four cases are left. The front end ends
answers by itself, at a stop string or when all are aborted: it keeps the newest stamp for that. Of `n` samples it keeps what the last
output brought: each output brings those of all samples that have ended. Of several prompts it takes the first one's: all are put
together. And streamed answers have no such field: the chunk that says why an answer ended gets it.
"""

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
"""Attribute of vLLM's state of a request (the newest stamp), and of its parent's (those of its samples that have ended)."""

_COMPLETION = "vllm.entrypoints.openai.completion.serving", "OpenAIServingCompletion"
_STREAMS = (
    ("vllm.entrypoints.openai.chat_completion.serving", "OpenAIServingChat", "chat_completion_stream_generator"),
    (*_COMPLETION, "completion_stream_generator"),
    ("vllm.entrypoints.scale_out.token_in_token_out.serving", "ServingTokens", "serve_tokens_stream_generator"),
)


def install() -> None:
    """In a process that makes an engine, and serves it over HTTP or not."""
    from vllm.v1.engine.output_processor import RequestState

    wrap(RequestState, "make_request_output", _make_output)
    if "uvicorn" in sys.modules:  # this process is, or will be, a server
        batch = *_COMPLETION, "request_output_to_completion_response"
        for (module, owner, name), instead in ((batch, _batch), *((stream, _stream) for stream in _STREAMS)):
            with suppress(ImportError):
                wrap(getattr(importlib.import_module(module), owner, None), name, instead)


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
    parent = state.parent_req
    if finish_reason is not None and (stamp := getattr(state, _KEPT, None)) is not None:
        stamp = _at_end(state, stamp)
        if parent is None:
            params = {**(params or {}), STAMP_KEY: stamp}
        else:
            parent.__dict__.setdefault(_KEPT, [None] * parent.n)[state.request_index] = stamp
    if parent is not None and _KEPT in parent.__dict__:  # the last sample to end may have none
        params = {**(params or {}), STAMP_KEY: {"samples": parent.__dict__[_KEPT]}}
    return function(state, new_token_ids, pooling_output, finish_reason, stop_reason, params, *args, **kwargs)


def _at_end(state: Any, stamp: dict[str, Any]) -> dict[str, Any]:
    """Of tokens behind a stop string nobody hears."""
    num_tokens = state.detokenizer.num_output_tokens() if state.detokenizer is not None else 0
    return {**stamp, "tokens": [one for one in stamp["tokens"] if one["from_token"] < num_tokens]}


def _samples(output: Any) -> list[dict[str, Any] | None]:
    """The stamps of what a prompt was answered, one for each sample."""
    stamp = (output.kv_transfer_params or {}).get(STAMP_KEY)
    return [None] * len(output.outputs) if stamp is None else stamp.get("samples", [stamp])


def _batch(function: Callable[..., Any], serving: Any, outputs: list[Any], *args: Any, **kwargs: Any) -> Any:
    """The answer to several prompts has the stamps of all of them, in the order of its choices."""
    samples = [sample for output in outputs for sample in _samples(output)]
    if len(outputs) > 1 and any(samples):
        outputs[0].kv_transfer_params = {**(outputs[0].kv_transfer_params or {}), STAMP_KEY: {"samples": samples}}
    return function(serving, outputs, *args, **kwargs)


async def _stream(function: Callable[..., AsyncIterator[str]], *args: Any, **kwargs: Any) -> AsyncIterator[str]:
    """Each line that vLLM sends, with the stamp of the choice that it ends; the line of `include_usage`, the last one, has all of them."""
    given = inspect.signature(function).bind(*args, **kwargs)
    num_samples = getattr(given.arguments.get("request"), "n", None) or 1
    ended: dict[int, dict[str, Any] | None] = {}  # by choice
    unsent: set[int] = set()

    async def results(outputs: AsyncIterator[Any]) -> AsyncIterator[Any]:
        async for each in outputs:
            prompt, output = each if isinstance(each, tuple) else (0, each)
            ended.setdefault((prompt + 1) * num_samples - 1, None)
            for choice, stamp in enumerate(_samples(output), prompt * num_samples):
                if stamp is not None and ended.get(choice) is None:
                    ended[choice] = stamp
                    unsent.add(choice)
            yield each

    given.arguments["result_generator"] = results(given.arguments["result_generator"])
    async for line in function(*given.args, **given.kwargs):
        is_last = any(ended.values()) and '"choices":[]' in line
        chunk = json.loads(line.removeprefix("data: ")) if (unsent or is_last) and line.startswith("data: {") else {}
        for choice in chunk.get("choices", ()):
            if choice.get("finish_reason") and choice["index"] in unsent:
                unsent.discard(choice["index"])
                chunk["kv_transfer_params"] = {STAMP_KEY: ended[choice["index"]]}
        if is_last and chunk.get("choices") == []:
            samples = [ended.get(choice) for choice in range(max(ended) + 1)]
            chunk["kv_transfer_params"] = {STAMP_KEY: samples[0] if len(samples) == 1 else {"samples": samples}}
        yield line if "kv_transfer_params" not in chunk else f"data: {json.dumps(chunk, ensure_ascii=False, separators=(',', ':'))}\n\n"
