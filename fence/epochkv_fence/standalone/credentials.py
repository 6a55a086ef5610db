"""What a standalone hub keeps beside its record: keys, and the folder that engines and trainers join with.

`keys.json` is the truth and is replaced as a whole. The client folder is made from it, so the next start or rotation repairs
what a process leaves that is killed between two files. Keys belong to one pool uid: with the keys of a lost record, engines of
before would meet epochs that count from 0 again, under names that were used.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import json
import logging
import math
import os
import secrets
import stat
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import msgspec

from epochkv_fence.connection import CONFIG_FILE, ROOT_SECRET_BYTES, ROOT_SECRET_FILE, warn_of_unknown
from epochkv_fence.net import HubServer
from epochkv_fence.net.keys import (
    CLIENT_PUBLIC_FILE,
    CLIENT_SECRET_FILE,
    HUB_PUBLIC_FILE,
    CredentialsError,
    KeyPair,
    check_key,
    generate_keypair,
)
from epochkv_fence.protocol.pool import PoolConfig
from epochkv_fence.standalone.authority import StateError

logger = logging.getLogger("epochkv.hub")

KEYS_FILE: Final = "keys.json"
KEYS_LOCK: Final = "keys.lock"
CLIENT_FOLDER: Final = "client"
KEYS_VERSION: Final = 1
KEEP_SECONDS: Final = 600.0
"""How long the key before stays at least, unless its grace is shorter: nobody knows which key a trainer has."""
LOCK_SECONDS: Final = 5.0
LOCK_POLL_SECONDS: Final = 0.05


class Previous(msgspec.Struct, frozen=True):
    """The client key that was replaced last; accepted until no engine uses it, at the latest until `retire_at` (Unix seconds)."""

    public: str
    rotated_at: float
    retire_at: float

    @property
    def keep_until(self) -> float:
        """It stays until then also when no engine uses it, for trainers."""
        return min(self.retire_at, self.rotated_at + KEEP_SECONDS)


class Keys(msgspec.Struct, frozen=True):
    """What `keys.json` holds."""

    pool_uid: str
    hub: KeyPair
    client: KeyPair
    root_secret: str
    previous: Previous | None = None
    version: int = KEYS_VERSION

    @property
    def accepted(self) -> tuple[str, ...]:
        """Client keys, the newest first."""
        return (self.client.public, *([self.previous.public] if self.previous is not None else []))


def ensure_keys(directory: Path, pool_uid: str) -> Keys:
    """The keys of this pool, made on first use.

    Raises:
        StateError: they cannot be read, or belong to another record.
    """
    with _locked(directory):
        keys = read_keys(directory)
        if keys is None:
            if not is_new(directory):
                logger.warning(
                    "%s is missing, so the hub made new keys and rejects engines and trainers with the old ones; give them the new %s, "
                    "and restart the engines",
                    directory / KEYS_FILE,
                    directory / CLIENT_FOLDER,
                )
            keys = Keys(pool_uid, generate_keypair(), generate_keypair(), secrets.token_hex(ROOT_SECRET_BYTES))
            _write(directory / KEYS_FILE, msgspec.json.format(msgspec.json.encode(keys)))
    if keys.pool_uid != pool_uid:
        raise StateError(
            f"{directory / KEYS_FILE} belongs to pool uid {keys.pool_uid}, whose record is missing: epochs would begin at 0 again under "
            "names that were used. Remove the whole directory and start a new pool, whose engines get its new client folder"
        )
    return keys


def is_new(directory: Path) -> bool:
    """Nobody has had keys of it yet."""
    return not (directory / KEYS_FILE).exists() and not (directory / CLIENT_FOLDER).exists()


def exposed_files(directory: Path) -> list[tuple[Path, int]]:
    """Files with secrets that not this user alone can read, with their modes."""
    secret = (directory / KEYS_FILE, *(directory / CLIENT_FOLDER / name for name in (CLIENT_SECRET_FILE, ROOT_SECRET_FILE)))
    found = []
    for path in secret:
        with contextlib.suppress(OSError):
            mode = stat.S_IMODE(path.stat().st_mode)
            if mode & 0o077:
                found.append((path, mode))
    return found


def read_keys(directory: Path) -> Keys | None:
    """None: there are none yet.

    Raises:
        StateError: the file is not one that this version wrote.
    """
    path = directory / KEYS_FILE
    try:
        keys = msgspec.json.decode(path.read_bytes(), type=Keys)
        if keys.previous is not None:
            check_key("the client key before", keys.previous.public)
        valid = keys.version == KEYS_VERSION and len(bytes.fromhex(keys.root_secret)) == ROOT_SECRET_BYTES
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StateError(f"{path} cannot be read ({error.strerror or error}); run as the user that made it") from error
    except (msgspec.MsgspecError, CredentialsError, RecursionError, ValueError):
        valid = False
    if not valid:
        raise StateError(
            f"{path} holds no keys that this version can read; restore it, or remove it: engines then need the new client folder"
        )
    return keys


def rotate_keys(directory: Path, grace_seconds: float) -> Keys:
    """Make a new client key; the one before stays accepted until no engine uses it, or for `grace_seconds`.

    For trainers, whose keys nobody counts, it stays `KEEP_SECONDS` at least, or `grace_seconds` if that is less.

    Raises:
        StateError: there are no keys yet, or an older key is still accepted.
    """
    with _locked(directory):
        keys = _existing(directory)
        now = time.time()
        if keys.previous is not None and now < keys.previous.retire_at:
            still = accepted_for(keys.previous.retire_at - now, keys.previous.keep_until - now)
            raise StateError(
                f"{directory}: the key before is still accepted {still}; rotate again afterwards, or drop it now with `epochkv keys retire`"
            )
        previous = Previous(keys.client.public, now, now + grace_seconds)
        keys = msgspec.structs.replace(keys, client=generate_keypair(), previous=previous)
        _write(directory / KEYS_FILE, msgspec.json.format(msgspec.json.encode(keys)))
        _write_credentials(directory / CLIENT_FOLDER, keys)
    return keys


def accepted_for(most: float, least: float) -> str:
    """How long the key before is, in seconds from now."""
    if least >= most:
        return f"for {math.ceil(most)} s, even if an engine still uses it"
    first = f"for {math.ceil(least)} s at least and " if least > 0 else ""
    return f"{first}until no engine uses it, for {math.ceil(most)} s at most"


def retire_previous(directory: Path, judged: str | None = None) -> Keys:
    """Accept the newest client key alone, once the client folder has it.

    Args:
        judged: the public key that is found to be of no use; if another one is the key before by now, nothing changes.
            None: whichever it is.

    Raises:
        StateError: there are no keys yet, or they cannot be written.
    """
    with _locked(directory):
        keys = _existing(directory)
        _write_credentials(directory / CLIENT_FOLDER, keys)
        if keys.previous is not None and judged in (None, keys.previous.public):
            keys = msgspec.structs.replace(keys, previous=None)
            _write(directory / KEYS_FILE, msgspec.json.format(msgspec.json.encode(keys)))
    return keys


def repair_client(directory: Path, keys: Keys) -> bool:
    """Write the client folder's credentials again if they are not those of `keys`: a rotation was killed in the middle.

    Returns:
        Whether they had to be.

    Raises:
        StateError: they cannot be written.
    """
    folder = directory / CLIENT_FOLDER
    if _has_credentials(folder, keys):
        return False
    with _locked(directory):
        keys = _existing(directory)
        if _has_credentials(folder, keys):  # a rotation was under way
            return False
        _write_credentials(folder, keys)
    return True


def write_client(directory: Path, keys: Keys, pool: str, endpoint: str) -> Path:
    """Write what engines and trainers join with; other keys of an existing `connection.json` are kept, those that are gone are not.

    Returns:
        Path of `connection.json`.

    Raises:
        StateError: it cannot be written.
    """
    folder = directory / CLIENT_FOLDER
    path = folder / CONFIG_FILE
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        with _locked(directory):
            if (folder / CONFIG_FILE).exists() and not _has_credentials(folder, keys):
                logger.warning("%s did not have the pool's keys; they are written again", folder)
            _write_credentials(folder, keys)
            content = _existing_json(path)
            warn_of_unknown(content, str(path))
            content["pool"] = {"name": pool, "uid": keys.pool_uid}
            content["hub"] = {"endpoint": endpoint, "credentials_dir": "."}
            _write(path, json.dumps(content, indent=2).encode() + b"\n")
    except OSError as error:
        raise StateError(f"{folder} cannot be written ({error.strerror or error})") from error
    return path


def _existing(directory: Path) -> Keys:
    keys = read_keys(directory)
    if keys is None:
        raise StateError(f"{directory} holds no keys; give the --state directory of `epochkv hub`")
    return keys


def _existing_json(path: Path) -> dict[str, Any]:
    """What somebody may have added to; what is no JSON object is kept aside, because it was written by hand."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        return found
    names = (path.with_name(path.name + ".bad" + (f".{number}" if number else "")) for number in itertools.count())
    aside = next(name for name in names if not name.exists())
    os.replace(path, aside)
    logger.warning("%s was not a JSON object; it is now %s, and what was added to it is not in the new one", path, aside)
    return {}


