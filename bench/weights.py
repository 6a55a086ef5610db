"""What it costs to name KV after weights: `make bench-weights`, or `python -m bench.weights [ROW ...]`.

The rows `digest`, `sample` and `updates` need torch only, and run on the GPU where there is one; `decode`, `start` and `push` run a vLLM
CPU engine with a random-weight model of about 100 million parameters in this process. The sides of a ratio take turns.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bench import harness
from bench.harness import Entry
from bench.report import Figure, Progress, Row, repeated
from epochkv_connector.weights.digest import NUM_ELEMENTS, Sample, digest

HIDDEN, LAYERS = 768, 12
LEARNING_RATES = (1e-5, 3e-6, 1e-6, 3e-7, 1e-7)
SHARE_OF_A_SMALL_PUSH = 1e-3
MISS_AIM = 1e-6
BLOCK_TOKENS = 32
STEPS = 48

Tensors = list[tuple[str, torch.Tensor]]


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def model_tensors(dtype: torch.dtype = torch.bfloat16, layers: int = LAYERS, hidden: int = HIDDEN) -> Tensors:
    """Names and sizes as of a decoder; 100 million elements with the defaults."""
    source = torch.Generator(device()).manual_seed(1)
    shapes = {"embed": (12288, hidden), "head": (12288, hidden), "norm": (hidden,)}
    for layer in range(layers):
        shapes |= {
            f"{layer}.qkv": (hidden * 5 // 3, hidden),
            f"{layer}.o": (hidden, hidden),
            f"{layer}.gate_up": (6 * hidden, hidden),
            f"{layer}.down": (hidden, 3 * hidden),
            f"{layer}.norm1": (hidden,),
            f"{layer}.norm2": (hidden,),
            f"{layer}.q_norm": (64,),
            f"{layer}.k_norm": (64,),
        }
    return [
        (name, torch.randn(shape, generator=source, device=device(), dtype=torch.float32).mul_(0.02).to(dtype))
        for name, shape in shapes.items()
    ]


def seconds(work: Callable[[], Any]) -> float:
    """Of one run, the device's part included."""
    wait()
    began = time.perf_counter()
    work()
    wait()
    return time.perf_counter() - began


def digest_row(arguments: argparse.Namespace, progress: Progress) -> Row:
    """Against a plain read: the sum of the same bytes as 64-bit integers."""
    layers, hidden = (32, 4096) if torch.cuda.is_available() else (LAYERS, HIDDEN)
    tensors = model_tensors(layers=layers, hidden=hidden)
    num_bytes = sum(tensor.numel() * tensor.element_size() for _, tensor in tensors)
    words = [tensor.view(-1).view(torch.int64) for _, tensor in tensors]

    def read() -> None:
        torch.stack([word.sum() for word in words]).sum().item()

    read()
    pairs = [(seconds(read), seconds(lambda: digest(tensors))) for _ in range(3 * arguments.repeats)]
    best = min(plain for plain, _ in pairs) / min(ours for _, ours in pairs)  # a busy machine disturbs either at random
    figures = [
        Figure("bytes per second, digest / plain read, the best run of each", best, 0.5, "", at_least=True),
        repeated("of neighbouring runs", [plain / ours for plain, ours in pairs], None),
        repeated("digest", [num_bytes / ours / 1e9 for _, ours in pairs], None, "GB/s"),
        repeated("plain read", [num_bytes / plain / 1e9 for plain, _ in pairs], None, "GB/s"),
    ]
    return Row(f"digest of {num_bytes / 1e6:.0f} MB on {device().type}", figures, {"threads": torch.get_num_threads()})


