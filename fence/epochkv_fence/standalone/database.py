"""The state directory of a standalone hub: its lock, and the SQLite database in it. Synchronous; one thread uses it.

One process has the directory: it holds an exclusive lock on `hub.lock` for its life, and SQLite's own exclusive lock on
`state.db`. Exclusive locking also keeps SQLite's shared-memory file away, so the directory may lie on a network file system
whose `flock` works.

Triggers reject every write that would decrease something. Commits are synced (`synchronous=FULL`), because WAL's default may
lose the last ones in a power failure, and a target must never fall back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from epochkv_fence.protocol.authority import AuthorityError

DATABASE_FILE: Final = "state.db"
LOCK_FILE: Final = "hub.lock"
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
SCHEMAS: Final = (_SCHEMA, _SCHEMA_2, _SCHEMA_3, _SCHEMA_4)
"""What each version of the state adds to the one before."""
SCHEMA_VERSION: Final = len(SCHEMAS)


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


class Database:
    """The directory and what it holds. `open` takes it for this process."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.path = directory / DATABASE_FILE
        self._lock: int | None = None
        self._connection: sqlite3.Connection | None = None
        self._inode: tuple[int, int] | None = None

    def open(self) -> None:
        """Take the directory, making it and its database on first use.

        Raises:
            StateHeld: another process has it.
            StateError: it cannot be read or written, or holds something else.
        """
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._take_lock()
            self._connect()
        except sqlite3.Error as error:
            raise self.unusable(error) from error
        except OSError as error:
            text = f"{self.directory} cannot be used ({error.strerror or error}); give a --state directory that this user can write"
            raise StateError(text) from error

    def close(self) -> None:
        connection, self._connection = self._connection, None
        lock, self._lock = self._lock, None
        try:
            if connection is not None:
                connection.close()
        finally:
            if lock is not None:
                os.close(lock)

    @property
    def connection(self) -> sqlite3.Connection:
        """The connection that makes all reads and writes.

        Raises:
            AuthorityError: the directory was given back.
        """
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

    def in_place(self) -> bool:
        """The directory still holds the file that was opened. Another file is not ours, whatever is in it."""
        try:
            return _inode(self.path) == self._inode
        except FileNotFoundError:
            return False

    # ------------------------------------------------------------------ opening

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
        os.close(os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        connection = self._connection = sqlite3.connect(self.path, timeout=0, isolation_level=None, check_same_thread=False)
        for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
            connection.execute(f"PRAGMA {pragma}")
        with self.transaction():  # also takes SQLite's lock, for the life of the process
            application, version = self._upgrade(connection)
        if application != APPLICATION_ID:
            raise StateError(f"{self.path} is not the state of an EpochKV hub; give another --state")
        if version > SCHEMA_VERSION:
            raise StateError(
                f"{self.path} was written by a newer EpochKV (state version {version}, this one reads {SCHEMA_VERSION}); "
                "run that version again"
            )
        problems = [row[0] for row in connection.execute("PRAGMA quick_check(3)")]
        if problems != ["ok"]:
            raise self._corrupt("; ".join(str(problem) for problem in problems))
        self._inode = _inode(self.path)

    def _upgrade(self, connection: sqlite3.Connection) -> tuple[int, int]:
        """Bring a new file, or one of an older version, to the present version. Returns the application id and the version."""
        (application,) = connection.execute("PRAGMA application_id").fetchone()
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        if (application, version, num_tables) == (0, 0, 0):
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            application = APPLICATION_ID
        if application != APPLICATION_ID or version >= SCHEMA_VERSION:
            return application, version
        for schema in SCHEMAS[version:]:
            for statement in _statements(schema):
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        return application, SCHEMA_VERSION

    # ------------------------------------------------------------------ errors

    def given_back(self) -> AuthorityError:
        """The error of whoever still asks after `close`."""
        return AuthorityError(f"{self.directory} was given back: this hub does not lead any more")

    def unusable(self, error: sqlite3.Error) -> StateError:
        """What an error of SQLite means for whoever runs the hub."""
        name = getattr(error, "sqlite_errorname", "") or ""
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            return self._corrupt(str(error))
        if name.startswith("SQLITE_BUSY"):
            return StateHeld(self.directory, None)
        if name.startswith(("SQLITE_FULL", "SQLITE_IOERR")):
            return StateError(f"{self.path} cannot be written ({error}): is the disk full? Nothing is granted or published until it can be")
        if name.startswith(("SQLITE_READONLY", "SQLITE_CANTOPEN", "SQLITE_PERM", "SQLITE_AUTH")):
            return StateError(f"{self.path} cannot be written ({error}); give a --state directory that this user can write")
        return StateError(f"{self.path}: {error}")

    def _corrupt(self, detail: str) -> StateError:
        return StateError(
            f"{self.path} is damaged ({detail}), so nobody knows which epochs were used. "
            "Never restore an older copy: remove the whole directory and start a new pool, whose engines get its new client folder"
        )


def _statements(script: str) -> list[str]:
    """The statements of a script (`executescript` would commit the open transaction)."""
    found, text = [], ""
    for line in script.strip().splitlines(keepends=True):
        text += line
        if sqlite3.complete_statement(text):
            found.append(text)
            text = ""
    return found


def _inode(path: Path) -> tuple[int, int]:
    found = os.stat(path)
    return found.st_dev, found.st_ino
