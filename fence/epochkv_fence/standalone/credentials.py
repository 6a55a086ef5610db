"""What a standalone hub keeps beside its record: keys, and the folder that engines and trainers join with.

`keys.json` is the truth and is replaced as a whole. The client folder is made from it, so the next start or rotation repairs
what a process leaves that is killed between two files. Keys belong to one pool uid: with the keys of a lost record, engines of
before would meet epochs that count from 0 again, under names that were used.
"""

import asyncio
import contextlib
import json
import logging
import math
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec

from epochkv_fence.connection import CONFIG_FILE, ROOT_SECRET_BYTES, ROOT_SECRET_FILE
from epochkv_fence.net.keys import (
    CLIENT_PUBLIC_FILE,
    CLIENT_SECRET_FILE,
    HUB_PUBLIC_FILE,
    CredentialsError,
    KeyPair,
    check_key,
    generate_keypair,
)
from epochkv_fence.net.server import HubServer
from epochkv_fence.protocol.pool import AuthorityError, PoolConfig
from epochkv_fence.standalone.authority import StateError, hold, trouble

logger = logging.getLogger("epochkv.hub")

KEYS_FILE: Final = "keys.json"
CLIENT_FOLDER: Final = "client"
KEYS_VERSION: Final = 1
LOCK_SECONDS: Final = 5.0


class Previous(msgspec.Struct, frozen=True):
    """The client key that was replaced last; accepted until `retire_at` (Unix seconds)."""

    public: str
    retire_at: float


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
    """The keys of this pool, made on first use. Raises `StateError`: they cannot be read, or belong to another record."""
    with _locked(directory):
        keys = read_keys(directory)
        if keys is None:
            if (directory / CLIENT_FOLDER).exists():
                logger.warning(
                    "%s is missing, so the hub made new keys and rejects engines and trainers with the old ones; give them the new %s, "
                    "and restart the engines",
                    directory / KEYS_FILE,
                    directory / CLIENT_FOLDER,
                )
            else:
                logger.info("making the keys of a new pool in %s", directory)
            keys = Keys(pool_uid, generate_keypair(), generate_keypair(), secrets.token_hex(ROOT_SECRET_BYTES))
            _write(directory / KEYS_FILE, msgspec.json.format(msgspec.json.encode(keys)))
    if keys.pool_uid != pool_uid:
        raise StateError(
            f"{directory / KEYS_FILE} belongs to pool uid {keys.pool_uid}, whose record is missing: epochs would begin at 0 again under "
            "names that were used. Remove the whole directory and start a new pool, whose engines get its new client folder"
        )
    return keys


def read_keys(directory: Path) -> Keys | None:
    """None: there are none yet. Raises `StateError`: the file is not one that this version wrote."""
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
    """Make a new client key; the one before stays accepted for `grace_seconds`: nobody knows which key a trainer has.

    Raises:
        StateError: there are no keys yet, or an older key is still accepted.
    """
    with _locked(directory):
        keys = _existing(directory)
        now = time.time()
        if keys.previous is not None and now < keys.previous.retire_at:
            _write_credentials(directory / CLIENT_FOLDER, keys)  # the rotation before may have broken off
            still = f"for {math.ceil(keys.previous.retire_at - now)} s"
            raise StateError(
                f"{directory}: the key before is still accepted {still}; rotate again afterwards, or drop it now with `epochkv keys retire`"
            )
        previous = Previous(keys.client.public, now + grace_seconds)
        keys = msgspec.structs.replace(keys, client=generate_keypair(), previous=previous)
        _write(directory / KEYS_FILE, msgspec.json.format(msgspec.json.encode(keys)))
        _write_credentials(directory / CLIENT_FOLDER, keys)
    return keys


def retire_previous(directory: Path, judged: str | None = None) -> Keys:
    """Accept the newest client key alone, once the client folder has it.

    Args:
        judged: the public key whose time is over; if another one is the key before by now, nothing changes. None: whichever it is.

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


def write_client(directory: Path, pool: str, endpoint: str) -> Path:
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
            keys = _existing(directory)  # somebody may rotate them while the hub starts
            if path.exists() and not all(_holds(folder / name, text) for name, text in _credentials(keys)):
                logger.warning("%s did not have the pool's keys; they are written again", folder)
            _write_credentials(folder, keys)
            content = _existing_json(path)
            content["pool"] = {"name": pool, "uid": keys.pool_uid}
            content["hub"] = {"endpoint": endpoint, "credentials_dir": "."}
            _write(path, json.dumps(content, indent=2).encode() + b"\n")
    except OSError as error:
        raise trouble(error, f"{folder} cannot be written ({error.strerror or error})") from error
    return path


def _existing(directory: Path) -> Keys:
    keys = read_keys(directory)
    if keys is None:
        raise StateError(f"{directory} holds no keys; give the --state directory of `epochkv hub`")
    return keys


def _existing_json(path: Path) -> dict[str, Any]:
    """What somebody may have added to."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise StateError(f"{path} is not a JSON object; correct it, or remove it: the hub writes a new one")
    return found


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
    path = directory / "keys.lock"

    def held(who: str) -> StateError:
        return StateError(f"{path} has been held by {who} for {LOCK_SECONDS:g} s; end that process and try again")

    try:
        lock = hold(path, held, LOCK_SECONDS)
    except OSError as error:
        text = f"{directory} cannot be used ({error.strerror or error}); give the --state directory of `epochkv hub`"
        raise trouble(error, text) from error
    try:
        yield
        os.ftruncate(lock, 0)
    except OSError as error:
        raise trouble(error, f"{directory}: keys cannot be written ({error.strerror or error})") from error
    finally:
        os.close(lock)


# ----------------------------------------------------------------------------------------------------------------------
# Which client keys a standalone hub accepts: it notices a rotation, and the end of a grace.


CHECK_SECONDS: Final = 1.0


@dataclass(eq=False)
class KeyWatch:
    """Owns the pool's configuration, because the keys in it change while the hub serves."""

    _directory: Path
    _server: HubServer
    config: PoolConfig
    """What the hub serves now."""

    def configure(self, **changes: Any) -> None:
        """Serve with other values from now on. Raises `ValueError`: a value is impossible."""
        self.config = replace(self.config, **changes)
        self._server.set_pool(self.config)

    async def run(self) -> None:
        """Check the keys once a second. A problem is logged once."""
        problem = ""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            try:
                await self._check()
                problem = ""
            except (AuthorityError, OSError, ValueError) as error:
                if str(error) != problem:
                    problem = str(error)
                    logger.error("keys: %s", error)

    async def _check(self) -> None:
        keys = await asyncio.to_thread(read_keys, self._directory)
        if keys is None or keys.pool_uid != self.config.uid:
            raise StateError(f"{self._directory}: the keys are missing; the hub goes on with those in use, and a restart makes new keys")
        self._accept(keys)
        if keys.previous is not None and time.time() >= keys.previous.retire_at:
            self._accept(await asyncio.to_thread(retire_previous, self._directory, keys.previous.public), "its grace is over")

    def _accept(self, keys: Keys, why: str = "`epochkv keys retire`") -> None:
        """`why`: what ended the key before, if one has ended."""
        before = self.config.client_public_keys
        if keys.accepted == before:
            return
        self.configure(client_public_keys=keys.accepted)
        if keys.accepted[0] != before[0]:
            logger.info("a new client key is accepted%s", "; the one before as well, until its grace is over" if keys.previous else "")
        if set(before) - set(keys.accepted):
            logger.info(
                "the client key before is not accepted any more: %s. Who still has it is refused, and needs the client folder again", why
            )