def sample_row(arguments: argparse.Namespace, progress: Progress) -> Row:
    """One comparison: in the caches, and after the products of a step with other weights of the same size."""
    tensors, others = model_tensors(), [tensor.float() for _, tensor in model_tensors() if tensor.dim() == 2]
    sample = Sample(tensors)

    def after_a_step() -> float:
        for other in others:
            torch.nn.functional.linear(other[:1], other)
        return seconds(sample.holds)

    assert sample.holds()
    draws = [seconds(lambda: Sample(tensors)) for _ in range(arguments.repeats)]
    looks = [seconds(sample.holds) for _ in range(200)]
    issued = [seconds(sample.compare) for _ in range(200)]
    figures = [
        repeated("one comparison", [1e3 * one for one in looks], None, "ms"),
        repeated("one comparison after a step", [1e3 * after_a_step() for _ in range(50)], None, "ms"),
        repeated("its issue, without its result", [1e3 * one for one in issued], None, "ms"),
        repeated("drawn anew", [1e3 * one for one in draws], None, "ms"),
        Figure("elements", float(sample.num_elements), None, ""),
    ]
    return Row(f"sample of 100 million elements on {device().type}", figures, {"milliseconds": [1e3 * one for one in looks]})


def changed_share(rate: float, num: int = 4_000_000) -> float:
    """Share of elements that one step of an Adam-like update changes in bfloat16.

    Each moves by the rate, times a normal direction. The trainer keeps float32 masters that it rounds for the push.
    """
    source = torch.Generator().manual_seed(2)
    master = torch.randn(num, generator=source) * 0.02
    moved = master - rate * torch.randn(num, generator=source).clamp(-3, 3)
    return float((master.to(torch.bfloat16) != moved.to(torch.bfloat16)).double().mean())


def updates_row(arguments: argparse.Namespace, progress: Progress) -> Row:
    """How much of a model a small push changes, and how often one comparison would miss all of it."""
    figures = []
    num_elements = Sample(model_tensors(torch.int8)).num_elements
    for rate in LEARNING_RATES:
        share = changed_share(rate)
        figures.append(Figure(f"elements that a step at {rate:g} changes", 100 * share, None, "%"))
        figures.append(Figure(f"missed by one comparison, at {rate:g}", math.exp(num_elements * math.log1p(-share)), None, ""))
    missed = math.exp(num_elements * math.log1p(-SHARE_OF_A_SMALL_PUSH))
    figures.append(Figure("missed by one comparison, 0.1 % changed", missed, MISS_AIM, ""))
    return Row(f"pushes and a sample of {num_elements} elements", figures, {"asked for": NUM_ELEMENTS})


# ---------------------------------------------------------------------------------------------- real engines, in this process


@contextmanager
def engine(model: Path, folder: Path, connector: bool) -> Iterator[Any]:
    """A vLLM engine in this process, with L1 and a private root, or without a connector."""
    from vllm import LLM

    from epochkv_fence.launch import transfer_config

    transfer = {"pool": {"name": "bench", "namespace": "default", "uid": "bench"}, "local": {"capacity_bytes": 256 << 20}}
    options: dict[str, Any] = {"kv_transfer_config": transfer_config(transfer)} if connector else {}
    llm = LLM(
        model=str(model),
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=2048,
        max_num_seqs=8,
        enable_prefix_caching=True,
        block_size=BLOCK_TOKENS,
        num_gpu_blocks_override=256,
        **options,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def serve(llm: Any, seed: int, num_tokens: int) -> None:
    """One request of 64 tokens and so many more."""
    from vllm import SamplingParams, TokensPrompt

    tokens = [3 + (seed * 7919 + place * 104729) % 12000 for place in range(2 * BLOCK_TOKENS)]
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, temperature=0.0, detokenize=False)
    llm.generate([TokensPrompt(prompt_token_ids=tokens)], sampling, use_tqdm=False)


@contextmanager
def in_process() -> Iterator[Path]:
    """A folder with the model; engines made inside run in this very process."""
    from bench.model import make_large

    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_LOGGING_LEVEL="ERROR", VLLM_CPU_KVCACHE_SPACE="1")
    with tempfile.TemporaryDirectory(prefix="epochkv-bench-") as folder:
        yield make_large(Path(folder) / "model", 1)


