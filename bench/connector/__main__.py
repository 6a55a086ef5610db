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
from pathlib import Path

from bench import harness
from bench.connector import trace
from bench.harness import Entry
from bench.report import Progress, Row


def bookkeeping_row(arguments: argparse.Namespace, progress: Progress) -> Row:
    """Imports are late: a row loads only what it needs."""
    from bench.connector import bookkeeping

    return bookkeeping.row(3 * arguments.repeats, progress)


def steps_row(arguments: argparse.Namespace, progress: Progress) -> Row:
    from bench.connector import steps

    return steps.row(3 * arguments.repeats, progress)


def simulation_row(arguments: argparse.Namespace, progress: Progress) -> Row:
    from bench.connector import simulation

    return simulation.row(trace.load(arguments.trace, arguments.requests), progress)


def copies_row(arguments: argparse.Namespace, progress: Progress) -> Row:
    from bench.connector import copies

    return copies.row(arguments.repeats, progress)


def store_row(arguments: argparse.Namespace, progress: Progress) -> Row:
    from bench.connector import store

    return store.row(3 * arguments.repeats, progress)


def first_token_row(arguments: argparse.Namespace, progress: Progress) -> Row:
    from bench.connector import first_token

    return first_token.own_tiers(arguments.repeats, progress)


def stock_row(arguments: argparse.Namespace, progress: Progress) -> Row:
    from bench.connector import first_token

    return first_token.against_stock(arguments.repeats, progress)


def chat_row(arguments: argparse.Namespace, progress: Progress) -> Row:
    from bench.connector import chat

    return chat.against_stock(trace.load(arguments.trace), arguments.repeats, arguments.window, progress)


def decode_row(arguments: argparse.Namespace, progress: Progress) -> Row:
    from bench.connector import decode

    return decode.row(2 * arguments.repeats, progress)


ROWS: dict[str, Entry] = {
    "bookkeeping": Entry("lookup, plan and commit of a hit, no engine", 5, bookkeeping_row),
    "steps": Entry("a scheduler's step with 16, 64 and 256 running requests and no hits / without connector", 45, steps_row),
    "hit-rates": Entry("chat trace on 4, 8, 16 simulated engines against known hit rates", 70, simulation_row),
    "staging": Entry("copies between engine blocks and host slots / plain copy", 15, copies_row),
    "store": Entry("L2 put and get / raw Mooncake client", 60, store_row),
    "ttft": Entry("time to first token, 4k tokens: cold, warm L1, warm L2 from another engine", 180, first_token_row),
    "stock": Entry("the same from L2 / vLLM's MooncakeStoreConnector", 180, stock_row),
    "chat": Entry("throughput on chats of the trace / vLLM's MooncakeStoreConnector", 300, chat_row),
    "decode": Entry("decode throughput with the connector and no hits / without connector", 180, decode_row),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What only this benchmark can be told."""
    parser.add_argument(
        "--repeats", type=int, default=5, help="repetitions of each side of a ratio; short ones three times as many (default 5)"
    )
    parser.add_argument("--trace", type=Path, help=f"the chat trace, plain or gzip (default: ${trace.TRACE_ENV}, else a synthetic one)")
    parser.add_argument("--window", type=int, default=10, help="requests of the chat row in one turn of an engine (default 10)")
    parser.add_argument("--requests", type=int, help="only so many requests of the trace on the simulated engines (default: all)")


if __name__ == "__main__":
    sys.exit(harness.run("connector", __doc__, ROWS, add_arguments))
