"""The SQLite authority: the common suite, real kills at random points, and every way a directory can be unusable."""

import asyncio
import errno
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from epochkv_fence.protocol.messages import Source
from epochkv_fence.protocol.pool import Authority, AuthorityError, PoolRecord, Term
from epochkv_fence.standalone.authority import SqliteAuthority, StateError, hold
from tests.support.authority import Authorities, AuthorityConformance


async def opened(directory: Path, name: str = "policy", lease_seconds: float = 1.0) -> tuple[SqliteAuthority, str]:
    authority = await SqliteAuthority.open(directory)
    try:
        return authority, await authority.ensure_pool(name, lease_seconds)
    except BaseException:
        await authority.close()
        raise


def record_of(directory: Path) -> tuple[PoolRecord, Term]:
    """Open as the next process would, and look."""

    async def look() -> tuple[PoolRecord, Term]:
        authority, uid = await opened(directory)
        try:
            return await authority.load(uid), await authority.acquire()
        finally:
            await authority.close()

    return asyncio.run(look())


WRITER = """
import asyncio, sys
from epochkv_fence.protocol.messages import Source
from epochkv_fence.standalone.authority import SqliteAuthority

async def main():
    authority = await SqliteAuthority.open(sys.argv[1])
    uid = await authority.ensure_pool("policy", 1.0)
    term = await authority.acquire()
    epoch = (await authority.load(uid)).target
    print("term", term.transitions, flush=True)
    while True:
        epoch += 1
        await authority.record(uid, epoch, list(Source)[epoch % 3])
        print("target", epoch, flush=True)
        await authority.publish(uid, epoch)
        print("published", epoch, flush=True)

asyncio.run(main())
"""


