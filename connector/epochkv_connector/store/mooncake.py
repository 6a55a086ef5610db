"""One client of Mooncake: the only file that calls the library.

Facts that shape it, measured on the pinned version:

- `setup` and `close` hold the GIL.
- Most calls on a client that was closed, or whose `setup` failed, are a crash. So a `MooncakeClient` exists only between a successful
  `setup` and `close`, and its owner (`connection`) keeps calls and `close` apart.
- A client of another version connects and then fails silently, so each proves itself with a canary before it is used.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import secrets
import socket
from collections.abc import Sequence
from ctypes import addressof, c_char
from typing import Any

from epochkv_connector.store.queues import StoreOutcome
from epochkv_connector.store.settings import StoreSettings

OUTCOMES = {
    0: StoreOutcome.OK,
    -200: StoreOutcome.FULL,
    -703: StoreOutcome.PENDING,
    -704: StoreOutcome.ABSENT,
    -707: StoreOutcome.EXPIRED,
    -714: StoreOutcome.PENDING,
    -800: StoreOutcome.TRANSFER,
    -801: StoreOutcome.FOREIGN,
    -900: StoreOutcome.UNREACHABLE,
    -901: StoreOutcome.UNREACHABLE,
}
"""Mooncake's return codes; everything else is `StoreOutcome.ERROR`."""

_CANARY_BYTES = 2048


class SetupFailed(RuntimeError):
    """`setup` or the registration of memory was refused; the message has the code."""


def outcome_of(code: int) -> StoreOutcome:
    return OUTCOMES.get(code, StoreOutcome.ERROR)


def probe_master(address: str, timeout: float) -> str | None:
    """Find out without Mooncake whether the master answers: its calls block for seconds, and `setup` holds the GIL meanwhile.

    A half-closed TCP connection is closed in turn by a live process within a millisecond; the kernel of a hung one
    accepts and says nothing. Returns the address of this host as the master sees it, or None when no master answers.
    """
    half_close = "://" not in address
    for endpoint in address.split("://", 1)[-1].split(";"):
        host, _, port = endpoint.rpartition(":")
        with contextlib.suppress(OSError, ValueError):
            with socket.create_connection((host.strip("[]"), int(port)), timeout=timeout) as connection:
                local = str(connection.getsockname()[0])
                if half_close:
                    connection.shutdown(socket.SHUT_WR)
                    connection.recv(1)
                return local
    return None


class MooncakeClient:
    """A client that is set up, with registered memory. Blocking; not to be closed while a call runs."""

    def __init__(self, settings: StoreSettings, regions: Sequence[tuple[int, int]], local_address: str) -> None:
        """Set a client up and register `regions` of (address, bytes) with it. Raises SetupFailed."""
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise SetupFailed(f"Mooncake cannot be imported ({error}); install the connector extra") from error
        self._scratch = mmap.mmap(-1, 2 * _CANARY_BYTES)
        self._scratch_address = addressof(c_char.from_buffer(self._scratch))
        self._client: Any = MooncakeDistributedStore()
        hostname = settings.local_hostname or os.environ.get("POD_IP") or local_address
        code = self._client.setup(
            hostname, settings.metadata_server, 0, 0, settings.protocol, settings.device_name, settings.master_address
        )
        if code != 0:
            raise SetupFailed(f"Mooncake setup as {hostname} with master {settings.master_address} returned {code}")
        for address, num_bytes in (*regions, (self._scratch_address, 2 * _CANARY_BYTES)):
            code = self._client.register_buffer(address, num_bytes)
            if code != 0:
                self._client.close()
                raise SetupFailed(f"Mooncake register_buffer of {num_bytes} bytes returned {code}")

    def put(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        """0 or a negative code per key; an existing key is 0 and keeps its bytes."""
        return _complete(self._client.batch_put_from(keys, addresses, sizes), len(keys))

    def get(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        """Bytes read, or a negative code, per key."""
        return _complete(self._client.batch_get_into(keys, addresses, sizes), len(keys))

    def exists(self, keys: list[str]) -> list[int]:
        """1, 0 or a negative code per key. Every hit is leased (10 s by default)."""
        return _complete(self._client.batch_is_exist(keys), len(keys))

    def remove_matching(self, pattern: str) -> int:
        """Remove what matches and is not leased; number removed, or a negative code."""
        return int(self._client.remove_by_regex(pattern, False))

    def canary(self) -> tuple[StoreOutcome, str]:
        """Write, read, compare and remove a small object.

        Returns:
            OK; FULL (no space: the master answers, writing cannot be proved); TRANSFER (the segment owner of the
            canary is away); anything else means that this connection must not be used. And a word for the log.
        """
        key = f"epochkv-canary/{secrets.token_hex(16)}"
        value = random.randbytes(_CANARY_BYTES)
        self._scratch[:_CANARY_BYTES] = value
        self._scratch[_CANARY_BYTES:] = bytes(_CANARY_BYTES)
        code = self.put([key], [self._scratch_address], [_CANARY_BYTES])[0]
        if code != 0:
            return outcome_of(code), f"canary put returned {code}"
        try:
            code = self.get([key], [self._scratch_address + _CANARY_BYTES], [_CANARY_BYTES])[0]
            if code != _CANARY_BYTES:
                return (outcome_of(code) if code < 0 else StoreOutcome.SIZE), f"canary get returned {code}"
            if self._scratch[_CANARY_BYTES:] != value:
                return StoreOutcome.FOREIGN, "canary came back with other bytes"
        finally:
            self._client.remove(key, True)  # nobody else knows the key, so nobody can be reading it
        return StoreOutcome.OK, "canary written, read and compared"

    def close(self) -> None:
        """Give the client back; takes about a second and holds the GIL. No call may be running, and none may follow."""
        self._client.close()


def _complete(codes: Sequence[int], expected: int) -> list[int]:
    """The library answers `[]` when it is not usable; make that an error per key."""
    return [int(code) for code in codes] if len(codes) == expected else [-600] * expected
