"""What a hub may do, rule by rule: the design page "fence", section 4.

Each rule is a function of what it judges and of nothing else. `HubRules` holds all rules, so that a model test can replace one
of them and show that the fence needs it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from epochkv_fence.hub.record import InstanceRecord, Leadership, Record
from epochkv_fence.protocol.messages import Status
from epochkv_fence.protocol.pool import PoolConfig

# ------------------------------------------------------------------ granting


def may_grant(record: Record) -> bool:
    """The note must be durable before the leadership read that a grant rests on; otherwise a later hub may miss it."""
    return record.noted


def fence_timeout_seconds(config: PoolConfig) -> float:
    """After this time a grant made now is dead: the lease, and a margin for clocks at different rates.

    A new leader waits as long, because every grant of an older leader answers a heartbeat sent before now.
    """
    return config.fence_timeout_seconds


def may_forget(instance: InstanceRecord, config: PoolConfig, now: float) -> bool:
    """The engine instance was silent for a lease and margin, so all its grants are dead."""
    return now >= instance.dead_at(config.fence_timeout_seconds)


# ------------------------------------------------------------------ asks and answers


def above_record(record: Record, epoch: int) -> bool:
    """An engine reports an epoch above the record. A hub granted it, so it was durable once: somebody rolled the record back.

    What such a record says about older grants is void, too.
    """
    return epoch > max(record.target, record.durable)


def proposal_counts(record: Record, epoch: int) -> bool:
    """A proposal made from an older epoch does not count: another one came first, and one reset serves all."""
    return epoch == record.target + 1


def may_tell(record: Record, epoch: int) -> bool:
    """Whether a trainer may hear that its epoch is the target. It then trusts that nobody uses older epochs after a lease.

    A deposed hub's write may land late, while the leader goes on granting the epoch before. Only a leadership read that began
    after the target was durable shows that this hub leads.
    """
    return record.target <= record.proven or epoch <= record.published


def needs_read(question: Status) -> bool:
    """The first page waits for a leadership read, because a hub that does not know it was deposed tells an old target."""
    return question.after is None


# ------------------------------------------------------------------ publication


def settled_at(lead: Leadership) -> float:
    """When no grant of an older hub can be live."""
    return lead.settled_at


def fenced_at(instance: InstanceRecord) -> float:
    """When this engine instance can use no epoch below the target. Its grants of the target itself never delay publication."""
    return instance.below_until


# ------------------------------------------------------------------ the store


def may_remove(config: PoolConfig) -> bool:
    """The pool wants unused keys removed. With `Retain` the store's own eviction removes them."""
    return config.reclaim != "Retain"


def can_reclaim(instance: InstanceRecord, record: Record, config: PoolConfig, now: float) -> bool:
    """The engine instance can answer, and names its own keys with the published epoch or a later one."""
    return instance.at_least(record.published) and instance.alive(config, now)


def engines_known_at(lead: Leadership, config: PoolConfig) -> float:
    """By then every engine has had the time to tell a new leader which weights it holds."""
    return lead.since + config.grace_seconds


def says_weights(instance: InstanceRecord) -> bool:
    """The engine says which weights it holds. One that cannot say may hold any."""
    return instance.newest.weights is not None


@dataclass(frozen=True, slots=True)
class HubRules:
    """The rules that a hub goes by."""

    may_grant: Callable[[Record], bool] = may_grant
    fence_timeout_seconds: Callable[[PoolConfig], float] = fence_timeout_seconds
    may_forget: Callable[[InstanceRecord, PoolConfig, float], bool] = may_forget
    above_record: Callable[[Record, int], bool] = above_record
    proposal_counts: Callable[[Record, int], bool] = proposal_counts
    may_tell: Callable[[Record, int], bool] = may_tell
    needs_read: Callable[[Status], bool] = needs_read
    settled_at: Callable[[Leadership], float] = settled_at
    fenced_at: Callable[[InstanceRecord], float] = fenced_at
    may_remove: Callable[[PoolConfig], bool] = may_remove
    can_reclaim: Callable[[InstanceRecord, Record, PoolConfig, float], bool] = can_reclaim
    engines_known_at: Callable[[Leadership, PoolConfig], float] = engines_known_at
    says_weights: Callable[[InstanceRecord], bool] = says_weights


RULES: Final = HubRules()
