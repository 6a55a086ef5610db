"""What a folder of weights holds, as a digest: engines that were given one path may have read different files from it.

Times of files say nothing, as every machine has its own copy. Models are too large to read whole, so of large files samples
are read: the beginning of every tensor (safetensors) and places at equal distances. Any training changes those. Adapters are read
whole.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path

SUFFIXES = frozenset((".safetensors", ".bin", ".pt", ".pth", ".gguf"))
"""Of files that hold weights; an adapter's also depend on its `.json` files."""

WHOLE_BYTES = 1 << 20
SAMPLE_BYTES = 4096
NUM_PLACES = 256
MAX_TENSORS = 4096
MAX_HEADER_BYTES = 100 << 20
"""What safetensors itself accepts."""
READ_BYTES = 1 << 20
MAX_LINKS = 40

Stamp = tuple[tuple[str, int, int, int], ...]


def files_of(place: Path, *, adapter: bool = False) -> list[Path]:
    """The files at this level that weights are read from, by name; a file is itself.

    Raises:
        OSError: it is not there, or cannot be read.
    """
    if place.is_file():
        return [place]
    suffixes = SUFFIXES | {".json"} if adapter else SUFFIXES
    return sorted(path for path in place.iterdir() if path.suffix in suffixes and path.is_file())


def stamp_of(files: list[Path]) -> Stamp:
    """Changes when one of them is written to or replaced: name, inode, size, time of the last change (ns; nobody can set it).

    Raises:
        OSError: one of them is gone.
    """
    return tuple((path.name, found.st_ino, found.st_size, found.st_ctime_ns) for path in files for found in [path.stat()])


def way_to(place: Path) -> Stamp:
    """As `stamp_of`, of the folder and of every symbolic link on the way to it: changes when the folder is renamed, when something
    in it is, and when a link is pointed elsewhere.

    Raises:
        OSError: it is not there, behind more links than the kernel follows, or behind a link and `..`.
    """
    links: list[os.stat_result] = []
    where = Path(os.path.abspath(place))
    while (link := next((part for part in (*reversed(where.parents), where) if part.is_symlink()), None)) is not None:
        links.append(link.lstat())
        if len(links) > MAX_LINKS:
            raise OSError(f"more than {MAX_LINKS} symbolic links on the way to {place}")
        where = Path(os.path.abspath(link.parent / link.readlink() / where.relative_to(link)))
    if not os.path.samefile(where, place):  # behind a link the kernel takes `..` from where it leads to
        raise OSError(f"the way to {place} goes up from behind a symbolic link")
    return tuple(("", found.st_ino, 0, found.st_ctime_ns) for found in (*links, where.stat()))


def digest_of(files: list[Path], *, whole: bool = False) -> str:
    """64 hex digits of names, sizes and contents (`whole`), or samples of the contents.

    Raises:
        OSError: one of them cannot be read.
    """
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(json.dumps([path.name, size]).encode())
            for start, count in ((0, size),) if whole or size <= WHOLE_BYTES else _samples(file.fileno(), size, path.suffix):
                for offset in range(start, start + count, READ_BYTES):
                    digest.update(os.pread(file.fileno(), min(READ_BYTES, start + count - offset), offset))
    return digest.hexdigest()


def _samples(file: int, size: int, suffix: str) -> Iterator[tuple[int, int]]:
    """(offset, bytes) of what is read of a large file."""
    yield 0, SAMPLE_BYTES
    if suffix == ".safetensors":
        yield from _tensors(file, size)
    for place in range(1, NUM_PLACES + 1):
        yield place * (size - SAMPLE_BYTES) // NUM_PLACES, SAMPLE_BYTES


def _tensors(file: int, size: int) -> Iterator[tuple[int, int]]:
    """The header, and where tensors begin: of every one, or of so many at equal distances."""
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    if length > min(size - 8, MAX_HEADER_BYTES):
        return  # vLLM will say so
    yield 8, length
    try:
        header = json.loads(os.pread(file, length, 8))
        starts = sorted(8 + length + int(entry["data_offsets"][0]) for name, entry in header.items() if name != "__metadata__")
    except (ValueError, LookupError, TypeError, AttributeError):
        return
    for start in starts[:: -(-len(starts) // MAX_TENSORS) or 1]:
        yield start, SAMPLE_BYTES
