"""The CRDs, made from the models."""

from typing import Any, Final, NamedTuple

from pydantic import BaseModel

from epochkv_operator.api.base import Json
from epochkv_operator.api.engine import InferenceEngine
from epochkv_operator.api.pool import KVCachePool
from epochkv_operator.api.resources import ENGINES, POOLS, Resource

_DROPPED: Final = ("title", "$defs")
_ORDER: Final = ("description", "type", "format", "anyOf", "enum", "default", "required", "properties", "items")


def _column(name: str, kind: str, path: str, *, wide: bool = False) -> Json:
    return {"name": name, "type": kind, "jsonPath": path} | ({"priority": 1} if wide else {})


def _condition(name: str, part: str) -> str:
    return f'.status.conditions[?(@.type=="{name}")].{part}'


class Crd(NamedTuple):
    """What a CRD says beyond its schema."""

    model: type[BaseModel]
    resource: Resource
    short_name: str
    columns: tuple[Json, ...]
    scale: Json
    selectable: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.resource.plural}.{self.resource.group}"


POOL = Crd(
    KVCachePool,
    POOLS,
    "kvp",
    (
        _column("Ready", "string", _condition("Ready", "status")),
        _column("Epoch", "integer", ".status.epoch"),
        _column("Target", "integer", ".status.targetEpoch"),
        _column("Engines", "string", ".status.engines.summary"),
        _column("Weights", "string", ".status.weightsSummary"),
        _column("Stores", "integer", ".status.store.readyReplicas"),
        _column("Reason", "string", _condition("Ready", "reason"), wide=True),
        _column("External", "integer", ".status.engines.external", wide=True),
        _column("Origin", "string", ".status.reset.origin", wide=True),
        _column("Reset-ms", "integer", ".status.reset.durationMilliseconds", wide=True),
        _column("Reclaimed", "string", _condition("Reclaimed", "status"), wide=True),
        _column("Age", "date", ".metadata.creationTimestamp"),
    ),
    {
        "specReplicasPath": ".spec.distributed.mooncake.store.replicas",
        "statusReplicasPath": ".status.store.replicas",
        "labelSelectorPath": ".status.store.selector",
    },
)
ENGINE = Crd(
    InferenceEngine,
    ENGINES,
    "ie",
    (
        _column("Ready", "string", _condition("Ready", "status")),
        _column("Pool", "string", ".spec.poolRef.name"),
        _column("Desired", "integer", ".spec.replicas"),
        _column("Current", "integer", ".status.readyReplicas"),
        _column("Up-To-Date", "integer", ".status.updatedReplicas"),
        _column("At-Epoch", "integer", ".status.epochReplicas"),
        _column("Reason", "string", _condition("Ready", "reason"), wide=True),
        _column("Rollout", "string", _condition("Progressing", "reason"), wide=True),
        _column("Weights", "string", ".status.weights", wide=True),
        _column("Model", "string", ".spec.model.name", wide=True),
        _column("Age", "date", ".metadata.creationTimestamp"),
    ),
    {"specReplicasPath": ".spec.replicas", "statusReplicasPath": ".status.replicas", "labelSelectorPath": ".status.selector"},
    (".spec.poolRef.name",),
)
CRDS = (POOL, ENGINE)


def manifest(crd: Crd) -> Json:
    """The CustomResourceDefinition as JSON."""
    raw = crd.model.model_json_schema(by_alias=True)
    schema: Json = _convert(raw, raw.get("$defs", {}))
    for key in ("apiVersion", "kind"):
        del schema["properties"][key]
    # Declared only so that the rule about the name can point at it; the API server knows the rest of metadata by itself.
    schema["properties"]["metadata"] = {"type": "object", "properties": {"name": {"type": "string"}}}
    schema["required"] = ["spec"]
    # For tools that wait, which take an object without a status for one that is well.
    schema["properties"]["status"]["default"] = {"observedGeneration": -1}
    version: Json = {
        "name": crd.resource.version,
        "served": True,
        "storage": True,
        "subresources": {"status": {}, "scale": crd.scale},
        "additionalPrinterColumns": list(crd.columns),
        "schema": {"openAPIV3Schema": schema},
    }
    if crd.selectable:
        version["selectableFields"] = [{"jsonPath": path} for path in crd.selectable]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": crd.name},
        "spec": {
            "group": crd.resource.group,
            "names": {
                "kind": crd.resource.kind,
                "plural": crd.resource.plural,
                "singular": crd.resource.kind.lower(),
                "shortNames": [crd.short_name],
                "categories": ["inference"],
            },
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def _convert(node: Any, definitions: Json) -> Any:
    """The structural schema, with nested models inlined."""
    if not isinstance(node, dict):
        return node
    node = _inline(dict(node), definitions)
    for key in _DROPPED:
        node.pop(key, None)
    if node.get("default", ...) is None:
        del node["default"]
    if isinstance(node.get("additionalProperties"), bool):
        del node["additionalProperties"]
    if "const" in node:
        node["enum"] = [node.pop("const")]
    if "description" in node:
        node["description"] = " ".join(node["description"].split())
    if "properties" in node:
        node["properties"] = {name: _convert(child, definitions) for name, child in node["properties"].items()}
    for key in ("items", "additionalProperties"):
        if key in node:
            node[key] = _convert(node[key], definitions)
    if isinstance(node.get("maximum"), int) and node.get("format") in ("int32", "int64") and node["maximum"] >= 2**31:
        node["format"] = "int64"
    return {key: node[key] for key in (*(key for key in _ORDER if key in node), *sorted(node.keys() - set(_ORDER)))}


def _inline(node: Json, definitions: Json) -> Json:
    """Resolve a reference or an optional branch; what stands beside it (description, default, extensions) wins."""
    while True:
        branches = [branch for branch in node.get("anyOf", ()) if branch != {"type": "null"}]
        if len(branches) == 1:
            inner = branches[0]
            del node["anyOf"]
        elif "$ref" in node:
            inner = definitions[node.pop("$ref").rsplit("/", 1)[1]]
        else:
            break
        node = {**inner, **node}
    if node.get("exclusiveMaximum") == 2**31:
        del node["exclusiveMaximum"]  # it says int32, which `format` already does
    return node
