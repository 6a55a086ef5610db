"""KVCachePool (`kvp`): the engines that share KV, the tiers they share it through, and the epoch that names all of it."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, model_validator

from epochkv_operator.api.base import (
    API_VERSION,
    NAME_RULE,
    Address,
    ApiModel,
    Conditions,
    Count,
    Epoch,
    Generation,
    Image,
    Metadata,
    PodTemplate,
    Size,
    StatusModel,
    Timestamp,
    default_of,
    require_unique,
    rule,
    rules,
)


class Reset(ApiModel):
    """How a reset treats engines that are slow, gone or new."""

    lease_seconds: Annotated[int, Field(ge=1, le=3600, json_schema_extra={"format": "int32"})] = 30
    """Seconds an engine may use an epoch without hearing from the hub again. An engine that is frozen or cut off delays the
    publication of a
    new epoch by at most this plus a margin for clock rates (10 %, at least 1 s). Engines send a heartbeat every third of it.
    Never goes down: a new hub could not know that longer leases are still out."""
    join_after_seconds: Annotated[int, Field(ge=0, le=86400, json_schema_extra={"format": "int32"})] = 60
    """With pushed weights, an engine process younger than this when the epoch was raised is taken to have missed the push; it
    serves in bypass
    until the next one. Set it above the time one push takes, from its start to the raise."""


class Local(ApiModel):
    """L1: host memory inside each engine pod."""

    capacity: Size
    """Bytes per engine pod, split over its worker ranks. Added to the memory that the engine asks for."""


class EtcdBackend(ApiModel):
    """An etcd cluster that somebody else runs."""

    endpoints: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[^\s;,/]+:[0-9]+$")], ...],
        Field(strict=False, min_length=1, max_length=9, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ]
    """`host:port` of each member, without a scheme."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_unique(self.endpoints, "endpoint")
        return self


class HighAvailability(ApiModel):
    """How several masters agree on a leader."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "(self.backend == 'Etcd') == has(self.etcd)",
                "highAvailability.etcd is needed with backend: Etcd and only then: set etcd.endpoints, or backend: None",
            )
        )
    )

    backend: Literal["None", "Etcd"] = "None"
    """`Etcd`: leader election and an operation log in etcd, so the index of stored blocks survives a master. `None`: one master; when it
    restarts, the cache starts cold."""
    etcd: EtcdBackend | None = None
    """Where etcd is. Needed with `backend: Etcd`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.backend == "Etcd") != (self.etcd is not None):
            raise ValueError("highAvailability.etcd is needed with backend: Etcd and only then: set etcd.endpoints, or backend: None")
        return self


class Master(ApiModel):
    """The Mooncake masters: the index of what is stored where."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.replicas == 1 || self.highAvailability.backend != 'None'",
                "master.replicas is above 1 but highAvailability.backend is None: set backend: Etcd or replicas: 1",
                expression="'spec.distributed.mooncake.master.replicas is %d but highAvailability.backend is None: "
                "set backend: Etcd or replicas: 1'.format([self.replicas])",
                path=".replicas",
            )
        )
    )

    replicas: Annotated[int, Field(ge=1, le=5, json_schema_extra={"format": "int32"})] = 1
    """Masters. More than one needs `highAvailability.backend: Etcd`; one of them leads, the others stand by."""
    high_availability: Annotated[HighAvailability, Field(default_factory=HighAvailability, json_schema_extra=default_of(HighAvailability))]
    """How several masters agree on a leader."""
    template: PodTemplate | None = None
    """Overrides of the master pods; the operator's container is named `master`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.replicas > 1 and self.high_availability.backend == "None":
            raise ValueError(
                f"spec.distributed.mooncake.master.replicas is {self.replicas} but highAvailability.backend is None: "
                "set backend: Etcd or replicas: 1"
            )
        return self


