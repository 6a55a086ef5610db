"""Strategic merge of user overrides into pods that the operator builds.

The rules are those of `kubectl patch --type=strategic` for a PodSpec: maps merge, lists of keyed things merge by key, other
lists are replaced, `null`
removes. `$patch` directives are refused rather than half supported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final

from epochkv_operator.api.base import PROTECTED_ENV_TEXT, PodTemplate, is_protected_env
from epochkv_operator.planning.context import Json
from epochkv_operator.planning.names import CREDENTIALS_DIR

# k8s.io/api/core/v1: the patchMergeKey of each list under a PodSpec.
_MERGE_KEYS: Final = {
    "containers": "name",
    "initContainers": "name",
    "env": "name",
    "volumes": "name",
    "volumeMounts": "mountPath",
    "volumeDevices": "devicePath",
    "ports": "containerPort",
    "imagePullSecrets": "name",
    "hostAliases": "ip",
    "topologySpreadConstraints": "topologyKey",
    "schedulingGates": "name",
    "resourceClaims": "name",
}
FENCE_VOLUME: Final = "epochkv-fence"


class InvalidTemplate(ValueError):
    """A `template` that cannot be used; the text names the field and the fix."""


def finish_pod(pod: Json, template: PodTemplate | None, container: str, field: str) -> Json:
    """The pod template (`{metadata, spec}`) with the user's overrides merged in, and every container hardened.

    `container` is the operator's own container in it, `field` the path of `template` in the user's object, for messages.

    Raises:
        InvalidTemplate: an override that belongs to the operator, or one that cannot be merged.
    """
    metadata, spec = dict(pod["metadata"]), dict(pod["spec"])
    if template is not None:
        overrides = template.spec or {}
        _refuse(overrides, container, f"{field}.spec")
        spec = merge(spec, overrides, f"{field}.spec")
    if template is not None and template.metadata is not None:
        metadata["labels"] = {**(template.metadata.labels or {}), **metadata["labels"]}
        annotations = {**(template.metadata.annotations or {}), **metadata.get("annotations", {})}
        if annotations:
            metadata["annotations"] = annotations
    for key in ("containers", "initContainers"):
        if key in spec:
            spec[key] = [_hardened(item) for item in spec[key]]
    return {"metadata": metadata, "spec": spec}


def _hardened(container: Json) -> Json:
    """The container, with what Pod Security `restricted` demands of it wherever it says nothing itself."""
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}, **container.get("securityContext", {})}
    if security.get("privileged"):
        security.pop("allowPrivilegeEscalation")
    return {**container, "securityContext": security}


def merge(base: Json, patch: Json, path: str) -> Json:
    """`base` with `patch` merged in; neither is changed.

    Raises:
        InvalidTemplate: `$patch` directives, keyed list items without their key, or another type than the base has.
    """
    result = dict(base)
    for key, value in patch.items():
        here = f"{path}.{key}"
        if key.startswith("$"):
            raise InvalidTemplate(f"{here}: directives are not supported; set a key to null to remove it")
        if value is None:
            result.pop(key, None)
        elif key in _MERGE_KEYS:
            result[key] = _merge_list(result.get(key, []), value, key, here)
        elif isinstance(result.get(key), dict):
            if not isinstance(value, dict):
                raise InvalidTemplate(f"{here} is {value!r}; it must be an object")
            result[key] = merge(result[key], value, here)
        else:
            result[key] = _without_nulls(value)
    return result


def _merge_list(base: list[Json], patch: Any, field: str, path: str) -> list[Json]:
    key = _MERGE_KEYS[field]
    if not isinstance(patch, list) or not all(isinstance(item, dict) for item in patch):
        raise InvalidTemplate(f"{path} must be a list of objects")
    result = list(base)
    for index, item in enumerate(patch):
        if item.get(key) is None:
            raise InvalidTemplate(f"{path}[{index}] has no {key}; items of {field} are merged by it")
        known = next((position for position, other in enumerate(result) if other.get(key) == item[key]), None)
        if known is None:
            result.append(merge({}, item, f"{path}[{index}]"))
        elif _replaces(field, result[known], item):
            result[known] = _without_nulls(item)
        else:
            result[known] = merge(result[known], item, f"{path}[{index}]")
    return result


def _replaces(field: str, base: Json, patch: Json) -> bool:
    """Variables and volumes have one source: another source replaces the old one instead of standing beside it."""
    return (field == "env" and len(patch) > 1) or (field == "volumes" and not (base.keys() & patch.keys()) - {"name"})


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value


def _refuse(overrides: Json, container: str, path: str) -> None:
    """Raise for what only the operator may set, and for shapes that no pod can be built with; the text names each."""
    found = [*_removals(overrides, ("containers", "volumes"), path), *_shapes(overrides, path)]
    if any(volume.get("name") == FENCE_VOLUME for volume in _objects(overrides.get("volumes"))):
        found.append(f"{path}.volumes: {FENCE_VOLUME} belongs to the operator: choose another volume name")
    for item in _objects(overrides.get("containers")):
        if item.get("name") == container:
            found += _owned(item, container, f"{path}.containers[{container}]")
    if found:
        raise InvalidTemplate("; ".join(dict.fromkeys(found)))


def _owned(item: Json, container: str, path: str) -> Iterator[str]:
    """What overrides of the operator's own container must leave alone."""
    yield from _removals(item, ("env", "volumeMounts"), path)
    for key, remedy in (
        ("command", "use spec.args" if container == "engine" else "remove it"),
        ("args", "use spec.args" if container == "engine" else "remove it"),
        ("image", "use spec.image" if container == "engine" else "use spec.distributed.mooncake.image"),
    ):
        if key in item:
            yield f"{path}.{key} belongs to the operator: {remedy}"
    for variable in _objects(item.get("env")):
        if is_protected_env(str(variable.get("name", ""))):
            yield f"{path}.env: {variable['name']}: {PROTECTED_ENV_TEXT}: remove it"
    for mount in _objects(item.get("volumeMounts")):
        if str(mount.get("mountPath", "")).rstrip("/").startswith(CREDENTIALS_DIR):
            yield f"{path}.volumeMounts: {CREDENTIALS_DIR} belongs to the operator: mount elsewhere"


def _removals(overrides: Json, keys: Iterable[str], path: str) -> Iterator[str]:
    for key in keys:
        if key in overrides and overrides[key] is None:
            yield f"{path}.{key} is null, which would remove the operator's own {key} too: leave it out"


def _shapes(overrides: Json, path: str) -> Iterator[str]:
    for key in ("containers", "initContainers"):
        for item in _objects(overrides.get(key)):
            security = item.get("securityContext")
            if security is not None and not isinstance(security, dict):
                yield f"{path}.{key}[{item.get('name')}].securityContext is {security!r}; it must be an object"
    grace = overrides.get("terminationGracePeriodSeconds")
    if grace is not None and (isinstance(grace, bool) or not isinstance(grace, int) or grace < 0):
        yield f"{path}.terminationGracePeriodSeconds is {grace!r}; it must be a number of seconds, 0 or more"


def _objects(value: Any) -> list[Json]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
