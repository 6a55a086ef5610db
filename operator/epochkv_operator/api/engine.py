"""InferenceEngine (`ie`): a set of equal vLLM pods that join a pool."""

from typing import Annotated, Any, Final, Literal

from pydantic import Field, WithJsonSchema

from epochkv_operator.api.base import (
    API_VERSION,
    NAME_RULE,
    PROTECTED_ENV_NAMES,
    PROTECTED_ENV_PREFIXES,
    PROTECTED_ENV_TEXT,
    Amount,
    ApiModel,
    Conditions,
    Count,
    Epoch,
    Image,
    Json,
    Metadata,
    ModelName,
    ModelSource,
    ObservedGeneration,
    PodSecurity,
    PodTemplate,
    PoolName,
    Revision,
    Save,
    Serve,
    StatusModel,
    VariableName,
    list_field,
    matching,
    own_defaults,
    rule,
    ruled,
    rules,
    shown,
)

FORBIDDEN_ARG: Final = "^--(kv[-_](t|o)|config(=|$))"
_OWNED_OPTIONS: Final = (
    "model|u(ds?)?|po?r?t?|ho?s?t?|te[a-z_-]*|rev[a-z]*|pi[a-z_-]*|nn[a-z]*|nod[a-z_-]*|mas[a-z_-]*|hea[a-z]*"
    "|(no[-_])?(da|enable[-_]ex)[a-z_-]*"
)
OWNED_ARG: Final = f"^(--({_OWNED_OPTIONS})(=.*)?|-(t|pp|dp|e|n|r).*)$"
SECRET_ARG: Final = "^--(api[-_]k|hf[-_]t)"
BLANK_ARG: Final = r"^(\s+-|--?[a-zA-Z][-a-zA-Z0-9_.]*\s)"
EC_ARG: Final = "^--ec[-_]t"

FORBIDDEN_ARG_TEXT: Final = (
    "belongs to the operator, as do --kv-transfer-config, --kv-offloading-* and --config, also abbreviated: remove it from spec.args;"
    " the pool named by spec.poolRef decides about KV"
)
OWNED_ARG_TEXT: Final = (
    "belongs to the operator, as do --model, --revision, --tensor-parallel-size, --pipeline-parallel-size, --data-parallel-*,"
    " --enable-expert-parallel, --nnodes, --node-rank, --master-*, --headless, --host, --port and --uds: use spec.model and"
    " spec.parallelism; engines listen on port 8000 of every address, as with --host=::"
)
SECRET_ARG_TEXT: Final = (
    "is a secret on a command line, for everybody to see who may read this object or list processes: remove it from spec.args, and set"
    " VLLM_API_KEY (for --api-key) or HF_TOKEN (for --hf-token) in spec.env with valueFrom.secretKeyRef"
)
SECRET_ENV: Final = ("VLLM_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
SECRET_ENV_TEXT: Final = "is a secret, for everybody to see who may read this object: give it with valueFrom.secretKeyRef, and not as value"
BLANK_ARG_TEXT: Final = (
    "spec.args has an option and a blank in one item, which vLLM does not split: write --max-model-len=2048, or two items,"
    " instead of '--max-model-len 2048'"
)
EC_ARG_TEXT: Final = "spec.args has --ec-transfer-config: encoder outputs of other engines are not named by the weights; remove it"


def _without(pattern: str, text: str, besides: str = "") -> Json:
    """No argument that `pattern` finds, besides one. The message has the option's name and never its value, which may be a secret."""
    return rule(
        (f"self == '{besides}' || " if besides else "") + f"!self.matches(r'{pattern}')",
        f"an option {text}",
        expression=f"'%s {text}'.format([self.split('=')[0]])",
        reason="FieldValueForbidden",  # with another reason, the API server would show the value
    )


Argument = Annotated[
    str,
    Field(
        max_length=4096,
        json_schema_extra=rules(
            _without(FORBIDDEN_ARG, FORBIDDEN_ARG_TEXT),
            _without(OWNED_ARG, OWNED_ARG_TEXT, "--host=::"),  # as engines listen anyway
            _without(SECRET_ARG, SECRET_ARG_TEXT),
            rule(f"!self.matches(r'{BLANK_ARG}')", BLANK_ARG_TEXT, reason="FieldValueForbidden"),
        ),
    ),
]
"""One argument."""


_COUNT_TEXT = "must be a number of replicas from 0 on, or a percentage from 0% to 100%, such as 1 or 25%"
_BOTH_ZERO = "maxUnavailable and maxSurge are both 0, so no pod could ever be replaced; raise one of them"
_UNEVEN = "tensor x pipeline ranks cannot be spread evenly over that many nodes; make it a multiple of nodes"
_SPLIT = "data cannot be spread evenly over that many nodes, and a node holds whole data-parallel ranks; make it a multiple of nodes"
_TWO_SOURCES = "spec.model.volume holds the model's files: remove source, revision and cache, which are for models that are downloaded"


IntOrPercent = Annotated[
    int | Annotated[str, Field(max_length=4)],
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "maxLength": 4,
            **rules(rule("type(self) == int ? self >= 0 && self <= 5000 : self.matches('^(100|[0-9]{1,2})%$')", _COUNT_TEXT)),
        }
    ),
]
"""A number of replicas, or a share of them."""


