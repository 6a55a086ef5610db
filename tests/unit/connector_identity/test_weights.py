"""Folders of weights are told apart by what they hold, wherever they lie and whenever they were written."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from epochkv_connector import adapters, weights
from epochkv_connector.adapters import AdapterVersions, Version
from epochkv_connector.weights import MAX_TENSORS, SAMPLE_BYTES, WHOLE_BYTES, digest_of, files_of, stamp_of, way_to
from tests.helpers_store import wait_until

TENSOR_BYTES = 3 * SAMPLE_BYTES
NUM_TENSORS = 400


def write_safetensors(path: Path, num_tensors: int = NUM_TENSORS) -> int:
    """A file of tensors of random bytes; returns where the first begins."""
    header = {
        f"layers.{index}.weight": {
            "dtype": "U8",
            "shape": [TENSOR_BYTES],
            "data_offsets": [index * TENSOR_BYTES, (index + 1) * TENSOR_BYTES],
        }
        for index in range(num_tensors)
    }
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + random.Random(1).randbytes(num_tensors * TENSOR_BYTES))
    assert path.stat().st_size > WHOLE_BYTES
    return 8 + len(text)


def change(path: Path, offset: int) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    write_safetensors(folder / "model-1.safetensors")
    (folder / "small.bin").write_bytes(b"small")
    (folder / "config.json").write_text("{}")
    return folder


def digest(folder: Path) -> str:
    return digest_of(files_of(folder))


def test_a_copy_is_the_same_and_other_files_do_not_count(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    os.utime(copy / "small.bin", (1, 1))
    (copy / "README.md").write_text("words")
    (copy / "tokenizer.json").write_text("{}")
    assert digest(copy) == digest(model)


@pytest.mark.parametrize("tensor", [0, 1, 177, NUM_TENSORS - 1])
def test_every_tensor_counts(model: Path, tensor: int) -> None:
    before = digest(model)
    path = model / "model-1.safetensors"
    start = path.stat().st_size - NUM_TENSORS * TENSOR_BYTES
    change(path, start + tensor * TENSOR_BYTES)
    assert digest(model) != before


@pytest.mark.parametrize(
    "what",
    [
        lambda folder: (folder / "small.bin").write_bytes(b"smalL"),
        lambda folder: (folder / "small.bin").rename(folder / "other.bin"),
        lambda folder: (folder / "small.bin").unlink(),
        lambda folder: (folder / "more.bin").write_bytes(b""),
        lambda folder: change(folder / "model-1.safetensors", 20),  # a tensor's name
        lambda folder: os.truncate(folder / "model-1.safetensors", 2 * WHOLE_BYTES),
    ],
)
def test_what_else_counts(model: Path, what: Callable[[Path], object]) -> None:
    before = digest(model)
    what(model)
    assert digest(model) != before


@pytest.mark.parametrize("beginning", [b"", b"\xff" * 8, (50).to_bytes(8, "little") + b"[1, 2]" + b" " * 44, b"\0" * 8])
def test_large_files_of_any_kind_are_sampled(tmp_path: Path, beginning: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(beginning + random.Random(2).randbytes(2 * WHOLE_BYTES))
    before = digest(tmp_path)
    assert digest(path) == before, "a model may be a file"
    change(path, path.stat().st_size - 1)
    assert digest(tmp_path) != before


def test_what_is_read_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_safetensors(tmp_path / "model.safetensors", 2 * MAX_TENSORS)
    sizes: list[int] = []
    pread = os.pread
    monkeypatch.setattr(weights.os, "pread", lambda file, size, offset: sizes.append(size) or pread(file, size, offset))
    digest(tmp_path)
    assert MAX_TENSORS <= len(sizes) <= MAX_TENSORS + weights.NUM_PLACES + 10


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(b"one")
    return folder


@pytest.fixture
def versions() -> Iterator[AdapterVersions]:
    """Of an engine that starts an hour from now: every file is older."""
    made = AdapterVersions(since=time.time_ns() + 3600 * 10**9)
    yield made
    made.close()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for half a second would make an adapter nobody's."""
    monkeypatch.setattr(adapters, "WAIT_SECONDS", 30.0)


