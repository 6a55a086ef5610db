"""Status of a KVCachePool. Apart from the spec, because it is read leniently: a newer operator may have written it."""

from __future__ import annotations

from typing import Annotated

from pydantic import ConfigDict, Field

from epochkv_operator.api.base import Conditions, Count, Epoch, Generation, Number, StatusModel, Timestamp, list_field, rule, rules

WeightsId = Annotated[str, Field(pattern="^[0-9a-f]{32}$", max_length=32)]


class Laggard(StatusModel):
    """An engine that the reset waits for."""

    name: Annotated[str, Field(max_length=253)]
    """Pod, or the name under which an external engine reports."""
    reason: Annotated[str, Field(max_length=64)]
    """Why it is waited for."""


class ResetStatus(StatusModel):
    """The latest reset."""

    epoch: Epoch | None = None
    """The epoch that this reset leads to."""
    origin: Annotated[str | None, Field(max_length=16)] = None
    """Who asked for it first: `Spec` (`spec.resetEpoch`), `Trainer` (the client) or `Engine` (an engine whose own caches were reset)."""
    start_time: Timestamp | None = None
    """When the target was recorded."""
    completion_time: Timestamp | None = None
    """When it was published; absent while the reset is open."""
    duration_milliseconds: Annotated[int | None, Field(json_schema_extra={"format": "int64"})] = None
    """From recorded to published, by the hub's own clock."""
    laggards: Annotated[tuple[Laggard, ...] | None, list_field(16, key="name")] = None
    """Up to 16 engines that the reset waits for."""


class EnginesStatus(StatusModel):
    """The engines heard from."""

    total: Count = 0
    """Engine processes (one per data-parallel rank) with a live or recent lease."""
    converged: Count = 0
    """Of these, at the target epoch."""
    carried_requests: Number = 0
    """Requests still running that were admitted under an older epoch; they see only what they held already."""
    summary: Annotated[str, Field(max_length=64)] = ""
    """`converged/total`, for the printer column."""


class ExternalEngine(StatusModel):
    """An engine that joined without the operator having made it."""

    name: Annotated[str, Field(max_length=253)]
    """The name under which it reports, with its rank; where several report under one name, with the start of the boot's id."""
    epoch: Epoch | None = None
    """The epoch it reported last."""
    weights: Annotated[str | None, Field(max_length=64)] = None
    """The weights it holds, by the start of their id; absent while they are unknown."""
    rank: Number | None = None
    """Its data-parallel rank."""
    carried: Number | None = None
    """Requests it still runs that were admitted under an older epoch."""


class ReclaimStatus(StatusModel):
    """Memory of the distributed store that was freed."""

    policy: Annotated[str | None, Field(max_length=16)] = None
    """`Delete`, `RemoveAll` or `Retain`: what was done."""
    epoch: Epoch | None = None
    """No key of an epoch below this one is left."""
    keys: Number | None = None
    """Keys removed since the latest reset."""
    bytes: Number | None = None
    """Bytes freed since the latest reset, as far as they are known."""
    completion_time: Timestamp | None = None
    """When no old key was left."""


class KeysStatus(StatusModel):
    """The client keys that the hub accepts for the pool."""

    generation: Annotated[int | None, Field(ge=0, json_schema_extra={"format": "int32"})] = None
    """The `spec.keys.generation` that the Secret's key pair belongs to."""
    accepted: Annotated[int | None, Field(ge=0, json_schema_extra={"format": "int32"})] = None
    """Key pairs accepted: 2 while an older one is still in use, otherwise 1."""


class MasterStatus(StatusModel):
    """The masters that the operator runs."""

    replicas: Count = 0
    """Pods."""
    ready_replicas: Count = 0
    """Ready pods."""
    address: Annotated[str | None, Field(max_length=4096)] = None
    """What engines dial."""


class ScaleInStatus(StatusModel):
    """The latest time that stores were removed."""

    from_: Annotated[Count, Field(alias="from")] = 0
    """Stores before."""
    to: Count = 0
    """Stores after; before its end, the fewest asked for since it began."""
    start_time: Timestamp | None = None
    """When it began, or when more stores were to leave; `drainTimeoutSeconds` runs from here."""
    completion_time: Timestamp | None = None
    """When the stores were gone; absent before."""
    bytes: Number | None = None
    """Bytes of blocks that the leaving stores held."""
    moved_bytes: Number | None = None
    """Of these, moved to other stores."""
    outcome: Annotated[str | None, Field(max_length=64)] = None
    """`TimedOut` when the time was over before all blocks had moved."""
    job: Annotated[str | None, Field(max_length=128)] = None
    """The master's id of the latest drain job."""


