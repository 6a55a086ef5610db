"""Statuses, and what is said about them: written only when something changed, logged and evented only when a condition did.

What this process has written of a status counts. What somebody else makes of it is put back, and never read.
"""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import structlog

from epochkv_fence.protocol.pool import relabelled
from epochkv_operator.api.resources import POOLS, ref_of
from epochkv_operator.hub.authority import RECORD_FIELDS, record_of
from epochkv_operator.kube.client import Forbidden, Json
from epochkv_operator.kube.status import EventRecorder, StatusWriter
from epochkv_operator.kube.store import Key, key_of
from epochkv_operator.planning.context import Condition
from epochkv_operator.planning.status import conditions, conditions_by_type

REPEAT_SECONDS: Final = 60.0


@dataclass(eq=False)
class Written:
    """One object's status. The hub's record in a pool's status is written by the hub and judged by it (`hub/authority.py`)."""

    uid: str
    record: tuple[str, ...]
    known: Json | None = None
    """As it was after our last write."""

    def believed(self, live: Json) -> Json:
        """The status as this process knows it; the live one before it has written any."""
        if self.known is None:
            return live
        known = {name: value for name, value in self.known.items() if name not in self.record}
        known |= {name: live[name] for name in self.record if name in live}
        reset, before = live.get("reset") or {}, (self.known.get("reset") or {}).get("epoch") or 0
        if reset and before < (reset.get("epoch") or 0) <= (live.get("targetEpoch") or 0):
            known["reset"] = reset  # the hub's, which has recorded a target
        return known

    @property
    def labels(self) -> dict[bytes, str] | None:
        """What weights were called when this process last wrote; None: it has not."""
        return None if self.known is None else dict(record_of({"status": self.known}).labels)


log = structlog.get_logger(__name__)
#: A push has taken too long: the reason says so, and the status stays False.
OVERDUE = ("Updating", "Diverged")
#: These come and go with every reset, push and restart, and cost nobody anything; only where they are stuck they are worth an Event.
ROUTINE = frozenset(
    {"OldEpochRequests", "Drained", "Reclaiming", "Reclaimed", "Updating", "Converged", "Unknown", "NotReporting", "Usable"}
)


def merge_patch(old: Json, new: Json) -> Json:
    """The JSON merge patch that turns `old` into `new`; empty when they are equal. Lists are replaced whole."""
    patch: Json = {key: None for key in old if key not in new}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            nested = merge_patch(before, value)
            if nested:
                patch[key] = nested
        elif value != before or key not in old:
            patch[key] = value
    return patch


def unready(obj: Json, reason: str, message: str, now: datetime) -> Json:
    """The status of an object that this operator cannot judge; everything but `Ready` stays as it was."""
    before, generation = obj.get("status") or {}, obj["metadata"].get("generation", 1)
    ready = Condition("Ready", "False", reason, message)
    others = [condition for condition in before.get("conditions") or [] if condition["type"] != "Ready"]
    return {**before, "observedGeneration": generation, "conditions": [*conditions([ready], before, generation, now), *others]}


