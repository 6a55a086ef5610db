"""What both custom resources share: the base model, rules in CEL, values with a rule of their own, pod overrides, conditions.

The models are the single source of the API: `generate.py` turns them into CRDs. The API server judges the rules in CEL: what the operator
reads has passed them. `epochkv plan` judges files alone by the same rules (`rules.py`). The models check types, enums, bounds and what is
required, as the schema does.
"""

from typing import Annotated, Any, Final, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic.alias_generators import to_camel

from epochkv_fence import quantity

GROUP = "epochkv.io"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
MANAGED_BY = "epochkv-operator"
POOL_LABEL = "epochkv.io/pool"
MANAGED_BY_LABEL: Final = "app.kubernetes.io/managed-by"
OURS: Final = {MANAGED_BY_LABEL: MANAGED_BY, "app.kubernetes.io/part-of": "epochkv"}
"""Labels of all that the operator makes."""
SHARED_LABEL: Final = "epochkv.io/shared"
"""Of a ConfigMap by which pods join a pool of another namespace. Without it, none joins any more."""
POOL_NAMESPACE: Final = "epochkv.io/pool-namespace"
"""Annotation beside the pool's label where the pool is in another namespace: of pods, and of what the operator keeps for them there."""
ENGINE_LABEL = "epochkv.io/engine"
NAME_PATTERN = "^[a-z]([-a-z0-9]*[a-z0-9])?$"
NAME_MAX_LENGTH = 40
PROTECTED_ENV_NAMES = ("PYTHONHASHSEED", "POD_NAME", "POD_NAMESPACE", "POD_IP")
PROTECTED_ENV_PREFIXES = ("MOONCAKE_", "MC_", "EPOCHKV_")
PROTECTED_ENV_TEXT = "PYTHONHASHSEED, POD_NAME, POD_NAMESPACE, POD_IP, MOONCAKE_*, MC_* and EPOCHKV_* belong to the operator"

Json = dict[str, Any]