def test_an_adapter_is_named_by_its_files(adapter: Path, tmp_path: Path, versions: AdapterVersions) -> None:
    first = versions.version(1, str(adapter))
    assert first.shareable
    copy = tmp_path / "copy"
    shutil.copytree(adapter, copy)
    assert versions.version(7, str(copy)) == first
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    (other / "adapter_config.json").write_text('{"r": 9}')
    assert versions.version(7, str(other)) not in (first, Version(first.name, shareable=False))


def test_an_adapter_is_named_by_how_it_is_applied(adapter: Path, versions: AdapterVersions) -> None:
    others = [AdapterVersions(applied, time.time_ns() + 3600 * 10**9) for applied in ("", "o_proj alone")]
    names = {each.version(1, str(adapter)) for each in others} | {versions.version(2, str(adapter), "3d")}
    assert versions.version(1, str(adapter)) in names
    assert len(names) == 3
    assert all(version.shareable for version in names)
    for each in others:
        each.close()


def test_an_adapter_behind_a_link_that_moves_is_this_engines_own(adapter: Path, tmp_path: Path) -> None:
    """Links and folders are as telling as files: all files here are older than the engines."""
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    (tmp_path / "inner").symlink_to(adapter)
    (tmp_path / "moving").symlink_to("inner")
    time.sleep(0.05)
    path = str(tmp_path / "moving")

    def started() -> AdapterVersions:
        return AdapterVersions(since=time.time_ns())

    before = started()
    assert before.version(1, path).shareable
    assert before.version(1, path).name == before.version(1, str(adapter)).name
    (tmp_path / "next").symlink_to(other)
    (tmp_path / "next").rename(tmp_path / "inner")
    assert not before.version(1, path).shareable, "the link behind the link has changed"
    assert not before.version(2, path).shareable, "nor is it older than the engine"
    assert before.version(1, str(adapter)).shareable
    adapter.rename(tmp_path / "away")
    other.rename(adapter)
    assert not before.version(1, str(adapter)).shareable, "the folder is another"
    assert not before.version(3, str(adapter)).shareable
    time.sleep(0.05)
    after = started()
    assert not after.version(1, path).shareable, "it leads nowhere"
    assert after.version(1, str(adapter)).shareable
    for each in (before, after):
        each.close()


def test_links_without_end_are_no_adapter(tmp_path: Path, versions: AdapterVersions) -> None:
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    assert not versions.version(1, str(tmp_path / "a")).shareable
    with pytest.raises(OSError, match="symbolic link"):
        way_to(tmp_path / "a")


def test_a_way_up_from_behind_a_link_is_not_followed(adapter: Path, tmp_path: Path, versions: AdapterVersions) -> None:
    """The kernel goes up from where the link leads to, a text does not."""
    inner = tmp_path / "elsewhere" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "link").symlink_to(inner)
    (tmp_path / "elsewhere" / adapter.name).symlink_to(adapter)
    place = tmp_path / "link" / ".." / adapter.name
    assert place.resolve() == adapter.resolve()
    way_to(place)
    (tmp_path / "elsewhere" / adapter.name).unlink()
    other = tmp_path / "elsewhere" / adapter.name
    other.mkdir()
    with pytest.raises(OSError, match="goes up from behind"):
        way_to(place)
    assert not versions.version(1, str(place)).shareable


def test_files_that_change_under_an_engine_make_its_adapter_its_own(adapter: Path, versions: AdapterVersions) -> None:
    """At once, and for good: what was there before may be loaded or not."""
    path = adapter / "adapter_model.safetensors"
    before = path.stat()
    first = versions.version(1, str(adapter))
    assert versions.version(1, str(adapter)) == first
    seen = {first}
    for content in (b"two", b"one"):
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
        version = versions.version(1, str(adapter))
        assert version.changed
        assert not version.shareable
        assert not version.stable
        assert version not in seen
        seen.add(version)
        again = versions.version(1, str(adapter))
        assert again not in seen, "vLLM may have read them again between the two"
        seen.add(again)


