"""The state directory of a standalone hub: its lock, the SQLite database in it, and the hub's authority over that. One thread uses each.

One process has the directory: it holds an exclusive lock on `hub.lock` for its life, and SQLite's own exclusive lock on
`state.db`. The disk is this machine's: a file server may give the locks of a machine that it does not reach to another one.

Triggers reject every write that would decrease something. Commits are synced (`synchronous=FULL`), because WAL's default may
lose the last ones in a power failure, and a target must never fall back.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import secrets
import socket
import sqlite3
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

from epochkv_fence.common import LoopThread, fulfil
from epochkv_fence.protocol.messages import Source
from epochkv_fence.protocol.pool import AuthorityError, PoolRecord, Term, merged_labels

APPLICATION_ID: Final = 0x45504B56  # "EPKV"

_SCHEMA: Final = """
CREATE TABLE leadership (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    holder TEXT NOT NULL,
    transitions INTEGER NOT NULL
);
CREATE TABLE pools (
    uid TEXT PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    target INTEGER NOT NULL DEFAULT 0,
    published INTEGER NOT NULL DEFAULT 0,
    granting INTEGER NOT NULL DEFAULT 0,
    source TEXT,
    lease_seconds REAL NOT NULL DEFAULT 0,
    CHECK (published <= target)
);
CREATE TRIGGER pools_never_decrease BEFORE UPDATE ON pools
WHEN NEW.target < OLD.target OR NEW.published < OLD.published OR NEW.granting < OLD.granting
    OR NEW.lease_seconds < OLD.lease_seconds OR NEW.uid <> OLD.uid