def _credentials(keys: Keys) -> list[tuple[str, bytes]]:
    texts = (
        (HUB_PUBLIC_FILE, keys.hub.public),
        (ROOT_SECRET_FILE, keys.root_secret),
        (CLIENT_SECRET_FILE, keys.client.secret),
        (CLIENT_PUBLIC_FILE, keys.client.public),
    )
    return [(name, text.encode() + b"\n") for name, text in texts]


def _write_credentials(folder: Path, keys: Keys) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, content in _credentials(keys):
        _write(folder / name, content)


def _has_credentials(folder: Path, keys: Keys) -> bool:
    return all(_holds(folder / name, content) for name, content in _credentials(keys))


def _holds(path: Path, content: bytes) -> bool:
    with contextlib.suppress(OSError):
        return path.read_bytes() == content
    return False


def _write(path: Path, content: bytes) -> None:
    """Replace a file as a whole, readable by this user alone, durably; one that is the same is left alone."""
    if _holds(path, content):
        return
    part = path.with_name(path.name + ".part")
    file = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(file, "wb") as sink:
        sink.write(content)
        sink.flush()
        os.fsync(sink.fileno())
    os.replace(part, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hub and `keys rotate` change the same files. Who has the lock writes its process id into it."""
    try:
        lock = os.open(directory / KEYS_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StateError(f"{directory} cannot be used ({error.strerror or error}); give the --state directory of `epochkv hub`") from error
    try:
        _wait_for(lock, directory / KEYS_LOCK)
        yield
        os.ftruncate(lock, 0)
    except OSError as error:
        raise StateError(f"{directory}: keys cannot be written ({error.strerror or error})") from error
    finally:
        os.close(lock)


def _wait_for(lock: int, path: Path) -> None:
    """Raise `StateError` when somebody else holds it for too long: stopped, or on a disk that hangs."""
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except BlockingIOError as error:
            if time.monotonic() >= until:
                text = os.pread(lock, 32, 0).decode("ascii", "replace").strip()
                who = f"process {text}" if text.isdecimal() else "another process"
                raise StateError(f"{path} has been held by {who} for {LOCK_SECONDS:g} s; end that process and try again") from error
        time.sleep(LOCK_POLL_SECONDS)
    os.ftruncate(lock, 0)
    os.pwrite(lock, f"{os.getpid()}\n".encode(), 0)


# ----------------------------------------------------------------------------------------------------------------------
# Which client keys a standalone hub accepts: it notices a rotation, and lets the key before go when nobody uses it any more.


logger = logging.getLogger("epochkv.hub")

LOOK_SECONDS: Final = 1.0


class KeyWatch:
    """Owns the pool's configuration, because the keys in it change while the hub serves.

    Attributes:
        config: what the hub serves now.
    """

    def __init__(self, directory: Path, server: HubServer, config: PoolConfig) -> None:
        self.config = config
        self._directory = directory
        self._server = server

    def configure(self, **changes: Any) -> None:
        """Serve with other values from now on.

        Raises:
            ValueError: a value is impossible.
        """
        self.config = replace(self.config, **changes)
        self._server.set_pool(self.config)

    async def run(self) -> None:
        """Look at the keys once a second. A problem is logged once."""
        problem = ""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                await self._look()
                problem = ""
            except (StateError, OSError, ValueError) as error:
                if str(error) != problem:
                    problem = str(error)
                    logger.error("keys: %s", error)

    async def _look(self) -> None:
        keys = await asyncio.to_thread(read_keys, self._directory)
        if keys is None or keys.pool_uid != self.config.uid:
            raise StateError(f"{self._directory}: the keys are missing; the hub goes on with those in use, and a restart makes new keys")
        before = self.config
        self._accept(keys)
        if await asyncio.to_thread(repair_client, self._directory, keys):  # or the only key that is accepted could be nobody's
            logger.warning(
                "the client folder did not have the pool's keys (removed, changed, or a rotation was killed); they are written again"
            )
        if keys.previous is not None and (why := self._retired(keys, before)):
            self._accept(await asyncio.to_thread(retire_previous, self._directory, keys.previous.public), why)

    def _accept(self, keys: Keys, why: str = "`epochkv keys retire`") -> None:
        """`why`: what ended the key before, if one has ended."""
        before = self.config.client_public_keys
        if keys.accepted == before:
            return
        self.configure(client_public_keys=keys.accepted)
        if keys.accepted[0] != before[0]:
            logger.info(
                "a new client key is accepted"
                + ("; the one before as well, until no engine uses it or its grace is over" if keys.previous else "")
            )
        if set(before) - set(keys.accepted):
            logger.info(
                "the client key before is not accepted any more: %s. Who still has it is refused, and needs the client folder again", why
            )

    def _retired(self, keys: Keys, config: PoolConfig) -> str:
        """Why the previous key may go; empty: it may not yet, or the hub did not serve with these keys before this look.

        It stays for two leases at least, for some minutes for the sake of trainers, whose keys are not known, and as long
        as a live engine uses it. An engine reads its keys again when their files change. One that cannot (keys in its
        environment) needs a restart.
        """
        assert keys.previous is not None
        now = time.time()
        if now >= keys.previous.retire_at:
            return "its grace is over"
        keep_until = max(keys.previous.keep_until, keys.previous.rotated_at + 2 * config.fence_timeout_seconds)
        if keys.accepted != config.client_public_keys or now < keep_until:
            return ""
        engines = self._server.snapshot(config.uid).engines
        return "" if any(view.alive and view.key_index > 0 for view in engines) else "no engine uses it"
