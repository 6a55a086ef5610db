"""Engines of a benchmark run: one Mooncake, one pool, and vLLM CPU engines with the model of 100 million parameters.

All engines of a row are alike but for the connector. They run at the same time and are asked in turns, so that what else
the machine does meets every side of a ratio.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.connector.misses import OtherHit
from bench.connector.store import Raw, Region
from bench.model import make_large
from bench.report import Progress
from hack.demo.stock import stock_connector
from hack.engine_api import EngineError
from hack.loopback import free_ports
from hack.standalone.engine import Engine
from hack.standalone.mooncake import Mooncake
from hack.standalone.pool import Pool
from hack.standalone.process import Process
from hack.waiting import eventually

BLOCK_TOKENS = 32
"""The smallest that vLLM's CPU attention takes."""

BLOCK_BYTES = 24 * 1024 * BLOCK_TOKENS
MAX_TOKENS = 4112
GPU_BLOCKS = 150
"""One prompt of 4096 tokens and little more."""

CONCURRENCY = 4
STORE_BYTES = 3 << 30
TOUCHED_AT_ONCE = 16
PATIENT = {"MC_TCP_STATUS_TIMEOUT_SEC": "30", "MC_TCP_PROGRESS_TIMEOUT_SEC": "30"}
"""Only for who touches the store's memory before the measurement; engines run with the limits that ship."""
START_SECONDS = 400.0
SETTLE_SECONDS = 2.0
"""Between turns: an engine polls and stores for a moment after its last token, which would slow its neighbour."""
VOCABULARY = range(2, 12_000)
ARGS = (
    "--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(GPU_BLOCKS), "--max-model-len", str(MAX_TOKENS),
    "--max-num-batched-tokens", "2048", "--max-num-seqs", str(CONCURRENCY),
)  # fmt: skip
ROOT = Path(__file__).parents[2]
LMCACHE = ROOT / ".build/lmcache"
TICKS = os.sysconf("SC_CLK_TCK")


def l1_bytes(num_blocks: int) -> int:
    """Room for that many blocks with header and padding."""
    return num_blocks * (BLOCK_BYTES + 8192)


@dataclass(frozen=True)
class Fleet:
    """Engines by name, the store they share, and the folder with their model."""

    engines: Mapping[str, Engine]
    mooncake: Mooncake
    folder: Path

    def wait_stored(self, num_keys: int) -> None:
        """Return once the store holds that many objects.

        Raises:
            TimeoutError: not within a minute.
        """
        eventually(lambda: len(self.mooncake.keys()) >= num_keys, f"{num_keys} objects in the store, {len(self.mooncake.keys())} are there")


