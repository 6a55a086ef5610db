"""The hub's durable memory and its leadership in one directory, for pools without Kubernetes.

One process leads: it holds an exclusive lock on `hub.lock` for its life, and SQLite's own exclusive lock on `state.db`
besides. The three promises of `epochkv_fence.protocol.authority`:

1. `verify` reads holder and transitions from the database file that is in place at that moment; only `acquire` writes
   them, and every process that leads has acquired before.
2. `load` reads on the connection that makes all writes, one after the other, on one thread.
3. Every write is a `max()` in one transaction, and triggers refuse anything that would decrease. Commits are synced
   (`synchronous=FULL`): WAL's default may lose the last ones in a power failure, and a target that falls back is the one
   thing an authority must never show.

Exclusive locking also keeps SQLite's shared-memory file away, so that the directory may lie on a network file system
whose `flock` works. All file access happens on a thread of its own: a slow disk never holds up the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import queue
import secrets
import socket
import sqlite3
import threading
import uuid
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final, TypeVar

from epochkv_fence.protocol.authority import AuthorityError, Origin, PoolGone, PoolRecord, Term, merged_labels
from epochkv_fence.protocol.messages import Source

T = TypeVar("T")

DATABASE_FILE: Final = "state.db"
LOCK_FILE: Final = "hub.lock"
APPLICATION_ID: Final = 0x45504B56  # "EPKV"
SCHEMA_VERSION: Final = 4
DEADLINE_SECONDS: Final = 3.0
OPEN_SECONDS: Final = 30.0

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
    weights_version TEXT NOT NULL DEFAULT '',
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
"""
_SCHEMA_2: Final = """
CREATE TABLE updates (
    uid TEXT PRIMARY KEY REFERENCES pools,
    serial INTEGER NOT NULL,
    number BLOB NOT NULL,
    holder TEXT NOT NULL,
    version TEXT NOT NULL,
    open INTEGER NOT NULL
);
CREATE TRIGGER updates_never_go_back BEFORE UPDATE ON updates
WHEN NEW.serial < OLD.serial OR (NEW.serial = OLD.serial AND NEW.open >= OLD.open) OR NEW.uid <> OLD.uid
BEGIN SELECT RAISE(ABORT, 'the record of updates never goes back'); END;
CREATE TRIGGER updates_never_go BEFORE DELETE ON updates
BEGIN SELECT RAISE(ABORT, 'the record of updates is never removed'); END;
"""
_SCHEMA_3: Final = """
ALTER TABLE pools ADD COLUMN listed INTEGER NOT NULL DEFAULT 0;
ALTER TABLE pools ADD COLUMN inherited INTEGER NOT NULL DEFAULT 0;
"""
_SCHEMA_4: Final = """
DROP TABLE updates;
ALTER TABLE pools DROP COLUMN weights_version;
ALTER TABLE pools DROP COLUMN listed;
ALTER TABLE pools DROP COLUMN inherited;
CREATE TABLE labels (
    uid TEXT NOT NULL REFERENCES pools,
    place INTEGER NOT NULL,
    weights BLOB NOT NULL,
    label TEXT NOT NULL,
    PRIMARY KEY (uid, place)
);
"""
_SCHEMAS: Final = (_SCHEMA, _SCHEMA_2, _SCHEMA_3, _SCHEMA_4)
"""What each version of the state adds to the one before."""


class StateError(AuthorityError):
    """The state directory cannot be used; the message names it and the remedy."""


class StateHeld(StateError):
    """Another process holds the state directory.

    Attributes:
        pid: of that process, as it wrote it down; None when that is not known.
    """

    def __init__(self, directory: Path, pid: int | None) -> None:
        self.pid = pid
        who = f"process {pid}" if pid is not None else "another process"
        super().__init__(f"{directory} is held by {who}, which serves this pool; stop it first, or give another --state")


