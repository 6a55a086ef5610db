"""What the simulated world is made of, and what a schedule contains. Everything random comes from one seeded generator.

Times are in seconds of the world's own clock; engines, hubs and trainers see it through clocks of their own, whose rates
differ by as much as the pool's margin allows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from epochkv_fence.hub.machine import Hub
from epochkv_fence.protocol import agent as ag
from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.agent import Agent
from epochkv_fence.protocol.messages import WEIGHTS_BYTES, Message
from epochkv_fence.protocol.pool import PoolConfig, ReclaimPolicy, Term
from tests.model.views import HubHistory

START = 1000.0
STAYS = float("inf")
WANTS_TO_LEAVE = float("-inf")
LEASE = 4.0
LONGER_LEASE = 6.0
SPREAD = 1.249
"""Fastest clock over slowest: a lease of 4 s on the slowest ends just inside lease and margin (1 s) on the fastest."""
SPREAD_WITH_LONGER_LEASE = 1.16
GRACE = 8.0
"""Seconds after which keys of weights that nobody reports are removed; above any lease and its margin."""
RECLAIM_SECONDS = 2.0
STORE_LEASE = 1.5
"""How long a key that is read cannot be removed, and within which time a write lands: below `reclaim_seconds`."""
MAX_IN_FLIGHT = 80

ORDERS = (
    *("spec, reset", "client, reset", "client, reset, no waiting", "client, weight update", "client, label"),
    *("engines reset together", "one engine reset"),
)
Policy = ReclaimPolicy


class Violation(AssertionError):
    """An invariant does not hold."""


@dataclass
class Rules:
    """Rules outside the state machines that a mutant takes away, and the state machines themselves."""

    verify_always: bool = False
    read_before_collecting: bool = False
    holder_only: bool = False
    stale_load: bool = False
    record_lowers: bool = False
    labels_replace: bool = False
    settled_at_once: bool = False
    leaves_inside_schedule: bool = False
    lease_unchecked_after_load: bool = False
    loads_never_invalidated: bool = False
    saves_under_old_pins: bool = False
    serves_without_lease: bool = False
    local_reset_keeps_root: bool = False
    local_reset_without_floor: bool = False
    read_in_any_term: bool = False
    trainer_resumes_unpublished: bool = False
    trainer_remembers_target: bool = False
    config_late: bool = False
    agent: Callable[[bytes], Agent] = Agent
    hub: Callable[[PoolConfig], Hub] = Hub


@dataclass
class Profile:
    """What one schedule contains. A focus fixes some of it; the rest is drawn from the seed."""

    engines: int
    fingerprints: int
    steps: int
    pushes: float
    policy: Policy
    store_admin: bool
    orders: tuple[str, ...]
    restores: bool
    reconfigures: bool
    pace: float
    disorder: float
    trouble: float
    takeovers: float
    told_late: float
    watch: float
    freezes: float
    store_fails: float
    busy_store: bool
    idle: float
    ambush: float
    trainer_restarts: float
    wander: float

    @classmethod
    def draw(cls, rng: random.Random, focus: dict[str, Any] | None = None) -> Profile:
        """A profile of this seed, with the fields of `focus` as given there."""
        focus = focus or {}
        policy = focus.get("policy", rng.choice(["Delete", "Delete", "RemoveAll", "RemoveAll", "Retain"]))
        values = {
            "engines": rng.choice([1, 2, 2, 3, 3, 4]),
            "fingerprints": rng.choice([1, 1, 2]),
            "steps": rng.choice([300, 600, 1200]),
            "pushes": rng.choice([0.0, 0.1, 1.0, 3.0]),
            "policy": policy,
            "store_admin": policy == "RemoveAll" or rng.random() < 0.3,
            "orders": tuple(rng.sample(ORDERS, rng.choice([1, 2, len(ORDERS)]))),
            "restores": rng.random() < 0.06,
            "reconfigures": rng.random() < 0.15,
            "pace": rng.choice([0.1, 0.2, 0.4, 1.0]),
            "disorder": rng.choice([0.1, 0.4, 0.9]),
            "trouble": rng.choice([0.03, 0.1, 0.3, 1.0]),
            "takeovers": rng.choice([0.02, 0.1, 0.3, 1.0]),
            "told_late": rng.choice([0.1, 1.0]),
            "watch": rng.choice([0.1, 1.0]),
            "freezes": rng.choice([0.03, 0.2, 1.0]),
            "store_fails": rng.choice([0.0, 0.1, 0.6]),
            "busy_store": rng.random() < 0.5,
            "trainer_restarts": rng.choice([0.0, 0.1, 0.5]),
            "ambush": rng.choice([0.0, 0.0, 0.02, 0.1]),
            "idle": rng.choice([0.0, 1.0, 1.0]),
            "wander": rng.choice([0.0, 0.2, 0.2]),
        }
        return cls(**{**values, **focus})

    def config(self, lease: float = LEASE) -> PoolConfig:
        return PoolConfig(
            uid="u",
            name="sim",
            client_public_keys=(),
            lease_seconds=lease,
            reclaim=self.policy,
            reclaim_seconds=RECLAIM_SECONDS,
            store_admin=self.store_admin,
            weights_grace_seconds=GRACE,
        )


def digest(weights: int) -> bytes:
    return weights.to_bytes(WEIGHTS_BYTES, "big")


@dataclass(frozen=True, slots=True)
class Clock:
    """A monotonic clock: the world's time at a rate and an offset of its own."""

    rate: float
    offset: float

    def read(self, now: float) -> float:
        return self.offset + now * self.rate


