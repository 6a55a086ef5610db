"""The memory that copies and the store use has its pages before anybody uses it, and is the kind that gets huge ones."""

import ctypes
import mmap
from pathlib import Path

import pytest

from epochkv_connector.worker import staging
from epochkv_connector.worker.staging import HostRegion, populate

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
