"""L2 put and get through our client against the raw Mooncake client: same master, same store process, same object sizes.

Both clients live in this process and take turns. The raw client is measured twice: all objects in one call, and in calls of
as many objects as ours makes. A call to a hung store node takes seconds for each four objects, so ours makes small ones.
Ours also seals each object and checks what it gets: header, trailer and the payload's xxh3.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from bench.report import Figure, Progress, Row, repeated
from epochkv_connector.store.client import StoreClient, Transfer
from epochkv_connector.store.connection import StoreOutcome, StoreSettings, prepare_environment
from hack.standalone.mooncake import Mooncake

SIZES = {"64 KiB": 64 << 10, "384 KiB": 384 << 10, "2 MiB": 2 << 20}
AIMS = {"64 KiB": 0.7, "384 KiB": 0.85, "2 MiB": 0.9}
"""Payloads, and which share of the raw client's throughput is wanted. 384 KiB is a 16-token block of the benchmark's model, 2 MiB one of
a model of 8 billion parameters in bfloat16."""

ENDS = 256
BYTES_PER_TURN = 48 << 20
TIMEOUT = 30.0


class Region:
    """Page-aligned memory for `count` objects of `size` bytes."""

    def __init__(self, count: int, size: int) -> None:
        self.stride = -(-size // 4096) * 4096
        self.num_bytes = count * self.stride
        self._map = mmap.mmap(-1, self.num_bytes)
        self._map.write(bytes(range(256)) * (self.num_bytes // 256))  # every page is there
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self.view = memoryview(self._map)
        self.addresses = [self.address + index * self.stride for index in range(count)]
        self.size = size

    def transfers(self, keys: Sequence[str]) -> list[Transfer]:
        """One for each object."""
        return [
            Transfer(key, self.addresses[index], self.view[index * self.stride : index * self.stride + self.size])
            for index, key in enumerate(keys)
        ]


class Raw:
    """Mooncake's own client, as its documentation uses it."""

    def __init__(self, master: str, region: Region) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._region = region
        self.client: Any = MooncakeDistributedStore()
        code = self.client.setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "tcp", "", master)
        if code != 0 or self.client.register_buffer(region.address, region.num_bytes) != 0:
            raise RuntimeError(f"the raw client could not be set up ({code})")

    def close(self) -> None:
        self.client.close()

    def put(self, keys: Sequence[str], at_once: int) -> None:
        """All objects, `at_once` in a call."""
        for start, codes in self._calls(self.client.batch_put_from, keys, at_once):
            if any(codes):
                raise RuntimeError(f"raw put from {start}: {codes}")

    def get(self, keys: Sequence[str], at_once: int) -> None:
        """All objects, `at_once` in a call."""
        for start, codes in self._calls(self.client.batch_get_into, keys, at_once):
            if any(code != self._region.size for code in codes):
                raise RuntimeError(f"raw get from {start}: {codes}")

    def _calls(self, call: Callable[..., list[int]], keys: Sequence[str], at_once: int) -> Iterator[tuple[int, list[int]]]:
        for start in range(0, len(keys), at_once):
            chunk = list(keys[start : start + at_once])
            yield start, call(chunk, self._region.addresses[start : start + at_once], [self._region.size] * len(chunk))


@contextmanager
def clients(mooncake: Mooncake, size: int, count: int) -> Iterator[tuple[StoreClient, Region, Raw]]:
    """Both clients, ready, each with memory of its own."""
    region = Region(count, size)
    ours = StoreClient(StoreSettings(mooncake.address), [(region.address, region.num_bytes)])
    ours.start()
    try:
        with closing(Raw(mooncake.address, Region(count, size))) as raw:
            if not ours.wait_ready(30.0):
                raise RuntimeError("our client is not ready after 30 s")
            yield ours, region, raw
    finally:
        ours.close(10.0)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """Seconds of wall clock, and CPU seconds of this process (the client's side of the transfer)."""
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - cpu


def turn(ours: StoreClient, region: Region, raw: Raw, name: str, small: int, backwards: bool) -> dict[str, tuple[float, float]]:
    """Everything once: `timed` by what was done. Order changes from turn to turn, so that drifts cancel."""
    count = len(region.addresses)
    keys = {who: [f"bench/{name}/{who}/{index}" for index in range(count)] for who in ("ours", "raw", "raw small")}

    def check(outcomes: list[StoreOutcome]) -> None:
        if any(outcome is not StoreOutcome.OK for outcome in outcomes):
            raise RuntimeError(f"our client: {outcomes}")

    transfers = region.transfers(keys["ours"])
    work: dict[str, dict[str, Callable[[], object]]] = {
        "put": {
            "ours": lambda: check(ours.put(transfers, TIMEOUT).done.result(TIMEOUT)),
            "raw": lambda: raw.put(keys["raw"], count),
            "raw small": lambda: raw.put(keys["raw small"], small),
        },
        "get": {
            "ours": lambda: check(ours.get(transfers, TIMEOUT).done.result(TIMEOUT)),
            "raw": lambda: raw.get(keys["raw"], count),
            "raw small": lambda: raw.get(keys["raw small"], small),
        },
    }
    seconds: dict[str, tuple[float, float]] = {}
    for what, by_whom in work.items():
        for who in sorted(by_whom, reverse=backwards):
            seconds[f"{what} {who}"] = timed(by_whom[who])
    raw.client.remove_by_regex(f"^bench/{name}/", True)
    return seconds


