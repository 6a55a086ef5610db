"""Conditions about epochs: is it published, who has its weights, what is left of the older ones, which keys are in use. Pure.

Engines in bypass serve correctly, requests under older roots see only what they held, and old KV in a store is found by
nobody. So only `EpochConverged` counts for `Ready`; the others say what reuse or memory is still waiting for, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from epochkv_operator.api.pool import KVCachePool
from epochkv_operator.planning.context import Condition, HubEngine, HubView

LOCAL_RESET: Final = "LocalReset"
"""The epoch is what it should be, and engines whose caches were reset alone share nothing in it: a reason with status True."""
_SHOWN: Final = 4
_NO_HUB: Final = "no hub leads this pool at the moment; engines whose lease ends serve in bypass"
_ASKER: Final = {"Spec": "spec.resetEpoch", "Trainer": "a trainer", "Engine": "an engine that was reset alone"}


def epoch_converged(pool: KVCachePool, hub: HubView | None) -> Condition:
    """Published equals target, and target is at least what the spec asks for."""
    kind, asked = "EpochConverged", pool.spec.reset_epoch
    if hub is None:
        return Condition(kind, "Unknown", "HubUnavailable", _NO_HUB)
    if hub.target < asked:
        return Condition(kind, "False", "Recording", f"epoch {asked} is asked for, {hub.target} is recorded")
    if hub.published < hub.target:
        waiting = listed([f"{name} ({reason})" for name, reason in hub.laggards])
        text = f"epoch {hub.target} is recorded, {hub.published} is published"
        return Condition(kind, "False", "WaitingForEngines", f"{text}; waiting for {waiting}" if waiting else text)
    text = f"no engine uses an epoch below {hub.published}"
    alone = hub.alone(hub.engines)
    reset_alone = f"; {_reset_alone(pool, hub, alone)}" if alone else ""
    if epoch_ahead(asked, hub):
        asker = _ASKER.get(hub.origin or "", "somebody else")
        state = "resets nothing: that epoch was out already" if asked == hub.target else "resets nothing: it is below"
        return Condition(
            kind,
            "True",
            LOCAL_RESET if alone else "EpochAhead",
            f"{text}, which {asker} asked for; spec.resetEpoch {asked} {state}; to reset, set {hub.target + 1} or higher{reset_alone}",
        )
    return Condition(kind, "True", LOCAL_RESET if alone else "Published", text + reset_alone)


def epoch_ahead(asked: int, hub: HubView) -> bool:
    """The spec asks for an epoch that is out already, and not because the spec asked for it.

    0 asks for nothing: where a trainer owns the resets, the spec stays there. A target of an unknown origin that equals
    what the spec asks for is taken to be the spec's.
    """
    return asked > 0 and (asked < hub.target or (asked == hub.target and hub.origin not in (None, "Spec")))


def weights_converged(pool: KVCachePool, hub: HubView | None) -> Condition | None:
    """Every engine at the target has its weights; absent where weights never change under a running engine."""
    kind = "WeightsConverged"
    if hub is None:
        return Condition(kind, "Unknown", "HubUnavailable", _NO_HUB)
    if hub.weights_source == "Model":
        return None
    named = f" ({hub.weights_version})" if hub.weights_version else ""
    if hub.held:
        return Condition(
            kind,
            "False",
            "WeightsPending",
            f"epoch {hub.target} waits for its weights{named}, and every engine serves in bypass: push them, then "
            + _patch(pool, f'{{"spec":{{"weightsReady":"{hub.weights_version}"}}}}'),
        )
    if hub.pending:
        return Condition(kind, "False", "WeightsPending", _pending(pool, hub, named))
    return Condition(kind, "True", "Converged", f"no engine waits for the weights of epoch {hub.target}{named}")


def weights_current(ranks: Sequence[HubEngine], hub: HubView | None) -> Condition | None:
    """The same for the pods of one InferenceEngine."""
    if hub is None or hub.weights_source == "Model":
        return None
    pending = [rank.display_name for rank in ranks if rank.pending]
    if not pending:
        return Condition("WeightsCurrent", "True", "Current", f"no pod waits for the weights of epoch {hub.target}")
    text = f"in bypass, because nobody said that they have the weights of epoch {hub.target}: {listed(pending)}"
    return Condition("WeightsCurrent", "False", "WeightsPending", f"{text}; the pool's WeightsConverged says what to do")


def drained(hub: HubView | None) -> Condition:
    """No request runs any more that was admitted under an older epoch."""
    if hub is None:
        return Condition("Drained", "Unknown", "HubUnavailable", _NO_HUB)
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
        text = f"the store could not be emptied in time before epoch {hub.published} was published"
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


def listed(names: Iterable[str]) -> str:
    """The first few, and how many more there are."""
    found = list(names)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more


def _reset_alone(pool: KVCachePool, hub: HubView, names: Sequence[str]) -> str:
    patch = _patch(pool, f'{{"spec":{{"resetEpoch":{hub.target + 1}}}}}')
    asking = "" if pool.spec.reset.on_local_reset == "Propose" else "; with spec.reset.onLocalReset: Propose they ask for that themselves"
    return (
        f"the caches of these engines alone were reset, and they serve correctly, without shared KV, until the next epoch: {listed(names)}."
        f" To have them share again: {patch}{asking}"
    )


def _pending(pool: KVCachePool, hub: HubView, named: str) -> str:
    text = (
        f"in bypass, because nobody said that they have the weights of epoch {hub.target}{named}: {listed(hub.pending)}"
        " (started after the push, or no operator saw when the epoch was asked for). They serve correctly, without shared KV"
    )
    if hub.origin == "Trainer":
        return f"{text}, until the trainer's update ends, or until the next one"
    epoch = f'"resetEpoch":{hub.target + 1}'
    if hub.listed:
        patch = _patch(pool, f'{{"spec":{{{epoch},"weightsVersion":"NAME","weightsReady":"NAME"}}}}')
        text += ", until the next update of a trainer, who listed the others"
        return f"{text}; or push the weights to all, give them a new name, then {patch}"
    return f"{text}. Push the weights to them, then " + _patch(pool, f'{{"spec":{{{epoch}}}}}')


def _patch(pool: KVCachePool, patch: str) -> str:
    return f"kubectl patch kvp {pool.metadata.name} -n {pool.metadata.namespace} --type=merge -p '{patch}'"
