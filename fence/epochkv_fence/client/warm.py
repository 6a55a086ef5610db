"""Compute prompts once, so that every engine of the pool finds them in L2: after a push, before rollouts begin everywhere at once."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

from epochkv_fence.client.results import PoolError
from epochkv_fence.protocol.messages import STAMP_KEY

Prompt = str | Sequence[int]
WARM_SECONDS: Final = 120.0
AT_ONCE: Final = 8
POLL_SECONDS: Final = 0.1


class WarmFailed(PoolError):
    """A prompt is not in L2 in time, or the engine cannot say so; the message says which and why."""


@dataclass(frozen=True, slots=True)
class Warmed:
    """What L2 holds now.

    Attributes:
        prompts: how many were warmed.
        tokens: of their blocks, all together; the tokens behind a prompt's last whole block are never stored.
        computed: how many tokens the engine had to compute for it.
        weights: under which they are found, 32 hex digits; empty: they changed meanwhile.
    """

    prompts: int
    tokens: int
    computed: int
    weights: str


def warm(
    prompts: Iterable[Prompt],
    url: str,
    *,
    model: str | None = None,
    timeout_s: float = WARM_SECONDS,
    progress: Callable[[int], object] = lambda number: None,
) -> Warmed:
    """Have one engine compute these prompts, and return when L2 holds them under the weights that the engine holds.

    Args:
        prompts: texts, or token ids.
        url: of the engine's OpenAI server, such as `http://rollout:8000`. `VLLM_API_KEY` of the environment is its key.
        model: as the server calls it; None: the first that it serves.
        timeout_s: for all of them.
        progress: told how many prompts are done.

    Raises:
        WarmFailed: one is not in L2 in time, the engine has no L2 or no connector of ours, or it cannot be reached.
    """
    server = _Server(url.rstrip("/"), time.monotonic() + timeout_s)
    server.model = model or server.first_model()
    done: list[tuple[int, int, str]] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for one in pool.map(server.warm, prompts):
            done.append(one)
            progress(len(done))
    weights = {one for _, _, one in done}
    return Warmed(len(done), sum(one[0] for one in done), sum(one[1] for one in done), weights.pop() if len(weights) == 1 else "")


class _Server:
    def __init__(self, url: str, deadline: float) -> None:
        self.url, self.model, self._deadline = url, "", deadline

    def first_model(self) -> str:
        return str(self._ask("/v1/models")["data"][0]["id"])

    def warm(self, prompt: Prompt) -> tuple[int, int, str]:
        """(tokens in L2, tokens that were computed, weights). Asks again until the engine says that L2 holds all that it can."""
        tokens = prompt if isinstance(prompt, str) else list(prompt)
        body = {"model": self.model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "detokenize": False}
        computed: int | None = None
        while True:
            answer = self._ask(
                "/v1/completions", {**body, "kv_transfer_params": {STAMP_KEY: {"stamp": True, "stored": True, "save": "Prompts"}}}
            )
            said = (answer.get("kv_transfer_params") or {}).get(STAMP_KEY) or {}
            if "storable_tokens" not in said:
                raise WarmFailed(f"{self.url} does not say what L2 holds: it runs without the connector of this version of EpochKV")
            num_tokens = int(answer["usage"]["prompt_tokens"])
            if computed is None:
                computed = num_tokens - sum(said["cached_tokens"].values())
            stored, storable, made = said["stored_tokens"], said["storable_tokens"], said["tokens"]
            if storable == 0:
                raise WarmFailed(f"{self.url} can store nothing of a prompt of {num_tokens} tokens: it has no L2, or no whole block")
            if stored == storable:
                return stored, computed, made[-1]["weights"] if made else ""
            if time.monotonic() > self._deadline - POLL_SECONDS:
                raise WarmFailed(f"{self.url}: L2 holds {stored} of {storable} tokens of a prompt, and the time is over")
            time.sleep(POLL_SECONDS)

    def _ask(self, path: str, body: Any = None) -> Any:
        key = os.environ.get("VLLM_API_KEY", "")
        headers = {"Content-Type": "application/json", **({"Authorization": f"Bearer {key}"} if key else {})}
        request = urllib.request.Request(self.url + path, None if body is None else json.dumps(body).encode(), headers)
        try:
            with urllib.request.urlopen(request, timeout=max(0.1, self._deadline - time.monotonic())) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise WarmFailed(f"{self.url}{path}: HTTP {error.code}: {error.read(500).decode(errors='replace')}") from None
        except (OSError, ValueError) as error:
            raise WarmFailed(f"{self.url}{path}: {error}") from None