BEGIN SELECT RAISE(ABORT, 'the record of a pool never decreases'); END;
CREATE TRIGGER pools_never_go BEFORE DELETE ON pools
BEGIN SELECT RAISE(ABORT, 'the record of a pool is never removed'); END;
CREATE TRIGGER leadership_never_decreases BEFORE UPDATE ON leadership WHEN NEW.transitions <= OLD.transitions
BEGIN SELECT RAISE(ABORT, 'transitions only grow'); END;
INSERT INTO leadership VALUES (1, '', 0);
CREATE TABLE labels (
    uid TEXT NOT NULL REFERENCES pools,
    place INTEGER NOT NULL,
    weights BLOB NOT NULL,
    label TEXT NOT NULL,
    PRIMARY KEY (uid, place)
);
"""
SCHEMA_VERSION: Final = 4


class StateError(AuthorityError):
    """The state directory cannot be used; the message names it and the remedy."""


def hold(path: Path, held: Callable[[str], StateError], seconds: float = 0.0) -> int:
    """Lock this file for as long as what is returned is open; raises `held(who has it)` when nobody lets it go in time."""
    lock, until = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if time.monotonic() >= until:
                text = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
                os.close(lock)
                raise held(f"process {text}" if text.isdecimal() else "another process") from error
        except OSError as error:
            os.close(lock)
            raise StateError(f"{path}: its file system has no locks ({error.strerror}): use a --state directory on a local disk") from error
        time.sleep(0.05)
    with contextlib.suppress(OSError):  # the disk is full: only messages show who has it
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)
    return lock


def trouble(error: OSError, text: str) -> AuthorityError:
    """A `StateError`, unless it may work later as it is: the disk is full, or fails."""
    return (AuthorityError if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO) else StateError)(text)


class Database:
    """The directory and what it holds. `open` takes it for this process. `term`: the newest that began here; None: none, or released."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / "state.db"
        self._opened = contextlib.ExitStack()
        self._connection: sqlite3.Connection | None = None
        self.inode: tuple[int, int] | None = None
        self.term: Term | None = None

    def open(self) -> None:
        """Take the directory, making it and its database on first use.

        Raises:
            StateError: another process has it, it cannot be read or written, or it holds something else.
            AuthorityError: the disk is full.
        """
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._opened.callback(os.close, hold(self.directory / "hub.lock", self._held))
            self._connect()
        except sqlite3.Error as error:
            raise self.unusable(error) from error
        except OSError as error:
            text = f"{self.directory} cannot be used ({error.strerror or error}); give a --state directory that this user can write"
            raise trouble(error, text) from error

    def close(self) -> None:
        self.term = self._connection = None  # first: from then on another hub may lead
        self._opened.close()

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection that makes all reads and writes. Raises `AuthorityError`: the directory was released."""
        if self._connection is None:
            raise self.given_back()
        return self._connection

    @contextlib.contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Do what the block does as a whole, or not at all."""
        connection = self.connection
        connection.execute("BEGIN IMMEDIATE")
        try:
            yield connection
            connection.execute("COMMIT")
        except BaseException:
            with contextlib.suppress(sqlite3.Error):
                connection.execute("ROLLBACK")
            raise

    # ------------------------------------------------------------------ opening

    def _connect(self) -> None:
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = self._connection = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
        self._opened.callback(connection.close)
        for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
            connection.execute(f"PRAGMA {pragma}")
        with self.transaction():  # takes SQLite's lock, for the life of the process
            pass
        application, version = self._made(connection)
        if application != APPLICATION_ID:
            raise StateError(f"{self.path} is not the state of an EpochKV hub; give another --state")
        if version != SCHEMA_VERSION:
            raise StateError(
                f"{self.path} has state version {version}, and this EpochKV reads version {SCHEMA_VERSION}; "
                "run the EpochKV that wrote it, or give another --state, which makes a new pool"
            )
        problems = [row[0] for row in connection.execute("PRAGMA quick_check(3)")]
        if problems != ["ok"]:
            raise self._corrupt("; ".join(str(problem) for problem in problems))
        self.inode = _inode(self.path)

    def _made(self, connection: sqlite3.Connection) -> tuple[int, int]:
        """Make what an empty file lacks. Returns the application id and the version."""
        found = tuple(
            int(connection.execute(query).fetchone()[0])
            for query in ("PRAGMA application_id", "PRAGMA user_version", "SELECT count(*) FROM sqlite_schema")
        )
        if found != (0, 0, 0):
            return found[0], found[1]
        made = f"PRAGMA application_id = {APPLICATION_ID}; PRAGMA user_version = {SCHEMA_VERSION};"
        connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} {made} COMMIT;")
        return APPLICATION_ID, SCHEMA_VERSION

    # ------------------------------------------------------------------ errors

    def given_back(self) -> AuthorityError:
        """The error of whoever still asks after `close`."""
        return AuthorityError(f"{self.directory} released; this hub is no longer the leader")

    def unusable(self, error: sqlite3.Error) -> AuthorityError:
        """What an error of SQLite means for whoever runs the hub. No `StateError`: it may work later, as it is."""
        name = getattr(error, "sqlite_errorname", "") or ""
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            return self._corrupt(str(error))
        if name.startswith("SQLITE_BUSY"):
            return self._held("another process")
        if name.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
            return AuthorityError(f"{self.path} cannot be written ({error}): is the disk full? Nothing new is recorded until it can be")
        if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")):
            return StateError(f"{self.path} cannot be written ({error}); give a --state directory that this user can write")
        return StateError(f"{self.path}: {error}")

    def _held(self, who: str) -> StateError:
        return StateError(f"{self.directory} is held by {who}, which serves this pool; stop it first, or give another --state")

    def _corrupt(self, detail: str) -> StateError:
        return StateError(
            f"{self.path} is damaged ({detail}), so nobody knows which epochs were used. "
            "Never restore an older copy: remove the whole directory and start a new pool, whose engines get its new client folder"
        )


