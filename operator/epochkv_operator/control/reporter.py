"""Statuses, and what is said about them: written only when something changed, logged and evented only when a condition
did.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime

import structlog

from epochkv_operator.control.written import Repeats, Written
from epochkv_operator.kube.client import Json
from epochkv_operator.kube.events import EventRecorder
from epochkv_operator.kube.resources import POOLS, ref_of
from epochkv_operator.kube.status import StatusWriter
from epochkv_operator.kube.work_keys import Key, key_of
from epochkv_operator.planning.context import Condition
from epochkv_operator.planning.status import conditions, conditions_by_type

log = structlog.get_logger(__name__)
#: Written by the hub's authority alone once they exist; here they may only be set for the first time or be raised.
EPOCH_FIELDS = ("targetEpoch", "epoch")
#: A push has taken too long: the reason says so, and the status stays False.
OVERDUE = ("Updating", "Diverged")
#: These come and go with every reset, push and restart, and cost nobody anything; only where they are stuck they are worth an Event.
ROUTINE = frozenset({"CarriedRequests", "Drained", "Reclaiming", "Reclaimed", "Updating", "Converged", "Unknown", "NotReporting", "Usable"})


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


def keep_epochs(old: Json, new: Json) -> Json:
    """`new` with epochs never lower than in `old`, and with the hub's notes as they are."""
    kept = dict(new)
    for field in EPOCH_FIELDS:
        values = [status[field] for status in (old, new) if status.get(field) is not None]
        if values:
            kept[field] = max(values)
    return kept | {key: old[key] for key in ("granting", "weightsLabels") if old.get(key)}  # the hub's own; nobody else writes them


def invalid_status(obj: Json, message: str, now: datetime) -> Json:
    """The status of an object that this operator cannot read; everything but `Ready` stays as it was."""
    before = obj.get("status") or {}
    ready = Condition("Ready", "False", "InvalidSpec", message)
    others = [condition for condition in before.get("conditions") or [] if condition["type"] != "Ready"]
    return {**before, "conditions": [*conditions([ready], before, obj["metadata"].get("generation", 1), now), *others]}


class Reporter:
    """Writes statuses that planning computes. What this process has written of a status counts, and not what somebody made of it."""

    def __init__(self, statuses: StatusWriter, events: EventRecorder) -> None:
        self._statuses = statuses
        self._events = events
        self._written: dict[Key, Written] = {}
        self._told = Repeats()

    async def report(self, obj: Json, compute: Callable[[Json], Json]) -> None:
        """Bring the status of `obj` to `compute(newest object)`, in which the status is what this process knows of it.

        Raises:
            ObjectGone, ApiError; whatever `compute` raises.
        """
        key = key_of(obj["kind"], obj)
        written = self._written.get(key)
        if written is None or written.uid != obj["metadata"]["uid"]:
            written = self._written[key] = Written(obj["metadata"]["uid"], obj["kind"])
        before: Json = {}
        after: Json = {}
        edits: list[str] = []
        raised = 0

        def decide(newest: Json) -> Json | None:
            nonlocal before, after, edits, raised
            live = newest.get("status") or {}
            edits, raised = edits or written.edits(live), max(raised, written.raised(live))
            before = written.believed(live)
            after = compute({**newest, "status": before})
            if obj["kind"] == POOLS.kind:
                after = keep_epochs(live, after)
            written.tried(after)
            return merge_patch(live, after) or None

        answer = await self._statuses.update(ref_of(obj), decide)
        written.confirmed(answer.get("status") or {})
        self._tell_edits(obj, edits, raised)
        if before != after:
            self._tell(obj, before, after)

    def forget(self, key: Key) -> None:
        """The object is gone."""
        self._written.pop(key, None)

    def tell(self, obj: Json, *, reason: str, action: str, note: str) -> None:
        """Something that no condition's change would say: a warning, as an Event and in the log."""
        about = f"{obj['kind']} {obj['metadata']['namespace']}/{obj['metadata']['name']}"
        log.warning("told the user", object=about, reason=reason, note=note)
        more = self._told.again((about, note), time.monotonic())
        if more is None:
            return  # it is in the log; who does the same again each second gets one Event a minute
        text = f"{note} ({more} times more since it was last said)" if more else note
        self._events.emit(obj, warning=True, reason=reason, action=action, note=text)

    def tell_restored(self, obj: Json, note: str) -> None:
        """Children that somebody else had changed or deleted are as they should be again."""
        self.tell(obj, reason="ChildRestored", action="Apply", note=note)

    def _tell_edits(self, obj: Json, edits: list[str], raised: int) -> None:
        if edits:
            note = f"status was edited ({', '.join(edits)}) and is as it was again: nothing can be set there"
            self.tell(obj, reason="StatusRestored", action="Status", note=note)
        if raised:
            note = f"status.targetEpoch was edited to {raised}. Epochs never go down, so the pool goes there. Use spec.resetEpoch"
            self.tell(obj, reason="EpochEdited", action="Reset", note=note)

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
