"""Blocks come back byte for byte, from every layout and by every way the driver has; then for a minute, at random."""

from __future__ import annotations

import os
import random
import threading
import time
import unittest
from pathlib import Path
from types import SimpleNamespace

import torch

from epochkv_connector.worker import staging
from epochkv_connector.worker.staging import CudaCopies, Pair, SideStream, StagingStream, compute_event
from tests.cuda.rig import BLOCKS, LAYOUTS, Rig, needs_cuda

SOAK_SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
MIB = 1 << 20


def round_trip(test: unittest.TestCase, rig: Rig) -> None:
    """Every block out, and back in reverse."""
    stream = StagingStream(rig.stage)
    before = [rig.block(block) for block in range(BLOCKS)]
    stream.gather([Pair(0, block, 2 * block) for block in range(BLOCKS)])
    for block, wanted in enumerate(before):
        assert torch.equal(rig.slot(2 * block), wanted), f"block {block} in its slot"
    stream.scatter([Pair(0, BLOCKS - 1 - block, 2 * block) for block in range(BLOCKS)])
    for block, wanted in enumerate(reversed(before)):
        assert torch.equal(rig.block(block), wanted), f"block {block} after the way back"


class OnTheHost(unittest.TestCase):
    """The same rig without a GPU: what is wrong here is wrong in the rig."""

    def test_blocks_come_back_byte_for_byte(self) -> None:
        for layout in LAYOUTS:
            with self.subTest(layout=layout):
                round_trip(self, Rig(layout, device="cpu"))

    def test_other_platforms_are_refused_by_name(self) -> None:
        with self.assertRaisesRegex(RuntimeError, r"ROCm \(HIP 7\.1\)"):
            staging.check_device(torch.device("cuda"), "7.1")
        with self.assertRaisesRegex(RuntimeError, "'xpu'"):
            staging.check_device(torch.device("xpu"), None)


@needs_cuda
class OnADevice(unittest.TestCase):
    """Between device memory and page-locked host memory."""

    def test_blocks_come_back_byte_for_byte(self) -> None:
        for layout in LAYOUTS:
            with self.subTest(layout=layout):
                round_trip(self, Rig(layout))

    def test_rows_of_the_size_of_real_models(self) -> None:
        round_trip(self, Rig("blocks first", layers=32, row_bytes=64 << 10))

    def test_row_by_row_moves_the_same_bytes(self) -> None:
        rig = Rig()
        library = staging.runtime()
        old = SimpleNamespace(cudaMemcpyAsync=library.cudaMemcpyAsync, cudaGetLastError=library.cudaGetLastError)
        single = CudaCopies(rig.stage.groups, rig.stage.region, SideStream(rig.stage.device), staging.batch_copy(old))
        single.gather([(0, list(range(BLOCKS)), list(range(BLOCKS)))])
        for block in range(BLOCKS):
            assert torch.equal(rig.slot(block), rig.block(block))

    def test_this_driver_takes_batches_where_the_runtime_has_them(self) -> None:
        version = tuple(int(part) for part in (torch.version.cuda or "0.0").split(".")[:2])
        if version < (12, 8):
            self.skipTest("CUDA 12.8 brought batched copies")
        with self.assertNoLogs("epochkv_connector.worker.staging", "WARNING"):
            round_trip(self, Rig())

    def test_soak(self) -> None:
        """Both directions at random beside a computing model: every byte is right, nothing leaks."""
        soak = Soak(SOAK_SECONDS)
        soak.run()
        print(f"soak: {soak.rounds} round trips of {soak.num_bytes / MIB:.1f} MiB in {SOAK_SECONDS:.0f} s", flush=True)
        assert soak.wrong == []
        assert soak.rounds > 10
        assert soak.host_growth < 64 * MIB
        assert soak.device_growth < 64 * MIB


class Soak:
    """Two pools of blocks, each with a thread that saves and loads at random; the main thread computes."""

    def __init__(self, seconds: float) -> None:
        self.rounds, self.host_growth, self.device_growth = 0, 0, 0
        self.wrong: list[str] = []
        self._rigs = [Rig("blocks first", layers=16, row_bytes=32 << 10) for _ in range(2)]
        self.num_bytes = BLOCKS * self._rigs[0].payload_bytes
        self._lock = threading.Lock()
        self._seconds = seconds

    def run(self) -> None:
        """For the given time."""
        left, product = torch.ones((2048, 2048), dtype=torch.bfloat16, device="cuda"), None
        end = time.monotonic() + self._seconds
        threads = [threading.Thread(target=self._copy, args=(rig, seed, end)) for seed, rig in enumerate(self._rigs)]
        for thread in threads:
            thread.start()
        start = (0, 0)
        warm = time.monotonic() + self._seconds / 4
        while any(thread.is_alive() for thread in threads):
            for _ in range(8):
                product = torch.mm(left, left, out=product)
            torch.cuda.synchronize()
            if start == (0, 0) and time.monotonic() > warm:
                start = _memory()
        for thread in threads:
            thread.join()
        now = _memory()
        self.host_growth, self.device_growth = now[0] - start[0], now[1] - start[1]

    def _copy(self, rig: Rig, seed: int, end: float) -> None:
        draw, stream = random.Random(seed), StagingStream(rig.stage)
        try:
            while time.monotonic() < end and not self.wrong:
                self._round(rig, draw, stream)
        except Exception as error:
            self.wrong.append(repr(error))

    def _round(self, rig: Rig, draw: random.Random, stream: StagingStream) -> None:
        count = draw.randint(1, BLOCKS)
        blocks, back = draw.sample(range(BLOCKS), count), draw.sample(range(BLOCKS), count)
        slots = draw.sample(range(2 * BLOCKS), count)
        for block in blocks:
            for tensor in rig.tensors:
                tensor[block].view(torch.uint8).fill_(draw.randrange(256))
        wanted = [rig.block(block) for block in blocks]
        stream.gather([Pair(0, *ids) for ids in zip(blocks, slots, strict=True)], compute_event(rig.stage.device))
        stream.scatter([Pair(0, *ids) for ids in zip(back, slots, strict=True)], compute_event(rig.stage.device))
        for block, slot, bytes_wanted in zip(back, slots, wanted, strict=True):
            if not torch.equal(rig.slot(slot), bytes_wanted) or not torch.equal(rig.block(block), bytes_wanted):
                self.wrong.append(f"block {block} from slot {slot} of round {self.rounds}")
        with self._lock:
            self.rounds += 1


def _memory() -> tuple[int, int]:
    """Bytes in use: resident in this process, and on the device."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    free, total = torch.cuda.mem_get_info()
    return pages * os.sysconf("SC_PAGESIZE"), total - free
