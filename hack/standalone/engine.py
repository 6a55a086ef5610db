"""A vLLM CPU engine behind its OpenAI server, as a process: prompts are token ids, so no tokenizer is needed."""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from hack.standalone.mooncake import CLIENT_ENVIRONMENT
from hack.standalone.process import Process, free_port

CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_SERVER_DEV_MODE": "1",  # /collective_rpc, to load new weights
    "VLLM_LOGGING_LEVEL": "INFO",
    "PYTHONHASHSEED": "0",
    # Two engines on few cores: a thread team that spins while it waits starves its neighbour.
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
}


@dataclass(frozen=True)
class Answer:
    """What an engine said: token ids, and how many tokens of the prompt it took from a cache of any tier."""

    tokens: tuple[int, ...]
    cached: int
    logprobs: tuple[float, ...] = ()


class Engine:
    """One engine. `connector` is the JSON of `--kv-transfer-config`, None for a cache-less reference."""

    def __init__(
        self,
        name: str,
        model: Path,
        directory: Path,
        connector: Mapping[str, Any] | None = None,
        prefix_caching: bool = True,
        args: Sequence[str] = (),
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.port = name, free_port()
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--served-model-name", "model", "--host", "127.0.0.1",
            "--port", str(self.port), "--skip-tokenizer-init", "--enforce-eager", "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "8",
            "--enable-prompt-tokens-details", "--shutdown-timeout", "5",
            "--enable-prefix-caching" if prefix_caching else "--no-enable-prefix-caching", *args,
        ]  # fmt: skip
        if connector is not None:
            command += ["--kv-transfer-config", json.dumps(connector)]
        self.process = Process(
            name, command, directory / f"{name}.log", {**CPU_ENVIRONMENT, **CLIENT_ENVIRONMENT, **(environ or {})}
        )

    def wait_ready(self, seconds: float = 240.0) -> Self:
        """Return once `/health` answers 200."""
        self.process.wait_until(lambda: self._status("/health") == 200, seconds, "healthy")
        return self

    def complete(self, prompt: Sequence[int], max_tokens: int = 8) -> Answer:
        """Greedy completion of token ids."""
        body = {
            "model": "model", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "return_token_ids": True,
            "detokenize": False,
        }  # fmt: skip
        reply = self.post("/v1/completions", body)
        details = reply["usage"].get("prompt_tokens_details") or {}
        return Answer(tuple(reply["choices"][0]["token_ids"]), int(details.get("cached_tokens") or 0))

    def reload_weights(self, model: Path) -> None:
        """Load the weights of another folder into the running engine."""
        self.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(model)}})

    def reset_prefix_cache(self, external: bool) -> bool:
        """vLLM's own reset; True if it says that it succeeded."""
        return bool(
            self.post(f"/reset_prefix_cache?reset_running_requests=true&reset_external={str(external).lower()}", {})[
                "success"
            ]
        )

    def metric(self, name: str, **labels: str) -> float:
        """Sum of a Prometheus metric over the series that carry `labels`."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        total = 0.0
        for line in text.splitlines():
            match = re.match(r"^([a-zA-Z_:][\w:]*)(\{.*\})? (\S+)$", line)
            if (
                match
                and match[1] == name
                and all(f'{key}="{value}"' in (match[2] or "") for key, value in labels.items())
            ):
                total += float(match[3])
        return total

    def post(self, path: str, body: Mapping[str, Any], seconds: float = 120.0) -> Any:
        """POST JSON, return JSON (None for an empty answer). Errors carry the engine's own words."""
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=seconds) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            raise RuntimeError(
                f"{self.name} {path}: HTTP {error.code}: {error.read().decode(errors='replace')[:500]}"
            ) from error
        return json.loads(text) if text.strip() else None

    def _status(self, path: str) -> int:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=2) as answer:
                status: int = answer.status
                return status
        except urllib.error.HTTPError as error:
            return error.code
        except OSError:
            return 0

    def __enter__(self) -> Self:
        return self.wait_ready()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.end(15.0)
