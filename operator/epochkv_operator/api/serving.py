"""How an engine's pods are spread, updated and given their model: the parts of an InferenceEngine that are objects of their own."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema, model_validator

from epochkv_operator.api.base import ApiModel, rule, rules
from epochkv_operator.api.values import Checked, Image, ModelName, ModelSource, Revision, matching, shown

_PERCENT = "^(100|[0-9]{1,2})%$"
_COUNT_TEXT = "must be a number of replicas from 0 on, or a percentage from 0% to 100%, such as 1 or 25%"
_BOTH_ZERO = "spec.updateStrategy: maxUnavailable and maxSurge are both 0, so no pod could ever be replaced; raise one of them"
_UNEVEN = "spec.parallelism: tensor x pipeline ranks cannot be spread evenly over that many nodes; make it a multiple of nodes"
_TWO_SOURCES = "spec.model.volume holds the model's files: remove source, revision and cache, which are for models that are downloaded"
_ONE_VOLUME = "spec.model.volume needs exactly one of claimName and image"


def _count(value: int | str) -> int | str:
    if not (value >= 0 if isinstance(value, int) else re.match(_PERCENT, value)):
        raise ValueError(f"{value!r} {_COUNT_TEXT}")
    return value


IntOrPercent = Annotated[
    int | Annotated[str, Field(max_length=4)],
    AfterValidator(_count),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "maxLength": 4,
            **rules(rule(f"type(self) == int ? self >= 0 && self <= 5000 : self.matches('{_PERCENT}')", _COUNT_TEXT)),
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

    model_config = ConfigDict(json_schema_extra=rules(rule(f"!{_cel_zero('maxUnavailable')} || !{_cel_zero('maxSurge')}", _BOTH_ZERO)))

    max_unavailable: IntOrPercent = 1
    """Replicas that may be missing meanwhile. A node that is drained may take away as many, and always one."""
    max_surge: IntOrPercent = 0
    """Replicas that may be added meanwhile. None by default: there is rarely a free accelerator."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if is_zero(self.max_unavailable) and is_zero(self.max_surge):
            raise ValueError(_BOTH_ZERO)
        return self


def _ranks(maximum: int) -> Any:
    return Field(ge=1, le=maximum, json_schema_extra={"format": "int32"})


class Parallelism(ApiModel):
    """How one replica is spread over devices and nodes."""

    model_config = ConfigDict(json_schema_extra=rules(rule("(self.tensor * self.pipeline) % self.nodes == 0", _UNEVEN)))

    tensor: Annotated[int, _ranks(64)] = 1
    """Tensor-parallel ranks."""
    pipeline: Annotated[int, _ranks(64)] = 1
    """Pipeline stages, each of `tensor` ranks."""
    nodes: Annotated[int, _ranks(64)] = 1
    """Pods of one replica, each with the same number of ranks. Above 1, a LeaderWorkerSet makes the pods: install it first
    (https://lws.sigs.k8s.io). `resources` are those of one pod."""

    @property
    def ranks_per_pod(self) -> int:
        """Ranks that share a pod."""
        return self.tensor * self.pipeline // self.nodes

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tensor * self.pipeline % self.nodes:
            raise ValueError(_UNEVEN)
        return self


class ModelImage(ApiModel):
    """An OCI image or artifact whose files are the model's."""

    reference: Image
    """As in a container's `image`."""
    pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    """As in a pod."""


ClaimName = Annotated[
    str,
    Field(min_length=1, max_length=253),
    matching("^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$", "must be the name of a PersistentVolumeClaim: a-z, 0-9, '-' and '.'"),
]
Folder = Annotated[
    str,
    Field(min_length=1, max_length=1024),
    matching(r"^[A-Za-z0-9_.]\S*$", "must be a folder in the volume without a leading slash, such as qwen3/8b"),
    Checked(
        "!('..' in self.split('/'))",
        lambda folder: ".." not in folder.split("/"),
        "must be a folder in the volume, without '..', such as qwen3/8b",
        shown("must be a folder in the volume, without '..', such as qwen3/8b"),
        lambda folder: f"'{folder}' must be a folder in the volume, without '..', such as qwen3/8b",
        since_stored=True,
    ),
]


class ModelVolume(ApiModel):
    """A volume with the model's files; exactly one kind."""

    model_config = ConfigDict(json_schema_extra=rules(rule("has(self.claimName) != has(self.image)", _ONE_VOLUME)))

    claim_name: ClaimName | None = None
    """A PersistentVolumeClaim in the same namespace."""
    image: ModelImage | None = None
    """An image. Nodes keep it like any other image. The cluster must allow image volumes: Kubernetes 1.35, or the feature gate
    `ImageVolume` before."""
    path: Folder | None = None
    """Folder of the model in the volume. The whole volume when unset."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.claim_name is None) == (self.image is None):
            raise ValueError(_ONE_VOLUME)
        return self


class ModelCache(ApiModel):
    """A volume that keeps what was downloaded."""

    claim_name: ClaimName
    """A PersistentVolumeClaim in the same namespace. Pods on several nodes need one that they can mount at once (ReadWriteMany)."""


class Model(ApiModel):
    """What the engine serves."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("!has(self.volume) || !(has(self.source) || has(self.revision) || has(self.cache))", _TWO_SOURCES, path=".volume")
        )
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

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.volume is not None and not (self.source is None and self.revision is None and self.cache is None):
            raise ValueError(_TWO_SOURCES)
        return self
