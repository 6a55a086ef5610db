"""Copies on a GPU. Blocks come back byte for byte, from every layout and by every way the driver has, then for a minute at random. Copies
run behind exactly what their event stands for, whether the model writes eagerly or from a CUDA graph. What the driver refuses, is an error.
"""

import os
import random
import threading
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch
from torch import Tensor

from epochkv_connector.worker import staging
from epochkv_connector.worker.staging import CudaCopies, HostRegion, SideStream, StagingStream, compute_event, pin_chunks
from tests.cuda.rig import BLOCKS, LAYOUTS, LONG, Rig, copied, is_page_locked, last_error, needs_cuda

SOAK_SECONDS = float(os.environ.get("SOAK_SECONDS", "60"))
MIB = 1 << 20


def round_trip(test: unittest.TestCase, rig: Rig) -> None:
    """Every block out, and back in reverse."""
    stream = StagingStream(rig.stage)
    before = [rig.block(block) for block in range(BLOCKS)]
    stream.gather([copied(0, block, 2 * block) for block in range(BLOCKS)])
    for block, wanted in enumerate(before):
        assert torch.equal(rig.slot(2 * block), wanted), f"block {block} in its slot"
    stream.scatter([copied(0, BLOCKS - 1 - block, 2 * block) for block in range(BLOCKS)])
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
        stream.gather([copied(0, *ids) for ids in zip(blocks, slots, strict=True)], compute_event(rig.stage.device))
        stream.scatter([copied(0, *ids) for ids in zip(back, slots, strict=True)], compute_event(rig.stage.device))
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


def eager(work: Callable[[], object]) -> Callable[[], object]:
    return work


