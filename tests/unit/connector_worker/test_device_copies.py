"""What copies need of a device: the driver's calls by their C signatures, registration in whole slots, and no error before what was issued
has ended (what only a GPU can show is in `tests/cuda`); and memory that has its pages before anybody uses it.
"""

import ctypes
import itertools
import mmap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epochkv_connector.worker import staging
from epochkv_connector.worker.layout import GroupSpec
from epochkv_connector.worker.staging import HostRegion, Staging, pin_chunks, populate, row_classes
from hack.waiting import poll
from tests.cuda.rig import copied


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
    assert max(sizes) <= 2 << 30, "more than that some kernels refuse"
    assert len(sizes) <= 256
    assert list(pin_chunks(3 * stride, stride)) == [(0, 3 * stride)]


@pytest.mark.parametrize(("code", "says"), [(801, "this device forbids"), (2, r"lower local\.capacity_bytes")])
def test_a_refusal_to_page_lock_says_what_would_help(monkeypatch: pytest.MonkeyPatch, code: int, says: str) -> None:
    refusing = SimpleNamespace(cudaHostRegister=lambda *_: code, cudaGetLastError=lambda: None)
    monkeypatch.setattr(staging, "runtime", lambda: refusing)
    with pytest.raises(RuntimeError, match=f"cannot be page-locked: cudaHostRegister returned CUDA error {code}; {says}"):
        HostRegion(1, mmap.PAGESIZE, pin=True)


def test_rows_are_where_plain_indexing_finds_them() -> None:
    pool = torch.arange(2 * 5 * 3 * 8, dtype=torch.uint8).view(2, 5, 3, 8)  # K and V first, then 5 blocks of 24 bytes
    stage = Staging({"a": pool}, {0: GroupSpec(["a"])}, 1, 5)
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
    row = ctypes.CFUNCTYPE(integer, pointer, pointer, size_type, integer, pointer)(one)
    made = SimpleNamespace(cudaGetLastError=lambda: 0, cudaMemcpyAsync=row)
    if batched:
        kinds = (pointer, pointer, pointer, size_type, pointer, pointer, size_type, *last)
        made.cudaMemcpyBatchAsync = ctypes.CFUNCTYPE(integer, *kinds)(many)
    return made


@pytest.mark.parametrize("batched", [True, False])
def test_the_driver_gets_every_row_of_a_job(batched: bool) -> None:
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    places, offsets, lengths = torch.tensor([0, 32, 16]), torch.tensor([40, 0, 16]), torch.tensor([8, 16, 4])
    calls: list[str] = []
    staging.batch_copy(runtime(calls, batched))(target.data_ptr() + offsets, source.data_ptr() + places, lengths, 77)
    assert calls == (["many"] if batched else ["one"] * 3)
    wanted = torch.zeros(64, dtype=torch.uint8)
    wanted[40:48], wanted[0:16], wanted[16:20] = source[0:8], source[32:48], source[16:20]
    assert torch.equal(target, wanted)
    with pytest.raises(RuntimeError, match="CUDA error 3"):
        staging.batch_copy(runtime([], batched, fail=3))(target.data_ptr() + offsets, source.data_ptr() + places, lengths, 77)


