"""What scale-in asks of a Mooncake master's admin port: which segments there are, and jobs that empty some of them.

Every call has a deadline, and runs on the loop of the reconcilers, never on the hub's.
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import aiohttp

CALL_SECONDS: Final = 3.0
MAX_CONCURRENCY: Final = 64
"""Of one job. With Mooncake's own 4, a store moves 4 blocks a second; from 16 on, the 16 that it fetches each second."""
OPEN: Final = ("CREATED", "PLANNING", "RUNNING")
_MAX_SHOWN: Final = 200


class MasterSilent(Exception):
    """No master answered as a serving one does; the text says what each said."""


@dataclass(frozen=True)
class Segment:
    """Memory of one store, as the master sees it. `used` bytes are 0 from the moment on that it drains."""

    name: str
    status: str
    """`OK`, `DRAINING`, `DRAINED`, or another one of Mooncake's."""
    used: int

    @property
    def host(self) -> str:
        """Address of the store's pod."""
        host = self.name.rpartition(":")[0].strip("[]")
        try:
            return str(ipaddress.ip_address(host))
        except ValueError:
            return host


@dataclass(frozen=True)
class Job:
    """A drain job."""

    id: str
    status: str
    segments: tuple[str, ...]
    moved_bytes: int = 0
    failed: int = 0
    """Attempts to move a block."""
    blocked: int = 0
    """Blocks that are being read, or that fit on no other store."""

    @property
    def open(self) -> bool:
        return self.status in OPEN


class MasterAdmin:
    """The master that serves, among those at `urls`, asked in order: a standby refuses.

    All methods raise MasterSilent when none answers.
    """

    def __init__(self, urls: Callable[[], list[str]]) -> None:
        self._urls = urls

    async def segments(self) -> list[Segment]:
        """Every mounted segment."""
        status, answer = await self._call("GET", "get_segments_detail")
        try:
            return [
                Segment(str(item["segment_name"]), str(item["status"]), int(item["allocator_used_bytes"]))
                for item in answer.get("segments") or ()
                if status == 200
            ]
        except (KeyError, TypeError, ValueError) as error:
            raise MasterSilent(f"get_segments_detail: unexpected answer ({type(error).__name__}: {error})") from error

    async def job(self, job_id: str) -> Job | None:
        """A job; None: the master does not know it, as after a restart."""
        status, answer = await self._call("GET", f"api/v1/drain_jobs/query?job_id={job_id}")
        if status != 200:
            return None
        segments = tuple(str(name) for name in answer.get("segments") or ())
        moved, failed, blocked = (int(answer.get(key) or 0) for key in ("migrated_bytes", "failed_units", "blocked_units"))
        return Job(job_id, str(answer.get("status_name", "")), segments, moved, failed, blocked)

    async def drain(self, segments: Sequence[str]) -> str:
        """Have these segments emptied into all others; the job's id, or empty when the master refuses, such as while one drains."""
        body = {"segments": list(segments), "target_segments": [], "max_concurrency": MAX_CONCURRENCY}
        status, answer = await self._call("POST", "api/v1/drain_jobs", body)
        return str(answer.get("job_id", "")) if status == 200 else ""

    async def cancel(self, job_id: str) -> bool:
        """End a job; its segments take blocks again. False: it moves blocks right now, or has ended."""
        status, _ = await self._call("POST", f"api/v1/drain_jobs/cancel?job_id={job_id}", {})
        return status == 200

    async def _call(self, method: str, path: str, body: Any = None) -> tuple[int, dict[str, Any]]:
        said = []
        timeout = aiohttp.ClientTimeout(total=CALL_SECONDS)
        async with aiohttp.ClientSession(timeout=timeout) as session:
            for url in self._urls():
                try:
                    async with session.request(method, f"{url}/{path}", json=body) as answer:
                        text = await answer.text()
                        content = json.loads(text)
                except (aiohttp.ClientError, TimeoutError, ValueError, RecursionError) as error:
                    said.append(f"{url}: {type(error).__name__} {error}".strip()[:_MAX_SHOWN])
                    continue
                if answer.status != 503 and isinstance(content, dict):
                    return answer.status, content
                said.append(f"{url}: HTTP {answer.status} {text}"[:_MAX_SHOWN])
        raise MasterSilent("; ".join(said) or "no master has an address")
