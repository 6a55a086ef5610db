"""Quantities, and the CRDs that are made from the models. What the models read and refuse is in `operator_plan/test_plan_files.py`."""

import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import pytest

from epochkv_fence import quantity
from epochkv_operator.api import parse_pool
from epochkv_operator.api.generate import CRDS, Crd, manifest

Json = dict[str, Any]


def test_a_status_of_a_newer_operator_is_read() -> None:
    """Unknown status fields are somebody's; they must not stop this operator."""
    metadata = {"name": "p", "namespace": "n", "uid": "u", "resourceVersion": "7", "managedFields": []}
    status = {"epoch": 3, "targetEpoch": 4, "somethingNew": {"a": 1}}
    pool = parse_pool({"metadata": metadata, "spec": {"local": {"capacity": "1Gi"}}, "status": status})
    assert pool.status is not None
    assert (pool.status.epoch, pool.status.target_epoch) == (3, 4)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        *(("1Ki", 1024), ("1.5Gi", 1610612736), ("1e3", 1000), ("1Ei", 2**60), ("+2", 2), ("-2Mi", -2 * 2**20), (12, 12)),
        *(("500m", Decimal("0.5")), ("7n", Decimal("0.000000007")), (".5", Decimal("0.5"))),
    ],
)
def test_quantities(text: str | int, value: int | Decimal) -> None:
    assert quantity.parse(text) == value


@pytest.mark.parametrize("text", ["", "Gi", "1GB", "1 Gi", "1KiB", "0x10", "1e", "--1", "1.2.3", "१", "1e9999999"])
def test_no_quantities(text: str) -> None:
    with pytest.raises(ValueError, match="must be a Kubernetes quantity such as"):
        quantity.parse(text)


def test_bytes_are_rounded_up_and_printed_exactly() -> None:
    assert quantity.to_bytes("1.0001Ki") == 1025
    assert [quantity.from_bytes(size) for size in (0, 5 * 2**30, 3 * 2**29, 1536, 1025)] == ["0", "5Gi", "1536Mi", "1536", "1025"]


BOUNDS = {
    "string": {"minLength", "maxLength", "pattern", "format", "enum"},
    "integer": {"minimum", "maximum", "format"},
    "boolean": set(),
    "array": {"minItems", "maxItems", "items"},
    "object": {"maxProperties", "properties", "additionalProperties", "required"},
}
BOOLEANS = {
    *(f"InferenceEngine.spec.env[].valueFrom.{kind}KeyRef.optional" for kind in ("configMap", "secret")),
    "InferenceEngine.spec.parallelism.expert",
    *(f"{kind}.spec.serve.strict" for kind in ("InferenceEngine", "KVCachePool")),
    "KVCachePool.status.granting",
}
"""As in pods, as vLLM's option, what is done where nobody knows, and a fact: elsewhere a third value comes later."""
WRONG_NAMES = re.compile("phase|timestamp|(timeout|duration|interval|period|delay|lease)$", re.IGNORECASE)
CAMEL = re.compile(r"[a-z][a-z0-9]*(?:[A-Z][a-z0-9]*)*")


def nodes(schema: Json, path: str) -> Iterator[tuple[str, Json]]:
    """Every schema in a schema, with its path. Metadata is Kubernetes' own."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        if name != "metadata" or "." in path:
            yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


def oddities(path: str, node: Json) -> Iterator[str]:
    """What the conventions of Kubernetes APIs, as kube-api-linter checks them on Go types, say against names, defaults and statuses."""
    for name, child in node.get("properties", {}).items():
        if name != "metadata" or "." in path:
            if "description" not in child:
                yield f"{name} is not explained"
            if not CAMEL.fullmatch(name) or WRONG_NAMES.search(name):
                yield f"{name} is no name for it"
    yield from (f"{name} has a default and is required" for name in node.get("required", ()) if "default" in node["properties"][name])
    if path.count(".") == 1 and path.endswith(".status"):
        found = node["properties"].get("conditions", {})
        if next(iter(node["properties"])) != "conditions" or found.get("x-kubernetes-list-map-keys") != ["type"] or node.get("required"):
            yield "conditions come first, a map by type; a status is written field by field"


def unbounded(path: str, node: Json) -> Iterator[str]:
    """A bound on the wrong type is silently ignored by the API server; an unbounded string, list or map makes CEL too expensive."""
    if node.get("x-kubernetes-int-or-string"):
        if "maxLength" not in node:
            yield "unbounded"
        return
    kind = node["type"]
    said = {key for key in node if not key.startswith("x-kubernetes-")} - {"description", "type", "default"}
    if said - BOUNDS[kind]:
        yield f"{said - BOUNDS[kind]} has no effect"
    if kind == "string" and not {"maxLength", "enum"} & node.keys() and node.get("format") != "date-time":
        yield "unbounded"
    if kind == "integer" and (
        node.get("format") not in ("int32", "int64") or (".spec" in path and not {"minimum", "maximum"} <= node.keys())
    ):
        yield "an integer without its size or bounds"
    if kind == "array":
        lists, items = node.get("x-kubernetes-list-type"), node["items"]
        keyed = lists == "map" and set(node.get("x-kubernetes-list-map-keys") or [""]) <= set(items.get("required", ()))
        if "maxItems" not in node or (items.get("type") == "object" and not items.get("required")):
            yield "unbounded, or of items that nobody can tell apart"
        if not keyed and (lists not in ("atomic", "set") or (lists == "set" and items.get("type") == "object")):
            yield f"list type {lists}: applies of several managers do not merge"
    if isinstance(node.get("additionalProperties"), dict) and "maxProperties" not in node:
        yield "unbounded"
    if kind == "boolean" and path not in BOOLEANS:
        yield "a boolean"


@pytest.mark.parametrize("crd", CRDS, ids=lambda crd: crd.resource.kind)
def test_schemas_keep_the_conventions_of_kubernetes(crd: Crd) -> None:
    [version] = manifest(crd)["spec"]["versions"]
    assert "status" in version["subresources"]
    schema = version["schema"]["openAPIV3Schema"]
    found = nodes(schema, crd.resource.kind)
    assert [f"{path}: {text}" for path, node in found for rule in (oddities, unbounded) for text in rule(path, node)] == []
