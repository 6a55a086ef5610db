"""A store's admin: empties the store of a pool in one call, over the HTTP port of Mooncake's masters."""

import asyncio
import contextlib
import http.client
import json
import re
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import urlsplit

from epochkv_fence.common import on_daemon_thread


class StoreAdminError(Exception):
    """The store did not answer or refused. What was removed is then unknown; the hub tries again."""


class StoreAdmin(Protocol):
    """All calls are made with a deadline by the caller; a call that is cancelled may still take effect later."""

    async def remove_all(self, pool_uid: str) -> tuple[int, int | None]:
        """Remove every key of this pool's store that nobody reads now. Returns how many the store has counted, and the bytes that are
        free now; None: it does not say.

        Raises:
            StoreAdminError: no answer, or a refusal; what was removed is then unknown.
        """


# ----------------------------------------------------------------------------------------------------------------------
# Mooncake's admin port as a `StoreAdmin`: one HTTP call empties the store, one before and one after say how many bytes.
#
# Keys that somebody reads stay. It needs only the standard library. The requests run on a thread with a deadline, because looking up
# a name cannot be ended.


DEADLINE_SECONDS: Final = 7.0
"""Less than the hub waits (`net.server`), whose sentence does not name the address."""
CONNECT_SECONDS: Final = 2.0
MAX_ANSWER_BYTES: Final = 1 << 20
REMOVE_ALL: Final = "/api/v1/remove_all?force=false"
STANDBY: Final = b"service plane is not active"
"""What a master that does not serve answers to everything, with status 503, before it does anything."""
ALLOCATED: Final = re.compile(rb"^master_allocated_bytes(?:\{[^}]*\})?\s+([0-9.eE+-]+)\s*$", re.MULTILINE)


class _NotTaken(StoreAdminError):
    """This master has not begun to remove anything, so another one may be asked."""


@dataclass(eq=False)
class MooncakeAdmin:
    """`epochkv_fence.mooncake_admin.StoreAdmin` over the HTTP admin ports of Mooncake masters."""

    _url_of: Callable[[str], list[str]]
    """The admin URLs of a pool's masters, such as `http://master:9003`; the first that takes the request is used (a standby master
    refuses). Only stores of one pool alone may be named."""
    deadline_seconds: float = DEADLINE_SECONDS
    """For one `remove_all`, over all its requests."""

    async def remove_all(self, pool_uid: str) -> tuple[int, int | None]:
        """As in `StoreAdmin`. A request that was sent and failed may still be carried out: no other master's answer stands for it."""
        urls = self._url_of(pool_uid)
        if not urls:
            raise StoreAdminError(f"no admin address is known for the store of pool {pool_uid}")
        until = time.monotonic() + self.deadline_seconds
        problems: list[str] = []
        for url in urls:
            master = _Master(url, until)
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    return await asyncio.wrap_future(on_daemon_thread(master.remove_all, "epochkv-store-admin"))
            except TimeoutError as error:
                raise StoreAdminError("; ".join([*problems, f"{url}: no answer within {self.deadline_seconds:.3g} s"])) from error
            except _NotTaken as error:
                problems.append(str(error))
            finally:
                master.hang_up()
        raise StoreAdminError("; ".join(problems))


def check_admin_url(url: str) -> str:
    """`url` without a slash at its end. Raises `ValueError`: it is not `http://host:port`."""
    try:
        parts = urlsplit(url)
        valid = parts.scheme == "http" and bool(parts.hostname) and parts.port is not None and parts.path in ("", "/") and url.isprintable()
        valid = valid and not (parts.query or parts.fragment or parts.username)
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"--store-admin is {url!r}; it must look like http://host:9003")
    return url.rstrip("/")


@dataclass(eq=False)
class _Master:
    """One `remove_all` at one master. It sends nothing after `until`."""

    _url: str
    _until: float
    _sock: socket.socket | None = None

    def hang_up(self) -> None:
        """End the thread soon, also where an answer comes byte by byte, which no socket time-out notices."""
        if self._sock is not None:
            with contextlib.suppress(OSError):
                self._sock.shutdown(socket.SHUT_RDWR)

    def remove_all(self) -> tuple[int, int | None]:
        before = self._allocated()
        answer = self._request("POST", REMOVE_ALL)
        try:
            content = json.loads(answer)
            keys = content["removed_count"]
            well = content.get("success") is True and isinstance(keys, int) and not isinstance(keys, bool) and keys >= 0
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            well = False
        if not well:
            raise StoreAdminError(
                f"{self._url}{REMOVE_ALL}: unexpected answer {answer[:200]!r}; give the address of a Mooncake master's admin port"
            )
        after = self._allocated()
        return keys, max(0, before - after) if before is not None and after is not None else None

    def _allocated(self) -> int | None:
        """Bytes that the store's keys take; None when the master does not say."""
        try:
            match = ALLOCATED.search(self._request("GET", "/metrics"))
            return int(float(match[1])) if match is not None else None
        except (StoreAdminError, ValueError, OverflowError):
            return None

    def _request(self, method: str, path: str) -> bytes:
        """The body of an answer with status 200."""
        what = f"{self._url}{path}"
        parts = urlsplit(self._url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=min(CONNECT_SECONDS, self._left(what)))
        try:
            try:
                connection.connect()
                self._sock = connection.sock
                connection.sock.settimeout(self._left(what))
            except OSError as error:
                raise _NotTaken(f"{what}: {error}") from error
            connection.request(method, path, headers={"Connection": "close"})
            answer = connection.getresponse()
            body = answer.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise StoreAdminError(f"{what}: {error or type(error).__name__}") from error
        finally:
            connection.close()
        if answer.status != 200:
            kind = _NotTaken if answer.status == 503 and STANDBY in body else StoreAdminError
            raise kind(f"{what}: HTTP {answer.status}: {body[:200].decode(errors='replace')}")
        return body

    def _left(self, what: str) -> float:
        """Seconds that are left, more than 0; also of a process that slept between two steps."""
        left = self._until - time.monotonic()
        if left <= 0.0:
            raise _NotTaken(f"{what}: not sent, it is too late")
        return left