class SqliteAuthorities:
    """Processes one after the other, as the lock allows."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.uid = ""
        self.current: SqliteAuthority | None = None

    async def take_over(self) -> tuple[Authority, Term]:
        if self.current is not None:
            await self.current.close()
        self.current = await SqliteAuthority.open(self.directory)
        self.uid = await self.current.ensure_pool("policy", 1.0)
        return self.current, await self.current.acquire()


class TestConformance(AuthorityConformance):
    @pytest.fixture(autouse=True)
    def _directory(self, tmp_path: Path) -> None:
        self.directory = tmp_path / "state"

    @asynccontextmanager
    async def authorities(self) -> AsyncIterator[Authorities]:
        world = SqliteAuthorities(self.directory)
        yield world
        assert world.current is not None
        await world.current.close()


def start_writer(directory: Path, **extra: object) -> subprocess.Popen[str]:
    return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
        [sys.executable, "-c", WRITER, str(directory)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **extra
    )


# ---------------------------------------------------------------------------------------------------------------- crashes
def test_kill_9_at_any_point_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    rng = random.Random(9)
    directory, said, terms, kills_in_writes = tmp_path / "state", {"target": 0, "published": 0}, [0], 0
    for _ in range(12):
        writer = start_writer(directory)
        assert writer.stdout is not None
        lines = [writer.stdout.readline()]  # it leads
        killer = threading.Timer(rng.uniform(0.0, 0.08), writer.send_signal, (signal.SIGKILL,))
        killer.start()
        lines += writer.stdout.readlines()
        assert writer.wait(30) == -signal.SIGKILL
        killer.join()
        assert writer.stderr is not None
        writer.stderr.close()
        writer.stdout.close()
        for line in lines:
            word, _, number = line.partition(" ")
            if word == "term":
                assert int(number) > terms[-1]
                terms.append(int(number))
            elif line.endswith("\n"):
                said[word] = int(number)
        record, term = record_of(directory)
        kills_in_writes += record.target > said["target"] or record.published < record.target
        assert said["target"] <= record.target <= said["target"] + 1
        assert said["published"] <= record.published <= record.target
        assert record.origin == (list(Source)[record.target % 3] if record.target else None)
        assert term.transitions > terms[-1]
        terms.append(term.transitions)
        said = {"target": record.target, "published": record.published}
    assert said["target"] > 12
    assert kills_in_writes > 0  # at least one came between a record and its publication


def test_a_kill_while_the_state_is_made_leaves_something_that_can_be_used(tmp_path: Path) -> None:
    rng, cut_short = random.Random(3), 0
    for number in range(8):
        directory = tmp_path / str(number)
        writer = start_writer(directory)
        deadline = time.monotonic() + 20
        while not directory.exists():
            assert time.monotonic() < deadline
        time.sleep(rng.uniform(0.0, 0.006))
        writer.kill()
        cut_short += writer.communicate(timeout=30)[0] == ""
        record_of(directory)
    assert cut_short > 0  # at least one kill came before the writer led


async def test_commits_are_synced(tmp_path: Path) -> None:
    authority, _ = await opened(tmp_path)
    connection = authority._database.connection
    settings = [
        await authority._call("look", lambda name=name: connection.execute(f"PRAGMA {name}").fetchone()[0])  # type: ignore[misc]
        for name in ("journal_mode", "synchronous", "locking_mode")
    ]
    assert settings == ["wal", 2, "exclusive"]  # 2 is FULL
    await authority.close()


# ------------------------------------------------------------------------------------------------------------- one writer
def test_a_second_process_is_refused_and_told_who_holds_it(tmp_path: Path) -> None:
    writer = start_writer(tmp_path)
    try:
        assert writer.stdout is not None
        assert writer.stdout.readline().startswith("term")
        assert writer.stdout.readline() == "target 1\n"
        refused(tmp_path, f"is held by process {writer.pid}, which serves this pool")
        (tmp_path / "hub.lock").unlink()  # somebody "cleans up": SQLite's own lock still holds
        refused(tmp_path, "is held by another process, which serves this pool")
    finally:
        writer.kill()
        writer.communicate(timeout=30)
    assert record_of(tmp_path)[0].target >= 1, "the writer went on as if nobody had tried"


async def test_a_state_that_is_replaced_under_a_hub_ends_its_term(tmp_path: Path) -> None:
    authority, uid = await opened(tmp_path / "state")
    term = await authority.acquire()
    assert await authority.verify(term)
    shutil.rmtree(tmp_path / "state")
    assert not await authority.verify(term)
    successor, other = await opened(tmp_path / "state")
    assert other != uid  # never reused
    await successor.acquire()
    assert not await authority.verify(term)
    await authority.close()
    await successor.close()


async def test_the_same_holder_gets_a_new_term(tmp_path: Path) -> None:
    authority, _ = await opened(tmp_path)
    first, second = await authority.acquire(), await authority.acquire()
    assert second == Term(first.holder, first.transitions + 1)
    assert [await authority.verify(term) for term in (first, second)] == [False, True]
    await authority.close()
    for call in (authority.verify(second), authority.load("x"), authority.record("x", 1)):
        with pytest.raises(AuthorityError, match="released; this hub is no longer the leader"):
            await call


# ------------------------------------------------------------------------------- directories that cannot be used
def refused(directory: Path, match: str) -> None:
    with pytest.raises(StateError, match=match):
        asyncio.run(opened(directory))


def test_a_file_system_without_locks_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", fail)
    refused(tmp_path, r"hub\.lock: its file system has no locks \(No locks available\): use a --state directory on a local disk")


async def test_a_directory_of_another_pool_and_a_shorter_lease_are_refused(tmp_path: Path) -> None:
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


def test_what_is_no_state_of_this_version_is_refused(tmp_path: Path) -> None:
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
    ours = tmp_path / "ours"
    record_of(ours)
    damaged = shutil.copytree(ours, tmp_path / "damaged")
    content = bytearray((damaged / "state.db").read_bytes())
    content[4096 * 2 : 4096 * 3] = os.urandom(4096)
    (damaged / "state.db").write_bytes(content)
    refused(damaged, "is damaged")
    connection = sqlite3.connect(ours / "state.db")
    connection.execute("PRAGMA user_version = 5")
    connection.close()
    refused(ours, "has state version 5, and this EpochKV reads version 4; run the EpochKV that wrote it")
    (tmp_path / "file").write_text("")
    refused(tmp_path / "file", "cannot be used .*give a --state directory that this user can write")
    refused(Path("/proc/epochkv"), "cannot be used")


FULL_DISK = """
import asyncio, resource, sys
from epochkv_fence.protocol.pool import AuthorityError
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
        print(type(error).__name__, error)
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
    assert error.startswith("AuthorityError "), "a hub that starts now tries again"
    assert "is the disk full? Nothing new is recorded until it can be" in error
    assert after == "1 True"
    assert last == "3"
    assert record_of(tmp_path)[0].target == 3
    for _ in range(2):  # a lock needs no room on the disk, and ends
        os.close(hold(Path("/dev/full"), StateError))


async def test_a_disk_that_hangs_is_an_error_and_never_blocks_the_loop(tmp_path: Path) -> None:
    authority = await SqliteAuthority.open(tmp_path, deadline_seconds=0.2)
    uid, term = await authority.ensure_pool("policy", 1.0), await authority.acquire()
    hang = threading.Event()
    authority._thread.post(hang.wait)  # the thread is where a write that does not return would leave it
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
        assert await authority.verify(term), "engines keep their leases"
    assert ticks > 10
    hang.set()
    assert (await authority.load(uid)).target == 0  # a call that was given up before it began is never made
    ticker.cancel()
    await authority.close()