@contextmanager
def fleet(
    kinds: Mapping[str, str],
    l1_blocks: int = 0,
    args: Sequence[str] = ARGS,
    make: Callable[[Path, int], Path] = make_large,
    store_bytes: int = STORE_BYTES,
) -> Iterator[Fleet]:
    """Start engines: name -> "ours", "stock" (vLLM's MooncakeStoreConnector), "lmcache" or "none"; returns when all are healthy.

    Args:
        l1_blocks: L1 of each engine of ours.
        make: writes the model into a folder.
        store_bytes: more than all turns put, so that nothing is evicted which is to be found.
    """
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="epochkv-bench-")))
        model = make(folder / "model", 1)
        mooncake = stack.enter_context(Mooncake(folder, segment_bytes=store_bytes))
        touch_memory(mooncake, store_bytes * 4 // 5)  # above that, Mooncake evicts
        pool = stack.enter_context(Pool(folder))
        stock, environ = stock_connector(folder, mooncake)
        ours = pool.connector(local_bytes=l1_bytes(l1_blocks), master_address=mooncake.address) if l1_blocks else None
        sides: dict[str, tuple[Any, Mapping[str, str]]] = {"ours": (ours, {}), "stock": (stock, environ), "none": (None, {})}
        if "lmcache" in kinds.values():
            sides["lmcache"] = stack.enter_context(lmcache(folder, l1_bytes(l1_blocks)))
        engines: dict[str, Engine] = {}
        for name, kind in kinds.items():
            connector, environ = sides[kind]
            engine = Engine(name, model, folder, connector, args=args, environ=environ)
            stack.callback(engine.end)
            engines[name] = engine
        for engine in engines.values():
            engine.wait_ready(START_SECONDS)
        pool.wait_engines(sum(kind == "ours" for kind in kinds.values()))
        yield Fleet(engines, mooncake, folder)


@contextmanager
def lmcache(folder: Path, num_bytes: int) -> Iterator[tuple[dict[str, Any], Mapping[str, str]]]:
    """LMCache's server with that much memory, shared with engines, touched when it starts; its connector and the engine's variables."""
    subprocess.run([str(ROOT / "hack/setup.sh"), "lmcache"], check=True)
    port, http_port = free_ports(2)
    beside = {"PYTHONPATH": os.pathsep.join([str(LMCACHE), os.environ.get("PYTHONPATH", "")]), "LMCACHE_TRACK_USAGE": "false"}
    command = [
        sys.executable, "-m", "lmcache.cli.main", "server", "--host", "127.0.0.1", "--port", str(port), "--http-port", str(http_port),
        "--l1-size-gb", str(num_bytes / (1 << 30)), "--no-l1-use-lazy", "--eviction-policy", "LRU", "--chunk-size", str(BLOCK_TOKENS),
        "--supported-transfer-mode", "engine_driven", "--shm-name", folder.name,
    ]  # fmt: skip
    with Process("lmcache", command, folder / "lmcache.log", beside) as server:
        server.wait_until(lambda: "LMCache cache server is running" in server.log.read_text(), START_SECONDS, "running")
        where = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": port}
        yield {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": where}, beside


def touch_memory(mooncake: Mooncake, num_bytes: int) -> None:
    """Write so much into the store and remove it again: on a virtual machine the first use of memory can take seconds, and would
    make whoever stores first look slow.
    """
    with raw_client(mooncake, TOUCHED_AT_ONCE) as raw:
        for first in range(0, num_bytes // BLOCK_BYTES, TOUCHED_AT_ONCE):
            raw.put([f"touch/{index}" for index in range(first, first + TOUCHED_AT_ONCE)], TOUCHED_AT_ONCE)
        raw.client.remove_by_regex("^touch/", True)
        eventually(lambda: not mooncake.keys(), "the store emptied")


@contextmanager
def raw_client(mooncake: Mooncake, num_blocks: int) -> Iterator[Raw]:
    """Mooncake's own client, with memory for so many blocks."""
    with environment(PATIENT):  # read when the client is made
        raw = Raw(mooncake.address, Region(num_blocks, BLOCK_BYTES))
    with closing(raw):
        yield raw


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """Variables of this process, put back afterwards."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def in_turns(names: Iterable[str], rounds: int, progress: Progress) -> Iterator[tuple[int, str]]:
    """(round, name): everybody once a round, and in the next round the other way round."""
    order, began = list(names), time.monotonic()
    for index in range(rounds):
        for name in order:
            yield index, name
        order.reverse()
        progress.step(index + 1, rounds, began)


def prompt(seed: str, num_tokens: int) -> list[int]:
    """Token ids that no other seed shares."""
    rng = random.Random(seed)
    return [rng.choice(VOCABULARY) for _ in range(num_tokens)]


def empty_gpu(engine: Engine) -> None:
    """Drop what the engine's own prefix cache holds, and nothing of a tier; waits for saves that still hold blocks."""

    def emptied() -> bool:
        try:
            return engine.reset_prefix_cache(external=False)
        except EngineError:  # vLLM's answer while blocks are still on their way
            return False

    eventually(emptied, f"{engine.name}: prefix cache emptied")


def timed_answer(engine: Engine, tokens: Sequence[int], cached: int, save: Any = None) -> float:
    """Seconds to the first token over HTTP.

    Args:
        cached: tokens that caches should have.
        save: what an engine of ours saves of it; None: all.

    Raises:
        OtherHit: the engine took another number of tokens than `cached` from caches, so it is not what should be measured.
    """
    began = time.perf_counter()
    answer = engine.complete(tokens, 1, transfer=None if save is None else {"epochkv": {"save": save}})
    seconds = time.perf_counter() - began
    if answer.cached != cached:
        raise OtherHit(f"{engine.name} took {answer.cached} tokens from caches, expected {cached} of {len(tokens)}")
    return seconds


def cpu_seconds(engine: Engine) -> float:
    """CPU time of the engine's processes so far."""
    total = 0
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        if int(fields[3]) == engine.process.popen.pid:
            total += int(fields[11]) + int(fields[12])
    return total / TICKS
