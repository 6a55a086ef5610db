"""Leaks of a soak: memory of every process over its life, and what an idle engine still holds."""

from __future__ import annotations

import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hack.engine_api import EngineError, metric_total
from hack.soak.tally import Tally
from hack.soak.world import Rank, World

SAMPLE_SECONDS, NOTE_SECONDS = 5.0, 60.0
WARM_UP_SECONDS, WINDOW_SECONDS = 120.0, 30.0
HUB_WARM_UP_SECONDS, HUB_WINDOW_SECONDS = 20.0, 15.0
MIN_GROWTH_BYTES, MAX_GROWTH_BYTES = 16 << 20, 48 << 20
MAX_GROWTH_BYTES_PER_MINUTE = 6 << 20
"""Beyond the warm-up. A leak of one KV block (0.2 MB) in fifty requests is faster. Smaller ones show in the gauges, which count
every block, slot, plan and job; allocators, and Mooncake's clients that are made anew after faults, move within these bounds."""

OPEN = (
    "plans_open", "jobs_open", 'slots{state="held"}', 'slots{state="reserved"}', 'slots{state="busy"}', "old_epoch_requests",
    "old_epoch_sessions", "rank_held_slots", "rank_open", "store_queue", "store_in_flight",
)  # fmt: skip
"""Gauges of the connector that must be 0 when nothing runs."""


@dataclass(frozen=True)
class Growth:
    """Memory of one process group: medians at the begin and at the end of what follows its warm-up."""

    name: str
    minutes: float
    begin: float
    end: float

    @property
    def flat(self) -> bool:
        """Whether it has grown no more than is allowed."""
        grown = self.end - self.begin
        return grown <= MAX_GROWTH_BYTES and grown <= max(MIN_GROWTH_BYTES, MAX_GROWTH_BYTES_PER_MINUTE * self.minutes)

    def __str__(self) -> str:
        return f"{self.name} {self.begin / 1e6:.0f} -> {self.end / 1e6:.0f} MB in {self.minutes:.1f} min after its warm-up"


def group_memory(group: int) -> dict[str, int]:
    """Resident bytes that are backed by no file, of the processes of a group, by their names.

    Code that is touched for the first time, or read again after the machine was short of memory, is no growth.
    """
    sizes: defaultdict[str, int] = defaultdict(int)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, LookupError, ValueError):  # it ends, or has ended and has no memory
            if int(stat.read_text().rsplit(")", 1)[1].split()[2]) == group:
                status = dict(line.split(":", 1) for line in (stat.parent / "status").read_text().splitlines())
                size = sum(int(status[kind].split()[0]) << 10 for kind in ("RssAnon", "RssShmem"))
                sizes[status["Name"].strip()] += size
    return dict(sizes)


class Memory:
    """Samples the memory of every engine boot and of every life of the hub."""

    def __init__(self, world: World, stop: threading.Event, note: Callable[[str], None] = lambda text: None) -> None:
        """`note` is told every minute which process of each group has how much."""
        self._world, self._stop, self._note = world, stop, note
        self.error: Exception | None = None
        self._samples: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        self._thread = threading.Thread(target=self._run, name="soak-memory", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def growths(self) -> list[Growth]:
        """Of every process that lived long enough past its warm-up to tell."""
        found = []
        for name, samples in self._samples.items():
            is_hub = name.startswith("hub")
            warm_up = HUB_WARM_UP_SECONDS if is_hub else WARM_UP_SECONDS
            window = HUB_WINDOW_SECONDS if is_hub else WINDOW_SECONDS
            warm = [(at, size) for at, size in samples if at >= samples[0][0] + warm_up]
            if not warm or warm[-1][0] - warm[0][0] < window:
                continue
            first, last = warm[0][0], warm[-1][0]
            begin = statistics.median(size for at, size in warm if at <= first + window)
            end = statistics.median(size for at, size in warm if at >= last - window)
            found.append(Growth(name, (last - first) / 60.0, begin, end))
        return found

    def last(self) -> dict[str, float]:
        """The newest sample of each process that lives, in MB."""
        living = {name: samples[-1] for name, samples in self._samples.items()}
        newest = max((at for at, _ in living.values()), default=0.0)
        return {name: size / 1e6 for name, (at, size) in sorted(living.items()) if at == newest}

    def _run(self) -> None:
        try:
            self._sample()
        except Exception as error:  # reported by the run
            self.error = error

    def _sample(self) -> None:
        noted = -NOTE_SECONDS
        while not self._stop.wait(SAMPLE_SECONDS):
            now = time.monotonic()
            notes = now >= noted + NOTE_SECONDS
            noted = now if notes else noted
            groups = {rank.engine.name: rank.engine.process for rank in self._world.ranks if rank.up}
            groups[f"hub {self._world.hub.process.popen.pid}"] = self._world.hub.process
            for name, process in groups.items():
                if process.alive() and (sizes := group_memory(process.popen.pid)):
                    self._samples[name].append((now, sum(sizes.values())))
                    if notes:
                        self._note(f"memory of {name}: " + ", ".join(f"{part} {size / 1e6:.1f} MB" for part, size in sizes.items()))


def holdings(rank: Rank) -> dict[str, float]:
    """What an engine without requests still holds, as its metrics say: used GPU blocks, and the connector's `OPEN` gauges.

    Metrics travel with a step, at most once a second, so a step is made first.
    """
    time.sleep(1.1)
    rank.engine.complete(list(range(2, 10)), 2)
    text = rank.engine.request("GET", "/metrics", seconds=20).decode()
    held = {name: _open(text, name) for name in OPEN}
    held["gpu_blocks"] = metric_total(text, "vllm:kv_cache_usage_perc", {})
    held["unknown"] = float("vllm:epochkv_jobs_open{" not in text)  # silence is no proof
    return {name: value for name, value in held.items() if value}


def _open(text: str, name: str) -> float:
    family, _, state = name.partition('{state="')
    return metric_total(text, f"vllm:epochkv_{family}", {"state": state.removesuffix('"}')} if state else {})


def leaks(world: World, tally: Tally, seconds: float = 60.0) -> int:
    """Wait until every engine holds nothing; the number of things that are held after `seconds`."""
    deadline = time.monotonic() + seconds
    left: dict[str, dict[str, float]] = {}
    while time.monotonic() < deadline:
        try:
            left = {rank.name: held for rank in world.ranks if (held := holdings(rank))}
        except EngineError as error:
            tally.problem("failed requests", error=error)
            left = {"engine": {"unknown": 1.0}}
        if not left:
            return 0
    for name, held in left.items():
        tally.problem("leaks", engine=name, **held)
    return sum(len(held) for held in left.values())
