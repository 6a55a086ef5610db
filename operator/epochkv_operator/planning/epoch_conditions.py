"""Conditions about epochs: is it published, what is left of the older ones, which keys are in use. Pure.

Requests under older roots see only what they held, and old KV in a store is found by nobody. So only `EpochConverged` counts
for `Ready`; the others say what reuse or memory is still waiting for, and what to do.
"""

from __future__ import annotations

from typing import Final

from epochkv_operator.api.pool import KVCachePool
from epochkv_operator.planning.context import NO_HUB, Condition, HubView, listed

_ASKER: Final = {"Spec": "spec.resetEpoch", "Trainer": "a trainer", "Engine": "an engine that was reset alone"}


def epoch_converged(pool: KVCachePool, hub: HubView | None) -> Condition:
    """Published equals target, and target is at least what the spec asks for."""
    kind, asked = "EpochConverged", pool.spec.reset_epoch
    if hub is None:
        return Condition(kind, "Unknown", "HubUnavailable", NO_HUB)
    if hub.target < asked:
        return Condition(kind, "False", "Recording", f"epoch {asked} is asked for, {hub.target} is recorded")
    if hub.published < hub.target:
        waiting = listed([f"{name} ({reason})" for name, reason in hub.laggards])
        text = f"epoch {hub.target} is recorded, {hub.published} is published"
        return Condition(kind, "False", "WaitingForEngines", f"{text}; waiting for {waiting}" if waiting else text)
    text = f"no engine uses an epoch below {hub.published}"
    if epoch_ahead(asked, hub):
        asker = _ASKER.get(hub.origin or "", "somebody else")
        state = "resets nothing: that epoch was out already" if asked == hub.target else "resets nothing: it is below"
        return Condition(
            kind,
            "True",
            "EpochAhead",
            f"{text}, which {asker} asked for; spec.resetEpoch {asked} {state}; to reset, set {hub.target + 1} or higher",
        )
    return Condition(kind, "True", "Published", text)


def epoch_ahead(asked: int, hub: HubView) -> bool:
    """The spec asks for an epoch that is out already, and not because the spec asked for it.

    0 asks for nothing: where a trainer owns the resets, the spec stays there. A target of an unknown origin that equals
    what the spec asks for is taken to be the spec's.
    """
    return asked > 0 and (asked < hub.target or (asked == hub.target and hub.origin not in (None, "Spec")))


def drained(hub: HubView | None) -> Condition:
    """No request runs any more that was admitted under an older epoch."""
    if hub is None:
        return Condition("Drained", "Unknown", "HubUnavailable", NO_HUB)
    carried = sum(engine.carried for engine in hub.engines)
    if not carried:
        return Condition("Drained", "True", "Drained", f"no request runs that was admitted before epoch {hub.target}")
    where = listed([f"{engine.display_name} ({engine.carried})" for engine in hub.engines if engine.carried])
    text = f"{carried} requests were admitted under an older epoch and run on, seeing only what they held already: {where}"
    return Condition("Drained", "False", "CarriedRequests", f"{text}; abort them, or wait until they end")


def reclaimed(pool: KVCachePool, hub: HubView | None) -> Condition | None:
    """Nothing is left of older epochs in the distributed store; absent without one, and with `Retain`."""
    kind, policy = "Reclaimed", pool.spec.reset.reclaim_policy
    if pool.spec.distributed is None or policy == "Retain":
        return None
    if hub is None:
        return Condition(kind, "Unknown", "HubUnavailable", "no hub leads this pool at the moment")
    known = hub.reclaim
    gave = f"{known.keys} keys and {known.bytes} bytes were given back" if known.keys else "there was nothing to give back"
    if known.epoch >= hub.published:
        return Condition(kind, "True", "Reclaimed", f"the store holds nothing of epochs below {hub.published}; {gave}")
    if known.wipe_failed:
        text = f"the store could not be emptied in time after epoch {hub.published} was published"
        remedy = "nobody finds the old KV, it only takes memory, and removing it goes on; is the master reachable on its admin port?"
        return Condition(kind, "False", "WipeFailed", f"{text}: {remedy}")
    if not hub.engines and pool.spec.distributed.external is not None:
        return Condition(kind, "False", "NoEngine", "old KV in an external store is removed by an engine, and none is connected")
    return Condition(kind, "False", "Reclaiming", f"old KV is being removed from the store; nothing waits for it; {gave} so far")


def keys_rotated(pool: KVCachePool, hub: HubView | None) -> Condition | None:
    """The Secret has the key pair that `spec.keys.generation` asks for, and no older one is accepted."""
    kind, asked = "KeysRotated", pool.spec.keys.generation
    if not asked:
        return None
    if hub is None or hub.keys is None:
        return Condition(kind, "Unknown", "HubUnavailable", "no hub leads this pool at the moment")
    if hub.keys.accepted > 1:
        secret = f"{pool.metadata.name}-fence -n {pool.metadata.namespace}"
        cut = f'kubectl patch secret {secret} --type=json -p \'[{{"op":"remove","path":"/data/previous.pub"}}]\''
        waits = f"still used by {listed(hub.keys.old_users)}" if hub.keys.old_users else "about to be refused"
        text = f"the key pair before generation {hub.keys.generation} is {waits}"
        return Condition(kind, "False", "OldKeyInUse", f"{text}; to refuse it at once: {cut}")
    if hub.keys.generation < asked:
        return Condition(kind, "False", "Rotating", f"key generation {asked} is asked for, {hub.keys.generation} is in the Secret")
    return Condition(kind, "True", "Rotated", f"only the key pair of generation {hub.keys.generation} is accepted")