class Store(ApiModel):
    """The Mooncake stores: the memory that L2 is made of."""

    replicas: Annotated[int, Field(ge=1, le=1000, json_schema_extra={"format": "int32"})] = 1
    """Store pods. `kubectl scale kvp` changes it. A store that is removed takes its blocks with it; engines recompute them."""
    segment_size: Size
    """Bytes each store pod gives. Its memory limit is this plus what the process itself needs."""
    template: PodTemplate | None = None
    """Overrides of the store pods; the operator's container is named `store`."""


class Transport(ApiModel):
    """How blocks travel between engines and stores."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self.protocol != 'RDMA' || (has(self.devices) && size(self.devices) > 0)",
                "transport.protocol RDMA needs transport.devices: name at least one, such as mlx5_0, or set protocol: TCP",
            ),
            rule(
                "self.protocol == 'RDMA' || !has(self.devices)",
                "transport.devices is only for RDMA: remove devices, or set protocol: RDMA",
                reason="FieldValueForbidden",
            ),
        )
    )

    protocol: Literal["TCP", "RDMA"] = "TCP"
    """`TCP` runs under Pod Security `restricted`. `RDMA` needs a namespace at level `privileged`: store and engine pods run as root
    with `IPC_LOCK` and the host's `/dev/infiniband`."""
    devices: Annotated[
        tuple[Annotated[str, Field(min_length=1, max_length=64, pattern=r"^[^\s,]+$")], ...] | None,
        Field(strict=False, max_length=16, json_schema_extra={"x-kubernetes-list-type": "set"}),
    ] = None
    """RDMA devices, such as `mlx5_0`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.protocol == "RDMA" and not self.devices:
            raise ValueError("transport.protocol RDMA needs transport.devices: name at least one, such as mlx5_0, or set protocol: TCP")
        if self.protocol != "RDMA" and self.devices is not None:
            raise ValueError("transport.devices is only for RDMA: remove devices, or set protocol: RDMA")
        require_unique(self.devices or (), "device")
        return self


class Mooncake(ApiModel):
    """A Mooncake store that the operator runs."""

    image: Image | None = None
    """Image of master and stores; the engines' Mooncake client must have the same version. The operator's own default when unset."""
    master: Annotated[Master, Field(default_factory=Master, json_schema_extra=default_of(Master))]
    """The masters."""
    store: Store
    """The stores."""
    transport: Annotated[Transport, Field(default_factory=Transport, json_schema_extra=default_of(Transport))]
    """How blocks travel between engines and stores."""


class External(ApiModel):
    """A Mooncake store that somebody else runs."""

    master_address: Address
    """`host:port` of the master, or `etcd://host:port;host:port` when it is highly available."""
    metadata_server: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^\S+$")] = "P2PHANDSHAKE"
    """Transfer Engine metadata server; `P2PHANDSHAKE` needs none."""


class Distributed(ApiModel):
    """L2: a store that all engines of the pool share."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "has(self.mooncake) != has(self.external)",
                "set exactly one of distributed.mooncake and distributed.external",
                expression="has(self.mooncake) ? "
                "'spec.distributed has both mooncake and external: keep the one you mean' : "
                "'spec.distributed has neither mooncake nor external: set one of them, or remove distributed'",
            ),
            rule(
                "has(self.mooncake) == has(oldSelf.mooncake)",
                "spec.distributed cannot change between mooncake and external in place: create a new pool, or remove distributed first",
                reason="FieldValueForbidden",
            ),
        )
    )

    mooncake: Mooncake | None = None
    """A Mooncake store that the operator runs."""
    external: External | None = None
    """A Mooncake store that somebody else runs."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.mooncake is not None and self.external is not None:
            raise ValueError("spec.distributed has both mooncake and external: keep the one you mean")
        if self.mooncake is None and self.external is None:
            raise ValueError("spec.distributed has neither mooncake nor external: set one of them, or remove distributed")
        return self


class NetworkPolicy(ApiModel):
    """Who may reach the pool's ports; Mooncake itself has no authentication."""

    mode: Literal["Enabled", "Disabled"] = "Enabled"
    """`Enabled`: master and store accept only pods of this namespace that carry the label `epochkv.io/pool: <pool>` (all engines
    do; give it to
    trainers that join), the master's admin port only the operator and namespaces labelled `epochkv.io/scrape: "true"`, and the engines'
    transfer ports only pods of the pool."""


