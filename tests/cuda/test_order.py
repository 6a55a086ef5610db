"""Copies run behind exactly what their event stands for, whether the model writes eagerly or from a CUDA graph."""

from __future__ import annotations

import unittest
from collections.abc import Callable

import torch

from epochkv_connector.worker.staging import Pair, StagingStream, compute_event
from tests.cuda.rig import BLOCKS, LONG, Rig, needs_cuda


def eager(work: Callable[[], object]) -> Callable[[], object]:
    """As it is."""
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
                    stream.gather([Pair(0, number % BLOCKS, number % BLOCKS)], compute_event(rig.stage.device))
                    assert rig.slot(number % BLOCKS).unique().tolist() == [number]

    def test_a_save_does_not_wait_for_what_comes_after_its_event(self) -> None:
        rig = Rig()
        rig.fill(3)
        stream = StagingStream(rig.stage)
        stream.gather([Pair(0, 0, 0)])
        after = compute_event(rig.stage.device)
        torch.cuda._sleep(2 * LONG)
        busy = torch.cuda.Event()
        busy.record()
        stream.gather([Pair(0, 1, 1)], after)
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
                stream.scatter([Pair(0, block, block) for block in range(BLOCKS)], compute_event(rig.stage.device))
                assert seen.unique().tolist() == [1], "the reader before the load's event"
                step()
                assert seen.unique().tolist() == [2], "the reader after the load was reported"

    def test_both_directions_on_their_own_threads_streams_do_not_wait_for_each_other(self) -> None:
        """A load behind a long step must not hold up a save that has nothing to wait for."""
        import threading

        rig = Rig()
        rig.fill(5)
        rig.fill_slot(3, 6)
        torch.cuda.synchronize()
        free = compute_event(rig.stage.device)
        torch.cuda._sleep(2 * LONG)
        behind = compute_event(rig.stage.device)
        loaded = threading.Event()

        def load() -> None:
            StagingStream(rig.stage).scatter([Pair(0, 4, 3)], behind)
            loaded.set()

        thread = threading.Thread(target=load)
        thread.start()
        StagingStream(rig.stage).gather([Pair(0, 0, 0)], free)
        assert not loaded.is_set(), "the save waited for the load"
        assert rig.slot(0).unique().tolist() == [5]
        assert loaded.wait(30)
        thread.join()
        assert rig.block(4).unique().tolist() == [6]
