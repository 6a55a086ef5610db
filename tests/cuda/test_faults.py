"""What the driver refuses: page-locking, and a submit that fails half-way, on the real thing."""

from __future__ import annotations

import unittest
from unittest import mock

import torch
from torch import Tensor

from epochkv_connector.worker import staging
from epochkv_connector.worker.staging import CudaCopies, HostRegion, Pair, SideStream, StagingStream, compute_event, pin_chunks
from tests.cuda.rig import LONG, Rig, is_page_locked, last_error, needs_cuda

MIB = 1 << 20


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
            self.assertRaisesRegex(RuntimeError, r"lower local\.capacity_bytes"),
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
        stream.gather([Pair(0, 0, 1)])
        assert rig.slot(1).unique().tolist() == [8]