@dataclass(slots=True)
class Load:
    """A read from the store under way in an engine."""

    epoch: int
    weights: int
    block: int
    made_at: float
    ends: float
    leased_until: float  # the store keeps the key so long
    invalidated: bool = False


@dataclass(slots=True)
class Lookup:
    """A `schedule()` under way: it has answered a lookup under this root and has not admitted the request yet."""

    epoch: int
    lease_until: float


@dataclass(slots=True)
class Engine:
    """One engine slot; a restart puts a new engine instance into it. Agent and scheduler freeze together."""

    index: int
    clock: Clock
    agent: Agent
    born: float
    fingerprint: str
    weights: int = 0
    note: str = ""  # why it cannot say which weights it holds; empty: it can
    reported: tuple[bytes | None, float] = (None, 0.0)  # what its last heartbeat said of them, and since when it says so
    bound: int | None = None
    private_at: int | None = None  # its caches were reset alone at this epoch
    floor_unknown: bool = False  # they were, without a lease: which epoch that was is for the next lease to say
    cleared: int = -1  # the truth of it: no epoch up to this one may be used again
    settling: bool = False
    lookup: Lookup | None = None
    blocks: dict[tuple[int, int, int], float] = field(default_factory=dict)  # L1: (epoch, weights, block) -> when it was made
    loads: list[Load] = field(default_factory=list)
    queue: list[ag.Action] = field(default_factory=list)
    frozen_until: float = 0.0
    leaving: float = STAYS  # when its process ends, once it has told the hub
    beats: int = 0
    highest: int = 0  # epoch seen in this engine instance

    def live(self, now: float) -> bool:
        """Whether it has adopted something and its lease holds by its own clock."""
        return self.bound is not None and self.clock.read(now) < self.agent.view.lease_until


@dataclass(slots=True)
class HubProcess:
    """One hub process slot and what `net.server.HubServer` keeps around the state machine."""

    index: int
    clock: Clock
    hub: Hub
    holder: str
    incarnation: int
    term: Term | None = None
    rounds: int = 0
    round_running: bool = False
    frozen_until: float = 0.0
    queue: list[ev.Action] = field(default_factory=list)
    target: int = 0  # highest seen in this process
    published: int = 0
    history: HubHistory = field(default_factory=HubHistory)
    steps: int = 0


@dataclass(slots=True)
class Call:
    """A call of a hub to the authority or the store: its effect and its answer are two steps, either late or never."""

    process: HubProcess
    kind: str
    value: int
    term: Term | None
    not_before: float = 0.0
    patience: float = float("inf")  # no answer until then: the caller gives up
    deadline: float = float("inf")  # no effect after this
    origin: Any = None
    effective: bool = False
    answered: bool = False
    result: Any = None


@dataclass(slots=True)
class Packet:
    """A message in flight, as frames, from `sender` to `receiver`: `e0`, `h1`, `t`."""

    sender: str
    receiver: str
    message: Message
    frames: list[bytes]
    not_before: float = 0.0
