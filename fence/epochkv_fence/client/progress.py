"""How far a call is: what its caller is told, and by name who has not acknowledged an epoch."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from epochkv_fence.client.results import Engine
from epochkv_fence.protocol.messages import EngineStatus, Status

logger = logging.getLogger(__name__)

FIRST_LOOK_SECONDS: Final = 0.5
"""Most resets are over by then, and nobody has to be listed for them."""
LOOK_SECONDS: Final = 1.0
SILENT_SHARE: Final = 0.9
"""Of a lease. One that vanishes from the hub's list and was heard within it has said goodbye: no lease was waited for."""

Progress = Callable[["Standing"], None]


@dataclass(frozen=True, slots=True)
class Standing:
    """How far a reset is.

    Attributes:
        laggards: how many engines have not acknowledged; `names` has their names once the reset takes longer.
    """

    epoch: int
    recorded: bool
    published: bool
    engines: int
    laggards: int
    names: tuple[str, ...] = ()


class Teller:
    """Calls the caller's `progress`. That only looks on, so whatever it raises goes to the log once and never ends a call."""

    def __init__(self, progress: Callable[[Any], None] | None) -> None:
        self._progress = progress
        self._has_failed = False
        self._told: object = None

    def again(self) -> None:
        """Tell the next standing even if it is the same."""
        self._told = None

    def __call__(self, standing: object) -> None:
        if self._progress is None or standing == self._told:
            return
        self._told = standing
        try:
            self._progress(standing)
        except BaseException:  # also SystemExit, which would end the client's thread
            if not self._has_failed:
                logger.warning("the progress callback failed; the call goes on", exc_info=True)
            self._has_failed = True


@dataclass(frozen=True, slots=True)
class _Seen:
    """An engine below the epoch, as it was listed last; `heard_at` is on our monotonic clock."""

    name: str
    heard_at: float


@dataclass(slots=True)
class Laggards:
    """Engines that a call saw below its epoch, and has not seen at it since. The hub lists live engines alone, so this remembers
    those that fell silent."""

    _seen: dict[bytes, _Seen] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self._seen)

    def look(self, page: Status, engines: Sequence[EngineStatus], epoch: int) -> tuple[str, ...]:
        """Take a list of the live engines; returns the names of those below `epoch`."""
        before, now = self._seen, time.monotonic()
        listed = {engine.boot for engine in engines}
        # A hub that has only begun to lead lists those that it has heard; whom it has not heard has not left.
        settling = page.settling_seconds > 0
        self._seen = {
            boot: seen
            for boot, seen in before.items()
            if boot not in listed and (settling or now - seen.heard_at >= SILENT_SHARE * page.lease_seconds)
        }
        behind = [engine for engine in engines if engine.epoch is None or engine.epoch < epoch]
        if page.published >= epoch:  # nobody waited for one that has joined since
            behind = [engine for engine in behind if engine.epoch is not None or engine.boot in before]
        for engine in behind:
            self._seen[engine.boot] = _Seen(Engine.of(engine, page.target).name, now - engine.silent_seconds)
        return tuple(sorted(self._seen[engine.boot].name for engine in behind))

    @property
    def names(self) -> tuple[str, ...]:
        """Of all of them, live or not."""
        return tuple(sorted(seen.name for seen in self._seen.values()))
