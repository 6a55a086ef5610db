"""What copies need of a device: the driver's calls by their C signatures, registration in whole slots, and, where there is
CUDA, the same bytes as on CPU without waiting for anybody else's work."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epochkv_connector.worker import copies
from epochkv_connector.worker.layout import GroupSpec
from epochkv_connector.worker.rows import progressions, row_classes
from epochkv_connector.worker.staging import HostRegion, Pair, Staging, StagingStream, compute_event, pin_chunks

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@settings(deadline=None)
@given(st.integers(1, 1 << 16), st.integers(1, 5000), st.integers(1, 1 << 24))
def test_registrations_cover_the_region_in_whole_slots_and_pages(units: int, slots: int, limit: int) -> None:
    stride = 256 * units
    chunks = list(pin_chunks(slots * stride, stride, limit))
    assert [start for start, _ in chunks] + [slots * stride] == list(itertools.accumulate((size for _, size in chunks), initial=0))
    for start, size in chunks:
        assert start % stride == start % mmap.PAGESIZE == 0
        assert size <= limit or size <= stride * mmap.PAGESIZE, "one unit may be larger than the limit"


def test_a_region_larger_than_the_limit_is_registered_in_several_pieces() -> None:
    stride = 256 * 8193  # an object of 2 MiB and its ends
    slots = (200 << 30) // stride
    sizes = [size for _, size in pin_chunks(slots * stride, stride)]
    assert len(sizes) == 4
    assert max(sizes) <= 64 << 30
    assert list(pin_chunks(3 * stride, stride)) == [(0, 3 * stride)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 200), min_size=1, max_size=12, unique=True))
def test_series_name_every_value_once_and_in_order(values: list[int]) -> None:
    series = progressions(torch.tensor(values))
    named = [first + step * place for first, step, order in series for place in range(len(order))]
    indices = [index for _, _, order in series for index in order.tolist()]
    assert sorted(indices) == list(range(len(values)))
    assert named == [values[index] for index in indices] == sorted(values)


def test_rows_are_where_plain_indexing_finds_them() -> None:
    pool = torch.arange(2 * 5 * 3 * 8, dtype=torch.uint8).view(2, 5, 3, 8)  # K and V first, then 5 blocks of 24 bytes
    stage = Staging({"a": pool}, [GroupSpec(["a"])], 1, 5)
    (rows,) = row_classes(stage.groups[0].parts)
    found = [bytes((ctypes.c_uint8 * rows.num_bytes).from_address(address)) for address in rows.of_blocks(torch.tensor([3]))[0].tolist()]
    assert found == [bytes(pool[0, 3].flatten().tolist()), bytes(pool[1, 3].flatten().tolist())]
    assert rows.offsets.tolist() == [0, 24]


def runtime(calls: list[str], batched: bool, fail: int = 0) -> Any:
    """A CUDA runtime in this process's memory, called through the C signatures of its header."""
    pointer, size_type, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int

    def one(to: int, source: int, size: int, kind: int, stream: int) -> int:
        calls.append("one")
        assert (kind, stream) == (4, 77)
        ctypes.memmove(to, source, size)
        return fail

    def many(to: int, source: int, size: int, count: int, attrs: int, indices: int, num_attrs: int, *rest: int) -> int:
        calls.append("many")
        assert (integer.from_address(attrs).value, size_type.from_address(indices).value, num_attrs, rest[-1]) == (1, 0, 1, 77)
        lists = [(size_type * count).from_address(address) for address in (to, source, size)]
        for target, origin, length in zip(*lists, strict=True):
            ctypes.memmove(target, origin, length)
        return fail

    before_13 = int((torch.version.cuda or "0").split(".")[0]) < 13
    last = (pointer, pointer) if before_13 else (pointer,)
    made = SimpleNamespace(cudaMemcpyAsync=ctypes.CFUNCTYPE(integer, pointer, pointer, size_type, integer, pointer)(one))
    if batched:
        kinds = (pointer, pointer, pointer, size_type, pointer, pointer, size_type, *last)
        made.cudaMemcpyBatchAsync = ctypes.CFUNCTYPE(integer, *kinds)(many)
    return made


