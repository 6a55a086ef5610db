"""Status writes and Events: what the operator says about an object.

All status writes go through `StatusWriter`: compare-and-swap on the resourceVersion, re-read and decide again on conflict.
Two writers share a pool's status in one process: the hub's authority writes epochs, and `control/reporter.py` the rest, and epochs
that somebody has removed. A second operator may be alive. The newest state known of each object, from whichever answer, is
kept, so that the usual write costs one request and no read.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import structlog

from epochkv_operator import metrics
from epochkv_operator.api.base import MANAGED_BY
from epochkv_operator.api.resources import EVENTS, ObjectRef, Resource, micro_time
from epochkv_operator.kube.client import ApiError, Conflict, Invalid, Json, KubeClient, NotFound, Unavailable
from epochkv_operator.kube.store import resource_version

DEADLINE_SECONDS = 10.0
#: Status fields to merge in, from the object as it is, or None: leave it alone.
Decide = Callable[[Json], Json | None]


class ObjectGone(Exception):
    """The object was deleted, or a namesake with another uid stands in its place."""


class Known(Protocol):
    """The newest states that are known; `store.Store` is one."""

    def by_uid(self, kind: str, uid: str) -> Json | None: ...

    def upsert(self, kind: str, obj: Json) -> object: ...


@dataclass(eq=False)
class StatusWriter:
    """Writes statuses of objects that the store knows.

    `news` takes every state that may be newer than what the watches have brought: when they bring it, it is no news any more.
    """

    _client: KubeClient
    _store: Known
    _news: Callable[[Resource, Json], object]

    async def read(self, ref: ObjectRef, deadline_seconds: float | None = None) -> Json:
        """Quorum read of the object. Raises `ObjectGone`, `ApiError`."""
        try:
            obj = await self._client.get(ref.resource, ref.namespace, ref.name, deadline_seconds)
        except NotFound as error:
            raise ObjectGone(f"{ref} is gone") from error
        if obj["metadata"]["uid"] != ref.uid:
            raise ObjectGone(f"{ref} was recreated with uid {obj['metadata']['uid']}")
        self._news(ref.resource, obj)
        return obj

    async def update(
        self, ref: ObjectRef, decide: Decide, deadline_seconds: float | None = None, depends_on: Sequence[str] | None = None
    ) -> Json:
        """Merge what `decide(object)` returns into the status, unless it is None; the object afterwards.

        `decide` runs again on each newer state. The patch is accepted only at the resourceVersion that `decide` saw, so
        what it checked still holds at the write. Where it depends on few fields of the status (`depends_on`), a conflict makes it
        compare those alone. Then nobody who keeps writing to the rest of the object can hold it up.

        Raises:
            ObjectGone, ApiError (`Unavailable` at the deadline); anything `decide` raises.
        """
        deadline = time.monotonic() + (deadline_seconds or DEADLINE_SECONDS)
        obj = self._store.by_uid(ref.resource.kind, ref.uid) or await self.read(ref, deadline_seconds)
        attempt = 0
        while True:
            fields = depends_on if attempt and obj.get("status") else None
            patch = decide(obj)
            if patch is None:
                return obj
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise Unavailable(0, "Timeout", f"changed under each of {attempt} writes", f"PATCH status of {ref}")
            try:
                if fields:
                    seen = {name: obj["status"].get(name) for name in fields}
                    answer = await self._client.patch_status_fields(ref, seen, patch, remaining)
                else:
                    answer = await self._client.patch_status(ref, str(resource_version(obj)), patch, remaining)
            except NotFound as error:
                raise ObjectGone(f"{ref} is gone") from error
            except (Conflict, Invalid) as error:  # with `fields`, 422 says that one was not as seen
                if isinstance(error, Invalid) and not fields:
                    raise
                attempt += 1
                if attempt > 3:
                    await asyncio.sleep(min(0.005 * 2 ** min(attempt, 6), 0.2))
                obj = await self.read(ref, remaining)
                continue
            if resource_version(answer) != resource_version(obj):
                metrics.API_WRITES.labels(kind=ref.resource.kind, operation="status").inc()
            if fields:
                self._news(ref.resource, answer)  # somebody may have changed the rest of it, the spec, say
            else:
                self._store.upsert(ref.resource.kind, answer)
            return answer


log = structlog.get_logger(__name__)


@dataclass(eq=False)
class EventRecorder:
    """Queues Events and posts them from one task; drops them, with one log line, when the API server cannot keep up."""

    _client: KubeClient
    _instance: str
    _queue: asyncio.Queue[tuple[str, Json]] = field(default_factory=lambda: asyncio.Queue(256))

    def emit(self, about: Json, *, warning: bool, reason: str, action: str, note: str) -> bool:
        """Say what changed about an object, unless too many wait. `reason` is CamelCase. The API server takes 1 kB of `note`, names like
        those of pods.
        """
        metadata = about["metadata"]
        namespace = metadata.get("namespace", "default")
        about_object = {"apiVersion": about["apiVersion"], "kind": about["kind"], "namespace": namespace}
        body: Json = {
            "apiVersion": EVENTS.api_version,
            "kind": EVENTS.kind,
            "metadata": {"name": f"{metadata['name'][:230].rstrip('.-')}.{time.time_ns() // 1000:x}", "namespace": namespace},
            "eventTime": micro_time(),
            "reportingController": f"epochkv.io/{MANAGED_BY}",
            "reportingInstance": self._instance[:128],
            "action": action,
            "reason": reason,
            "note": note.encode(errors="replace")[:1024].decode(errors="ignore"),
            "type": "Warning" if warning else "Normal",
            "regarding": {**about_object, "name": metadata["name"], "uid": metadata["uid"]},
        }
        try:
            self._queue.put_nowait((namespace, body))
        except asyncio.QueueFull:
            name = f"{namespace}/{metadata['name']}"
            log.warning("event dropped: the API server takes events too slowly", object=name, reason=reason)
            return False
        return True

    async def run(self) -> None:
        while True:
            namespace, body = await self._queue.get()
            try:
                await self._client.create(EVENTS, namespace, body)
            except ApiError as error:
                log.debug("event not posted", error=str(error))
