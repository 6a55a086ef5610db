"""Statuses, and what is said about them: written only when something changed, logged and evented only when a condition
did.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime

import structlog

from epochkv_operator.kube.client import Json
from epochkv_operator.kube.events import EventRecorder
from epochkv_operator.kube.resources import ref_of
from epochkv_operator.kube.status import StatusWriter
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
    """Writes statuses that planning computes."""

    def __init__(self, statuses: StatusWriter, events: EventRecorder) -> None:
        self._statuses = statuses
        self._events = events

    async def report(self, obj: Json, compute: Callable[[Json], Json]) -> None:
        """Bring the status of `obj` to `compute(newest object)`.

        Raises:
            ObjectGone, ApiError; whatever `compute` raises.
        """
        before: Json = {}
        after: Json = {}

        def decide(newest: Json) -> Json | None:
            nonlocal before, after
            before = newest.get("status") or {}
            after = keep_epochs(before, compute(newest))
            return merge_patch(before, after) or None

        if await self._statuses.update(ref_of(obj), decide):
            self._tell(obj, before, after)

    def tell(self, obj: Json, *, reason: str, action: str, note: str) -> None:
        """Something that no condition's change would say: a warning, as an Event and in the log."""
        about = f"{obj['kind']} {obj['metadata']['namespace']}/{obj['metadata']['name']}"
        log.warning("told the user", object=about, reason=reason, note=note)
        self._events.emit(obj, warning=True, reason=reason, action=action, note=note)

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
