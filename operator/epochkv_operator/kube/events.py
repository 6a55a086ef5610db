"""Kubernetes Events, for transitions only: one per change of a condition's status or reason. Best effort, never in the
way.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime

import structlog

from epochkv_operator.api.base import MANAGED_BY
from epochkv_operator.kube.client import ApiError, Json, KubeClient
from epochkv_operator.kube.resources import EVENTS

log = structlog.get_logger(__name__)
MAX_PENDING = 256


class EventRecorder:
    """Queues Events and posts them from one task; drops them, with one log line, when the API server cannot keep up."""

    def __init__(self, client: KubeClient, instance: str) -> None:
        self._client = client
        self._instance = instance
        self._queue: asyncio.Queue[tuple[str, Json]] = asyncio.Queue(MAX_PENDING)

    def emit(self, about: Json, *, warning: bool, reason: str, action: str, note: str) -> None:
        """Say what changed about an object. `reason` is CamelCase, `note` at most 1 kB."""
        metadata = about["metadata"]
        namespace = metadata.get("namespace", "default")
        now = datetime.now(UTC)
        body: Json = {
            "apiVersion": "events.k8s.io/v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name']}.{int(now.timestamp() * 1e6):x}", "namespace": namespace},
            "eventTime": now.strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "reportingController": f"epochkv.io/{MANAGED_BY}",
            "reportingInstance": self._instance[:128],
            "action": action,
            "reason": reason,
            "note": note[:1024],
            "type": "Warning" if warning else "Normal",
            "regarding": {
                "apiVersion": about["apiVersion"],
                "kind": about["kind"],
                "name": metadata["name"],
                "namespace": namespace,
                "uid": metadata["uid"],
            },
        }
        try:
            self._queue.put_nowait((namespace, body))
        except asyncio.QueueFull:
            log.warning(
                "event dropped: the API server takes events too slowly",
                object=f"{namespace}/{metadata['name']}",
                reason=reason,
            )

    async def run(self) -> None:
        while True:
            namespace, body = await self._queue.get()
            try:
                await self._client.create(EVENTS, namespace, body)
            except ApiError as error:
                log.debug("event not posted", error=str(error))