def decode_row(arguments: argparse.Namespace, progress: Progress) -> Row:
    """Real decode steps of one request, and the comparisons that they made."""
    from epochkv_connector.weights import rank

    spent: list[float] = []
    look = rank.Comparison.__init__

    def timed(self: Any, held: Any, number: int) -> None:
        began = time.perf_counter()
        look(self, held, number)
        if number >= 0:
            spent.append(time.perf_counter() - began)

    rank.Comparison.__init__ = timed  # type: ignore[method-assign]
    try:
        with in_process() as model, engine(model, model.parent, connector=True) as llm:
            serve(llm, 0, 4)
            spent.clear()
            steps = [seconds(lambda seed=seed: serve(llm, seed, STEPS)) / STEPS for seed in range(1, 2 + arguments.repeats)]  # type: ignore[misc]
    finally:
        rank.Comparison.__init__ = look  # type: ignore[method-assign]
    step, one = statistics.median(steps), statistics.median(spent)
    figures = [
        Figure("comparison, share of a decode step", 100 * one / step, 1.0, "%"),
        repeated("decode step", [1e3 * value for value in steps], None, "ms"),
        repeated("comparison in it", [1e3 * value for value in spent], None, "ms"),
    ]
    return Row("comparison after each step, 100 million parameters on cpu", figures, {"comparisons": len(spent)})


def start_row(arguments: argparse.Namespace, progress: Progress) -> Row:
    """The first look of an engine, beside the rest of its start in the same process: what a start without it takes is the difference."""
    from epochkv_connector.weights.watch import Watch

    ratios, looks, starts = [], [], []
    asked = Watch._digest
    for _ in range(max(1, arguments.repeats // 2)):
        spent: list[float] = []

        def timed(self: Any, spent: list[float] = spent) -> None:
            spent.append(seconds(lambda: asked(self)))

        Watch._digest = timed  # type: ignore[method-assign]
        try:
            with in_process() as model:
                began = time.perf_counter()
                with engine(model, model.parent, connector=True):
                    whole = time.perf_counter() - began
        finally:
            Watch._digest = asked  # type: ignore[method-assign]
        ratios.append(whole / (whole - sum(spent)))
        looks.append(sum(spent))
        starts.append(whole)
    figures = [
        repeated("engine start with the digest / without", ratios, 1.05),
        repeated("engine start", starts, None, "s"),
        repeated("digest in it", [1e3 * one for one in looks], None, "ms"),
    ]
    return Row("engine start, 100 million parameters on cpu", figures)


def push_row(arguments: argparse.Namespace, progress: Progress) -> Row:
    """A push by RPC to an engine that serves nothing at the moment, then one request."""
    with in_process() as model, engine(model, model.parent, connector=True) as llm:
        core = llm.llm_engine.engine_core.engine_core
        watch = core.scheduler.connector.scheduler.weights.watch
        serve(llm, 0, 4)
        pauses, named = [], []
        for seed in range(1, 3 + 2 * arguments.repeats):
            llm.collective_rpc(_scale)
            before, looks = watch.value, watch.counters["digests"]
            began = time.perf_counter()
            serve(llm, 1000 + seed, 1)
            if watch.counters["digests"] != looks + 1 or watch.value in (None, before):
                raise RuntimeError("the first request after a push was not named after one digest")
            pauses.append(time.perf_counter() - began)
            named.append(watch.seconds)
    figures = [
        Figure("digests between the push and the first request named by it", 1.0, 1.0, ""),
        Figure("steps between them", 0.0, 1.0, ""),
        repeated("that digest", [1e3 * one for one in named], None, "ms"),
        repeated("first request of 64 tokens, that digest in it", [1e3 * one for one in pauses], None, "ms"),
    ]
    return Row("push by RPC, 100 million parameters on cpu", figures)


def _scale(worker: Any) -> None:
    """A push of one tensor."""
    with torch.no_grad():
        next(iter(worker.get_model().parameters())).mul_(1.001)


ENTRIES = {
    "digest": Entry("digest against a plain read of the same bytes (torch only)", 10, digest_row),
    "sample": Entry("one comparison of the sample (torch only)", 10, sample_row),
    "updates": Entry("elements that small pushes change, and what the sample misses (torch only)", 10, updates_row),
    "decode": Entry("comparisons beside real decode steps (vLLM)", 60, decode_row),
    "start": Entry("engine start with the digest and without (vLLM)", 90, start_row),
    "push": Entry("from a push to the first request named by it (vLLM)", 60, push_row),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=5, help="default: 5")


if __name__ == "__main__":
    sys.exit(harness.run("weights", __doc__, ENTRIES, add_arguments))