def is_zero(value: int | str) -> bool:
    """True for `0` and `0%`."""
    return value == 0 if isinstance(value, int) else not value.rstrip("%").strip("0")


def _cel_zero(field: str) -> str:
    return f"(type(self.{field}) == int ? self.{field} == 0 : self.{field}.matches('^0+%$'))"


class UpdateStrategy(ApiModel):
    """How pods are replaced when what they run changes."""

    model_config = ruled(rule(f"!{_cel_zero('maxUnavailable')} || !{_cel_zero('maxSurge')}", _BOTH_ZERO))

    max_unavailable: IntOrPercent = 1
    """Replicas that may be missing meanwhile. A node that is drained may take away as many, and always one. With `nodes` above 1, give a
    number or a `maxSurge`: LeaderWorkerSet rounds a percentage down, and refuses 0 of both."""
    max_surge: IntOrPercent = 0
    """Replicas that may be added meanwhile. None by default: there is rarely a free accelerator."""


def _ranks(maximum: int) -> Any:
    return Field(ge=1, le=maximum, json_schema_extra={"format": "int32"})


class Parallelism(ApiModel):
    """How one replica is spread over devices and nodes."""

    model_config = ruled(
        rule(
            "self.data > 1 || (self.tensor * self.pipeline) % self.nodes == 0",
            _UNEVEN,
            expression=f"'{_UNEVEN} (now %d and %d)'.format([self.tensor * self.pipeline, self.nodes])",
        ),
        rule(
            "self.data == 1 || self.data % self.nodes == 0",
            _SPLIT,
            expression=f"'{_SPLIT} (now %d and %d)'.format([self.data, self.nodes])",
        ),
    )

    tensor: Annotated[int, _ranks(64)] = 1
    """Tensor-parallel ranks."""
    pipeline: Annotated[int, _ranks(64)] = 1
    """Pipeline stages, each of `tensor` ranks."""
    data: Annotated[int, _ranks(256)] = 1
    """Data-parallel ranks, each with an engine core and a KV cache of its own, and with `tensor` x `pipeline` ranks. A dense model is
    copied; experts are spread over them."""
    expert: bool = False
    """Spread whole experts over the ranks (`--enable-expert-parallel`), and not slices of each. Only for mixtures of experts."""
    nodes: Annotated[int, _ranks(64)] = 1
    """Pods of one replica, each with the same number of ranks, and of whole data-parallel ranks where `data` is above 1. Above 1, a
    LeaderWorkerSet makes the pods: install it first (https://lws.sigs.k8s.io). `resources` are those of one pod."""

    @property
    def ranks_per_pod(self) -> int:
        """Ranks that share a pod."""
        return self.tensor * self.pipeline * self.data // self.nodes

    @property
    def engines_per_pod(self) -> int:
        """Data-parallel ranks that share a pod, or the one that it has a part of."""
        return max(1, self.data // self.nodes)


class ModelImage(ApiModel):
    """An OCI image or artifact whose files are the model's."""

    reference: Image
    """As in a container's `image`."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """As in a pod."""


ClaimName = Annotated[
    str, matching(253, "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "must be the name of a PersistentVolumeClaim: a-z, 0-9, '-' and '.'")
]
_NO_PARENT: Final = "must be a folder in the volume, without '..', such as qwen3/8b"
Folder = Annotated[
    str,
    matching(
        1024,
        r"^[A-Za-z0-9_.]\S*$",
        "must be a folder in the volume without a leading slash, such as qwen3/8b",
        rule("!('..' in self.split('/'))", _NO_PARENT, expression=shown(_NO_PARENT)),
    ),
]


class ModelVolume(ApiModel):
    """A volume with the model's files; exactly one kind."""

    model_config = ruled(rule("has(self.claimName) != has(self.image)", "spec.model.volume needs exactly one of claimName and image"))

    claim_name: ClaimName | None = None
    """A PersistentVolumeClaim in the same namespace."""
    image: ModelImage | None = None
    """An image. Nodes keep it like any other image."""
    path: Folder | None = None
    """Folder of the model in the volume. The whole volume when unset."""


class ModelCache(ApiModel):
    """A volume that keeps what was downloaded."""

    claim_name: ClaimName
    """A PersistentVolumeClaim in the same namespace. Pods on several nodes need one that they can mount at once (ReadWriteMany)."""


class Model(ApiModel):
    """What the engine serves."""

    model_config = ruled(
        rule("!has(self.volume) || !(has(self.source) || has(self.revision) || has(self.cache))", _TWO_SOURCES, path=".volume")
    )

    name: ModelName
    """Name under which the model is served, and where it is loaded from unless `source` or `volume` says otherwise."""
    revision: Revision | None = None
    """Revision to load: branch, tag or commit."""
    source: ModelSource | None = None
    """Path or repository to load the model from, such as a path in a volume that `template` mounts."""
    volume: ModelVolume | None = None
    """A volume with the model's files, mounted read-only at `/models`. Nothing is downloaded then."""
    cache: ModelCache | None = None
    """A volume that keeps downloads, mounted at `/cache`, so that a new pod does not download the model again."""


class PoolReference(ApiModel):
    """A pool in the same namespace."""

    model_config = ruled(
        rule(
            "self == oldSelf",
            "spec.poolRef is immutable: create a new InferenceEngine to move to another pool",
            reason="FieldValueForbidden",
        )
    )

    name: PoolName
    """Name of the KVCachePool."""


_WITHIN: Final = (
    "!(k in self.limits) || !isQuantity(string(self.requests[k])) || !isQuantity(string(self.limits[k]))"
    " || quantity(string(self.requests[k])).compareTo(quantity(string(self.limits[k]))) <= 0"
)


class ResourceRequirements(ApiModel):
    """Compute resources of a container, as in a pod."""

    model_config = ruled(
        rule(
            f"!has(self.requests) || !has(self.limits) || self.requests.all(k, {_WITHIN})",
            "a request is above its limit",
            expression=f"'requests.%s is %s, above limits.%s, which is %s: lower one or raise the other'.format("
            f"self.requests.filter(k, !({_WITHIN})).map(k, [k, string(self.requests[k]), k, string(self.limits[k])])[0])",
        )
    )

    limits: Annotated[dict[str, Amount] | None, Field(max_length=32)] = None
    """Upper bounds by resource name, such as `nvidia.com/gpu`, `memory`."""
    requests: Annotated[dict[str, Amount] | None, Field(max_length=32)] = None
    """What the scheduler reserves, by resource name."""


class KeySelector(ApiModel):
    """One key of a ConfigMap or Secret in the same namespace."""

    name: Annotated[str, Field(min_length=1, max_length=253)]
    """Name of the object."""
    key: Annotated[str, Field(min_length=1, max_length=253)]
    """Key in it."""
    optional: bool | None = None
    """True: the variable is left out when object or key is missing."""


class FieldSelector(ApiModel):
    """A field of the pod."""

    field_path: Annotated[str, Field(min_length=1, max_length=512)]
    """Such as `status.hostIP`."""


class ResourceFieldSelector(ApiModel):
    """A resource bound of the container."""

    resource: Annotated[str, Field(min_length=1, max_length=253)]
    """Such as `limits.cpu`."""


class EnvVarSource(ApiModel):
    """Where a variable's value comes from; exactly one."""

    model_config = ruled(
        rule(
            "[has(self.configMapKeyRef), has(self.secretKeyRef), has(self.fieldRef), has(self.resourceFieldRef)].filter(x, x).size() == 1",
            "env valueFrom needs exactly one of configMapKeyRef, secretKeyRef, fieldRef, resourceFieldRef",
        )
    )

    config_map_key_ref: KeySelector | None = None
    """A key of a ConfigMap."""
    secret_key_ref: KeySelector | None = None
    """A key of a Secret."""
    field_ref: FieldSelector | None = None
    """A field of the pod."""
    resource_field_ref: ResourceFieldSelector | None = None
    """A resource bound of the container."""


class EnvVar(ApiModel):
    """One environment variable."""

    model_config = ruled(
        rule("!has(self.value) || !has(self.valueFrom)", "an env entry has both value and valueFrom: keep one"),
        rule(
            f"!has(self.value) || !(self.name in {list(SECRET_ENV)})",
            f"a variable {SECRET_ENV_TEXT}",
            expression=f"'%s {SECRET_ENV_TEXT}'.format([self.name])",
            reason="FieldValueForbidden",  # with another reason, the API server would show the value
        ),
    )

    name: VariableName
    """Name of the variable."""
    value: Annotated[str | None, Field(max_length=16384)] = None
    """Its value."""
    value_from: EnvVarSource | None = None
    """Where its value comes from."""


_PROTECTED_CEL = " || ".join(
    [
        "e.name in [" + ", ".join(f"'{name}'" for name in PROTECTED_ENV_NAMES) + "]",
        *(f"e.name.startsWith('{prefix}')" for prefix in PROTECTED_ENV_PREFIXES),
    ]
)


class InferenceEngineSpec(ApiModel):
    """What the engine should be."""

    model_config = ruled(
        rule(
            "has(self.poolRef) == has(oldSelf.poolRef)",
            "spec.poolRef cannot be added or removed: create a new InferenceEngine",
            path=".poolRef",
            reason="FieldValueForbidden",
        ),
        rule(
            "!has(self.serve) || has(self.poolRef)",
            "spec.serve needs spec.poolRef: without a pool nobody tells which weights the engine holds; remove serve",
            path=".serve",
            reason="FieldValueForbidden",
        ),
        rule(
            f"!has(self.poolRef) || !has(self.args) || !self.args.exists(a, a.matches('{EC_ARG}'))",
            EC_ARG_TEXT,
            path=".args",
            reason="FieldValueForbidden",
        ),
    )

    pool_ref: PoolReference | None = None
    """The pool to join, in the same namespace. Without it, and while the pool does not exist, the engine serves without shared
    KV. Immutable."""
    model: Model
    """What to serve."""
    image: Image | None = None
    """Image with vLLM and the EpochKV connector. The operator's own default when unset."""
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """As in a pod."""
    replicas: Annotated[int, Field(ge=0, le=5000, json_schema_extra={"format": "int32"})] = 1
    """Engine pods; groups of `parallelism.nodes` pods where that is above 1. `kubectl scale ie` and autoscalers change it."""
    parallelism: Annotated[Parallelism, own_defaults(Parallelism)]
    """How one replica is spread over devices and nodes."""
    update_strategy: Annotated[UpdateStrategy, own_defaults(UpdateStrategy)]
    """How pods are replaced when what they run changes. The condition `Progressing` shows how far that is."""
    args: Annotated[tuple[Argument, ...] | None, list_field(128, kind="atomic")] = None
    """Arguments for vLLM's OpenAI server, added to the operator's own and winning over its defaults. An option and its value are two
    items, or one with `=`. Secrets go into `env`, as `VLLM_API_KEY` and `HF_TOKEN`, with `valueFrom.secretKeyRef`."""
    env: Annotated[
        tuple[EnvVar, ...] | None,
        list_field(
            128,
            key="name",
            checks=rules(
                rule(f"!self.exists(e, {_PROTECTED_CEL})", f"{PROTECTED_ENV_TEXT}: remove them from spec.env", reason="FieldValueForbidden")
            ),
        ),
    ] = None
    """Environment variables."""
    resources: ResourceRequirements | None = None
    """Compute resources of the engine container. The pool's L1 capacity is added to the memory given here."""
    save: Save | None = None
    """What L1 and L2 get of a request; the pool's `save` when unset."""
    serve: Serve | None = None
    """Which weights the pods must hold to be in the engine's Service; the pool's `serve` when unset."""
    pod_security: PodSecurity | None = None
    """`restricted`: the pods run as user and group 65532. `platform`: the ids are left to a platform that assigns them, such as
    OpenShift. The operator's own default when unset (chart value `podSecurity`). RDMA runs as root with either."""
    template: PodTemplate | None = None
    """Overrides of the engine pods; the operator's container is named `engine`."""


class InferenceEngineStatus(StatusModel):
    """What the engine is."""

    conditions: Conditions | None = None
    """`Ready`, `Available`, `Progressing`; with a poolRef also `PoolBound`, `EpochCurrent` and `TiersUsable` (once the pool exists)."""
    observed_generation: ObservedGeneration | None = None
    """The `metadata.generation` this status was computed from. -1: not reconciled yet."""
    replicas: Count | None = None
    """Pods."""
    ready_replicas: Count | None = None
    """Ready pods."""
    updated_replicas: Count | None = None
    """Pods made from the current spec."""
    epoch_replicas: Count | None = None
    """Replicas whose every data-parallel rank reported the pool's target epoch."""
    epoch: Epoch | None = None
    """Lowest epoch that a data-parallel rank of this engine reported."""
    weights: Annotated[str | None, Field(max_length=256)] = None
    """Weights that most ranks of its pods hold and how many of them, such as `3f2a9c1e 3/4`; for the printer column."""
    selector: Annotated[str | None, Field(max_length=1024)] = None
    """Label selector of the pods, for the scale subresource."""


class InferenceEngine(ApiModel):
    """A set of equal vLLM pods, with the EpochKV connector configured for one pool."""

    model_config = ruled(NAME_RULE)

    api_version: Annotated[Literal["epochkv.io/v1alpha1"], Field(default=API_VERSION)]
    kind: Annotated[Literal["InferenceEngine"], Field(default="InferenceEngine")]
    metadata: Metadata
    spec: InferenceEngineSpec
    """What the engine should be."""
    status: InferenceEngineStatus | None = None
    """What the engine is."""
