"""Mooncake's admin port as a `StoreAdmin`: one HTTP call empties the store, one before and one after say how many bytes.

The call belongs to the hub and not to an engine: an engine that is frozen before it and thaws later would wipe under
readers. Only the standard library; each request runs on a thread of its own with a deadline, so that a master that
accepts connections and never answers costs a thread until that deadline and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import math
import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final
from urllib.parse import urlsplit

from epochkv_fence.store_admin import Removed, StoreAdminError

DEADLINE_SECONDS: Final = 10.0
MAX_ANSWER_BYTES: Final = 1 << 20
ALLOCATED: Final = re.compile(rb"^master_allocated_bytes(?:\{[^}]*\})?\s+([0-9.eE+-]+)\s*$", re.MULTILINE)


class MooncakeAdmin:
    """`epochkv_fence.store_admin.StoreAdmin` over the HTTP admin ports of Mooncake masters.

    Args:
        url_of: the admin URLs of a pool's masters, the first that answers is used (a standby master refuses); such as
            `http://master:9003`. Only stores of one pool alone may be named.
        deadline_seconds: for one `remove_all`, over all its requests.
    """

    def __init__(self, url_of: Callable[[str], list[str]], deadline_seconds: float = DEADLINE_SECONDS) -> None:
        self._url_of = url_of
        self._deadline = deadline_seconds

    async def remove_all(self, pool_uid: str, *, force: bool, before: float = math.inf) -> Removed:
        """Remove every key, leased ones only with `force`, and none from `before` on (`time.monotonic`).

        Raises:
            StoreAdminError: no master answered in time, or all refused; what was removed is then unknown.
        """
        urls = self._url_of(pool_uid)
        if not urls:
            raise StoreAdminError(f"no admin address is known for the store of pool {pool_uid}")
        until = min(time.monotonic() + self._deadline, before)
        problems = []
        for url in urls:
            call = _Call(url, force, until)
            try:
                async with asyncio.timeout(max(0.0, until - time.monotonic())):
                    return await asyncio.wrap_future(call.start())
            except TimeoutError:
                problems.append(f"{url}: no answer within {self._deadline:g} s")
            except StoreAdminError as error:
                problems.append(str(error))
            finally:
                call.abort()
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
    """One `remove_all` at one master, on a daemon thread (an executor's would be joined at exit)."""

    def __init__(self, url: str, force: bool, until: float) -> None:
        self._url = url
        self._force = force
        self._until = until
        self._lock = threading.Lock()
        self._connection: http.client.HTTPConnection | None = None
        self._aborted = False

    def start(self) -> Future[Removed]:
        future: Future[Removed] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(self._remove_all())
            except BaseException as error:  # handed to the caller
                future.set_exception(error)

        threading.Thread(target=run, name="epochkv-store-admin", daemon=True).start()
        return future

    def abort(self) -> None:
        """End the thread soon, also when an answer comes byte by byte, which no socket time-out notices."""
        with self._lock:
            self._aborted = True
            sock = self._connection.sock if self._connection is not None else None
            if sock is not None:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _remove_all(self) -> Removed:
        before = self._allocated()
        path = f"/api/v1/remove_all?force={'true' if self._force else 'false'}"
        answer = self._request("POST", path)
        try:
            content = json.loads(answer)
            keys = content["removed_count"]
            well = content.get("success") is True and isinstance(keys, int) and not isinstance(keys, bool) and keys >= 0
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            well = False
        if not well:
            raise StoreAdminError(f"{self._url}{path}: unexpected answer {answer[:200]!r}; is this the admin port of a Mooncake master?")
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
        left = self._until - time.monotonic()
        if left <= 0.0:  # also of a process that slept between two requests
            raise StoreAdminError(f"{self._url}{path}: not sent, it is too late")
        parts = urlsplit(self._url)
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=left)
        with self._lock:
            if self._aborted:
                raise StoreAdminError(f"{self._url}{path}: given up")
            self._connection = connection
        try:
            connection.request(method, path, headers={"Connection": "close"})
            answer = connection.getresponse()
            body = answer.read(MAX_ANSWER_BYTES)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise StoreAdminError(f"{self._url}{path}: {error or type(error).__name__}") from error
        finally:
            with self._lock:
                self._connection = None
            connection.close()
        if answer.status != 200:
            raise StoreAdminError(f"{self._url}{path}: HTTP {answer.status}: {body[:200].decode(errors='replace')}")
        return body