def test_files_that_vllm_fetches_are_looked_at_when_it_has_them(tmp_path: Path) -> None:
    """Of a repository that was not downloaded before: this engine's own, and reused."""
    versions = AdapterVersions(since=time.time_ns() - 10**9)
    place = tmp_path / "fetched"
    before = versions.version(1, str(place))
    assert not before.stable
    place.mkdir()
    (place / "adapter_config.json").write_text("{}")
    versions.loaded(1, str(place))
    after = versions.version(1, str(place))
    assert after.stable
    assert not after.shareable
    versions.loaded(1, str(place))  # once more: nothing was fetched
    assert versions.version(1, str(place)) == after
    versions.close()


def test_files_that_appear_later_are_nobodys(tmp_path: Path) -> None:
    versions = AdapterVersions(since=time.time_ns() - 10**9)
    place = tmp_path / "fetched"
    assert not versions.version(1, str(place)).stable
    place.mkdir()
    assert versions.version(1, str(place)).changed
    versions.loaded(1, str(place))
    assert versions.version(1, str(place)).changed
    versions.close()


def test_an_adapter_that_is_younger_than_the_engine_is_its_own(adapter: Path) -> None:
    """vLLM may have read what was there before."""
    versions = AdapterVersions(since=time.time_ns() - 10**9)
    first = versions.version(1, str(adapter))
    assert not first.shareable
    assert versions.version(1, str(adapter)) == first
    (adapter / "adapter_model.safetensors").write_bytes(b"two")
    assert versions.version(1, str(adapter)) != first
    versions.close()


def test_an_adapter_that_goes_and_comes_is_this_engines_own(adapter: Path, tmp_path: Path, versions: AdapterVersions) -> None:
    seen = {versions.version(1, str(adapter))}
    adapter.rename(tmp_path / "away")
    seen.add(versions.version(1, str(adapter)))
    (tmp_path / "away").rename(adapter)
    seen.add(versions.version(1, str(adapter)))
    assert len(seen) == 3
    assert sum(version.shareable for version in seen) == 1


def test_an_adapter_that_cannot_be_read_is_this_engines_own(tmp_path: Path, versions: AdapterVersions) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    for path in (str(tmp_path / "nowhere"), str(empty), "no/such-repository", ""):
        first, second = versions.version(1, path), versions.version(2, path)
        assert not first.shareable
        assert first != second
        again = versions.version(1, path)
        assert not again.changed
        assert (again == first) is first.stable is (path in (str(empty), ""))


def test_a_disk_that_hangs_costs_one_short_wait(adapter: Path, monkeypatch: pytest.MonkeyPatch, versions: AdapterVersions) -> None:
    monkeypatch.setattr(adapters, "WAIT_SECONDS", 0.5)
    go_on = threading.Event()

    def hung(*args: Any, **kwargs: Any) -> str:
        assert go_on.wait(10)
        return digest_of(*args, **kwargs)

    waits: list[float | None] = []
    wait = threading.Event.wait
    monkeypatch.setattr(adapters, "digest_of", hung)
    monkeypatch.setattr(threading.Event, "wait", lambda self, seconds=None: waits.append(seconds) or wait(self, seconds))
    answers = [versions.version(1, str(adapter)) for _ in range(5)]
    assert not any(answer.shareable for answer in answers)
    assert len(set(answers)) == 5, "nobody knows what these have in common"
    assert [seconds for seconds in waits if seconds not in (None, 10)] == [adapters.WAIT_SECONDS]
    go_on.set()
    wait_until(lambda: versions.version(1, str(adapter)).shareable, 10, "the digest")


def test_adapters_beyond_the_limit_are_this_engines_own(adapter: Path, monkeypatch: pytest.MonkeyPatch, versions: AdapterVersions) -> None:
    monkeypatch.setattr(adapters, "MAX_ADAPTERS", 1)
    assert versions.version(1, str(adapter)).shareable
    assert not versions.version(2, str(adapter)).shareable


def test_a_stamp_sees_a_file_that_was_replaced(adapter: Path) -> None:
    files = files_of(adapter, adapter=True)
    before = stamp_of(files)
    new = adapter / "new"
    new.write_bytes(b"two")
    path = adapter / "adapter_model.safetensors"
    os.utime(new, ns=(path.stat().st_atime_ns, path.stat().st_mtime_ns))
    new.rename(path)
    assert stamp_of(files) != before
