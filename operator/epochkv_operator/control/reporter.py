"""Statuses, and what is said about them: written only when something changed, logged and evented only when a condition did.

What this process has written of a status counts. What somebody else makes of it is noticed, put back, and never read.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import datetime
from typing import Final

import structlog

from epochkv_operator.hub.authority import RECORD_FIELDS
from epochkv_operator.kube.client import Json
from epochkv_operator.kube.resources import POOLS, ref_of
from epochkv_operator.kube.status import EventRecorder, StatusWriter
from epochkv_operator.kube.store import Key, key_of
from epochkv_operator.planning.context import Condition
from epochkv_operator.planning.status import conditions, conditions_by_type

REPEAT_SECONDS: Final = 60.0
_MAX_TRIED: Final = 8


class Written:
    """One object's status. The hub's record in a pool's status is written by the hub and judged by it (`hub/authority.py`)."""

    def __init__(self, uid: str, kind: str) -> None:
        self.uid = uid
        self._record = RECORD_FIELDS if kind == POOLS.kind else ()
        self._known: Json | None = None
        self._tried: list[Json] = []

    def believed(self, live: Json) -> Json:
        """The status as this process knows it; the live one before it has written any."""
        if self._known is None:
            return live
        known = {name: value for name, value in self._known.items() if name not in self._record}
        known |= {name: live[name] for name in self._record if name in live}
        reset = live.get("reset") or {}
        if self._newer(reset, live):
            known["reset"] = reset  # the hub's, which has recorded a target
        return known

    def edits(self, live: Json) -> list[str]:
        """Fields that somebody else has changed."""
        if self._known is None:
            return []
        states = [self._known, *self._tried]  # a write without an answer may have been carried out

        def own(state: Json) -> Json:
            hidden = (*self._record, "reset") if self._newer(live.get("reset") or {}, live) else self._record
            return {name: value for name, value in state.items() if name not in hidden}

        shown = own(live)
        if any(own(state) == shown for state in states):
            return []
        wanted = own(self._known)
        return sorted(name for name in {*shown, *wanted} if shown.get(name) != wanted.get(name))

    def raised(self, live: Json) -> int:
        """The target, if somebody else than a hub has raised it: hubs write who asked with it, at once. Else 0."""
        if self._known is None or "targetEpoch" not in self._record:
            return 0
        target = int(live.get("targetEpoch") or 0)
        return target if target > int(self._known.get("targetEpoch") or 0) and (live.get("reset") or {}).get("epoch") != target else 0

    def tried(self, status: Json) -> None:
        """This is about to be written."""
        if status not in self._tried:
            self._tried = [*self._tried, status][-_MAX_TRIED:]

    def confirmed(self, live: Json) -> None:
        """This is the status after our write."""
        self._known, self._tried = live, []

    def _newer(self, reset: Json, live: Json) -> bool:
        known = ((self._known or {}).get("reset") or {}).get("epoch") or 0
        return bool(reset) and known < (reset.get("epoch") or 0) <= (live.get("targetEpoch") or 0)


class Repeats:
    """How often the same was said."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str], tuple[float, int]] = {}

    def again(self, what: tuple[str, str], now: float) -> int | None:
        """How many times it was held back since it was last said; None: hold it back now, too."""
        self._said = {key: (at, held) for key, (at, held) in self._said.items() if now < at + 10 * REPEAT_SECONDS}
        at, held = self._said.get(what, (-REPEAT_SECONDS, 0))
        if now < at + REPEAT_SECONDS:
            self._said[what] = at, held + 1
            return None
        self._said[what] = now, 0
        return held


log = structlog.get_logger(__name__)
#: Written by the hub's authority alone once they exist; here they may only be set for the first time or be raised.
EPOCH_FIELDS = ("targetEpoch", "epoch")
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
