"""What this process has written of a status, so that what somebody else makes of it is noticed, put back, and never read."""

from __future__ import annotations

from typing import Any, Final

from epochkv_operator.hub.kubernetes import RECORD_FIELDS
from epochkv_operator.kube.resources import POOLS

Json = dict[str, Any]
REPEAT_SECONDS: Final = 60.0
_MAX_TRIED: Final = 8


class Written:
    """One object's status. The hub's record in a pool's status is written by the hub and judged by it (`hub/kubernetes.py`)."""

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