def _inode(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino


# ----------------------------------------------------------------------------------------------------------------------
# The durable memory and the leadership of a hub without Kubernetes, in the SQLite database of its state directory.
#
# The three promises of `epochkv_fence.protocol.pool`:
#
# 1. `verify` is True only while the database file that this process has locked is in place. Nobody else can write to that file
#    before `close`, so its holder and transitions are those that `acquire` wrote last.
# 2. `load` reads on the connection that makes all writes, one after the other, on one thread.
# 3. Every write is a `max()` in one transaction, and triggers reject anything that would decrease.
#
# The database has a thread of its own, so a slow disk never holds up the event loop. `verify` has another one: it reads nothing of the
# database, and a commit that the disk holds up costs no engine its lease.


T = TypeVar("T")

DEADLINE_SECONDS: Final = 2.5  # less than the hub waits, so that its log has our reason
OPEN_SECONDS: Final = 30.0


class SqliteAuthority:
    """An `Authority` in a state directory. Make one with `open`.

    Attributes:
        directory: the state directory.
        holder: unique per `open`.
        why_deposed: why the newest `verify` found that a term has ended.
    """

    def __init__(self, directory: str | os.PathLike[str], deadline_seconds: float) -> None:
        self.directory = Path(directory).absolute()
        self.holder = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self.why_deposed = "another hub leads now"
        self._deadline = deadline_seconds
        self._database = Database(self.directory)
        self._thread = LoopThread("epochkv-state", 0.0)  # not waited for at its end: a disk may hang
        self._looking = LoopThread("epochkv-state-look", 0.0)
        self._closed = False

    @classmethod
    async def open(cls, directory: str | os.PathLike[str], deadline_seconds: float = DEADLINE_SECONDS) -> SqliteAuthority:
        """Take the directory for this process, as `Database.open` does. `deadline_seconds`: for every later call."""
        authority = cls(directory, deadline_seconds)
        try:
            await authority._call("open", authority._database.open, OPEN_SECONDS)
        except BaseException:
            await authority.close()
            raise
        return authority

    async def close(self) -> None:
        """Give the directory back; later calls fail. Returns within the deadline, also when the disk hangs."""
        with contextlib.suppress(AuthorityError):
            await self._call("close", self._database.close)
        self._closed = True
        self._thread.stop()
        self._looking.stop()

    # ------------------------------------------------------------------ what a hub asks

    async def acquire(self) -> Term:
        """Begin a new term of this holder; returns after it is durable."""

        def write(connection: sqlite3.Connection) -> Term:
            connection.execute("UPDATE leadership SET holder = ?, transitions = transitions + 1", (self.holder,))
            (transitions,) = connection.execute("SELECT transitions FROM leadership").fetchone()
            term = self._database.term = Term(self.holder, int(transitions))  # nobody hears of it before it is durable
            return term

        return await self._write("acquire", write)

    async def verify(self, term: Term) -> bool:
        """Whether `term` is the one in the database that lies in the directory now."""

        def look() -> bool:
            with contextlib.suppress(FileNotFoundError):
                if _inode(self._database.path) == self._database.inode:  # another file is not ours, whatever is in it
                    return term == self._database.term  # after that look: what is the term now was so then
            self.why_deposed = f"the state directory {self.directory} was removed or replaced"
            return False

        return await self._call("verify", look, thread=self._looking)

    async def load(self, pool_uid: str) -> PoolRecord:
        """What is recorded. Raises `AuthorityError`: there is no pool with this uid."""
        return await self._call("load", lambda: self._record_of(self._database.connection, pool_uid))

    def _record_of(self, connection: sqlite3.Connection, pool_uid: str) -> PoolRecord:
        row = connection.execute("SELECT target, published, granting, source FROM pools WHERE uid = ?", (pool_uid,)).fetchone()
        if row is None:
            raise self._gone(pool_uid)
        target, published, granting, source = row
        origin = Source(source) if source in {kind.value for kind in Source} else None
        labels = connection.execute("SELECT weights, label FROM labels WHERE uid = ? ORDER BY place", (pool_uid,)).fetchall()
        return PoolRecord(target, published, bool(granting), origin, dict(labels))

    async def record(self, pool_uid: str, target: int, origin: Source | None = None) -> None:
        """Durably raise the target, and set its origin if it rises."""

        def write(connection: sqlite3.Connection) -> None:
            if target > self._record_of(connection, pool_uid).target:
                source = None if origin is None else origin.value
                connection.execute("UPDATE pools SET target = ?, source = ? WHERE uid = ?", (target, source, pool_uid))

        await self._write("record", write)

    async def publish(self, pool_uid: str, epoch: int) -> None:
        """Durably raise the published epoch. The target is never below it: the hub recorded it before it asked."""
        statement = "UPDATE pools SET published = max(published, :epoch), target = max(target, :epoch) WHERE uid = :uid"
        await self._update("publish", statement, {"uid": pool_uid, "epoch": epoch})

    async def note_granting(self, pool_uid: str) -> None:
        await self._update("note", "UPDATE pools SET granting = 1 WHERE uid = :uid", {"uid": pool_uid})

    async def note_labels(self, pool_uid: str, labels: Mapping[bytes, str], held: Collection[bytes] = ()) -> None:
        """Durably add these labels; see `merged_labels` for which go."""

        def write(connection: sqlite3.Connection) -> None:
            known = merged_labels(self._record_of(connection, pool_uid).labels, labels, held)
            connection.execute("DELETE FROM labels WHERE uid = ?", (pool_uid,))
            rows = [(pool_uid, place, weights, label) for place, (weights, label) in enumerate(known.items())]
            connection.executemany("INSERT INTO labels VALUES (?, ?, ?, ?)", rows)

        await self._write("note_labels", write)

    async def ensure_pool(self, name: str, lease_seconds: float) -> str:
        """The uid of this directory's pool, made on first use.

        The longest lease ever given is remembered: a hub that starts waits for older grants as it knows leases.

        Raises:
            StateError: the directory belongs to a pool of another name, or leases were longer before.
        """

        def write(connection: sqlite3.Connection) -> str:
            row = connection.execute("SELECT uid, name, lease_seconds FROM pools").fetchone()
            if row is None:
                uid = str(uuid.uuid4())
                connection.execute("INSERT INTO pools (uid, name, lease_seconds) VALUES (?, ?, ?)", (uid, name, lease_seconds))
                return uid
            uid, known, longest = row
            if known != name:
                raise StateError(f"{self.directory} belongs to pool {known!r}, not {name!r}; give --pool {known} or another --state")
            if lease_seconds < longest:
                raise StateError(
                    f"{self.directory}: leases of {longest:g} s were given before, and grants of that length may still be out; "
                    f"a lease never gets shorter: give --lease-seconds {longest:g} or more"
                )
            connection.execute("UPDATE pools SET lease_seconds = ? WHERE uid = ?", (lease_seconds, uid))
            return str(uid)

        return await self._write("ensure_pool", write)

    # ------------------------------------------------------------------ calls

    def _gone(self, pool_uid: str) -> AuthorityError:
        return AuthorityError(f"{self.directory} holds no pool with uid {pool_uid}")

    async def _update(self, what: str, statement: str, values: dict[str, Any]) -> None:
        def write(connection: sqlite3.Connection) -> None:
            if connection.execute(statement, values).rowcount == 0:
                raise self._gone(values["uid"])

        await self._write(what, write)

    async def _write(self, what: str, write: Callable[[sqlite3.Connection], T]) -> T:
        def work() -> T:
            with self._database.transaction() as connection:
                return write(connection)

        return await self._call(what, work)

    async def _call(self, what: str, work: Callable[[], T], deadline_seconds: float | None = None, thread: LoopThread | None = None) -> T:
        """On the database's thread, or another one; one that was not begun when its caller gave up is never begun."""
        seconds = self._deadline if deadline_seconds is None else deadline_seconds
        if self._closed:
            raise self._database.given_back()
        done: Future[T] = Future()
        (thread or self._thread).post(fulfil, done, work)
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(done)
        except TimeoutError as error:
            raise AuthorityError(f"{what}: the disk under {self.directory} did not answer within {seconds:g} s") from error
        except sqlite3.Error as error:
            raise self._database.unusable(error) from error
        except OSError as error:
            raise AuthorityError(f"{what}: {self.directory}: {error.strerror or error}") from error