class ApiModel(BaseModel):
    """Frozen, camelCase outside, snake_case inside; unknown fields and silent conversions are errors. Null is as good as nothing."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, alias_generator=to_camel, serialize_by_alias=True, use_attribute_docstrings=True
    )

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, given: Any) -> Any:
        return {name: value for name, value in given.items() if value is not None} if isinstance(given, dict) else given


class StatusModel(BaseModel):
    """Part of a status. Unknown fields are ignored: a newer operator may have written them, and this one must still start."""

    model_config = ConfigDict(**{**ApiModel.model_config, "extra": "ignore"})


def rule(cel: str, message: str, *, expression: str | None = None, path: str | None = None, reason: str = "FieldValueInvalid") -> Json:
    """One `x-kubernetes-validations` entry. `message` is used when `expression` (a CEL messageExpression) fails."""
    entry: Json = {"rule": cel, "message": message, "reason": reason}
    if expression is not None:
        entry["messageExpression"] = expression
    if path is not None:
        entry["fieldPath"] = path
    return entry


def rules(*entries: Json) -> Json:
    """Schema extension carrying CEL rules, for `json_schema_extra`."""
    return {"x-kubernetes-validations": list(entries)}


def ruled(*entries: Json) -> ConfigDict:
    """`model_config` of a model with these rules."""
    return ConfigDict(json_schema_extra=rules(*entries))


def shown(message: str) -> str:
    """A messageExpression: the value, then what is wrong. The API server itself shows the value of few types."""
    return f"\"'%s' {message}\".format([self])"


def text(max_length: int, *entries: Json) -> Any:
    """A string that is not empty, with its rules."""
    return Field(min_length=1, max_length=max_length, json_schema_extra=rules(*entries))


def matching(max_length: int, pattern: str, message: str, *entries: Json) -> Any:
    """The same, which `pattern` (RE2, from `^` to `$`) matches. A `pattern` of the schema would refuse with the pattern alone."""
    return text(max_length, rule(f"self.matches(r'{pattern}')", message, expression=shown(message)), *entries)


def int_or_string(max_length: int, *entries: Json) -> WithJsonSchema:
    return WithJsonSchema({"x-kubernetes-int-or-string": True, "maxLength": max_length, **rules(*entries)})


def list_field(max_length: int, *, key: str = "", kind: str = "", min_length: int | None = None, checks: Json | None = None) -> Any:
    """A list: a map by `key` (or several), or of the list type `kind`. `checks` are rules on the whole list."""
    merged: Json = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": key.split()} if key else {"x-kubernetes-list-type": kind}
    return Field(strict=False, min_length=min_length, max_length=max_length, json_schema_extra=merged | (checks or {}))


def own_defaults(model: type[ApiModel]) -> Any:
    """A nested object whose default is exactly its own defaults, so that its rules hold on it."""
    return Field(default_factory=model, json_schema_extra={"default": model().model_dump(exclude_none=True)})


def is_protected_env(name: str) -> bool:
    """True for variables that only the operator may set."""
    return name in PROTECTED_ENV_NAMES or name.startswith(PROTECTED_ENV_PREFIXES)


def _parsed(value: int | str) -> int | str:
    """Planning counts with it. Raises `ValueError`."""
    quantity.parse(value)
    return value


def _amount(smallest: int, least: str, message: str) -> WithJsonSchema:
    at_least = f"type(self) == int ? self >= {smallest} : (isQuantity(self) && quantity(self).compareTo(quantity('{least}')) >= 0)"
    at_most = f"type(self) == int ? self <= {2**50} : (!isQuantity(self) || quantity(self).compareTo(quantity('1Pi')) <= 0)"
    too_large = "is above 1Pi: check the unit; give a size such as 64Gi"
    return int_or_string(32, rule(at_least, message, expression=shown(message)), rule(at_most, too_large, expression=shown(too_large)))


_Quantity = Annotated[int | Annotated[str, Field(max_length=32)], AfterValidator(_parsed)]
Size = Annotated[_Quantity, _amount(2**20, "1Mi", "must be a Kubernetes quantity of at least 1Mi, such as 64Gi")]
"""Bytes, as an integer or a quantity."""
Amount = Annotated[_Quantity, _amount(0, "0", "must be a Kubernetes quantity that is not negative, such as 2 or 16Gi")]
"""An amount of a compute resource."""

_SAVE: Final = "must be All, Prompts, or the number of tokens of a request that are saved, from its first on"
_SAVED: Final = f"type(self) == int ? self >= 0 && self <= {2**40} : self in ['All', 'Prompts']"
Save = Annotated[int | str, int_or_string(16, rule(_SAVED, _SAVE, expression=shown(_SAVE)))]
"""What the tiers get of a request."""

_HOST: Final = r"([a-zA-Z0-9]([-a-zA-Z0-9.]*[a-zA-Z0-9.])?|\[[0-9a-fA-F:.]+\])"
_PORT: Final = "([1-9][0-9]{0,3}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-5])"
_HOST_PORT: Final = f"{_HOST}:{_PORT}"
HostPort = Annotated[str, matching(253, f"^{_HOST_PORT}$", "must be host:port without a scheme, such as etcd-0.example:2379")]
MasterAddress = Annotated[
    str,
    matching(
        1024,
        f"^({_HOST_PORT}|etcd://{_HOST_PORT}(;{_HOST_PORT})*)$",
        "must be host:port, such as mooncake.example:50051, or etcd://host:port;host:port",
    ),
]
MetadataServer = Annotated[
    str,
    matching(
        1024,
        rf"^(P2PHANDSHAKE|([a-z]+://)?{_HOST_PORT}([;,]{_HOST_PORT})*(/\S*)?)$",
        "must be P2PHANDSHAKE, or host:port with a scheme and a path where it has them, such as http://mooncake.example:8080/metadata",
    ),
]
Image = Annotated[str, matching(512, r"^\S+$", "has a blank: give one image, such as registry.example/engine:1")]
_WORD: Final = r"^[^\s-]\S*$"
ModelName = Annotated[str, matching(512, _WORD, "must be one word that does not begin with '-', such as Qwen/Qwen3-8B")]
Revision = Annotated[str, matching(128, _WORD, "must be one word that does not begin with '-': a branch, a tag or a commit")]
ModelSource = Annotated[str, matching(1024, _WORD, "must be one word that does not begin with '-': a path in the pod, or a repository")]
Device = Annotated[str, matching(64, r"^[^\s,]+$", "must be one device, such as mlx5_0: give each device as an item of its own")]
VariableName = Annotated[
    str, matching(256, "^[-._a-zA-Z][-._a-zA-Z0-9]*$", "must be a variable's name: letters, digits, _, - and ., not beginning with a digit")
]
PoolName = Annotated[
    str, matching(NAME_MAX_LENGTH, NAME_PATTERN, "must be the name of a KVCachePool: a-z, 0-9 and '-', starting with a letter")
]

Epoch = Annotated[int, Field(ge=0, le=2**53 - 1, json_schema_extra={"format": "int64"})]
Number = Annotated[int, Field(ge=0, json_schema_extra={"format": "int64"})]
ObservedGeneration = Annotated[int, Field(ge=-1, json_schema_extra={"format": "int64"})]
Count = Annotated[int, Field(ge=0, lt=2**31, json_schema_extra={"format": "int32"})]
Timestamp = Annotated[str, Field(json_schema_extra={"format": "date-time"})]


PodSecurity = Literal["restricted", "platform"]
"""Who chooses the ids that pods run with. `restricted`: the operator, which sets `runAsUser`, `runAsGroup` and `fsGroup`. `platform`: a
platform that assigns them and refuses others, such as OpenShift. Everything else that Pod Security `restricted` asks for is in both."""


_OWNED: Final = "keys under epochkv.io/ and app.kubernetes.io/ belong to the operator: use a prefix of your own"
_OWN_KEYS: Final = Field(
    max_length=64,
    json_schema_extra=rules(
        rule("self.all(k, !k.startsWith('epochkv.io/') && !k.startsWith('app.kubernetes.io/'))", _OWNED, reason="FieldValueForbidden")
    ),
)


class TemplateMetadata(ApiModel):
    """Labels and annotations added to the pods."""

    labels: Annotated[dict[str, Annotated[str, Field(max_length=63)]] | None, _OWN_KEYS] = None
    """Labels added to the pods. Those under `epochkv.io/` and `app.kubernetes.io/` belong to the operator."""
    annotations: Annotated[dict[str, Annotated[str, Field(max_length=16384)]] | None, _OWN_KEYS] = None
    """Annotations added to the pods. Those under `epochkv.io/` and `app.kubernetes.io/` belong to the operator."""


class PodTemplate(ApiModel):
    """Strategic-merge overrides of a pod that the operator builds, for everything this API has no field for."""

    metadata: TemplateMetadata | None = None
    """Labels and annotations added to the pods."""
    spec: Annotated[Json | None, Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True})] = None
    """Merged into the pod's spec as `kubectl patch --type=strategic` would: volumes, mounts, nodeSelector, tolerations, sidecars, probes,
    terminationGracePeriodSeconds. `{$patch: delete}` in the place of a value removes the operator's own; null does, too, but `kubectl
    apply` drops it without `--server-side`. The operator's own container cannot be given a command, args, an image or protected variables
    here; an attempt is reported in a condition (`InvalidTemplate`) and nothing is changed."""


ANY: Final = "Any"
CONVERGED: Final = "Converged"


class Serve(ApiModel):
    """Which weights a pod's engines must hold for the pod to be in its Services."""

    weights: Annotated[
        str,
        text(
            253,
            rule(
                f"!self.matches('(?i)^(any|converged)$') || self in ['{ANY}', '{CONVERGED}']",
                f"{ANY} and {CONVERGED} are written so; anything else is a label or a digest",
                expression=shown(f"must be written {ANY} or {CONVERGED}"),
            ),
        ),
    ] = ANY
    """`Any`: pods serve whatever their engines hold. `Converged`: pods whose engines hold other weights than most live engines of the pool
    leave their Services. Anything else names the weights to serve: a trainer's label, or the first 8 or more hex digits of a digest. Pods
    then have the readiness gate `epochkv.io/weights`, so changing from or to `Any` replaces the pods one by one."""
    strict: bool = False
    """True: a pod serves only while it is known to hold the weights, also when that leaves a Service without pods. Only a running operator
    closes gates: a container that starts again without one serves what it holds. False: a pod whose weights nobody can tell serves, such as
    while no hub leads; and of the pods that are ready otherwise, at least half stay."""


GATE: Final = "epochkv.io/weights"
"""The readiness gate of pods that wait for weights."""
GATED: Final = "x-weights-gate"
"""What the store notes of a pod that has the gate: it drops specs."""


def has_gate(pod: Json) -> bool:
    """Whether the pod waits for the gate; as the API server or the store has it."""
    gates = (pod.get("spec") or {}).get("readinessGates") or ()
    return bool(pod.get(GATED)) or any(gate.get("conditionType") == GATE for gate in gates)


class Condition(StatusModel):
    """One condition, as in all Kubernetes objects."""

    type: Annotated[str, Field(max_length=316)]
    """What the condition is about."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    observed_generation: Number | None = None
    """The `metadata.generation` this was computed from."""
    last_transition_time: Timestamp
    """When `status` last changed."""
    reason: Annotated[str, Field(min_length=1, max_length=64, pattern="^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """Why, in one stable word."""
    message: Annotated[str, Field(max_length=4096)]
    """Why, in a sentence, with the remedy where there is one."""


Conditions = Annotated[tuple[Condition, ...], list_field(16, key="type")]

NAME_RULE = rule(
    f"self.metadata.name.size() <= {NAME_MAX_LENGTH} && self.metadata.name.matches('{NAME_PATTERN}')",
    f"metadata.name must be at most {NAME_MAX_LENGTH} characters of a-z, 0-9 and '-', starting with a letter:"
    " Services and labels are named after it",
    path=".metadata.name",
)


class Metadata(BaseModel):
    """The part of an object's metadata that planning reads."""

    model_config = ConfigDict(extra="ignore", frozen=True, alias_generator=to_camel)

    name: str
    namespace: str = "default"
    uid: str = ""
    generation: int = 1
    deletion_timestamp: str | None = None
