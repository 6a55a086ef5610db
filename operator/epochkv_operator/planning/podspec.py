"""Pods: what all of the operator's have in common, and the strategic merge of user overrides (`template`) into them."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from epochkv_fence import quantity
from epochkv_operator.api.base import PROTECTED_ENV_TEXT, PodSecurity, PodTemplate, is_protected_env
from epochkv_operator.planning.context import Json
from epochkv_operator.planning.names import CREDENTIALS_DIR

USER_ID: Final = 65532


def downward(field_path: str) -> Json:
    """A variable's source: a field of the pod."""
    return {"fieldRef": {"apiVersion": "v1", "fieldPath": field_path}}


def environment(values: Mapping[str, str]) -> list[Json]:
    """Variables with plain values."""
    return [{"name": name, "value": value} for name, value in values.items()]


def pod_ip() -> Json:
    """The variable POD_IP, which others refer to as `$(POD_IP)`."""
    return {"name": "POD_IP", "valueFrom": downward("status.podIP")}


EVERY_ADDRESS: Final = "any=0.0.0.0; read -r _ 2>/dev/null </proc/net/if_inet6 && any=::"
"""Line of the shell. `$any` is then what a server has to listen on for the families that the pod has; without IPv6 in the kernel, `::`
is an error."""


def started(program: str, *lines: str) -> list[str]:
    """`command` of a container that runs these lines of the shell, and then the program in its place, with the container's `args`."""
    return ["sh", "-c", "; ".join((*lines, f'exec {program} "$@"')), "sh"]


def exec_probe(code: str, *, period: int, failures: int) -> Json:
    """Runs lines of Python in the container, for what listens on IPv4 alone: the kubelet may reach the pod by IPv6 only."""
    return {"exec": {"command": ["python3", "-c", code]}, "periodSeconds": period, "failureThreshold": failures, "timeoutSeconds": 5}


def tcp_probe(port: int, *, period: int, failures: int) -> Json:
    return {"tcpSocket": {"port": port}, "periodSeconds": period, "failureThreshold": failures, "timeoutSeconds": 2}


def http_probe(path: str, port: int, *, period: int, failures: int, tls: bool = False) -> Json:
    """With `tls` the kubelet asks by HTTPS, and takes any certificate."""
    get: Json = {"path": path, "port": port, **({"scheme": "HTTPS"} if tls else {})}
    return {"httpGet": get, "periodSeconds": period, "failureThreshold": failures, "timeoutSeconds": 5}


def port(name: str, number: int) -> Json:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def service(selector: dict[str, str], name: str, number: int) -> Json:
    """Spec of a Service with one port."""
    return {"selector": selector, "ports": [{"name": name, "port": number, "targetPort": number, "protocol": "TCP"}]}


def base_spec(security: PodSecurity) -> Json:
    """The part of a pod spec that satisfies Pod Security `restricted` and hands no API token to the pod."""
    ids = {} if security == "platform" else {"runAsUser": USER_ID, "runAsGroup": USER_ID, "fsGroup": USER_ID}
    return {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": {
            "runAsNonRoot": True,
            **ids,
            # Without it the kubelet changes the owner of every file of a mounted volume at every start: minutes for big models.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
    }


def container_security() -> Json:
    return {"allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]}}


def budget(selector: dict[str, str], max_unavailable: int | str = 1) -> Json:
    """Body of a PodDisruptionBudget: so many pods at a time, and a pod that is not healthy never keeps a node from being drained."""
    return {"spec": {"maxUnavailable": max_unavailable, "unhealthyPodEvictionPolicy": "AlwaysAllow", "selector": {"matchLabels": selector}}}


def with_disk(spec: Json, capacity: int, storage_class: str | None, mount: str) -> Json:
    """The pod with a volume `ssd` of so many bytes, made and deleted with the pod. `storage_class` None: the cluster's default."""
    [container] = spec["containers"]
    claim: Json = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": quantity.from_bytes(capacity)}}}
    if storage_class is not None:
        claim["storageClassName"] = storage_class
    volume = {"name": "ssd", "ephemeral": {"volumeClaimTemplate": {"spec": claim}}}
    mounts = [*container["volumeMounts"], {"name": "ssd", "mountPath": mount}]
    return {**spec, "containers": [{**container, "volumeMounts": mounts}], "volumes": [*spec["volumes"], volume]}


def with_rdma(spec: Json, resource: str | None) -> Json:
    """The pod with what RDMA needs: root, locked memory and devices. Only a namespace at level `privileged` admits it.

    `resource`: a device plugin's name for the devices, which then brings one of them; None: the host's folder of them is mounted.
    """
    [container] = spec["containers"]
    capabilities = {"drop": ["ALL"], "add": ["IPC_LOCK", "SYS_RESOURCE"]}
    security = {key: value for key, value in spec["securityContext"].items() if key != "runAsNonRoot"}
    changed = {**container, "securityContext": {**container["securityContext"], "capabilities": capabilities}}
    volumes = spec["volumes"]
    if resource is not None:
        resources = container.get("resources", {})
        changed["resources"] = {**resources, "limits": {**resources.get("limits", {}), resource: 1}}
    else:
        changed["volumeMounts"] = [*container["volumeMounts"], {"name": "infiniband", "mountPath": "/dev/infiniband"}]
        volumes = [*volumes, {"name": "infiniband", "hostPath": {"path": "/dev/infiniband", "type": "Directory"}}]
    return {**spec, "securityContext": {**security, "runAsUser": 0, "runAsGroup": 0}, "containers": [changed], "volumes": volumes}


# k8s.io/api/core/v1: the patchMergeKey of each list under a PodSpec. Gates have none, and each type stands once.
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
    "readinessGates": "conditionType",
}
DELETE: Final = {"$patch": "delete"}
"""In the place of a value. `kubectl apply` sends merge patches, in which null is no value: what it says does not arrive."""
FENCE_VOLUME: Final = "epochkv-fence"


