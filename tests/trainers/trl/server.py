"""The `vllm serve` that TRL's documentation asks for, on CPU, and what its metrics say of a generation."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trl import GRPOTrainer

from hack.loopback import free_port
from hack.standalone.engine import Engine
from tests.trainers.trl import grpo

ROOT = Path(__file__).resolve().parents[3]
BATCH = grpo.Batch(prompts=3, shared_tokens=384, own_tokens=560, generations=4)
SAMPLING = {"seed": 7}
"""vLLM draws the tokens of a request from a generator of its own then, so that equal logits give equal tokens. (At temperature 0
the completions of a prompt are equal, and GRPO learns nothing; vLLM refuses several of them.)"""
GPU_BLOCKS = 14
"""Room for a prompt with its completions and half of another one: most of what a step asks for again, the GPU has lost."""
START_SECONDS = 480.0

ARGUMENTS = (
    "--weight-transfer-config", '{"backend": "tcp"}', "--worker-extension-cls", "tests.trainers.trl.transport.Extension",
    "--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1",
    "--no-skip-tokenizer-init", "--max-model-len", "1024", "--max-num-seqs", "4",
    # A prompt in two parts ends vLLM 0.31 on CPU, where the request has a seed: "CPU Generator does not use offset".
    "--max-num-batched-tokens", "4096",
)  # fmt: skip


def start(name: str, model: Path, folder: Path, connector: Mapping[str, Any] | None, environ: Mapping[str, str] | None = None) -> Engine:
    """Start a server for a trainer. Without a connector it caches nothing at all."""
    environ = {"PYTHONPATH": str(ROOT), "VLLM_HOST_IP": "127.0.0.1", **(environ or {})}
    blocks = () if connector is None else ("--num-gpu-blocks-override", str(GPU_BLOCKS))
    return Engine(name, model, folder, connector, connector is not None, (*ARGUMENTS, *blocks), environ)


def train(
    engine: Engine, model: Path, folder: Path,
    observe: Callable[[], Any] = lambda: None,
    prepare: Callable[[GRPOTrainer], None] = lambda _: None,
) -> grpo.Run:  # fmt: skip
    """Train against this server, as `grpo.train`."""
    where = {
        "vllm_mode": "server",
        "vllm_server_base_url": f"http://127.0.0.1:{engine.port}",
        "vllm_group_port": free_port(),
        "vllm_server_timeout": 10.0,
        "generation_kwargs": SAMPLING,
    }
    return grpo.train(model, BATCH, where, folder, observe, prepare)


def hits(engine: Engine) -> grpo.Hits:
    return grpo.Hits(int(engine.metric("vllm:prefix_cache_hits_total")), int(engine.metric("vllm:external_prefix_cache_hits_total")))