class KVCachePoolSpec(ApiModel):
    """What the pool should be."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "!has(oldSelf.resetEpoch) || (has(self.resetEpoch) && self.resetEpoch >= oldSelf.resetEpoch)",
                "spec.resetEpoch never goes down and cannot be removed: to reset, set it higher than it is",
                expression="'spec.resetEpoch never goes down: it is %d; to reset, set %d or higher'"
                ".format([oldSelf.resetEpoch, oldSelf.resetEpoch + 1])",
                path=".resetEpoch",
            ),
            rule(
                "!has(self.reset.leaseSeconds) || !has(oldSelf.reset) || !has(oldSelf.reset.leaseSeconds)"
                " || self.reset.leaseSeconds >= oldSelf.reset.leaseSeconds",
                "spec.reset.leaseSeconds never goes down: a longer lease may still be out; keep it, or create a new pool",
                path=".reset.leaseSeconds",
            ),
            rule(
                "has(self.local) || has(self.distributed)",
                "spec has neither local nor distributed: set local.capacity for L1, distributed for L2, or both",
                reason="FieldValueRequired",
            ),
        )
    )

    reset_epoch: Epoch = 0
    """Raise it to invalidate all KV of the pool: above `status.targetEpoch`, which is higher where engines or trainers asked for resets
    themselves. `status.epoch` reaches it when that is proved. It never goes down. Leave it out of charts and GitOps manifests that do not
    own resets."""
    reset: Annotated[Reset, Field(default_factory=Reset, json_schema_extra=default_of(Reset))]
    """How a reset treats engines that are slow, gone or new."""
    local: Local | None = None
    """L1: host memory inside each engine pod."""
    distributed: Distributed | None = None
    """L2: a store that all engines of the pool share. Adding or removing it restarts the engines one by one."""
    network_policy: Annotated[NetworkPolicy, Field(default_factory=NetworkPolicy, json_schema_extra=default_of(NetworkPolicy))]
    """Who may reach the pool's ports."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.local is None and self.distributed is None:
            raise ValueError("spec has neither local nor distributed: set local.capacity for L1, distributed for L2, or both")
        return self


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
    start_time: Timestamp | None = None
    """When the target was recorded."""
    completion_time: Timestamp | None = None
    """When it was published; absent while the reset is open."""
    duration_milliseconds: Annotated[int | None, Field(json_schema_extra={"format": "int64"})] = None
    """From recorded to published, by the hub's own clock."""
    laggards: Annotated[
        tuple[Laggard, ...] | None,
        Field(strict=False, max_length=16, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
    ] = None
    """Up to 16 engines that the reset waits for."""


class EnginesStatus(StatusModel):
    """The engines heard from."""

    total: Count = 0
    """Engine processes (one per data-parallel rank) with a live or recent lease."""
    converged: Count = 0
    """Of these, at the target epoch."""
    bypassed: Count = 0
    """Of these, serving without shared KV."""
    carried_requests: Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"})] = 0
    """Requests still running that were admitted under an older epoch; they see only what they held already."""
    summary: Annotated[str, Field(max_length=64)] = ""
    """`converged/total`, for the printer column."""


class ExternalEngine(StatusModel):
    """An engine that joined without the operator having made it."""

    name: Annotated[str, Field(max_length=253)]
    """The name under which it reports, with its rank."""
    epoch: Epoch | None = None
    """The epoch it reported last."""
    mode: Annotated[str | None, Field(max_length=16)] = None
    """`Use` or `Bypass`."""


class MasterStatus(StatusModel):
    """The masters that the operator runs."""

    replicas: Count = 0
    """Pods."""
    ready_replicas: Count = 0
    """Ready pods."""
    address: Annotated[str | None, Field(max_length=4096)] = None
    """What engines dial."""


class StoreStatus(StatusModel):
    """The stores that the operator runs."""

    replicas: Count = 0
    """Pods."""
    ready_replicas: Count = 0
    """Ready pods."""
    selector: Annotated[str | None, Field(max_length=1024)] = None
    """Label selector of the pods, for the scale subresource."""


class Endpoints(StatusModel):
    """What an engine or trainer that the operator did not make needs to join."""

    hub: Annotated[str | None, Field(max_length=1024)] = None
    """Address of the hub."""
    master: Annotated[str | None, Field(max_length=4096)] = None
    """Address of the master."""
    config_map: Annotated[str | None, Field(max_length=253)] = None
    """ConfigMap with `connection.json`."""
    secret: Annotated[str | None, Field(max_length=253)] = None
    """Secret with the keys."""


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
    """`Ready`, `MasterAvailable` and `StoreAvailable` (with a store that the operator runs), `EpochConverged`."""
    observed_generation: Generation | None = None
    """The `metadata.generation` this status was computed from."""
    target_epoch: Epoch | None = None
    """Highest epoch durably recorded; engines are told this one. Never goes down."""
    epoch: Epoch | None = None
    """Published epoch: proved that no engine uses an older one. Never goes down."""
    granting: bool | None = None
    """True once a hub may have granted an epoch of this pool to an engine; a later hub then waits for a lease before it publishes."""
    reset: ResetStatus | None = None
    """The latest reset."""
    engines: EnginesStatus | None = None
    """The engines heard from."""
    external_engines: Annotated[
        tuple[ExternalEngine, ...] | None,
        Field(strict=False, max_length=64, json_schema_extra={"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}),
    ] = None
    """Up to 64 engines that joined without the operator having made them."""
    master: MasterStatus | None = None
    """The masters that the operator runs."""
    store: StoreStatus | None = None
    """The stores that the operator runs."""
    endpoints: Endpoints | None = None
    """What an engine or trainer that the operator did not make needs to join."""


def _never_down(field: str) -> dict[str, object]:
    return rule(
        f"!has(oldSelf.status) || !has(oldSelf.status.{field}) || "
        f"(has(self.status) && has(self.status.{field}) && self.status.{field} >= oldSelf.status.{field})",
        f"status.{field} never goes down and is never removed",
        path=".status",
    )


_RAISED_FOR_A_RESET = rule(
    "!has(oldSelf.status) || !has(oldSelf.status.targetEpoch) || !has(self.spec.resetEpoch) || !has(oldSelf.spec.resetEpoch)"
    " || self.spec.resetEpoch <= oldSelf.spec.resetEpoch || self.spec.resetEpoch > oldSelf.status.targetEpoch",
    "spec.resetEpoch must be raised above status.targetEpoch: that epoch is out already, so nothing would be reset",
    expression="'spec.resetEpoch %d would reset nothing, epoch %d is out already: set %d or higher'"
    ".format([self.spec.resetEpoch, oldSelf.status.targetEpoch, oldSelf.status.targetEpoch + 1])",
    path=".spec.resetEpoch",
)


class KVCachePool(ApiModel):
    """A set of engines that share KV, the tiers they share it through, and the epoch that names all of it."""

    model_config = ConfigDict(json_schema_extra=rules(NAME_RULE, _never_down("targetEpoch"), _never_down("epoch"), _RAISED_FOR_A_RESET))

    api_version: Annotated[Literal["epochkv.io/v1alpha1"], Field(default=API_VERSION)]
    kind: Annotated[Literal["KVCachePool"], Field(default="KVCachePool")]
    metadata: Metadata
    spec: KVCachePoolSpec
    """What the pool should be."""
    status: KVCachePoolStatus | None = None
    """What the pool is."""
