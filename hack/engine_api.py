"""What the demo, the tests and the benchmarks ask of a vLLM OpenAI server, however it is reached: prompts are token ids."""

from __future__ import annotations

import json
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

METRICS_SECONDS = 1.1
"""A little more than between two reports of the connector's counts."""
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)$")


def headers_of(rank: int | None = None) -> dict[str, str]:
    """Of a request with a JSON body. `rank`: the data-parallel rank that is to answer; None: vLLM chooses."""
    return {"Content-Type": "application/json"} | ({} if rank is None else {"X-data-parallel-rank": str(rank)})


def completion(model: str, prompt: Sequence[int], max_tokens: int, transfer: Mapping[str, Any] | None) -> dict[str, Any]:
    """Body of a request for a greedy completion of exactly so many tokens, as token ids."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        "detokenize": False,
        **({"kv_transfer_params": dict(transfer)} if transfer else {}),
    }


@dataclass(frozen=True)
class Answer:
    """What an engine said: token ids, how many tokens of the prompt it took from a cache of any tier, and what it hands over (P/D)."""

    tokens: tuple[int, ...]
    cached: int
    transfer: Mapping[str, Any] | None = None


class EngineError(RuntimeError):
    """The engine answered with an error, or not at all; the message names engine, path and its own words."""


def metric_total(text: str, name: str, labels: Mapping[str, str]) -> float:
    """Sum of a metric in Prometheus text over the series that carry `labels`; 0 when there is none."""
    total = 0.0
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match and match[1] == name and all(f'{key}="{value}"' in (match[2] or "") for key, value in labels.items()):
            total += float(match[3])
    return total


class EngineApi(ABC):
    """One engine. `model` is the name it serves under."""

    name: str
    model: str

    @abstractmethod
    def request(self, method: str, path: str, body: bytes | None = None, seconds: float = 120.0) -> bytes:
        """One HTTP request; the body of a 2xx answer.

        Raises:
            EngineError: any other answer, or none within `seconds`.
        """

    def complete(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        adapter: str | None = None,
        cache_salt: str | None = None,
        transfer: Mapping[str, Any] | None = None,
    ) -> Answer:
        """Greedy completion of token ids, by the model or an adapter that is loaded. `transfer`: `kv_transfer_params` (P/D)."""
        body = completion(adapter or self.model, prompt, max_tokens, transfer)
        reply = self.post("/v1/completions", {**body, **({"cache_salt": cache_salt} if cache_salt else {})})
        details = reply["usage"].get("prompt_tokens_details") or {}
        tokens = tuple(reply["choices"][0]["token_ids"])
        return Answer(tokens, int(details.get("cached_tokens") or 0), reply.get("kv_transfer_params"))

    def report_metrics(self, prompt: Sequence[int]) -> None:
        """Have the connector's counts be those of now. They travel with a step, at most once a second.

        Args:
            prompt: for that step.
        """
        time.sleep(METRICS_SECONDS)
        self.complete(prompt, 2)

    def load_adapter(self, name: str, path: str | Path, in_place: bool = False) -> None:
        """Load an adapter from a folder, as the engine sees it. Needs `VLLM_ALLOW_RUNTIME_LORA_UPDATING`."""
        self.request(
            "POST", "/v1/load_lora_adapter", json.dumps({"lora_name": name, "lora_path": str(path), "load_inplace": in_place}).encode()
        )

    def reload_weights(self, path: str | Path) -> None:
        """Load the weights of another folder, as the engine sees it, into the running engine. Needs vLLM's dev mode."""
        self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(path)}})

    def reset_prefix_cache(self, external: bool) -> bool:
        """vLLM's own reset; True if it succeeded, False while a transfer holds blocks. Needs vLLM's dev mode."""
        query = f"reset_running_requests=true&reset_external={str(external).lower()}"
        try:
            return bool(self.post(f"/reset_prefix_cache?{query}", {})["success"])
        except EngineError as error:
            if "Failed to reset KV cache" in str(error):
                return False
            raise

    def pause(self, mode: str = "abort", clear_cache: bool = True) -> None:
        """vLLM's own pause; returns when it is complete. Needs vLLM's dev mode."""
        self.post(f"/pause?mode={mode}&clear_cache={str(clear_cache).lower()}", {})

    def resume(self) -> None:
        """End a pause. Needs vLLM's dev mode."""
        self.post("/resume", {})

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a Prometheus metric over the series that carry `labels`."""
        return metric_total(self.request("GET", "/metrics", seconds=10).decode(), name, labels)

    def post(self, path: str, body: Mapping[str, Any], seconds: float = 120.0) -> Any:
        """POST JSON, return JSON (None for an empty answer)."""
        text = self.request("POST", path, json.dumps(body).encode(), seconds)
        return json.loads(text) if text.strip() else None