@pytest.mark.parametrize("code", [36, 801])
def test_a_driver_without_batches_copies_row_by_row_from_then_on(code: int) -> None:
    source, target = torch.arange(64, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    calls: list[str] = []
    library = runtime(calls, True)
    library.cudaMemcpyBatchAsync = lambda *_: calls.append("refused") or code
    submit = staging.batch_copy(library)
    for place in (0, 8):
        submit(target.data_ptr() + torch.tensor([place]), source.data_ptr() + torch.tensor([place]), torch.tensor([8]), 77)
    assert calls == ["refused", "one", "one"]
    assert target[:16].tolist() == list(range(16))


@pytest.mark.parametrize("empty", [{1}, {0, 1}])
def test_blocks_whose_layers_are_on_other_pipeline_stages_cost_no_call(empty: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    groups = {group: GroupSpec([] if group in empty else ["a"]) for group in range(3)}
    stage = Staging({"a": torch.zeros(4, 40, dtype=torch.uint8)}, groups, 4, 4)
    calls: list[int] = []
    work: Any = SimpleNamespace(behind=lambda after: None, wait=lambda: None, handle=77)
    copies = staging.CudaCopies(stage.groups, stage.region, work, lambda to, *_: calls.append(to.numel()))
    stream = staging.StagingStream(stage)
    monkeypatch.setattr(stream, "_copies", copies)
    for copy in (stream.gather, stream.scatter):
        copy([copied(group, 1, 2) for group in (0, 1)])
    assert calls == [1, 1] if 0 not in empty else not calls


# -- a submit that fails half-way --------------------------------------------------------------------------------------
WORDS = "their blocks stay taken until they do"


class LateDevice:
    """Host memory that behaves like a device: what is issued is copied by its own thread, a while later, and once `may_end` says so."""

    handle = 77

    def __init__(self, fail_at: int, may_end: Callable[[], bool] = lambda: True) -> None:
        self._fail_at, self._may_end = fail_at, may_end
        self._issued: list[tuple[int, int, int]] = []
        self._threads: list[threading.Thread] = []
        self.forgotten = 0
        kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
        one = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(self._one)
        self.library = SimpleNamespace(cudaMemcpyAsync=one, cudaGetLastError=self._forget)

    def _forget(self) -> int:
        self.forgotten += 1
        return 0

    def _one(self, to: int, source: int, size: int, kind: int, stream: int) -> int:
        if len(self._issued) == self._fail_at:
            return 3
        self._issued.append((to, source, size))

        def copy() -> None:
            time.sleep(0.2)
            poll(self._may_end, 30.0)
            ctypes.memmove(to, source, size)

        self._threads.append(threading.Thread(target=copy))
        self._threads[-1].start()
        return 0

    def behind(self, after: Any) -> None:
        pass

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(10)

    def idle(self) -> bool:
        return not any(thread.is_alive() for thread in self._threads)


@pytest.mark.parametrize("to_host", [True, False])
def test_an_error_leaves_only_when_what_was_issued_has_ended(to_host: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Its blocks, and its slots, are then given to others."""
    tensors = [torch.randint(1, 255, (9, 40), dtype=torch.uint8) for _ in range(4)]
    names = [f"l{i}" for i in range(4)]
    stage = Staging(dict(zip(names, tensors, strict=True)), {0: GroupSpec(names)}, 9, 9)
    device = LateDevice(fail_at=5)
    work = staging.CudaCopies(stage.groups, stage.region, device, staging.batch_copy(device.library))  # type: ignore[arg-type]  # a double
    batch = stage.batch([copied(0, block, block) for block in range(2)])
    with pytest.raises(RuntimeError, match="cudaMemcpyAsync returned CUDA error 3"):
        work.gather(batch) if to_host else work.scatter(batch)
    stage.region.tensor.fill_(7)  # what the next owner of a slot writes, or of a block
    for tensor in tensors:
        tensor.fill_(9)
    device.wait()  # whatever was issued has been copied by now, also behind our back
    assert stage.region.tensor.unique().tolist() == [7]
    assert {value for tensor in tensors for value in tensor.unique().tolist()} == {9}
    assert device.forgotten == 1, "the error stays in the thread, where the next launch would raise it"


def test_copies_that_do_not_end_are_spoken_of_and_waited_for(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(staging, "SAY_SECONDS", 0.05)
    stage = Staging({"a": torch.zeros((9, 40), dtype=torch.uint8)}, {0: GroupSpec(["a"])}, 9, 9)
    device = LateDevice(fail_at=1, may_end=lambda: WORDS in caplog.text)
    work = staging.CudaCopies(stage.groups, stage.region, device, staging.batch_copy(device.library))  # type: ignore[arg-type]  # a double
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="CUDA error 3"):
        work.gather(stage.batch([copied(0, block, block) for block in range(2)]))
    assert WORDS in caplog.text
    assert time.monotonic() - began < 30.0, "only the end of the copies brought the word"


MIB = 1 << 20


def smaps(address: int) -> tuple[str, dict[str, str]]:
    """Permissions and fields of the mapping at this address, as the kernel tells them."""
    permissions, fields, found = "", {}, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if not words[0].endswith(":"):
            low, high = (int(number, 16) for number in words[0].split("-"))
            found = low <= address < high
            permissions = words[1] if found else permissions
        elif found:
            fields[words[0][:-1]] = " ".join(words[1:])
    return permissions, fields


def resident_pages(address: int, num_bytes: int) -> int:
    """Pages of this range that are in memory."""
    libc = ctypes.CDLL(None, use_errno=True)
    seen = (ctypes.c_ubyte * -(-num_bytes // mmap.PAGESIZE))()
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes), seen) == 0
    return sum(page & 1 for page in seen)


def test_the_region_is_private_asks_for_huge_pages_and_is_resident() -> None:
    region = HostRegion(33, 256 * 1024, pin=False)
    permissions, fields = smaps(region.address)
    assert permissions == "rw-p", "shared memory gets no huge pages by advice"
    assert {"hg", "dc"} <= set(fields["VmFlags"].split()), "asks for huge pages; not copied to children"
    assert resident_pages(region.address, region.num_bytes) == -(-region.num_bytes // mmap.PAGESIZE)
    if "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        assert fields["THPeligible"] == "1"
    assert int(region.tensor.max()) == 0


def test_a_kernel_without_a_word_for_it_has_its_pages_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "_MADV_POPULATE_WRITE", 9999)
    region = HostRegion(3, 32 * MIB, pin=False)
    assert resident_pages(region.address, region.num_bytes) == region.num_bytes // mmap.PAGESIZE


def test_memory_that_cannot_be_had_is_an_error() -> None:
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).munmap(ctypes.c_void_p(address + mmap.PAGESIZE), ctypes.c_size_t(mmap.PAGESIZE)) == 0
    with pytest.raises(OSError, match="cannot be had"):
        populate(address, len(memory))
