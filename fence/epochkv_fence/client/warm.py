"""Compute prompts once, so that every engine of the pool finds them in L2: after a push, before rollouts begin everywhere at once."""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from epochkv_fence.client.arguments import check_timeout
from epochkv_fence.client.results import PoolError
from epochkv_fence.common import on_daemon_thread
from epochkv_fence.protocol.messages import STAMP_KEY, UNKNOWN_WEIGHTS

T = TypeVar("T")
Prompt = str | Sequence[int] | Mapping[str, Any]
Names = tuple[str, str, int | None]
"""Weights, adapter and epoch."""
NOBODYS: Final[Names] = ("", "", None)
AT_ONCE: Final = 8
WARM_SECONDS: Final = 120.0
POLL_SECONDS: Final = 0.1
ASKED: Final = {STAMP_KEY: {"stamp": True, "stored": True, "save": "Prompts"}}
LOOKED: Final = {STAMP_KEY: {**ASKED[STAMP_KEY], "save": 0}}


class WarmFailed(PoolError):
    """A prompt is not in L2 in time, or the engine cannot say so; the message says which and why."""


class _Away(WarmFailed):
    """Behind the URL, no engine takes the request now."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """What L2 holds now.

    Attributes:
        prompts: how many were warmed.
        tokens: of their blocks, all together; the tokens behind a prompt's last whole block are never stored.
        computed: how many tokens the engine had to compute for it.
        weights: under which they are found, 32 hex digits.
    """

    prompts: int
    tokens: int
    computed: int
    weights: str


def warm(
    prompts: Iterable[Prompt],
    engine: Any,
    *,
    model: str | None = None,
    timeout_s: float = WARM_SECONDS,
    progress: Callable[[int], object] = lambda number: None,
) -> Warmed:
    """Have one engine compute these prompts, and return when L2 holds them under the weights that the engine holds.

    Args:
        prompts: texts, token ids, or what a request holds of a prompt, such as `{"messages": [...], "cache_salt": "..."}`; for `LLM`,
            one of vLLM's dicts.
        engine: URL of its OpenAI server, such as `http://rollout:8000`, whose key is `VLLM_API_KEY` of the environment; or vLLM's `LLM`, in
            whose process this runs.
        model: as the server calls it; None: the first that it serves.
        timeout_s: for all of them; a call of `LLM.generate` is not cut off.
        progress: told how many prompts are done; fewer again when names have changed.

    Raises:
        WarmFailed: L2 does not hold all of them in time, names keep changing, the engine has no L2 or no connector of ours, or is away.
        ArgumentError (a ValueError): so many seconds cannot be waited for.
    """
    check_timeout(timeout_s)
    deadline = time.monotonic() + timeout_s
    one = _Server(engine.rstrip("/").removesuffix("/v1"), deadline, model) if isinstance(engine, str) else _InProcess(engine)
    over = threading.Event()
    works = [partial(_warm, one, number, prompt, deadline, over) for number, prompt in enumerate(prompts, 1)]
    tokens: dict[int, int] = {}  # by prompt, of those that are found under `names`
    computed, names, looks = 0, NOBODYS, False
    try:
        while len(tokens) < len(works) or not looks:
            looks = len(tokens) == len(works)  # at the end: later ones may have pushed out earlier ones
            if names != NOBODYS and not looks and (over.wait(POLL_SECONDS) or time.monotonic() > deadline):
                raise WarmFailed(f"{one.name}: the weights or the epoch changed between prompts, and the time is over")
            left = [index for index in range(len(works)) if looks or index not in tokens]
            asked = [partial(works[index], names if looks else NOBODYS) for index in left]
            each = _together(asked) if isinstance(one, _Server) else (work() for work in asked)  # vLLM's `LLM` answers one at a time
            for index, (stored, num_computed, under) in zip(left, each, strict=True):
                if under != names:  # what was found under others is found no more
                    tokens, names = {}, under
                tokens |= {index: stored} if stored else {}
                computed += num_computed * (not looks)
                progress(len(tokens))
    finally:
        over.set()
    return Warmed(len(works), sum(tokens.values()), computed, names[0])


def _together(works: Sequence[Callable[[], T]]) -> Iterator[T]:
    """What they return, in order, a few at a time. When one raises, or the caller is interrupted, nobody waits for the others."""
    running: deque[Future[T]] = deque()
    for work in works:
        running.append(on_daemon_thread(work, "epochkv-warm"))
        if len(running) == AT_ONCE:
            yield running.popleft().result()
    while running:
        yield running.popleft().result()


def _warm(
    engine: _Server | _InProcess, number: int, prompt: Prompt, deadline: float, over: threading.Event, held: Names
) -> tuple[int, int, Names]:
    """(tokens in L2, tokens that were computed, names). Asks again until the engine says that L2 holds all that it can, or names change.

    Args:
        over: nobody waits for it any more.
        held: L2 held all under these names, so nothing is saved.
    """
    computed: int | None = None
    while True:
        try:
            num_tokens, answered, ended = engine.ask(
                prompt if isinstance(prompt, str | Mapping) else list(prompt), ASKED if held == NOBODYS else LOOKED
            )
            if ended == "abort":
                raise _Away(f"{engine.name} aborts requests")
        except WarmFailed as error:
            if not isinstance(error, _Away) or over.wait(POLL_SECONDS) or time.monotonic() > deadline:
                raise WarmFailed(f"prompt {number}: {error}") from None
            continue
        said = (answered or {}).get(STAMP_KEY) or {}
        if "storable_tokens" not in said:
            raise WarmFailed(f"{engine.name} does not say what L2 holds: it runs without the connector of this version of EpochKV")
        if computed is None:
            computed = num_tokens - sum(said["cached_tokens"].values())
        stored, storable, made = said["stored_tokens"], said["storable_tokens"], said["tokens"]
        if storable == 0:
            raise WarmFailed(f"{engine.name}: prompt {number} has no whole block, or the engine has no L2 that works (`epochkv engines`)")
        under = (made[-1]["weights"], made[-1].get("adapter", ""), said.get("epoch")) if made else (UNKNOWN_WEIGHTS, "", None)
        if UNKNOWN_WEIGHTS not in under and (stored == storable or held not in (NOBODYS, under)):
            return stored if stored == storable else 0, computed, under
        if over.wait(POLL_SECONDS) or time.monotonic() > deadline:
            why = "the time is over" if held == NOBODYS else "it held all: it has no room for all prompts, or does not answer"
            raise WarmFailed(f"{engine.name}: L2 holds {stored} of {storable} tokens of prompt {number}, and {why}")


class _InProcess:
    name = "the engine"

    def __init__(self, llm: Any) -> None:
        self._llm, self._params = llm, llm.get_default_sampling_params()
        self._params.max_tokens, self._params.temperature, self._params.detokenize = 1, 0.0, False

    def ask(self, prompt: str | list[int] | Mapping[str, Any], params: Any) -> tuple[int, Any, str]:
        asked = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
        self._params.extra_args = {"kv_transfer_params": params}
        (answer,) = self._llm.generate([asked], self._params, use_tqdm=False)
        return len(answer.prompt_token_ids), answer.kv_transfer_params, answer.outputs[0].finish_reason


class _Server:
    def __init__(self, url: str, deadline: float, model: str | None) -> None:
        self.name, self._deadline = url, deadline
        self._direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # a proxy does not know the cluster's names
        self._model = model or str(self._ask("/v1/models", lambda answer: answer["data"][0]["id"]))

    def ask(self, prompt: str | list[int] | Mapping[str, Any], params: Any) -> tuple[int, Any, str]:
        asked = prompt if isinstance(prompt, Mapping) else {"prompt": prompt}
        body = {**asked, "model": self._model, "max_tokens": 1, "temperature": 0, "detokenize": False, "kv_transfer_params": params}
        path = "/v1/chat/completions" if "messages" in asked else "/v1/completions"
        return self._ask(
            path, lambda it: (it["usage"]["prompt_tokens"], it.get("kv_transfer_params"), it["choices"][0]["finish_reason"]), body
        )

    def _ask(self, path: str, read: Callable[[Any], T], body: Any = None) -> T:
        key = os.environ.get("VLLM_API_KEY", "").strip()  # one that ends in a newline would be told in the error
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        left = max(0.1, self._deadline - time.monotonic())

        def answer() -> T:
            try:
                with self._direct.open(request, timeout=left) as found:
                    return read(json.load(found))
            except urllib.error.HTTPError as error:
                kind = _Away if error.code in (502, 503, 504) else WarmFailed
                raise kind(f"{self.name}{path}: HTTP {error.code}: {error.read(500).decode(errors='replace')}") from None

        try:
            request = urllib.request.Request(self.name + path, None if body is None else json.dumps(body).encode(), headers)
            return on_daemon_thread(answer, "epochkv-warm-answer").result(left)  # it may come in small pieces without end
        except (OSError, ValueError, http.client.HTTPException) as error:
            kind = _Away if isinstance(getattr(error, "reason", error), ConnectionError) else WarmFailed
            raise kind(f"{self.name}{path}: {str(error) or 'no answer in time'}") from None
        except (LookupError, TypeError, AttributeError) as error:
            raise WarmFailed(f"{self.name}{path}: an answer as of no OpenAI server ({error!r})") from None