@dataclass(eq=False)
class Reporter:
    """Writes statuses that planning computes. What this process has written of a status counts, and not what somebody made of it."""

    _statuses: StatusWriter
    _events: EventRecorder
    _written: dict[Key, Written] = field(default_factory=dict)
    _told: dict[tuple[str, str], float] = field(default_factory=dict)  # when it was last said

    async def report(self, obj: Json, compute: Callable[[Json], Json]) -> None:
        """Bring the status of `obj` to `compute(newest object)`, in which the status is what this process knows of it.

        Raises:
            ObjectGone, ApiError; whatever `compute` raises.
        """
        key = key_of(obj["kind"], obj)
        written = self._written.get(key)
        if written is None or written.uid != obj["metadata"]["uid"]:
            written = self._written[key] = Written(obj["metadata"]["uid"], RECORD_FIELDS if obj["kind"] == POOLS.kind else ())
        before: Json = {}
        after: Json = {}
        labels = written.labels if obj["kind"] == POOLS.kind else None

        def decide(newest: Json) -> Json | None:
            nonlocal before, after
            live = newest.get("status") or {}
            before = written.believed(live)
            after = compute({**newest, "status": before})
            return merge_patch(live, after) or None

        try:
            answer = await self._statuses.update(ref_of(obj), decide)
        except Forbidden as error:
            note = f"the operator may not write this object's status, which is old: {error.message}"
            self.tell(obj, reason="StatusForbidden", action="Status", note=note)
            raise
        written.known = answer.get("status") or {}
        if labels is not None:
            self._tell_labels(obj, labels, written.labels or {}, after)
        if before != after:
            self._tell(obj, before, after)

    def forget(self, key: Key) -> None:
        """The object is gone."""
        self._written.pop(key, None)

    def tell(self, obj: Json, *, reason: str, action: str, note: str, warning: bool = True) -> bool:
        """Something that no condition's change would say, as an Event and in the log. False: there are too many Events, so say it again."""
        about = f"{obj['kind']} {obj['metadata']['namespace']}/{obj['metadata']['name']}"
        log.log(logging.WARNING if warning else logging.INFO, "event emitted", object=about, reason=reason, note=note)
        now = time.monotonic()
        self._told = {what: at for what, at in self._told.items() if now < at + REPEAT_SECONDS}
        fresh = (about, note) not in self._told  # who does the same again each second gets one Event a minute
        if fresh and self._events.emit(obj, warning=warning, reason=reason, action=action, note=note):
            self._told[about, note] = now
        return (about, note) in self._told

    def _tell_labels(self, obj: Json, before: dict[bytes, str], now: dict[bytes, str], status: Json) -> None:
        """A label went from weights to others, or weights that have one got another."""
        held = {bytes.fromhex(group["id"]) for group in status.get("weights") or []}
        for weights, label in now.items():
            if before.get(weights) != label and (note := relabelled(before, weights, label, held)):
                self.tell(obj, reason="WeightsRelabelled", action="Weights", note=f"{weights.hex()[:8]} ({label}): {note}")

    def _tell(self, obj: Json, before: Json, after: Json) -> None:
        about = f"{obj['kind']} {obj['metadata']['namespace']}/{obj['metadata']['name']}"
        old = conditions_by_type(before)
        for kind, condition in conditions_by_type(after).items():
            previous = old.get(kind)
            if previous is not None and (previous["status"], previous["reason"]) == (condition["status"], condition["reason"]):
                continue
            status, reason, message = condition["status"], condition["reason"], condition["message"]
            level = "debug" if reason in ROUTINE else "info"
            getattr(log, level)("condition changed", object=about, condition=kind, status=status, reason=reason, message=message)
            # On first sight nothing has changed yet; the condition itself is the news.
            if previous is None:
                continue
            moved = previous["status"] != status and not {reason, previous["reason"]} <= ROUTINE
            if moved or (previous["reason"], reason) == OVERDUE:
                self._events.emit(obj, warning=status != "True", reason=reason, action=kind, note=message or kind)
        self._tell_reset(obj, about, before.get("reset") or {}, after.get("reset") or {})

    def _tell_reset(self, obj: Json, about: str, before: Json, after: Json) -> None:
        done = after.get("completionTime")
        if not done or (done, after.get("epoch")) == (before.get("completionTime"), before.get("epoch")):
            return
        epoch, milliseconds = after.get("epoch"), after.get("durationMilliseconds")
        log.info("epoch published", object=about, epoch=epoch, milliseconds=milliseconds, origin=after.get("origin"))
        took = f" after {milliseconds} ms" if milliseconds is not None else ""
        asker = f", asked for by {after['origin']}" if after.get("origin") else ""
        note = f"epoch {epoch} published{took}{asker}: no engine uses an older one"
        self._events.emit(obj, warning=False, reason="EpochPublished", action="Reset", note=note)
