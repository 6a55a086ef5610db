"""KVCachePool (`kvp`): the engines that share KV, the tiers they share it through, and the epoch that names all of it."""

from typing import Annotated, Literal

from pydantic import Field

from epochkv_fence.protocol.messages import MAX_EPOCH_STEP
from epochkv_fence.protocol.pool import margin_seconds
from epochkv_operator.api.base import (
    API_VERSION,
    NAME_RULE,
    ApiModel,
    Conditions,
    Count,
    Device,
    Epoch,
    HostPort,
    Image,
    MasterAddress,
    Metadata,
    MetadataServer,
    Number,
    ObservedGeneration,
    PodSecurity,
    PodTemplate,
    Save,
    Serve,
    Size,
    StatusModel,
    Timestamp,
    list_field,
    matching,
    own_defaults,
    rule,
    ruled,
)


class Ssd(ApiModel):
    """Disk of each store pod. Blocks are copied to it as they come, and found there when memory has no room for them any more."""

    model_config = ruled(
        rule(
            "type(self.capacity) == int ? self.capacity >= 4294967296 : "
            "(!isQuantity(self.capacity) || quantity(self.capacity).compareTo(quantity('4Gi')) >= 0)",
            "store.ssd.capacity must be at least 4Gi: Mooncake leaves a part of the disk free; make it larger, or remove ssd",
            path=".capacity",
        )
    )

    capacity: Size
    """Bytes of disk for each store pod: the size of a volume that is made for the pod and deleted with it. Mooncake fills nine tenths
    of the volume's file system; then the oldest blocks go."""
    storage_class_name: Annotated[str | None, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")] = None
    """Class of the volume; the cluster's default when unset. For another kind of volume, give `template` a volume named `ssd`: a file
    system of its own, as Mooncake fills it."""


class Reset(ApiModel):
    """How a reset treats slow or dead engines, and old KV."""

    lease_seconds: Annotated[int, Field(ge=1, le=3600, json_schema_extra={"format": "int32"})] = 30
    """Seconds an engine may use an epoch without hearing from the hub again. A stalled or unreachable
    engine delays the publication of a new epoch by at most this time and a margin for clock rates (10 %, at least 1 s). Engines send a
    heartbeat every third of it. It never goes down: a new hub could not know that longer leases are still out."""
    reclaim_policy: Literal["Delete", "RemoveAll", "Retain"] = "Delete"
    """How the distributed store gets rid of old KV, which no engine can find any more. `Delete`: after publication, one engine removes
    it; nothing waits for that. `RemoveAll`: after publication, the hub empties the whole store; the operator has to run the store.
    `Retain`: the store's own eviction removes it. `Delete` and `RemoveAll` also remove KV of weights that no live engine has reported for
    10 minutes."""

    @property
    def fence_timeout_seconds(self) -> float:
        """How long after a grant nobody can still rely on it: a lease and its margin."""
        return self.lease_seconds + margin_seconds(self.lease_seconds)


class Keys(ApiModel):
    """The key pair with which engines and trainers of the pool speak to the hub."""

    generation: Annotated[int, Field(ge=0, le=2**31 - 1, json_schema_extra={"format": "int32"})] = 0
    """Raise it to replace the client key pair in the pool's Secret. Engines read the new pair without a restart. The hub accepts the old
    pair until no engine has used it for a lease and its margin. It never goes down."""


class Local(ApiModel):
    """L1: host memory inside each engine pod."""

    capacity: Size
    """Bytes in each engine pod, which its worker ranks share evenly, those of all its data-parallel ranks. Added to the memory that the
    pod asks for."""


class EtcdBackend(ApiModel):
    """An etcd cluster that somebody else runs, without TLS or passwords, which Mooncake has none of."""

    endpoints: Annotated[tuple[HostPort, ...], list_field(9, kind="set", min_length=1)]
    """`host:port` of each member, without a scheme."""


class HighAvailability(ApiModel):
    """How several masters agree on a leader."""

    model_config = ruled(
        rule(
            "(self.backend == 'Etcd') == has(self.etcd)",
            "highAvailability.etcd is needed with backend: Etcd and only then: set etcd.endpoints, or backend: None",
            path=".etcd",
        )
    )

    backend: Literal["None", "Etcd"] = "None"
    """`Etcd`: leader election and an operation log in etcd, so the index of stored blocks survives a master. Mooncake never shortens the
    log: about 0.4 KB for each block. `None`: one master; when it restarts, the cache starts cold."""
    etcd: EtcdBackend | None = None
    """Where etcd is. Needed with `backend: Etcd`."""


class Master(ApiModel):
    """The Mooncake masters: the index of what is stored where."""

    model_config = ruled(
        rule(
            "self.replicas == 1 || self.highAvailability.backend != 'None'",
            "master.replicas is above 1 but highAvailability.backend is None: set backend: Etcd or replicas: 1",
            expression="'spec.distributed.mooncake.master.replicas is %d but highAvailability.backend is None: "
            "set backend: Etcd or replicas: 1'.format([self.replicas])",
            path=".replicas",
        )
    )

    replicas: Annotated[int, Field(ge=1, le=5, json_schema_extra={"format": "int32"})] = 1
    """Masters. More than one needs `highAvailability.backend: Etcd`; one of them leads, the others stand by."""
    high_availability: Annotated[HighAvailability, own_defaults(HighAvailability)]
    """How several masters agree on a leader."""
    template: PodTemplate | None = None
    """Overrides of the master pods; the operator's container is named `master`."""


class Store(ApiModel):
    """The Mooncake stores: the memory that L2 is made of, and disk."""

    replicas: Annotated[int, Field(ge=1, le=1000, json_schema_extra={"format": "int32"})] = 1
    """Store pods. `kubectl scale kvp` changes it. A store that is removed takes its blocks with it, and engines recompute them."""
    segment_size: Size
    """Bytes each store pod gives. Its memory limit is this plus what the process itself needs."""
    ssd: Ssd | None = None
    """Disk of each store pod. Adding or removing it restarts master and stores, so the cache starts cold."""
    template: PodTemplate | None = None
    """Overrides of the store pods; the operator's container is named `store`."""


_ONLY_RDMA = "transport.resourceName and gidIndex are only for RDMA: remove them, or set protocol: RDMA"


class Transport(ApiModel):
    """How blocks travel between engines and stores."""

    model_config = ruled(
        rule(
            "self.protocol != 'RDMA' || (has(self.devices) && size(self.devices) > 0)",
            "transport.protocol RDMA needs transport.devices: name at least one, such as mlx5_0, or set protocol: TCP",
            path=".devices",
            reason="FieldValueRequired",
        ),
        rule(
            "self.protocol == 'RDMA' || !has(self.devices)",
            "transport.devices is only for RDMA: remove devices, or set protocol: RDMA",
            path=".devices",
            reason="FieldValueForbidden",
        ),
        rule("self.protocol == 'RDMA' || (!has(self.resourceName) && !has(self.gidIndex))", _ONLY_RDMA, reason="FieldValueForbidden"),
    )

    protocol: Literal["TCP", "RDMA"] = "TCP"
    """`TCP` runs under Pod Security `restricted`. `RDMA` needs a namespace at level `privileged`: store and engine pods run as root
    with `IPC_LOCK` and `SYS_RESOURCE`. InfiniBand needs no more. With RoCE, pods need the network devices, too: `hostNetwork: true` and
    `dnsPolicy: ClusterFirstWithHostNet` in the `template` of stores and engines, or networks that your CNI attaches by an annotation."""
    devices: Annotated[tuple[Device, ...] | None, list_field(16, kind="set")] = None
    """RDMA devices, such as `mlx5_0`."""
    resource_name: Annotated[str | None, Field(max_length=253, pattern=r"^[a-z0-9][-a-z0-9.]*/[A-Za-z0-9][-A-Za-z0-9_.]*$")] = None
    """What your RDMA device plugin calls its devices, such as `rdma/hca_shared_devices_a`; each pod asks for one. Without it, pods mount
    the host's `/dev/infiniband`, and the container runtime has to let them open what is there."""
    gid_index: Annotated[int | None, Field(ge=0, le=255, json_schema_extra={"format": "int32"})] = None
    """Index of the address that RoCE devices use (`MC_GID_INDEX`), where Mooncake finds none or a wrong one by itself."""


class Mooncake(ApiModel):
    """A Mooncake store that the operator runs."""

    pod_security: PodSecurity | None = None
    """`restricted`: masters and stores run as user and group 65532. `platform`: the ids are left to a platform that assigns them, such as
    OpenShift. The operator's own default when unset (chart value `podSecurity`). RDMA runs as root with either."""
    image: Image | None = None
    """Image of master and stores; the engines' Mooncake client must have the same version. The operator's own default when unset."""
    master: Annotated[Master, own_defaults(Master)]
    """The masters."""
    store: Store
    """The stores."""
    transport: Annotated[Transport, own_defaults(Transport)]
    """How blocks travel between engines and stores."""


class External(ApiModel):
    """A Mooncake store that somebody else runs."""

    master_address: MasterAddress
    """`host:port` of the master, or `etcd://host:port;host:port` when it is highly available."""
    metadata_server: MetadataServer = "P2PHANDSHAKE"
    """Transfer Engine metadata server; `P2PHANDSHAKE` needs none."""
    cluster_id: Annotated[str | None, Field(min_length=1, max_length=253, pattern=r"^\S+$")] = None
    """The `--cluster_id` of highly available masters (`etcd://`); theirs and Mooncake's own default is `mooncake_cluster`. With another
    one, no client finds the leader."""
    transport: Annotated[Transport, own_defaults(Transport)]
    """How blocks travel between engines and the store: as the store's own processes do."""


class Distributed(ApiModel):
    """L2: a store that all engines of the pool share."""

    model_config = ruled(
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

    mooncake: Mooncake | None = None
    """A Mooncake store that the operator runs."""
    external: External | None = None
    """A Mooncake store that somebody else runs."""


_LABEL_VALUE = Annotated[str, Field(max_length=63, pattern="^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$")]


class Requirement(ApiModel):
    """What a label has to be."""

    model_config = ruled(
        rule(
            "(self.operator in ['In', 'NotIn']) == (has(self.values) && size(self.values) > 0)",
            "values are needed with In and NotIn, and only then",
            path=".values",
        )
    )

    key: Annotated[str, Field(min_length=1, max_length=317)]
    """The label."""
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    """How it relates to the values."""
    values: Annotated[tuple[_LABEL_VALUE, ...] | None, list_field(64, kind="atomic")] = None
    """Values, for `In` and `NotIn`."""


class LabelSelector(ApiModel):
    """Labels, as elsewhere in Kubernetes. Without any, everything matches."""

    match_labels: Annotated[dict[str, _LABEL_VALUE] | None, Field(max_length=32)] = None
    """Labels that there have to be."""
    match_expressions: Annotated[tuple[Requirement, ...] | None, list_field(32, kind="atomic")] = None
    """What other labels have to be."""

    def __str__(self) -> str:
        """As `labelSelector` of a LIST."""
        words = {"In": "{key} in ({values})", "NotIn": "{key} notin ({values})", "Exists": "{key}", "DoesNotExist": "!{key}"}
        found = [f"{key}={value}" for key, value in (self.match_labels or {}).items()]
        found += [words[it.operator].format(key=it.key, values=",".join(it.values or ())) for it in self.match_expressions or ()]
        return ",".join(found)


class NetworkPolicy(ApiModel):
    """Who may reach the pool's ports; Mooncake itself has no authentication."""

    mode: Literal["Enabled", "Disabled"] = "Enabled"
    """`Enabled`: master and store accept only pods of this namespace with the label `epochkv.io/pool: <pool>`. All engines have it; give
    it to trainers that start engines. The master's admin port accepts only the operator and namespaces with the label
    `epochkv.io/scrape: "true"`. The engines' transfer ports accept only pods of the pool."""


class AllowedNamespaces(ApiModel):
    """Namespaces whose pods may join the pool, beside its own. The operator keeps copies of the pool's ConfigMap and Secret there. Whoever
    may read Secrets there can read all KV of the pool."""

    model_config = ruled(
        rule(
            "has(self.names) || has(self.selector)",
            "spec.allowedNamespaces has neither names nor selector: set one of them, or remove allowedNamespaces",
            reason="FieldValueRequired",
        )
    )

    names: Annotated[
        tuple[Annotated[str, matching(63, "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$", "must be the name of a namespace")], ...] | None,
        list_field(256, kind="set", min_length=1),
    ] = None
    """By their names."""
    selector: LabelSelector | None = None
    """By their labels: those that match. Where the operator serves only some namespaces, it cannot look, so use `names`."""


class KVCachePoolSpec(ApiModel):
    """What the pool should be."""

    model_config = ruled(
        rule(
            "!has(oldSelf.resetEpoch) || (has(self.resetEpoch) && self.resetEpoch >= oldSelf.resetEpoch)",
            "spec.resetEpoch never goes down and cannot be removed: to reset, set it above status.targetEpoch",
            expression="'spec.resetEpoch never goes down: it is %d; to reset, set it above status.targetEpoch'"
            ".format([oldSelf.resetEpoch])",
            path=".resetEpoch",
        ),
        rule(
            f"!has(self.resetEpoch) || self.resetEpoch <= (has(oldSelf.resetEpoch) ? oldSelf.resetEpoch : 0) + {MAX_EPOCH_STEP}",
            f"spec.resetEpoch rises by at most {MAX_EPOCH_STEP} at a time, because it never goes down again:"
            " set it to status.targetEpoch + 1",
            path=".resetEpoch",
        ),
        rule(
            "!has(self.reset.leaseSeconds) || !has(oldSelf.reset) || !has(oldSelf.reset.leaseSeconds)"
            " || self.reset.leaseSeconds >= oldSelf.reset.leaseSeconds",
            "spec.reset.leaseSeconds never goes down: a longer lease may still be out; keep it, or create a new pool",
            expression="'spec.reset.leaseSeconds never goes down: it is %d, and a lease of that length may still be out; keep it, or "
            "create a new pool'.format([oldSelf.reset.leaseSeconds])",
            path=".reset.leaseSeconds",
        ),
        rule(
            "!has(self.reset) || !has(self.reset.reclaimPolicy) || self.reset.reclaimPolicy != 'RemoveAll'"
            " || !has(self.distributed) || !has(self.distributed.external)",
            "spec.reset.reclaimPolicy RemoveAll would wipe a store that others may share: use Delete or Retain with distributed.external",
            path=".reset.reclaimPolicy",
        ),
        rule(
            "!has(self.keys) || !has(self.keys.generation) || !has(oldSelf.keys) || !has(oldSelf.keys.generation)"
            " || self.keys.generation >= oldSelf.keys.generation",
            "spec.keys.generation never goes down: to replace the key pair, set it higher than it is",
            expression="'spec.keys.generation never goes down: it is %d; to replace the key pair, set %d or higher'"
            ".format([oldSelf.keys.generation, oldSelf.keys.generation + 1])",
            path=".keys.generation",
        ),
        rule(
            "has(self.local) || has(self.distributed)",
            "spec has neither local nor distributed: set local.capacity for L1, distributed for L2, or both",
            reason="FieldValueRequired",
        ),
    )

    reset_epoch: Epoch = 0
    """Raise it above `status.targetEpoch` to make all KV of the pool unreachable. `status.epoch` reaches it when that is proved. At or
    below the target, which engines and trainers raise, too, nothing is reset, and `EpochConverged` has the reason `EpochAhead`. It never
    goes down. Leave it out of charts and GitOps manifests that do not own resets."""
    reset: Annotated[Reset, own_defaults(Reset)]
    """How a reset treats slow or dead engines, and old KV."""
    keys: Annotated[Keys, own_defaults(Keys)]
    """The key pair with which engines and trainers of the pool speak to the hub."""
    local: Local | None = None
    """L1: host memory inside each engine pod."""
    distributed: Distributed | None = None
    """L2: a store that all engines of the pool share. Adding or removing it restarts the engines one by one."""
    save: Save | None = None
    """What L1 and L2 get of a request: `All` (prompt and answer, also when unset), `Prompts`, or a number of tokens from its first on. A
    request may say otherwise, and so may an InferenceEngine. Changing it restarts the engines one by one."""
    stamp: Literal["All", "Asked"] | None = None
    """Which answers say which weights made their tokens: `All`, or those whose request asks for it (`Asked`, also when unset). Changing it
    restarts the engines one by one."""
    media_ids: Literal["Trusted", "Untrusted"] | None = None
    """Whether ids that clients give to pictures, videos and audio (`uuid`) stand for their content, so that nobody uses one again for other
    bytes. Unless they are `Trusted`, blocks behind such an id reach neither L1 nor L2 without a `cache_salt`. Changing it restarts the
    engines one by one."""
    network_policy: Annotated[NetworkPolicy, own_defaults(NetworkPolicy)]
    """Who may reach the pool's ports."""
    allowed_namespaces: AllowedNamespaces | None = None
    """Other namespaces whose pods may join the pool, if they name its namespace. Without it, those of its own namespace may."""
    serve: Serve | None = None
    """Which weights the engines' pods must hold to be in their Services; an InferenceEngine's own `serve` replaces this one. Any weights
    when unset."""


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
    """When it was asked for, as far as the hub knows; else when it was recorded."""
    completion_time: Timestamp | None = None
    """When it was published; absent while the reset is open."""
    duration_milliseconds: Annotated[int | None, Field(json_schema_extra={"format": "int64"})] = None
    """From when the hub first saw that it was asked for to its publication, by the hub's own clock."""
    laggards: Annotated[tuple[Laggard, ...] | None, list_field(16, key="name")] = None
    """Up to 16 engines that the reset waits for."""


class EnginesStatus(StatusModel):
    """The engines heard from."""

    total: Count = 0
    """Engine processes (one per data-parallel rank) with a live or recent lease."""
    converged: Count = 0
    """Of these, at the target epoch."""
    external: Count = 0
    """Of these, in processes that the operator did not start."""
    old_epoch_requests: Number = 0
    """Requests still running that were admitted under an older epoch; they see only what they held already."""
    summary: Annotated[str, Field(max_length=64)] = ""
    """`converged/total`, for the printer column."""


class ExternalEngine(StatusModel):
    """An engine that joined without the operator having made it."""

    name: Annotated[str, Field(max_length=253)]
    """The name under which it reports, with its rank; where several report under one name, with the start of the instance's id."""
    pod: Annotated[str | None, Field(max_length=253)] = None
    """Its pod, if it is in one."""
    namespace: Annotated[str | None, Field(max_length=253)] = None
    """The namespace of its pod."""
    epoch: Epoch | None = None
    """The epoch it reported last."""
    weights: Annotated[str | None, Field(max_length=64)] = None
    """The weights it holds, by the start of their id; absent while they are unknown."""
    rank: Number | None = None
    """Its data-parallel rank."""
    old_epoch_requests: Number | None = None
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


class StoreStatus(StatusModel):
    """The stores that the operator runs."""

    replicas: Count = 0
    """Pods."""
    ready_replicas: Count = 0
    """Ready pods."""
    selector: Annotated[str | None, Field(max_length=1024)] = None
    """Label selector of the pods, for the scale subresource."""


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


class ServedWeights(StatusModel):
    """Weights whose pods serve, where `serve.weights` is `Converged`."""

    namespace: Annotated[str, Field(max_length=253)]
    """Of the engines that they are the weights of."""
    fingerprint: Annotated[str, Field(max_length=253)]
    """Of the same engines: of model, layout and all else that decides the bytes of KV."""
    id: WeightsId
    """Digest of the weights, 32 hex digits."""


class KVCachePoolStatus(StatusModel):
    """What the pool is. `status.epoch` is the proof: no engine finds KV that was named under an older epoch."""

    model_config = ruled(
        rule("!has(self.epoch) || (has(self.targetEpoch) && self.epoch <= self.targetEpoch)", "status.epoch cannot pass status.targetEpoch")
    )

    conditions: Conditions | None = None
    """`Ready`, `MasterAvailable` and `StoreAvailable` (with a store that the operator runs), `EpochConverged`,
    `WeightsConverged`, `ServingGate` (where `serve.weights` is not `Any`), `TiersUsable`, `Drained`, `Reclaimed` (with a store, unless
    `reclaimPolicy` is `Retain`), `KeysRotated` (once `keys.generation` was raised), `NamespacesAllowed` (with `allowedNamespaces`)."""
    observed_generation: ObservedGeneration | None = None
    """The `metadata.generation` this status was computed from. -1: not reconciled yet."""
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
    """What trainers called weights: the first, those of weights that engines hold, and the newest; 16."""
    served_weights: Annotated[tuple[ServedWeights, ...] | None, list_field(256, key="namespace fingerprint")] = None
    """Weights that serve with `serve.weights: Converged`. While an engine holds them, they move only to weights that more engines got by a
    push."""
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


def _never_down(field: str) -> dict[str, object]:
    return rule(
        f"!has(oldSelf.status) || !has(oldSelf.status.{field}) || "
        f"(has(self.status) && has(self.status.{field}) && self.status.{field} >= oldSelf.status.{field})",
        f"status.{field} never goes down and is never removed",
        path=".status",
    )


class KVCachePool(ApiModel):
    """A set of engines that share KV, the tiers they share it through, and the epoch that names all of it."""

    model_config = ruled(NAME_RULE, _never_down("targetEpoch"), _never_down("epoch"))

    api_version: Annotated[Literal["epochkv.io/v1alpha1"], Field(default=API_VERSION)]
    kind: Annotated[Literal["KVCachePool"], Field(default="KVCachePool")]
    metadata: Metadata
    spec: KVCachePoolSpec
    """What the pool should be."""
    status: KVCachePoolStatus | None = None
    """What the pool is."""

    @property
    def mooncake(self) -> Mooncake | None:
        """The store that the operator runs for the pool, if it does."""
        return self.spec.distributed.mooncake if self.spec.distributed is not None else None