def graph(work: Callable[[], object]) -> Callable[[], object]:
    """From a graph that was captured before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # whatever allocates does so now
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        work()
    return captured.replay


@needs_cuda
class Order(unittest.TestCase):
    def test_a_save_sees_the_last_write_before_its_event(self) -> None:
        for way in (eager, graph):
            with self.subTest(way=way.__name__):
                rig = Rig()

                def write(rig: Rig = rig) -> None:
                    for tensor in rig.tensors:
                        tensor.add_(1)

                rig.fill(0)
                step = way(write)
                torch.cuda.synchronize()
                rig.fill(0)
                stream = StagingStream(rig.stage)
                torch.cuda._sleep(LONG)
                for number in range(1, 101):
                    step()
                    stream.gather([copied(0, number % BLOCKS, number % BLOCKS)], compute_event(rig.stage.device))
                    assert rig.slot(number % BLOCKS).unique().tolist() == [number]

    def test_a_save_does_not_wait_for_what_comes_after_its_event(self) -> None:
        rig = Rig()
        rig.fill(3)
        stream = StagingStream(rig.stage)
        stream.gather([copied(0, 0, 0)])
        after = compute_event(rig.stage.device)
        torch.cuda._sleep(2 * LONG)
        busy = torch.cuda.Event()
        busy.record()
        stream.gather([copied(0, 1, 1)], after)
        assert not busy.query(), "the copy waited for work that it does not depend on"
        busy.synchronize()
        assert rig.slot(1).unique().tolist() == [3]

    def test_a_load_waits_for_older_readers_and_newer_ones_see_it(self) -> None:
        """The blocks that a load is given may still be read by the step before."""
        for way in (eager, graph):
            with self.subTest(way=way.__name__):
                rig = Rig(layers=1)
                seen = torch.empty_like(rig.tensors[0])

                def read(rig: Rig = rig, seen: torch.Tensor = seen) -> None:
                    seen.copy_(rig.tensors[0])

                step = way(read)
                rig.fill(1)
                for block in range(BLOCKS):
                    rig.fill_slot(block, 2)
                stream = StagingStream(rig.stage)
                torch.cuda._sleep(LONG)
                step()
                stream.scatter([copied(0, block, block) for block in range(BLOCKS)], compute_event(rig.stage.device))
                assert seen.unique().tolist() == [1], "the reader before the load's event"
                step()
                assert seen.unique().tolist() == [2], "the reader after the load was reported"

    def test_both_directions_on_their_own_threads_streams_do_not_wait_for_each_other(self) -> None:
        """A load behind a long step must not hold up a save that has nothing to wait for."""
        rig = Rig()
        rig.fill(5)
        rig.fill_slot(3, 6)
        torch.cuda.synchronize()
        free = compute_event(rig.stage.device)
        torch.cuda._sleep(2 * LONG)
        behind = compute_event(rig.stage.device)
        loaded = threading.Event()

        def load() -> None:
            StagingStream(rig.stage).scatter([copied(0, 4, 3)], behind)
            loaded.set()

        thread = threading.Thread(target=load)
        thread.start()
        StagingStream(rig.stage).gather([copied(0, 0, 0)], free)
        assert not loaded.is_set(), "the save waited for the load"
        assert rig.slot(0).unique().tolist() == [5]
        assert loaded.wait(30)
        thread.join()
        assert rig.block(4).unique().tolist() == [6]


@needs_cuda
class PageLocking(unittest.TestCase):
    def setUp(self) -> None:
        torch.zeros(1, device="cuda")  # a context

    def test_the_region_is_locked_exactly_and_in_chunks(self) -> None:
        region = HostRegion(33, 256 * 1000, pin=True, pin_limit=MIB)
        starts = [start for start, _ in pin_chunks(region.num_bytes, region.stride, MIB)]
        assert len(starts) > 1
        assert all(is_page_locked(region.address + start) for start in starts)
        device = torch.empty(region.num_bytes, dtype=torch.uint8, device="cuda")
        region.tensor.fill_(7)
        device.copy_(region.tensor)
        assert int(device.min()) == 7
        region.unpin()
        region.unpin()
        assert not any(is_page_locked(region.address + start) for start in starts)

    def test_a_refusal_leaves_no_error_behind(self) -> None:
        region = HostRegion(4, 256 * 1024, pin=True)
        with self.assertRaisesRegex(RuntimeError, "cudaHostRegister returned CUDA error 712"):
            staging.page_lock(region.address, region.num_bytes)
        assert last_error() == 0
        assert int(torch.ones(1000, device="cuda").sum()) == 1000, "the next launch would raise it"
        region.unpin()

    def test_a_region_that_is_refused_half_way_is_given_back(self) -> None:
        locked: list[int] = []
        lock = staging.page_lock

        def refuse_the_third(address: int, num_bytes: int) -> None:
            if len(locked) == 2:
                raise RuntimeError("cudaHostRegister returned CUDA error 2")
            lock(address, num_bytes)
            locked.append(address)

        with (
            mock.patch.object(staging, "page_lock", refuse_the_third),
            self.assertRaisesRegex(RuntimeError, "cannot be page-locked: cudaHostRegister returned CUDA error 2"),
        ):
            HostRegion(33, 256 * 1000, pin=True, pin_limit=MIB)
        assert not any(is_page_locked(address) for address in locked)

    def test_memory_is_given_back(self) -> None:
        """Regions made and dropped 50 times: the driver would refuse to lock an address twice."""
        for _ in range(50):
            region = HostRegion(16, MIB, pin=True)
            region.unpin()


@needs_cuda
class FailedSubmit(unittest.TestCase):
    def test_an_error_leaves_only_when_what_was_issued_has_ended(self) -> None:
        for to_host in (True, False):
            with self.subTest(to_host=to_host):
                self._fails_half_way(to_host)

    def _fails_half_way(self, to_host: bool) -> None:
        rig = Rig(layers=8)
        real = staging.batch_copy()

        def half(to: Tensor, source: Tensor, sizes: Tensor, stream: int) -> None:
            count = len(to) // 2
            real(to[:count].contiguous(), source[:count].contiguous(), sizes[:count].contiguous(), stream)
            raise RuntimeError("injected")

        side = SideStream(rig.stage.device)
        work = CudaCopies(rig.stage.groups, rig.stage.region, side, half)
        rig.fill(1)
        rig.fill_slot(0, 2)
        torch.cuda._sleep(LONG)  # the copies that were issued begin behind it
        after = compute_event(rig.stage.device)
        with self.assertRaisesRegex(RuntimeError, "injected"):
            (work.gather if to_host else work.scatter)([(0, [0], [0])], after)
        assert side.idle(), "copies are still under way while their blocks are given to others"
        now = rig.slot(0) if to_host else rig.block(0)
        assert set(now.unique().tolist()) == {1, 2}, "the half that was issued, and only that"
        rig.fill(8)
        rig.fill_slot(0, 9)
        torch.cuda.synchronize()
        assert rig.slot(0).unique().tolist() == [9]
        assert rig.block(0).unique().tolist() == [8]
        stream = StagingStream(rig.stage)  # the device works on
        stream.gather([copied(0, 0, 1)])
        assert rig.slot(1).unique().tolist() == [8]
