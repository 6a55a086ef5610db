"""What planning needs to know beside the objects: constants of this operator process, passed in so that planning stays pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Literal, NamedTuple

from epochkv_fence.protocol.pool import EngineView, PoolSnapshot, called
from epochkv_operator import __version__
from epochkv_operator.settings import Settings

Json = dict[str, Any]
PUSH_SECONDS: Final = 60.0
"""No engine of a push goes so long without being inside a call that writes: those that still differ then were missed by it."""


class KindNotServed(Exception):
    """The cluster lacks a kind that an object needs; the text names it and the fix."""


@dataclass(frozen=True)
class Context:
    """What of this operator ends up in objects."""

    settings: Settings
    credentials_revision: str = ""
    """Changes when engines must restart to have the right credentials: another hub, or a Secret that was made anew. A replaced
    client key changes nothing: agents read that again by themselves.
    Make the Secret before the first plan of an engine, or the engine starts twice."""
    served: frozenset[str] = frozenset()
    """Kinds of other projects that this cluster serves: of `LeaderWorkerSet` and `PodMonitor`."""
    operator_version: str = __version__
    """Noted on every object, never in a pod template: an upgrade of the operator alone restarts nothing."""


class KeysView(NamedTuple):
    """The client keys of the pool."""

    generation: int
    """Of the pair in the Secret."""
    accepted: int = 1
    old_users: tuple[str, ...] = ()
    """Engines that still use the older one."""


@dataclass(frozen=True, slots=True)
class HubView(PoolSnapshot):
    """What the hub of a pool says at one moment. None instead of a view: this process does not run the hub.

    `engines` are those that live, and those that publication waits for. Keys and bytes are counted since the latest reset, as far as
    this process knows.
    """

    reclaimed_at: float | None = None
    """When nothing below `reclaimed` was left (Unix seconds)."""
    overdue: bool = False
    """Engines have differed for so long, and none was taking weights."""
    keys: KeysView | None = None
    proof: str = ""
    """What `status.proof` says while `published` is `status.epoch`."""
    granted: bool = False
    """Some hub may have granted, as `status.granting` has to say."""
    doubted: int = 0
    """The epoch in the status, if nobody has proved it."""
    complete: bool = True
    """Every live engine has had the time to be heard from. A hub that has just begun to lead knows nobody yet."""

    @property
    def laggards(self) -> list[EngineView]:
        """Engines that publication waits for."""
        return [engine for engine in self.engines if not engine.converged]

    @property
    def older(self) -> list[str]:
        """Where engines of a fingerprint differ, those that do not hold what came last by a push (unknown: what most hold)."""
        found: list[str] = []
        for fingerprint, majority in {(engine.fingerprint, engine.majority) for engine in self.diverged}:
            members = [one for one in self.engines if one.alive and one.weights is not None and one.fingerprint == fingerprint]
            came: dict[bytes | None, float] = {}  # with the first engine that took them
            for one in members:
                if one.pushed:
                    came[one.weights] = max(one.weights_since, came.get(one.weights, 0.0))
            newest = min(came, key=lambda held: came[held]) if came else majority
            found += [one.display_name for one in members if one.weights != newest]
        return found

    def called(self, weights: str) -> str:
        """These weights, with their label if they have one."""
        return called(weights, next((group.label for group in self.weights if group.id == weights), ""))


class Condition(NamedTuple):
    """A condition without its times: type, status, a stable reason, a sentence with the remedy."""

    type: str
    status: Literal["True", "False", "Unknown"]
    reason: str
    message: str


class Problem(NamedTuple):
    """Why nothing could be planned: a stable reason and a sentence with the remedy."""

    reason: str
    message: str


class Shared(NamedTuple):
    """What became of `spec.allowedNamespaces`."""

    namespaces: Sequence[str]
    """Those that have copies of the pool's ConfigMap and Secret."""
    problem: Problem | None = None


class Turn(NamedTuple):
    """A gate to be written: of this pod, with this condition. `group`: the pods of which half have to serve; empty: this pod is none that
    others make room for or wait for."""

    pod: Json
    condition: Json
    group: str

    @property
    def opens(self) -> bool:
        return bool(self.condition["status"] == "True")


@dataclass(frozen=True)
class Serving:
    """What a look at the gates of a pool found.

    Attributes:
        serves: what serves, in words; empty: nobody knows.
        turns: gates to be written.
        held: pods that hold other weights and are out of their Services, with those.
        stays: pods that would leave and stay, so that half of their Service does.
        unsaid: pods of which nobody can tell what they hold, by why.
        absent: weights that are named and that no engine holds.
        strict: none of them serves.
        weights: W of `Converged`, by namespace and fingerprint of engines.
        look_again: after so many seconds a gate may change without news.
        forbidden: why gates could not be written.
    """

    serves: tuple[str, ...] = ()
    turns: tuple[Turn, ...] = ()
    held: tuple[tuple[str, str], ...] = ()
    stays: tuple[str, ...] = ()
    unsaid: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    absent: tuple[str, ...] = ()
    strict: bool = False
    weights: Mapping[tuple[str, str], str] = field(default_factory=dict)
    look_again: float | None = None
    forbidden: str = ""


@dataclass(frozen=True)
class Observed:
    """Live objects. `children` and `pods` may hold more than what belongs to the object: planning takes what it owns, by uid and label."""

    children: Sequence[Json] = ()
    pods: Sequence[Json] = ()
    hub: HubView | None = None
    problem: Problem | None = None
    """Problem of the plan (or of applying it), shown in conditions."""
    serving: Serving | None = None
    """Of a pool whose pods have gates."""
    leaderless: bool = False
    """Of a pool: every master that is ready says that it does not serve."""
    shared: Shared | None = None
    """Of a pool with `allowedNamespaces`; None: nobody has looked."""


def timestamp(moment: datetime | float, *, milliseconds: bool = False) -> str:
    """RFC 3339 in UTC. A number is Unix seconds."""
    moment = moment if isinstance(moment, datetime) else datetime.fromtimestamp(moment, UTC)
    return moment.astimezone(UTC).isoformat(timespec="milliseconds" if milliseconds else "seconds").replace("+00:00", "Z")
