"""What a hub may do, rule by rule: the design page "fence", section 4.

Each rule is a function of what it judges and of nothing else. `HubRules` holds all of them, so that the model tests can take
one away and show that it is needed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from epochkv_fence.hub.boots import BootRecord
from epochkv_fence.hub.record import Leadership, Record
from epochkv_fence.protocol.messages import Status
from epochkv_fence.protocol.pool import PoolConfig

# ------------------------------------------------------------------ granting


def may_grant(record: Record) -> bool:
    """The note must be durable before the read that a grant rests on, or a later hub would not see it."""
    return record.noted


def hold_seconds(config: PoolConfig) -> float:
    """After this a grant made now is dead: the lease, and the margin for clocks at different rates. A new leader waits as long:
    every grant of an older leader answers a heartbeat sent before now."""
    return config.hold_seconds


def may_forget(boot: BootRecord, config: PoolConfig, now: float) -> bool:
    """It was silent for a lease and margin; by then every grant it had is dead."""
    return now >= boot.dead_at(config.hold_seconds)


# ------------------------------------------------------------------ asks and answers


def above_record(record: Record, epoch: int) -> bool:
    """An engine reports an epoch that is not on record. It was granted it, so it was durable once: the record was rolled back
    (a restored store). Then what it says about older grants is void, too."""
    return epoch > max(record.target, record.durable)


def proposal_counts(record: Record, epoch: int) -> bool:
    """Made from an older epoch it does not: somebody's proposal was first, and one bump serves all."""
    return epoch == record.target + 1


def may_tell(record: Record, epoch: int) -> bool:
    """A trainer that is told of its target counts on it when publication does not come in time: after a lease nobody
    uses older epochs. So it must not hear of a target that only a deposed hub knows, whose Record landed late, while
    the one that leads goes on granting the epoch before: a read that began after it was durable shows that we lead."""
    return record.target <= record.proven or epoch <= record.published


def needs_read(question: Status) -> bool:
    """The first page waits for a leadership read: a hub that was deposed without knowing it knows an old target."""
    return question.first == 0 and question.after is None


# ------------------------------------------------------------------ publication


def settled_at(lead: Leadership) -> float:
    """When no grant of an older hub can be live."""
    return lead.settled_at


def fenced_at(boot: BootRecord) -> float:
    """When it can use no epoch below the target. Only grants *below* the target count: grants of the target never delay
    publication."""
    return boot.below_until


# ------------------------------------------------------------------ the store


def may_remove(config: PoolConfig) -> bool:
    """Keys are removed, of older epochs and of weights that nobody holds; else the store's own eviction gets them."""
    return config.reclaim != "Retain"


def can_reclaim(boot: BootRecord, record: Record, config: PoolConfig, now: float) -> bool:
    """It names its keys with the published epoch, or a later one, and is there to be asked."""
    return boot.at_least(record.published) and boot.alive(config, now)


def engines_known_at(lead: Leadership, config: PoolConfig) -> float:
    """By then whoever was there when this hub began to lead, or came back since, has had the time to say what it holds."""
    return lead.since + config.grace_seconds


def says_weights(boot: BootRecord) -> bool:
    """An engine that cannot say what it holds may hold anything."""
    return boot.newest.weights is not None


@dataclass(frozen=True, slots=True)
class HubRules:
    """The rules that a hub goes by."""

    may_grant: Callable[[Record], bool] = may_grant
    hold_seconds: Callable[[PoolConfig], float] = hold_seconds
    may_forget: Callable[[BootRecord, PoolConfig, float], bool] = may_forget
    above_record: Callable[[Record, int], bool] = above_record
    proposal_counts: Callable[[Record, int], bool] = proposal_counts
    may_tell: Callable[[Record, int], bool] = may_tell
    needs_read: Callable[[Status], bool] = needs_read
    settled_at: Callable[[Leadership], float] = settled_at
    fenced_at: Callable[[BootRecord], float] = fenced_at
    may_remove: Callable[[PoolConfig], bool] = may_remove
    can_reclaim: Callable[[BootRecord, Record, PoolConfig, float], bool] = can_reclaim
    engines_known_at: Callable[[Leadership, PoolConfig], float] = engines_known_at
    says_weights: Callable[[BootRecord], bool] = says_weights


RULES: Final = HubRules()