def row(arguments: argparse.Namespace, progress: Progress) -> Row:
    """Throughput of ours / raw for puts and gets of each size."""
    repeats = 3 * arguments.repeats
    prepare_environment(StoreSettings(""))
    figures: list[Figure] = []
    details: dict[str, Any] = {}
    began, done, total = time.monotonic(), 0, len(SIZES) * repeats
    small = StoreSettings("").max_call_keys
    with tempfile.TemporaryDirectory(prefix="epochkv-bench-") as folder, Mooncake(Path(folder), segment_bytes=1 << 30) as mooncake:
        for label, payload in SIZES.items():
            count = BYTES_PER_TURN // payload
            samples: dict[str, list[float]] = {}
            cpu: dict[str, float] = {}
            with clients(mooncake, payload + ENDS, count) as (ours, region, raw):
                turn(ours, region, raw, "warm-up", small, False)
                for index in range(repeats):
                    for what, (seconds, cpu_seconds) in turn(ours, region, raw, str(index), small, bool(index % 2)).items():
                        samples.setdefault(what, []).append(seconds)
                        cpu[what] = cpu.get(what, 0.0) + cpu_seconds / repeats
                    done += 1
                    progress.step(done, total, began)
            for what in ("put", "get"):
                own, whole, cut = (samples[f"{what} {who}"] for who in ("ours", "raw", "raw small"))
                figures.append(
                    repeated(f"{what} {label}, ours / raw", [b / a for a, b in zip(own, whole, strict=True)], AIMS[label], at_least=True)
                )
                figures.append(
                    repeated(f"{what} {label}, ours / raw, {small} in a call", [b / a for a, b in zip(own, cut, strict=True)], None)
                )
            rates = {what: payload * count / statistics.median(taken) / 1e9 for what, taken in samples.items()}
            details[label] = {"objects": count, "GB/s": rates, "seconds": samples, "client CPU seconds": cpu}
    return Row("L2 through our client / raw Mooncake client (throughput)", figures, details)


HANG_OBJECTS = 64
HANG_DEADLINE = 20.0
OLD_CALL_KEYS = 16


def hang(arguments: argparse.Namespace, progress: Progress) -> Row:
    """What a store node that hangs costs, with calls of the size that ships and with calls of 16 objects.

    Two requests meet the node, which is as many as fetch at a time; others want objects of a second node, one after the other.
    """
    figures: list[Figure] = []
    limits = (StoreSettings("").max_call_keys, OLD_CALL_KEYS)
    began = time.monotonic()
    for index, most in enumerate(limits):
        with tempfile.TemporaryDirectory(prefix="epochkv-bench-") as folder:
            seconds = _hang(Path(folder), most)
        figures += [Figure(f"{what}, calls of at most {most} objects", value, None, "s") for what, value in seconds.items()]
        progress.step(index + 1, len(limits), began)
    return Row("a store node that hangs", figures)


def _hang(folder: Path, most: int) -> dict[str, float]:
    size = SIZES["384 KiB"] + ENDS
    mooncake = Mooncake(folder, num_stores=0)
    prepare_environment(StoreSettings(""))
    region = Region(3 * HANG_OBJECTS, size)
    client = StoreClient(StoreSettings(mooncake.address, max_call_keys=most), [(region.address, region.num_bytes)])
    transfers = region.transfers([f"bench/{index}" for index in range(3 * HANG_OBJECTS)])
    other, *meeting = (transfers[start : start + HANG_OBJECTS] for start in range(0, len(transfers), HANG_OBJECTS))
    try:
        mooncake.start_master()
        mooncake.start_store(segment_bytes=HANG_OBJECTS * size * 5 // 4)
        client.start()
        client.wait_ready(TIMEOUT)
        client.put(other, TIMEOUT).done.result(TIMEOUT)
        node = mooncake.start_store(segment_bytes=1 << 30)  # most of what follows has room only there
        for part in meeting:
            client.put(part, TIMEOUT).done.result(TIMEOUT)
        for part in (*meeting, other) * 3:  # calls grow
            client.get(part, TIMEOUT).done.result(TIMEOUT)
        node.freeze()
        began = time.monotonic()
        tickets = [client.get(part, HANG_DEADLINE) for part in meeting]
        waits = []
        while not all(ticket.released.done() for ticket in tickets):
            asked = time.monotonic()
            client.get(other[:8], 4 * HANG_DEADLINE).done.result(5 * HANG_DEADLINE)
            waits.append(time.monotonic() - asked)
            time.sleep(0.1)
        answered = [ticket.done.result(0) for ticket in tickets]
        assert all(StoreOutcome.OK is not outcomes[-1] for outcomes in answered)
        return {"until the memory of who met it is free": time.monotonic() - began, "longest wait of another request": max(waits)}
    finally:
        client.close(10.0)
        mooncake.end()
