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
        """Read `hub.pub`, `client.pub` and `client.key`.

        Raises:
            CredentialsError: a file is missing or holds no key.
        """
        base = Path(directory)
        return cls(*(read_key(base / name) for name in (HUB_PUBLIC_FILE, CLIENT_PUBLIC_FILE, CLIENT_SECRET_FILE)))

    def apply(self, socket: zmq.Socket[Any]) -> None:
        """Have `socket` speak CURVE as this client, to that hub alone. Before it connects."""
        socket.curve_serverkey = self.hub_public.encode()
        socket.curve_publickey = self.public.encode()
        socket.curve_secretkey = self.secret.encode()


def generate_keypair() -> KeyPair:
    public, secret = zmq.curve_keypair()
    return KeyPair(public.decode("ascii"), secret.decode("ascii"))


def public_of(secret: str) -> str:
    """The public key of a secret key."""
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
# Reads an engine's credentials on threads of their own: a file system that hangs must not cost the lease.


READ_SECONDS: Final = 5.0
"""After this a read counts as hung; another is begun beside it, for the file system may have been replaced under it."""
MAX_READS: Final = 4
"""At once. A thread that hangs in the kernel cannot be ended."""


@dataclass(slots=True)
class _Read:
    """`superseded`: a younger read has answered. `told`: it was said that this one hangs."""

    began: float
    future: Future[ClientKeys]
    superseded: bool = False
    told: bool = False


class KeyReader:
    """Used by one thread; what it starts are daemon threads, for which nobody ever waits.

    Args:
        read: reads the credentials; may raise, and may never return.
        done: called on another thread when there is an answer.
        seconds: after which a read counts as hung.
    """

    def __init__(self, read: Callable[[], ClientKeys], done: Callable[[], None], seconds: float = READ_SECONDS) -> None:
        self._read = read
        self._done = done
        self._seconds = seconds
        self._reads: list[_Read] = []

    def begin(self) -> None:
        """Read, unless a read is under way that does not hang, or too many hang."""
        now = time.monotonic()
        running = [read for read in self._reads if not read.future.done()]
        if len(running) >= MAX_READS or any(now < read.began + self._seconds for read in running):
            return
        try:
            future = on_daemon_thread(self._read, "epochkv-keys")
        except RuntimeError as error:  # no more threads
            future = Future()
            future.set_exception(error)
        self._reads.append(_Read(now, future))
        future.add_done_callback(lambda _: self._done())

    def answer(self) -> ClientKeys | BaseException | None:
        """What the youngest read that has ended since the last call has found.

        A `TimeoutError`, once per read: the youngest hangs. Its answer still counts when it comes.
        """
        ended = [read for read in self._reads if read.future.done()]
        self._reads = [read for read in self._reads if read not in ended]
        if ended and not ended[-1].superseded:
            for read in self._reads:
                read.superseded = read.superseded or read.began < ended[-1].began
            return ended[-1].future.exception() or ended[-1].future.result()
        youngest = self._reads[-1] if self._reads else None
        if youngest is not None and not youngest.told and not youngest.superseded and time.monotonic() >= youngest.began + self._seconds:
            youngest.told = True
            return TimeoutError(f"no answer within {self._seconds} s: the file system hangs")
        return None
