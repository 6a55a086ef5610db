"""State directories that cannot be used: foreign, damaged, older, newer, read-only, full or on a disk that hangs."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from epochkv_fence.protocol.authority import AuthorityError
from epochkv_fence.standalone.authority import SqliteAuthority, StateError
from tests.unit.fence.state_dirs import opened, record_of


def refused(directory: Path, match: str, kind: type[StateError] = StateError) -> None:
    with pytest.raises(kind, match=match):
        asyncio.run(opened(directory))


def test_a_directory_of_another_pool_and_a_shorter_lease_are_refused(tmp_path: Path) -> None:
    async def body() -> None:
        authority, uid = await opened(tmp_path, lease_seconds=30.0)
        await authority.close()
        for name, lease, match in (
            ("other", 30.0, "belongs to pool 'policy', not 'other'; give --pool policy or another --state"),
            ("policy", 10.0, "give --lease-seconds 30 or more"),
        ):
            with pytest.raises(StateError, match=match):
                await opened(tmp_path, name, lease)
        authority, again = await opened(tmp_path, lease_seconds=60.0)
        assert again == uid
        await authority.close()
        with pytest.raises(StateError, match="give --lease-seconds 60 or more"):
            await opened(tmp_path, "policy", 30.0)

    asyncio.run(body())


def test_garbage_and_foreign_databases_are_refused(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage"
    garbage.mkdir()
    (garbage / "state.db").write_bytes(os.urandom(8192))
    refused(garbage, "is damaged .*remove the whole directory and start a new pool")
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    with sqlite3.connect(foreign / "state.db") as connection:
        connection.execute("CREATE TABLE mine (x)")
    connection.close()
    refused(foreign, "is not the state of an EpochKV hub; give another --state")


def test_a_damaged_page_is_found_when_the_state_is_opened(tmp_path: Path) -> None:
    record_of(tmp_path)
    path = tmp_path / "state.db"
    content = bytearray(path.read_bytes())
    content[4096 * 2 : 4096 * 3] = os.urandom(4096)
    path.write_bytes(content)
    refused(tmp_path, "is damaged")


@pytest.mark.parametrize("version", [3, 5])
def test_a_state_of_another_version_is_refused(tmp_path: Path, version: int) -> None:
    record_of(tmp_path)
    connection = sqlite3.connect(tmp_path / "state.db")
    connection.execute(f"PRAGMA user_version = {version}")
    connection.close()
    refused(tmp_path, f"has state version {version}, and this EpochKV reads version 4; run the EpochKV that wrote it")


def test_a_place_that_is_no_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "cannot be used .*give a --state directory that this user can write")
    refused(Path("/proc/epochkv"), "cannot be used")


FULL_DISK = """
import asyncio, resource, sys
from epochkv_fence.protocol.authority import AuthorityError
from epochkv_fence.standalone.authority import SqliteAuthority

async def main():
    authority = await SqliteAuthority.open(sys.argv[1])
    uid = await authority.ensure_pool("policy", 1.0)
    term = await authority.acquire()
    await authority.record(uid, 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))  # every write beyond this fails from here on
    try:
        await authority.record(uid, 2)
    except AuthorityError as error:
        print(error)
    print((await authority.load(uid)).target, await authority.verify(term))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    await authority.record(uid, 3)
    print((await authority.load(uid)).target)

asyncio.run(main())
"""


def test_a_write_that_the_disk_refuses_is_an_error_and_the_next_one_works(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", FULL_DISK, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    error, after, last = done.stdout.splitlines()
    assert "is the disk full? Nothing is granted or published until it can be" in error
    assert after == "1 True"
    assert last == "3"
    assert record_of(tmp_path)[0].target == 3


def test_a_disk_that_hangs_is_an_error_and_never_blocks_the_loop(tmp_path: Path) -> None:
    async def body() -> None:
        authority = await SqliteAuthority.open(tmp_path, deadline_seconds=0.2)
        uid = await authority.ensure_pool("policy", 1.0)
        hang = threading.Event()
        authority._worker.submit(hang.wait)  # the thread is where a write that does not return would leave it
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                ticks += 1
                await asyncio.sleep(0.01)

        ticker = asyncio.create_task(tick())
        for call in (authority.record(uid, 5), authority.load(uid)):
            with pytest.raises(AuthorityError, match=r"did not answer within 0\.2 s"):
                await call
        assert ticks > 10
        hang.set()
        assert (await authority.load(uid)).target == 0  # a call that was given up before it began is never made
        ticker.cancel()
        await authority.close()

    asyncio.run(body())