class StoreStatus(StatusModel):
    """The stores that the operator runs."""

    replicas: Count = 0
    """Pods."""
    ready_replicas: Count = 0
    """Ready pods."""
    selector: Annotated[str | None, Field(max_length=1024)] = None
    """Label selector of the pods, for the scale subresource."""
    scale_in: ScaleInStatus | None = None
    """The latest time that stores were removed."""


class Endpoints(StatusModel):
    """What an engine or trainer needs to join if the operator did not start it."""

    hub: Annotated[str | None, Field(max_length=1024)] = None
    """Address of the hub."""
    master: Annotated[str | None, Field(max_length=4096)] = None
    """Address of the master."""
    config_map: Annotated[str | None, Field(max_length=253)] = None
    """ConfigMap with `connection.json`."""
    secret: Annotated[str | None, Field(max_length=253)] = None
    """Secret with the keys."""


class WeightsStatus(StatusModel):
    """Weights that live engines hold."""

    id: WeightsId
    """Digest of the weights, 32 hex digits. Engines with equal digests share KV; other engines never do."""
    label: Annotated[str | None, Field(max_length=253)] = None
    """What a trainer called them."""
    engines: Count
    """Live engine processes that hold them."""
    since: Timestamp
    """When an engine was first seen with them."""


class WeightsLabel(StatusModel):
    """What a trainer called weights."""

    id: WeightsId
    """Digest of the weights, 32 hex digits."""
    label: Annotated[str, Field(max_length=253)]
    """What they are called."""


class KVCachePoolStatus(StatusModel):
    """What the pool is. `status.epoch` is the proof: no engine finds KV that was named under an older epoch."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(self.epoch) || (has(self.targetEpoch) && self.epoch <= self.targetEpoch)",
                "status.epoch cannot pass status.targetEpoch",
            )
        )
    )

    conditions: Conditions | None = None
    """`Ready`, `MasterAvailable` and `StoreAvailable` (with a store that the operator runs), `EpochConverged`,
    `WeightsConverged`, `TiersUsable`, `Drained`, `Reclaimed` (with a store, unless `reclaimPolicy` is `Retain`), `KeysRotated` (once
    `keys.generation` was raised), `StoreScaled` (once stores were removed)."""
    observed_generation: Generation | None = None
    """The `metadata.generation` this status was computed from."""
    target_epoch: Epoch | None = None
    """Highest epoch durably recorded; engines get this one. Never goes down."""
    epoch: Epoch | None = None
    """Published epoch: proved that no engine uses an older one. Never goes down."""
    proof: Annotated[str | None, Field(pattern="^[0-9]{1,19}:[01]:[0-9a-f]{32}$", max_length=64)] = None
    """The hub's signature under `epoch`. A hub does not take an `epoch` for published that has none: it proves it again."""
    granting: bool | None = None
    """True once a hub may have granted an epoch of this pool to an engine; a later hub then waits for a lease before it publishes."""
    weights: Annotated[tuple[WeightsStatus, ...] | None, list_field(8, key="id")] = None
    """Up to 8 groups of live engines by the weights they hold, the largest first."""
    weights_summary: Annotated[str | None, Field(max_length=256)] = None
    """Weights that most live engines hold and how many of them, such as `3f2a9c1e 16/16`; for the printer column."""
    weights_labels: Annotated[tuple[WeightsLabel, ...] | None, list_field(16, key="id")] = None
    """What trainers called weights, the 16 newest."""
    reset: ResetStatus | None = None
    """The latest reset."""
    reclaim: ReclaimStatus | None = None
    """Memory of the distributed store that was freed."""
    keys: KeysStatus | None = None
    """The client keys that the hub accepts for the pool."""
    engines: EnginesStatus | None = None
    """The engines heard from."""
    external_engines: Annotated[tuple[ExternalEngine, ...] | None, list_field(64, key="name")] = None
    """Up to 64 engines that joined and that the operator did not start."""
    master: MasterStatus | None = None
    """The masters that the operator runs."""
    store: StoreStatus | None = None
    """The stores that the operator runs."""
    endpoints: Endpoints | None = None
    """What an engine or trainer needs to join if the operator did not start it."""