class FileAuthority:
    """`epochkv_fence.protocol.authority.Authority` in a directory. Make one with `open`.

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
        self._worker = _Worker()
        self._lock: int | None = None
        self._connection: sqlite3.Connection | None = None
        self._inode = (0, 0)
        self._closed = False

    @classmethod
    async def open(cls, directory: str | os.PathLike[str], deadline_seconds: float = DEADLINE_SECONDS) -> FileAuthority:
        """Take the directory for this process, making it and its database on first use.

        Args:
            deadline_seconds: for every later call.

        Raises:
            StateHeld: another process serves from it.
            StateError: it cannot be read or written, or holds something else.
        """
        authority = cls(directory, deadline_seconds)
        try:
            await authority._call("open", authority._open, OPEN_SECONDS)
        except BaseException:
            await authority.close()
            raise
        return authority

    async def close(self) -> None:
        """Give the directory back; later calls fail. Returns within the deadline, also when the disk hangs."""
        with contextlib.suppress(AuthorityError):
            await self._call("close", self._close)
        self._closed = True
        self._worker.stop()

    # ------------------------------------------------------------------ what a hub asks

    async def acquire(self) -> Term:
        """Begin a new term of this holder; returns after it is durable."""

        def write(connection: sqlite3.Connection) -> Term:
            connection.execute("UPDATE leadership SET holder = ?, transitions = transitions + 1", (self.holder,))
            (transitions,) = connection.execute("SELECT transitions FROM leadership").fetchone()
            return Term(self.holder, int(transitions))

        return await self._write("acquire", write)

    async def verify(self, term: Term) -> bool:
        """Whether `term` is the one in the database that lies in the directory now."""

        def read() -> bool:
            if not self._in_place():
                self.why_deposed = f"the state directory {self.directory} was removed or replaced"
                return False
            holder, transitions = self._opened().execute("SELECT holder, transitions FROM leadership").fetchone()
            return term == Term(holder, transitions)

        return await self._call("verify", read)

    def _in_place(self) -> bool:
        try:
            return _inode(os.stat(self.directory / DATABASE_FILE)) == self._inode  # of another one nothing is ours, whatever is in it
        except FileNotFoundError:
            return False

    async def load(self, pool_uid: str) -> PoolRecord:
        """What is recorded.

        Raises:
            PoolGone: there is no pool with this uid.
        """

        return await self._call("load", lambda: self._record_of(self._opened(), pool_uid))

    def _record_of(self, connection: sqlite3.Connection, pool_uid: str) -> PoolRecord:
        row = connection.execute("SELECT target, published, granting, source FROM pools WHERE uid = ?", (pool_uid,)).fetchone()
        if row is None:
            raise self._gone(pool_uid)
        target, published, granting, source = row
        origin = Origin(Source(source)) if source in {kind.value for kind in Source} else None
        labels = connection.execute("SELECT weights, label FROM labels WHERE uid = ? ORDER BY place", (pool_uid,)).fetchall()
        return PoolRecord(target, published, bool(granting), origin, dict(labels))

    async def record(self, pool_uid: str, target: int, origin: Origin | None = None) -> None:
        """Durably raise the target, and set its origin if it rises."""

        def write(connection: sqlite3.Connection) -> None:
            if target > self._record_of(connection, pool_uid).target:
                source = None if origin is None else origin.source.value
                connection.execute("UPDATE pools SET target = ?, source = ? WHERE uid = ?", (target, source, pool_uid))

        await self._write("record", write)

    async def publish(self, pool_uid: str, epoch: int) -> None:
        """Durably raise the published epoch. The target is never below it: the hub recorded it before it asked."""
        statement = "UPDATE pools SET published = max(published, :epoch), target = max(target, :epoch) WHERE uid = :uid"
        await self._update(pool_uid, "publish", statement, {"epoch": epoch})

    async def note_granting(self, pool_uid: str) -> None:
        """Durably note that grants may be out."""
        await self._update(pool_uid, "note", "UPDATE pools SET granting = 1 WHERE uid = :uid", {})

    async def note_labels(self, pool_uid: str, labels: Mapping[bytes, str]) -> None:
        """Durably add these labels; the newest stay."""

        def write(connection: sqlite3.Connection) -> None:
            known = merged_labels(self._record_of(connection, pool_uid).labels, labels)
            connection.execute("DELETE FROM labels WHERE uid = ?", (pool_uid,))
            rows = [(pool_uid, place, weights, label) for place, (weights, label) in enumerate(known.items())]
            connection.executemany("INSERT INTO labels VALUES (?, ?, ?, ?)", rows)

        await self._write("note_labels", write)

    # ------------------------------------------------------------------ pools

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

    # ------------------------------------------------------------------ on the worker thread

    def _open(self) -> None:
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._take_lock()
            self._connect()
        except sqlite3.Error as error:
            raise self._unusable(error) from error
        except OSError as error:
            text = f"{self.directory} cannot be used ({error.strerror or error}); give a --state directory that this user can write"
            raise StateError(text) from error

    def _take_lock(self) -> None:
        self._lock = os.open(self.directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            text = os.pread(self._lock, 32, 0).decode("ascii", "replace").strip()
            raise StateHeld(self.directory, int(text) if text.isdecimal() else None) from error
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)

    def _connect(self) -> None:
        path = self.directory / DATABASE_FILE
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = self._connection = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
            connection.execute(f"PRAGMA {pragma}")
        self._check_database(connection)
        self._inode = _inode(os.stat(path))

    def _check_database(self, connection: sqlite3.Connection) -> None:
        connection.execute("BEGIN IMMEDIATE")  # also takes SQLite's lock, for the life of the process
        with _transaction(connection):
            (application,) = connection.execute("PRAGMA application_id").fetchone()
            (version,) = connection.execute("PRAGMA user_version").fetchone()
            (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
            if (application, version, num_tables) == (0, 0, 0):
                connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                application = APPLICATION_ID
            if application == APPLICATION_ID and version < SCHEMA_VERSION:
                for schema in _SCHEMAS[version:]:
                    for statement in _statements(schema):
                        connection.execute(statement)
                connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
                version = SCHEMA_VERSION
        path = self.directory / DATABASE_FILE
        if application != APPLICATION_ID:
            raise StateError(f"{path} is not the state of an EpochKV hub; give another --state")
        if version > SCHEMA_VERSION:
            raise StateError(
                f"{path} was written by a newer EpochKV (state version {version}, this one reads {SCHEMA_VERSION}); run that version again"
            )
        problems = [row[0] for row in connection.execute("PRAGMA quick_check(3)")]
        if problems != ["ok"]:
            raise self._corrupt("; ".join(str(problem) for problem in problems))

    def _close(self) -> None:
        connection, self._connection = self._connection, None
        lock, self._lock = self._lock, None
        try:
            if connection is not None:
                connection.close()
        finally:
            if lock is not None:
                os.close(lock)

    def _opened(self) -> sqlite3.Connection:
        if self._connection is None:
            raise self._given_back()
        return self._connection

    def _given_back(self) -> AuthorityError:
        return AuthorityError(f"{self.directory} was given back: this hub does not lead any more")

    def _gone(self, pool_uid: str) -> PoolGone:
        return PoolGone(f"{self.directory} holds no pool with uid {pool_uid}")

    # ------------------------------------------------------------------ calls

    async def _update(self, pool_uid: str, what: str, statement: str, values: dict[str, Any]) -> None:
        def write(connection: sqlite3.Connection) -> None:
            if connection.execute(statement, {**values, "uid": pool_uid}).rowcount == 0:
                raise self._gone(pool_uid)

        await self._write(what, write)

    async def _write(self, what: str, write: Callable[[sqlite3.Connection], T]) -> T:
        def work() -> T:
            connection = self._opened()
            connection.execute("BEGIN IMMEDIATE")
            with _transaction(connection):
                return write(connection)

        return await self._call(what, work)

    async def _call(self, what: str, work: Callable[[], T], deadline_seconds: float | None = None) -> T:
        """On the worker thread; one that was not begun when its caller gave up is never begun."""
        seconds = self._deadline if deadline_seconds is None else deadline_seconds
        if self._closed:
            raise self._given_back()
        try:
            async with asyncio.timeout(seconds):
                return await asyncio.wrap_future(self._worker.submit(work))
        except TimeoutError as error:
            raise AuthorityError(f"{what}: the disk under {self.directory} did not answer within {seconds:g} s") from error
        except sqlite3.Error as error:
            raise self._unusable(error) from error
        except OSError as error:
            raise AuthorityError(f"{what}: {self.directory}: {error.strerror or error}") from error

    def _unusable(self, error: sqlite3.Error) -> StateError:
        name = getattr(error, "sqlite_errorname", "") or ""
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            return self._corrupt(str(error))
        if name.startswith("SQLITE_BUSY"):
            return StateHeld(self.directory, None)
        path = self.directory / DATABASE_FILE
        if name.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
            return StateError(f"{path} cannot be written ({error}): is the disk full? Nothing is granted or published until it can be")
        if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")):
            return StateError(f"{path} cannot be written ({error}); give a --state directory that this user can write")
        return StateError(f"{path}: {error}")

    def _corrupt(self, detail: str) -> StateError:
        return StateError(
            f"{self.directory / DATABASE_FILE} is damaged ({detail}), so nobody knows which epochs were used. "
            "Never restore an older copy: remove the whole directory and start a new pool, whose engines get its new client folder"
        )


class _Worker:
    """One daemon thread that does calls in order. Not an executor: those are joined at exit, and a disk may hang."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="epochkv-state", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._queue.put((future, work))
        return future

    def stop(self) -> None:
        """End after what is queued."""
        self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # handed to the caller
                future.set_exception(error)
            del item, future, work


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Any:
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def _statements(script: str) -> list[str]:
    """The statements of a script (`executescript` would commit the open transaction)."""
    found, text = [], ""
    for line in script.strip().splitlines(keepends=True):
        text += line
        if sqlite3.complete_statement(text):
            found.append(text)
            text = ""
    return found


def _inode(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino
