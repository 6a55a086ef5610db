"""CURVE keys: made here, kept in files or Secrets as z85 text, checked when read so that a bad one is named, not guessed."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import zmq
from zmq.utils import z85

from epochkv_fence.common import on_daemon_thread

KEY_LENGTH = 40
"""Characters of a z85-encoded CURVE key (32 bytes)."""

HUB_PUBLIC_FILE = "hub.pub"
CLIENT_PUBLIC_FILE = "client.pub"
CLIENT_SECRET_FILE = "client.key"
CLIENT_FILES: Final = (HUB_PUBLIC_FILE, CLIENT_PUBLIC_FILE, CLIENT_SECRET_FILE)
"""In the order of `ClientKeys`."""


class CredentialsError(ValueError):
    """A key is missing or is not one; the message names it and says what to do. Never contains a secret."""


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A CURVE key pair, z85."""

    public: str
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        check_key("public key", self.public)
        check_key("secret key", self.secret)
        if public_of(self.secret) != self.public:
            raise CredentialsError("the public key does not belong to the secret key; take both from one key pair")

    def __iter__(self) -> Iterator[str]:
        """`public, secret = pair`."""
        return iter((self.public, self.secret))


@dataclass(frozen=True, slots=True)
class ClientKeys:
    """What a client of one pool needs: its own key pair and the hub's public key."""

    hub_public: str
    public: str
    secret: str = field(repr=False)

    def __post_init__(self) -> None:
        check_key("the hub's public key", self.hub_public)
        KeyPair(self.public, self.secret)

    @classmethod
    def load(cls, directory: str | Path) -> ClientKeys:
        """Read `hub.pub`, `client.pub` and `client.key`. Raises `CredentialsError`: a file is missing or holds no key."""
        base = Path(directory)
        return cls(*(read_key(base / name) for name in CLIENT_FILES))

    def apply(self, socket: zmq.Socket[Any]) -> None:
        """Have `socket` speak CURVE as this client, to that hub alone. Before it connects."""
        socket.curve_serverkey = self.hub_public.encode()
        socket.curve_publickey = self.public.encode()
        socket.curve_secretkey = self.secret.encode()


def generate_keypair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


def public_of(secret: str) -> str:
    public: bytes = zmq.curve_public(secret.encode())
    return public.decode("ascii")


def check_key(what: str, key: str) -> None:
    """Raise `CredentialsError` unless `key` is a z85-encoded CURVE key."""
    try:
        valid = len(key) == KEY_LENGTH and len(z85.decode(key.encode("ascii"))) == 32
    except (ValueError, KeyError, UnicodeError, struct.error):
        valid = False
    if not valid:
        raise CredentialsError(f"{what} is not a CURVE key; give {KEY_LENGTH} characters of z85")


def read_key(path: Path) -> str:
    """The key in a file (white space around it is ignored)."""
    try:
        key = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not ASCII"
        raise CredentialsError(f"{path}: cannot read the key ({reason}); mount the pool's credentials there") from error
    check_key(str(path), key)
    return key


# ----------------------------------------------------------------------------------------------------------------------
# Reads an engine's credentials on a thread of its own: a file system that hangs must not cost the lease.


READ_SECONDS: Final = 5.0
"""After this a read counts as hung. No other one is begun meanwhile: it would hang, too."""


@dataclass(eq=False)
class KeyReader:
    """Used by one thread; what it starts is a daemon thread, for which nobody ever waits."""

    _read: Callable[[], ClientKeys]
    """Reads the credentials; may raise, and may never return."""
    _done: Callable[[], None]
    """Called on another thread when there is an answer."""
    _reading: Future[ClientKeys] | None = None
    _hangs_at: float | None = None

    def begin(self) -> None:
        """Read, unless a read is under way."""
        if self._reading is None:
            self._reading = on_daemon_thread(self._read, "epochkv-keys")
            self._hangs_at = time.monotonic() + READ_SECONDS
            self._reading.add_done_callback(lambda _: self._done())

    def answer(self) -> ClientKeys | BaseException | None:
        """What a read that has ended since the last call has found. A `TimeoutError`, once: it hangs, and still counts when it ends."""
        read = self._reading
        if read is not None and read.done():
            self._reading = None
            return read.exception() or read.result()
        if read is not None and self._hangs_at is not None and time.monotonic() >= self._hangs_at:
            self._hangs_at = None
            return TimeoutError(f"no answer within {READ_SECONDS} s: the file system hangs")
        return None
