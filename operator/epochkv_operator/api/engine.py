"""InferenceEngine (`ie`): a set of equal vLLM pods that join a pool."""

from __future__ import annotations

import re
from typing import Annotated, Literal, Self

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from epochkv_operator.api.arguments import EC_ARG, EC_ARG_TEXT, SECRET_ENV, SECRET_ENV_TEXT, Argument
from epochkv_operator.api.base import (
    API_VERSION,
    NAME_RULE,
    PROTECTED_ENV_NAMES,
    PROTECTED_ENV_PREFIXES,
    PROTECTED_ENV_TEXT,
    ApiModel,
    Conditions,
    Count,
    Epoch,
    Generation,
    Metadata,
    PodTemplate,
    StatusModel,
    admitted,
    is_protected_env,
    list_field,
    own_defaults,
    refused,
    require_unique,
    rule,
    rules,
)
from epochkv_operator.api.serving import Model, Parallelism, UpdateStrategy
from epochkv_operator.api.values import Amount, Image, PoolName, VariableName


class PoolReference(ApiModel):
    """A pool in the same namespace."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "self == oldSelf",
                "spec.poolRef is immutable: create a new InferenceEngine to move to another pool",
                reason="FieldValueForbidden",
            )
        )
    )

    name: PoolName
    """Name of the KVCachePool."""


class ResourceRequirements(ApiModel):
    """Compute resources of a container, as in a pod."""

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

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "[has(self.configMapKeyRef), has(self.secretKeyRef), has(self.fieldRef), has(self.resourceFieldRef)]"
                ".filter(x, x).size() == 1",
                "env valueFrom needs exactly one of configMapKeyRef, secretKeyRef, fieldRef, resourceFieldRef",
            )
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

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = [self.config_map_key_ref, self.secret_key_ref, self.field_ref, self.resource_field_ref]
        if sum(source is not None for source in given) != 1:
            raise ValueError("env valueFrom needs exactly one of configMapKeyRef, secretKeyRef, fieldRef, resourceFieldRef")
        return self


class EnvVar(ApiModel):
    """One environment variable."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule("!has(self.value) || !has(self.valueFrom)", "an env entry has both value and valueFrom: keep one"),
            rule(
                f"!has(self.value) || !(self.name in {list(SECRET_ENV)})",
                f"a variable {SECRET_ENV_TEXT}",
                expression=f"'%s {SECRET_ENV_TEXT}'.format([self.name])",
                reason="FieldValueForbidden",  # with another reason, the API server would show the value
            ),
        )
    )

    name: VariableName
    """Name of the variable."""
    value: Annotated[str | None, Field(max_length=16384)] = None
    """Its value."""
    value_from: EnvVarSource | None = None
    """Where its value comes from."""

    @model_validator(mode="after")
    def _check(self, info: ValidationInfo) -> Self:
        if self.value is not None and self.value_from is not None:
            raise ValueError("an env entry has both value and valueFrom: keep one")
        if admitted(info) and self.value is not None and self.name in SECRET_ENV:
            raise ValueError(f"{self.name} {SECRET_ENV_TEXT}")
        return self


_PROTECTED_CEL = " || ".join(
    [
        "e.name in [" + ", ".join(f"'{name}'" for name in PROTECTED_ENV_NAMES) + "]",
        *(f"e.name.startsWith('{prefix}')" for prefix in PROTECTED_ENV_PREFIXES),
    ]
)


class InferenceEngineSpec(ApiModel):
    """What the engine should be."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            rule(
                "has(self.poolRef) == has(oldSelf.poolRef)",
                "spec.poolRef cannot be added or removed: create a new InferenceEngine",
                path=".poolRef",
                reason="FieldValueForbidden",
            ),
            rule(
                f"!has(self.poolRef) || !has(self.args) || !self.args.exists(a, a.matches('{EC_ARG}'))",
                EC_ARG_TEXT,
                path=".args",
                reason="FieldValueForbidden",
            ),
        )
    )

    pool_ref: PoolReference | None = None
    """The pool to join, in the same namespace. Without it, and while the pool does not exist, the engine serves without shared
    KV. Immutable."""
    model: Model
    """What to serve."""
    weights_source: Annotated[
        int | str | None,
        refused("spec.weightsSource", "KV is named by the weights that an engine holds, pushed or not; remove it (docs/trainers.md)"),
    ] = None
    """Not a field any more: refused."""
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
    args: Annotated[
        tuple[Argument, ...] | None,
        list_field(128, kind="atomic"),
    ] = None
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
    template: PodTemplate | None = None
    """Overrides of the engine pods; the operator's container is named `engine`."""

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: tuple[EnvVar, ...] | None) -> tuple[EnvVar, ...] | None:
        require_unique((variable.name for variable in env or ()), "env")
        for variable in env or ():
            if is_protected_env(variable.name):
                raise ValueError(f"spec.env has {variable.name}: {PROTECTED_ENV_TEXT}: remove them from spec.env")
        return env

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.pool_ref is not None and any(re.search(EC_ARG, arg) for arg in self.args or ()):
            raise ValueError(EC_ARG_TEXT)
        return self


class InferenceEngineStatus(StatusModel):
    """What the engine is."""

    conditions: Conditions | None = None
    """`Ready`, `Available`, `Progressing`; with a poolRef also `PoolBound`, `EpochCurrent` and `TiersUsable` (once the pool exists)."""
    observed_generation: Generation | None = None
    """The `metadata.generation` this status was computed from."""
    replicas: Count | None = None
    """Pods."""
    ready_replicas: Count | None = None
    """Ready pods."""
    updated_replicas: Count | None = None
    """Pods made from the current spec."""
    epoch_replicas: Count | None = None
    """Pods whose every rank reported the pool's target epoch."""
    epoch: Epoch | None = None
    """Lowest epoch that a pod of this engine reported."""
    weights: Annotated[str | None, Field(max_length=256)] = None
    """Weights that most ranks of its pods hold and how many of them, such as `3f2a9c1e 3/4`; for the printer column."""
    selector: Annotated[str | None, Field(max_length=1024)] = None
    """Label selector of the pods, for the scale subresource."""


class InferenceEngine(ApiModel):
    """A set of equal vLLM pods, with the EpochKV connector configured for one pool."""

    model_config = ConfigDict(json_schema_extra=rules(NAME_RULE))

    api_version: Annotated[Literal["epochkv.io/v1alpha1"], Field(default=API_VERSION)]
    kind: Annotated[Literal["InferenceEngine"], Field(default="InferenceEngine")]
    metadata: Metadata
    spec: InferenceEngineSpec
    """What the engine should be."""
    status: InferenceEngineStatus | None = None
    """What the engine is."""
