"""A store's admin: empties the store of a pool in one call, over the HTTP port of Mooncake's masters."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final, Protocol
from urllib.parse import urlsplit

from epochkv_fence.common import on_daemon_thread


class StoreAdminError(Exception):
    """The store did not answer or refused. What was removed is then unknown; the hub tries again."""


@dataclass(frozen=True, slots=True)
class Removed:
    """What one call removed.

    Attributes:
        keys: as the store counted them; 0 means that there were none.
        num_bytes: memory given back; None when the store does not say.
    """

    keys: int
    num_bytes: int | None = None


class StoreAdmin(Protocol):
    """All calls are made with a deadline by the caller; a call that is cancelled may still take effect later."""

    async def remove_all(self, pool_uid: str) -> Removed:
        """Remove every key of this pool's store that nobody reads now.

        Raises:
            StoreAdminError: no answer, or a refusal; what was removed is then unknown.
        """


# ----------------------------------------------------------------------------------------------------------------------
# Mooncake's admin port as a `StoreAdmin`: one HTTP call empties the store, one before and one after say how many bytes.
#
# Keys that somebody reads stay. It needs only the standard library. Each request runs on a thread of its own with a deadline: a
# master that accepts connections and never answers costs a thread until then, and nothing else.


DEADLINE_SECONDS: Final = 10.0
MAX_ANSWER_BYTES: Final = 1 << 20
STANDBY: Final = b"service plane is not active"
"""What a master that does not serve answers to everything, with status 503, before it does anything."""
ALLOCATED: Final = re.compile(rb"^master_allocated_bytes(?:\{[^}]*\})?\s+([0-9.eE+-]+)\s*$", re.MULTILINE)


class MooncakeAdmin:
    """`epochkv_fence.mooncake_admin.StoreAdmin` over the HTTP admin ports of Mooncake masters.

    Args:
        url_of: the admin URLs of a pool's masters, such as `http://master:9003`; the first that takes the request is used
            (a standby master refuses). Only stores of one pool alone may be named.
        deadline_seconds: for one `remove_all`, over all its requests.
    """

    def __init__(self, url_of: Callable[[str], list[str]], deadline_seconds: float = DEADLINE_SECONDS) -> None:
        self._url_of = url_of
        self._deadline = deadline_seconds

    async def remove_all(self, pool_uid: str) -> Removed:
        """Remove every key that is not being read.

        Raises:
            StoreAdminError: no master answered in time, or all refused; what was removed is then unknown. A request that was
                sent and failed may still be carried out: no other master's answer stands for it.
        """
        urls = self._url_of(pool_uid)
        if not urls:
            raise StoreAdminError(f"no admin address is known for the store of pool {pool_uid}")
        began = time.monotonic()
        until = began + self._deadline
        problems = []
        for url in urls:
            if time.monotonic() >= until:
                problems.append(f"{url}: not asked, it is too late")
                break
            call = _Call(url, until)
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    return await asyncio.wrap_future(call.start())
            except TimeoutError:
                problems.append(f"{url}: no answer within {until - began:.3g} s")
            except StoreAdminError as error:
                problems.append(str(error))
            finally:
                call.abort()
            if call.may_land:
                break
        raise StoreAdminError("; ".join(problems))


def check_admin_url(url: str) -> str:
    """`url` without a slash at its end.

    Raises:
        ValueError: it is not `http://host:port`.
    """
    try:
        parts = urlsplit(url)
        valid = parts.scheme == "http" and bool(parts.hostname) and parts.port is not None and parts.path in ("", "/") and url.isprintable()
        valid = valid and not (parts.query or parts.fragment or parts.username)
    except ValueError:
        valid = False
    if not valid:
        raise ValueError(f"the store's admin address is {url!r}; it must look like http://host:9003")
    return url.rstrip("/")


class _Call:
    """One `remove_all` at one master, on a daemon thread (an executor's would be joined at exit).

    Attributes:
        may_land: the removal was sent, and no answer says that it is over or was refused. Does not rise after `abort`.
    """

    def __init__(self, url: str, until: float) -> None:
        self._url = url
        self._until = until
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None
        self._aborted = False
        self.may_land = False

    def start(self) -> Future[Removed]:
        return on_daemon_thread(self._remove_all, "epochkv-store-admin")

    def abort(self) -> None:
        """Send nothing from now on and end the thread soon.

        Also when a connection is being made, or an answer comes byte by byte, which no socket time-out notices. Only a
        look-up of a name cannot be ended: the thread ends when it returns.
        """
        with self._lock:
            self._aborted = True
            if self._sock is not None:
                with contextlib.suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def _remove_all(self) -> Removed:
        before = self._allocated()
        path = "/api/v1/remove_all?force=false"
        answer = self._request("POST", path)
        try:
            content = json.loads(answer)
            keys = content["removed_count"]
            well = content.get("success") is True and isinstance(keys, int) and not isinstance(keys, bool) and keys >= 0
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            well = False
        if not well:
            raise StoreAdminError(
                f"{self._url}{path}: unexpected answer {answer[:200]!r}; give the address of a Mooncake master's admin port"
            )
        self.may_land = False
        after = self._allocated()
        return Removed(keys, max(0, before - after) if before is not None and after is not None else None)

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
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port)
        connection.auto_open = 0
        try:
            connection.sock = self._connect(what)
            with self._lock:  # whoever has aborted, or looks at the time, before this knows that nothing is sent
                connection.sock.settimeout(self._left(what))
                self.may_land = method == "POST"
                connection.request(method, path, headers={"Connection": "close"})
            answer = connection.getresponse()
            body = answer.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise StoreAdminError(f"{what}: {error or type(error).__name__}") from error
        finally:
            with self._lock:
                self._sock = None
            connection.close()
        if answer.status != 200:
            if answer.status == 503 and STANDBY in body:
                self.may_land = False
            raise StoreAdminError(f"{what}: HTTP {answer.status}: {body[:200].decode(errors='replace')}")
        return body

    def _connect(self, what: str) -> socket.socket:
        """To the first address that answers; each gets its share of the time that is left."""
        parts = urlsplit(self._url)
        found = socket.getaddrinfo(parts.hostname or "", parts.port, type=socket.SOCK_STREAM)
        problem = OSError("the name has no address")
        for number, (family, kind, protocol, _, address) in enumerate(found):
            sock = socket.socket(family, kind, protocol)
            try:
                with self._lock:
                    sock.settimeout(self._left(what) / (len(found) - number))
                    self._sock = sock
                sock.connect(address)
                return sock
            except OSError as error:
                problem = error
                sock.close()
            except StoreAdminError:
                sock.close()
                raise
        raise problem

    def _left(self, what: str) -> float:
        """Seconds that are left, more than 0; also of a process that slept between two steps.

        Raises:
            StoreAdminError: none are, or it was given up.
        """
        if self._aborted:
            raise StoreAdminError(f"{what}: given up")
        left = self._until - time.monotonic()
        if left <= 0.0:
            raise StoreAdminError(f"{what}: not sent, it is too late")
        return left
