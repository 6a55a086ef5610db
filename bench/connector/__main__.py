"""Benchmarks of the connector: `make bench-connector`, or `python -m bench.connector [ROW ...]`.

Every figure is a ratio within this run, or a time of code that runs alone; the sides of a ratio take turns. Prints a table
with the aim beside each figure and writes everything, samples included, to a JSON file. Engine rows start vLLM CPU engines
with a random-weight model of about 100 million parameters and the limits that ship; nothing is downloaded. A request that is
not answered in time, or not from the tier that is measured, is a miss: it is counted and printed, and the row goes on.

The chat trace is `conversation_trace.jsonl` of Mooncake's FAST'25 paper (repository kvcache-ai/Mooncake): give it with
--trace or EPOCHKV_TRACE. Without it a synthetic trace of the same shape is drawn, and the output says so.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from bench import harness
from bench.connector import trace
from bench.harness import Entry
from bench.report import Progress, Row


def late(module: str, name: str = "row", *, package: str = "bench.connector") -> Callable[[argparse.Namespace, Progress], Row]:
    """That function of that module: a row imports only what it needs."""

    def measure(arguments: argparse.Namespace, progress: Progress) -> Row:
        row: Row = getattr(import_module(f"{package}.{module}"), name)(arguments, progress)
        return row

    return measure


ROWS: dict[str, Entry] = {
    "bookkeeping": Entry("lookup, plan and commit of a hit, no engine", 5, late("bookkeeping")),
    "steps": Entry("a scheduler's step with 16, 64 and 256 running requests and no hits / without connector", 45, late("steps")),
    "hit-rates": Entry("chat trace on 4, 8, 16 simulated engines against known hit rates", 70, late("simulation")),
    "staging": Entry("copies between engine blocks and host slots / plain copy", 15, late("copies")),
    "store": Entry("L2 put and get / raw Mooncake client", 60, late("store")),
    "hang": Entry("a store node that hangs: memory and other requests held up, by size of calls", 150, late("store", "hang")),
    "ttft": Entry("time to first token, 4k tokens: cold, warm L1, warm L2 from another engine", 180, late("first_token", "own_tiers")),
    "stock": Entry("what L2 adds to a hit in the GPU's cache / vLLM's MooncakeStoreConnector", 180, late("first_token", "against_stock")),
    "lmcache": Entry(
        "what a hit in host memory adds to one in the GPU's cache / LMCache's server", 180, late("first_token", "against_lmcache")
    ),
    "load": Entry("time to first token of 16 requests, half of them in L2 / the same", 240, late("first_token", "under_load")),
    "queued": Entry("a hit in L2 that waits for a seat, from when that is free / the same", 240, late("first_token", "while_queued")),
    "chat": Entry("throughput on chats of the trace / vLLM's MooncakeStoreConnector", 300, late("chat", "against_stock")),
    "models": Entry(
        "tokens found of another engine's, by family / vLLM's MooncakeStoreConnector",
        480,
        late("found", package="bench.families"),
    ),
    "wide": Entry("two data-parallel ranks with experts: decode step, first token, pushes / stock vLLM", 240, late("wide")),
    "rollouts": Entry(
        "rollouts after a push on four engines: prefill with and without warm, bytes and hits by save policy", 240, late("rollouts")
    ),
    "beside": Entry("decode step beside a load from L2 and beside a save / the same step alone", 420, late("beside")),
    "decode": Entry("decode throughput with the connector and no hits / without connector", 180, late("decode")),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--repeats", type=int, default=5, help="repetitions of each side of a ratio; short ones three times as many (default 5)"
    )
    parser.add_argument("--trace", type=Path, help=f"the chat trace, plain or gzip (default: ${trace.TRACE_ENV}, else a synthetic one)")
    parser.add_argument("--window", type=int, default=10, help="requests of the chat row in one turn of an engine (default 10)")
    parser.add_argument("--requests", type=int, help="only so many requests of the trace on the simulated engines (default: all)")


if __name__ == "__main__":
    sys.exit(harness.run("connector", __doc__, ROWS, add_arguments))