class InvalidTemplate(ValueError):
    """A `template` that cannot be used; the text names the field and the fix."""


def finish_pod(pod: Json, template: PodTemplate | None, container: str, field: str) -> Json:
    """The pod template (`{metadata, spec}`) with the user's overrides merged in, and every container that they add hardened.

    `container` is the operator's own container in it, `field` the path of `template` in the user's object, for messages.

    Raises:
        InvalidTemplate: an override that belongs to the operator, or one that cannot be merged.
    """
    metadata, spec = dict(pod["metadata"]), dict(pod["spec"])
    if template is not None:
        overrides = _with_nulls(template.spec) or {}
        _refuse(overrides, container, f"{field}.spec")
        spec = merge(spec, overrides, f"{field}.spec")
    if template is not None and template.metadata is not None:
        metadata["labels"] = {**(template.metadata.labels or {}), **metadata["labels"]}
        annotations = {**(template.metadata.annotations or {}), **metadata.get("annotations", {})}
        if annotations:
            metadata["annotations"] = annotations
    for key in ("containers", "initContainers"):
        if key in spec:
            spec[key] = [_hardened(item, ours=item["name"] == container) for item in spec[key]]
    return {"metadata": metadata, "spec": spec}


def _with_nulls(value: Any) -> Any:
    """Overrides, with null for each `DELETE`."""
    if value == DELETE:
        return None
    if isinstance(value, dict):
        return {key: _with_nulls(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_nulls(item) if isinstance(item, dict) and item != DELETE else item for item in value]
    return value


def _hardened(container: Json, *, ours: bool) -> Json:
    """The container, with what Pod Security `restricted` demands of it wherever it says nothing itself. `ours`: it had that, so what it
    lacks was removed."""
    defaults: Json = {} if ours else {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    security = {**defaults, **container.get("securityContext", {})}
    if security.get("privileged"):
        security.pop("allowPrivilegeEscalation", None)
    return {**container, "securityContext": security}


def merge(base: Json, patch: Json, path: str) -> Json:
    """`base` with `patch` merged in; neither is changed.

    Raises:
        InvalidTemplate: `$patch` directives, keyed list items without their key, or another type than the base has.
    """
    result = dict(base)
    for key, value in patch.items():
        here = f"{path}.{key}"
        _refuse_directive(key, here)
        if value is None:
            result.pop(key, None)
        elif key in _MERGE_KEYS:
            result[key] = _merge_list(result.get(key, []), value, key, here)
        elif isinstance(result.get(key), dict):
            if not isinstance(value, dict):
                raise InvalidTemplate(f"{here} is {value!r}; it must be an object")
            result[key] = merge(result[key], value, here)
        else:
            result[key] = _without_nulls(value, here)
    return result


def _refuse_directive(key: str, path: str) -> None:
    if key.startswith("$"):
        raise InvalidTemplate(f"{path}: the only directive is {{$patch: delete}} in the place of a value, which removes it")


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
            result[known] = _without_nulls(item, f"{path}[{index}]")
        else:
            result[known] = merge(result[known], item, f"{path}[{index}]")
    return result


def _replaces(field: str, base: Json, patch: Json) -> bool:
    """Variables and volumes have one source: another source replaces the old one instead of standing beside it."""
    return (field == "env" and len(patch) > 1) or (field == "volumes" and not (base.keys() & patch.keys()) - {"name"})


def _without_nulls(value: Any, path: str) -> Any:
    if isinstance(value, dict):
        for key in value:
            _refuse_directive(key, f"{path}.{key}")
        return {key: _without_nulls(item, f"{path}.{key}") for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item, f"{path}[{index}]") for index, item in enumerate(value)]
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
    arguments, image = ("use spec.args", "spec.image") if container == "engine" else ("remove it", "spec.distributed.mooncake.image")
    for key, remedy in (("command", arguments), ("args", arguments), ("image", f"use {image}")):
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
            yield f"{path}.{key} is removed, and with it the operator's own {key}: leave it out"


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
