"""What a mutant is."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from epochkv_fence.hub.machine import Hub, HubState
from epochkv_fence.hub.record import RULES
from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.pool import PoolConfig
from tests.model.parts import Rules


@dataclass(frozen=True)
class Mutant:
    """A rule taken away.

    Attributes:
        rules: the world without it.
        focus: fields of the profile under which it matters; every one of them is also drawn at random without it.
        seen: the first seed whose schedule notices it, where that takes a while. When a change of the simulator or of the fence gives
            that seed another schedule, a hunt goes through all seeds from 0, as for the others.
        rare: the rule stands behind others: only several rare things together show that it is away, in one of many thousand schedules.
            Not every test run has to catch it; `python -m hack.simulate mutants --rare` looks for it.
    """

    rules: Rules
    focus: dict[str, Any] = field(default_factory=dict)
    seen: int | None = None
    rare: bool = False


def of_hub(rule: Any, focus: dict[str, Any] | None = None, **known: Any) -> Mutant:
    return Mutant(Rules(hub=rule), focus or {}, **known)


STEADY: dict[str, Any] = {"restores": False, "reconfigures": False}
RESETS: dict[str, Any] = {"pushes": 0.0, "policy": "Retain", "orders": ("spec, reset",), "idle": 0.0}
DUEL: dict[str, Any] = {**STEADY, **RESETS, "told_late": 0.1, "watch": 0.1, "pace": 0.4}
"""Two hubs, and one reset after the other."""

CALM: dict[str, Any] = {**STEADY, "takeovers": 0.02, "trouble": 0.03, "freezes": 0.03, "ambush": 0.0}
"""Hardly any trouble, so that there is time for several resets."""


# ------------------------------------------------------------------------------------------------------- hubs that lack a rule

MakeHub = Callable[[PoolConfig], Hub]


def without(**rules: Any) -> MakeHub:
    """A hub that goes by these rules instead of the fence's own."""
    return partial(Hub, rules=replace(RULES, **rules))


def with_part(**parts: Callable[[], object]) -> MakeHub:
    def make(config: PoolConfig) -> Hub:
        hub = Hub(config)
        for name, kind in parts.items():
            setattr(hub.state, name, kind())
        return hub

    return make


class _Misreading(Hub):
    def __init__(self, config: PoolConfig, kind: type[ev.Event], read: Callable[[HubState, Any], ev.Event | None]) -> None:
        super().__init__(config)
        self.kind, self.read = kind, read

    def step(self, event: ev.Event, now: float) -> list[ev.Action]:
        taken = self.read(self.state, event) if isinstance(event, self.kind) else event
        return [] if taken is None else super().step(taken, now)


def misreading(kind: type[ev.Event], read: Callable[[HubState, Any], ev.Event | None]) -> MakeHub:
    """A hub that takes `read(state, event)` for an event of this kind; None: it takes no such event."""
    return partial(_Misreading, kind=kind, read=read)


def deaf_to_failures_of(kind: type[ev.Call]) -> MakeHub:
    return misreading(ev.Done, lambda _, done: None if isinstance(done.call, kind) and not done.ok else done)


def deaf(kind: type[ev.Event]) -> MakeHub:
    return misreading(kind, lambda *_: None)