@pytest.mark.parametrize("batched", [True, False])
def test_the_driver_gets_every_row_of_a_job(batched: bool) -> None:
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    places, offsets, lengths = torch.tensor([0, 32, 16]), torch.tensor([40, 0, 16]), torch.tensor([8, 16, 4])
    calls: list[str] = []
    copies.batch_copy(runtime(calls, batched))(target.data_ptr() + offsets, source.data_ptr() + places, lengths, 77)
    assert calls == (["many"] if batched else ["one"] * 3)
    wanted = torch.zeros(64, dtype=torch.uint8)
    wanted[40:48], wanted[0:16], wanted[16:20] = source[0:8], source[32:48], source[16:20]
    assert torch.equal(target, wanted)
    with pytest.raises(RuntimeError, match="CUDA error 3"):
        copies.batch_copy(runtime([], batched, fail=3))(target.data_ptr() + offsets, source.data_ptr() + places, lengths, 77)


@pytest.mark.parametrize("code", [36, 801])
def test_a_driver_without_batches_copies_row_by_row_from_then_on(code: int) -> None:
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    calls: list[str] = []
    library = runtime(calls, True)
    library.cudaMemcpyBatchAsync = lambda *_: calls.append("refused") or code
    submit = copies.batch_copy(library)
    for place in (0, 8):
        submit(target.data_ptr() + torch.tensor([place]), source.data_ptr() + torch.tensor([place]), torch.tensor([8]), 77)
    assert calls == ["refused", "one", "one"]
    assert target[:16].tolist() == list(range(16))


# -- on a device ------------------------------------------------------------------------------------------------------


def on_device(layers: int = 3, blocks: int = 9) -> tuple[Staging, list[torch.Tensor]]:
    tensors = [torch.randint(0, 255, (2, blocks, 40), dtype=torch.uint8, device="cuda") for _ in range(layers)]
    names = [f"l{i}" for i in range(layers)]
    return Staging(dict(zip(names, tensors, strict=True)), [GroupSpec(names)], 2 * blocks, blocks), tensors


@needs_cuda
def test_blocks_travel_between_device_and_host_byte_for_byte() -> None:
    stage, tensors = on_device()
    stream = StagingStream(stage)
    before = [tensor.cpu() for tensor in tensors]
    stream.gather([Pair(0, block, 2 * block) for block in range(9)])
    for block in range(9):
        wanted = torch.cat([tensor[:, block].flatten() for tensor in before])
        assert torch.equal(stage.region.payload(2 * block, len(wanted)), wanted)
    stream.scatter([Pair(0, 8 - block, 2 * block) for block in range(9)])
    assert [tensor.cpu().tolist() for tensor in tensors] == [tensor.flip(1).tolist() for tensor in before]


@needs_cuda
def test_the_region_is_page_locked_exactly_and_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    region = HostRegion(33, 256 * 1000, pin=True, pin_limit=1 << 20)
    assert len(region._pinned) == len(list(pin_chunks(region.num_bytes, region.stride, 1 << 20))) > 1
    for address in region._pinned:
        flags = ctypes.c_uint(0)
        library = ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '0').split('.', maxsplit=1)[0]}")
        assert library.cudaHostGetFlags(ctypes.byref(flags), ctypes.c_void_p(address)) == 0
    device = torch.empty(region.num_bytes, dtype=torch.uint8, device="cuda")
    region.tensor.fill_(7)
    device.copy_(region.tensor)
    assert int(device.min()) == 7
    region.unpin()
    region.unpin()


@needs_cuda
def test_copies_end_while_the_model_computes_and_begin_behind_their_event() -> None:
    stage, tensors = on_device()
    stream = StagingStream(stage)
    stream.gather([Pair(0, 0, 0)])
    after = compute_event(stage.device)
    torch.cuda._sleep(2_000_000_000)  # about a second on the compute stream, issued after the event
    busy = torch.cuda.Event()
    busy.record()
    stream.gather([Pair(0, 1, 1)], after)
    assert not busy.query(), "the copy waited for work that it does not depend on"
    busy.synchronize()
    for tensor in tensors:
        tensor.fill_(5)
    torch.cuda._sleep(500_000_000)
    for tensor in tensors:
        tensor.fill_(9)
    ended = threading.Event()
    behind = compute_event(stage.device)
    thread = threading.Thread(target=lambda: (StagingStream(stage).gather([Pair(0, 2, 2)], behind), ended.set()))
    thread.start()
    time.sleep(0.01)
    assert ended.wait(30)
    thread.join()
    assert stage.region.payload(2, stage.groups[0].payload_bytes).unique().tolist() == [9]
