"""What planning needs to know beside the objects: constants of this operator process, passed in so that planning stays pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Literal

Json = dict[str, Any]


@dataclass(frozen=True)
class Context:
    """Settings of the operator that end up in objects."""

    hub_endpoint: str
    """What engines dial: `tcp://host:port`."""
    operator_namespace: str
    """Where the operator runs; its pods may reach admin ports."""
    operator_version: str
    """Noted on every object, never in a pod template: an upgrade of the operator alone restarts nothing."""
    store_image: str
    """Default of `spec.distributed.mooncake.image`."""
    engine_image: str
    """Default of `spec.image` of engines."""
    credentials_revision: str = ""
    """Changes when engines must restart to have the right credentials: another hub, or a Secret that was made anew. A replaced
    client key changes nothing: agents read that again by themselves.
    Make the Secret before the first plan of an engine, or the engine starts twice."""


@dataclass(frozen=True)
class HubEngine:
    """One engine process as the hub knows it."""

    engine: str
    """InferenceEngine, or the name under which an external engine reports; may be empty."""
    pod: str
    rank: int
    epoch: int | None
    """Highest epoch heard of; None before the first grant."""
    mode: Literal["Use", "Bypass"]
    carried: int = 0
    """Requests admitted under an older epoch."""
    boot: str = ""
    """Start of its boot's id, which tells engines of one name apart."""
    pending: bool = False
    """In bypass at the target, because nobody said that it has the weights."""
    private: bool = False
    """Its caches were reset alone: whatever its mode, it shares nothing before the next epoch."""

    @property
    def display_name(self) -> str:
        """Pod (or engine) and rank, unique within a pool."""
        base = self.pod or self.engine or "unnamed"
        return f"{base}/{self.rank}" if self.rank else base

    @property
    def kept_apart(self) -> bool:
        """It could share the epoch it is at, had its caches not been reset alone."""
        return self.private and self.mode == "Use"


@dataclass(frozen=True)
class ReclaimView:
    """What was given back of the store."""

    epoch: int = 0
    """Nothing below it is left."""
    keys: int = 0
    bytes: int = 0
    """Both for the latest reset, as far as this process knows."""
    completed: datetime | None = None
    wipe_failed: bool = False


@dataclass(frozen=True)
class KeysView:
    """The client keys of the pool."""

    generation: int
    """Of the pair in the Secret."""
    accepted: int = 1
    old_users: tuple[str, ...] = ()
    """Engines that still use the older one."""


@dataclass(frozen=True)
class HubView:
    """What the hub of a pool says at one moment. None instead of a view: this process does not run the hub."""

    target: int
    published: int
    engines: Sequence[HubEngine] = ()
    granting: bool = False
    laggards: Sequence[tuple[str, str]] = ()
    """`(name, reason)` of engines that publication waits for."""
    asked: int = 0
    """Highest epoch that anybody asked for, recorded or not."""
    reset_epoch: int | None = None
    """Epoch of the latest reset that this hub led; the four values below belong to it."""
    reset_started: datetime | None = None
    reset_completed: datetime | None = None
    reset_milliseconds: int | None = None
    origin: str | None = None
    """Who asked for the target: `Spec`, `Trainer` or `Engine`; None: not known."""
    weights_version: str = ""
    """Of the target."""
    listed: bool = False
    """A trainer listed who has the weights of the target."""
    inherited: bool = False
    """The target has the weights of the epoch before."""
    weights_source: str = "Pushed"
    held: bool = False
    """The target waits for `spec.weightsReady`."""
    reclaim: ReclaimView = ReclaimView()
    keys: KeysView | None = None
    complete: bool = True
    """Every live engine has had the time to be heard from. A hub that has just begun to lead knows nobody yet."""

    @property
    def pending(self) -> list[str]:
        """Engines in bypass for want of weights."""
        return [engine.display_name for engine in self.engines if engine.pending]

    def alone(self, engines: Sequence[HubEngine]) -> list[str]:
        """Names of those that could share at the target, had their caches not been reset alone; none once the next is asked for."""
        if self.asked > self.target:
            return []
        return [engine.display_name for engine in engines if engine.kept_apart and engine.epoch is not None and engine.epoch >= self.target]


@dataclass(frozen=True)
class Condition:
    """A condition without its times: type, status, a stable reason, a sentence with the remedy."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


@dataclass(frozen=True)
class Problem:
    """Why nothing could be planned: a stable reason and a sentence with the remedy."""

    reason: str
    message: str


@dataclass(frozen=True)
class Observed:
    """Live objects. `children` and `pods` may hold more than what belongs to the object: planning takes what it owns, by uid and
    label."""

    children: Sequence[Json] = ()
    pods: Sequence[Json] = ()
    hub: HubView | None = None
    problem: Problem | None = None
    """Problem of the plan (or of applying it), shown in conditions."""
