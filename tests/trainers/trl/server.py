"""The `vllm serve` that TRL's documentation asks for, on CPU, and what its metrics say of a generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hack.standalone.engine import Engine

ROOT = Path(__file__).resolve().parents[3]
GPU_BLOCKS = 14
"""Room for a prompt with its completions and half of another one: what a step asks for again, the GPU has lost."""
START_SECONDS = 480.0

ARGUMENTS = (
    "--weight-transfer-config", '{"backend": "tcp"}', "--worker-extension-cls", "tests.trainers.trl.transport.Extension",
    "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1",
    "--no-skip-tokenizer-init", "--max-model-len", "1024", "--max-num-seqs", "4",
    # A prompt in two parts ends vLLM 0.31 on CPU, where the request has a seed: "CPU Generator does not use offset".
    "--max-num-batched-tokens", "4096",
)  # fmt: skip


@dataclass(frozen=True)
class Hits:
    """Tokens of prompts that vLLM found, so far, in its own cache and through its connector."""

    own: int
    external: int

    def since(self, before: Hits) -> Hits:
        return Hits(self.own - before.own, self.external - before.external)


def start(name: str, model: Path, folder: Path, connector: Mapping[str, Any] | None, environ: Mapping[str, str] | None = None) -> Engine:
    """Start a server for a trainer. Without a connector it caches nothing at all."""
    environ = {"PYTHONPATH": str(ROOT), "VLLM_HOST_IP": "127.0.0.1", **(environ or {})}
    blocks = () if connector is None else ("--num-gpu-blocks-override", str(GPU_BLOCKS))
    return Engine(name, model, folder, connector, connector is not None, (*ARGUMENTS, *blocks), environ)


def hits(engine: Engine) -> Hits:
    return Hits(int(engine.metric("vllm:prefix_cache_hits_total")), int(engine.metric("vllm:external_prefix_cache_hits_total")))
