"""The conventions of Kubernetes APIs, as kube-api-linter checks them on Go types, on the generated CRDs.

Ours are generated from pydantic models, so its analysers have no Go to read. `RULES` says the same of a schema, one function for each of
its linters; `NOT_APPLIED` names the others with the reason. An exception names its field and why, and one that is over is noticed.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from epochkv_operator.api.generate import CRDS, manifest

Json = dict[str, Any]
Rule = Callable[[str, Json], Iterator[str]]
CAMEL = re.compile(r"^[a-z][a-z0-9]*(?:[A-Z][a-z0-9]*)*$")


def nodes(schema: Json, path: str) -> Iterator[tuple[str, Json]]:
    """Every schema in a schema, with its path. Metadata is Kubernetes' own."""
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        if name != "metadata" or "." in path:
            yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from nodes(schema[key], f"{path}[]")


def array_of_struct(path: str, node: Json) -> Iterator[str]:
    """arrayofstruct: items of a list have a required field, or nobody can tell where one begins."""
    items = node.get("items", {})
    if items.get("type") == "object" and not items.get("required"):
        yield path


def comment_start(path: str, node: Json) -> Iterator[str]:
    """commentstart: every field is explained. (Go's comments begin with the field's name, which a schema says beside.)"""
    for name, child in node.get("properties", {}).items():
        if "description" not in child and (name != "metadata" or "." in path):
            yield f"{path}.{name}"


def conditions(path: str, node: Json) -> Iterator[str]:
    """conditions: the first field of a status, a map by type, with the fields of `metav1.Condition`."""
    if path.count(".") != 1 or not path.endswith(".status"):
        return
    fields = node.get("properties", {})
    if next(iter(fields), None) != "conditions":
        yield f"{path}: conditions is not the first field"
        return
    found = fields["conditions"]
    if (found.get("x-kubernetes-list-type"), found.get("x-kubernetes-list-map-keys")) != ("map", ["type"]):
        yield f"{path}.conditions is no map by type"
    if sorted(found["items"]["required"]) != ["lastTransitionTime", "message", "reason", "status", "type"]:
        yield f"{path}.conditions: not the required fields of metav1.Condition"


def default_or_required(path: str, node: Json) -> Iterator[str]:
    """defaultorrequired, defaults: what has a default is optional."""
    for name in node.get("required", ()):
        if "default" in node["properties"][name]:
            yield f"{path}.{name}"


def integers(path: str, node: Json) -> Iterator[str]:
    """integers: int32 or int64."""
    if node.get("type") == "integer" and node.get("format") not in ("int32", "int64"):
        yield path


def json_tags(path: str, node: Json) -> Iterator[str]:
    """jsontags: camelCase."""
    yield from (f"{path}.{name}" for name in node.get("properties", {}) if not CAMEL.match(name))


def max_length(path: str, node: Json) -> Iterator[str]:
    """maxlength: strings, lists and (ours) maps are bounded, or rules about them become too expensive."""
    if node.get("type") == "string" and not {"maxLength", "enum"} & node.keys() and node.get("format") != "date-time":
        yield path
    if node.get("x-kubernetes-int-or-string") and "maxLength" not in node:
        yield path
    if node.get("type") == "array" and "maxItems" not in node:
        yield path
    if isinstance(node.get("additionalProperties"), dict) and "maxProperties" not in node:
        yield path


def numeric_bounds(path: str, node: Json) -> Iterator[str]:
    """Ours: what a person may set has two bounds."""
    if ".spec" in path and node.get("type") == "integer" and not {"minimum", "maximum"} <= node.keys():
        yield path


def no_bools(path: str, node: Json) -> Iterator[str]:
    """nobools: a third value often comes later."""
    if node.get("type") == "boolean":
        yield path


def no_durations(path: str, node: Json) -> Iterator[str]:
    """nodurations: integers, with the unit in the name."""
    if node.get("format") == "duration":
        yield path
    for name in node.get("properties", {}):
        if re.search("(timeout|duration|interval|period|delay|lease)$", name, re.IGNORECASE):
            yield f"{path}.{name}"


def no_floats(path: str, node: Json) -> Iterator[str]:
    """nofloats."""
    if node.get("type") == "number":
        yield path


def no_maps(path: str, node: Json) -> Iterator[str]:
    """nomaps: only of strings, such as labels."""
    values = node.get("additionalProperties")
    if isinstance(values, dict) and values.get("type") != "string":
        yield path


def no_nullable(path: str, node: Json) -> Iterator[str]:
    """nonullable."""
    if node.get("nullable"):
        yield path


def no_phase(path: str, node: Json) -> Iterator[str]:
    """nophase: conditions say it."""
    yield from (f"{path}.{name}" for name in node.get("properties", {}) if "phase" in name.lower())


def no_references(path: str, node: Json) -> Iterator[str]:
    """noreferences: Ref, not Reference."""
    yield from (f"{path}.{name}" for name in node.get("properties", {}) if "reference" in name.lower())


def no_timestamp(path: str, node: Json) -> Iterator[str]:
    """notimestamp: somethingTime."""
    yield from (f"{path}.{name}" for name in node.get("properties", {}) if "timestamp" in name.lower())


def ssa_tags(path: str, node: Json) -> Iterator[str]:
    """ssatags: a list says how applies of several managers merge."""
    if node.get("type") != "array":
        return
    kind, items = node.get("x-kubernetes-list-type"), node.get("items", {})
    structs = items.get("type") == "object"
    if kind not in ("atomic", "set", "map"):
        yield f"{path}: list type {kind}"
    elif structs and kind == "set":
        yield f"{path}: a set of objects"
    elif kind == "map" and not (structs and set(node.get("x-kubernetes-list-map-keys") or [""]) <= set(items.get("required", ()))):
        yield f"{path}: a map without required keys"


def status_optional(path: str, node: Json) -> Iterator[str]:
    """statusoptional: a status is written field by field."""
    if path.count(".") == 1 and path.endswith(".status"):
        yield from (f"{path}.{name}" for name in node.get("required", ()))


RULES: tuple[Rule, ...] = (
    array_of_struct,
    comment_start,
    conditions,
    default_or_required,
    integers,
    json_tags,
    max_length,
    no_bools,
    no_durations,
    no_floats,
    no_maps,
    no_nullable,
    no_phase,
    no_references,
    no_timestamp,
    numeric_bounds,
    ssa_tags,
    status_optional,
)
NOT_APPLIED = {
    "conflictingmarkers": "about comments in Go; a schema has a key once",
    "dependenttags": "about comments in Go",
    "duplicatemarkers": "about comments in Go; a schema has a key once",
    "forbiddenmarkers": "about comments in Go, and off unless configured",
    "minlength": "off by default. Empty lists, objects and values are accepted where no rule says otherwise: the corpus has such cases",
    "namingconventions": "off unless configured",
    "nonpointerstructs": "about Go, and not for CRDs",
    "optionalfields": "about pointers and omitempty in Go",
    "optionalorrequired": "a field of a schema is in `required`, or it is not",
    "preferredmarkers": "about comments in Go",
    "requiredfields": "about pointers and omitempty in Go",
    "statussubresource": "not on a schema: see test_a_status_has_its_subresource",
    "uniquemarkers": "about comments in Go; a schema has a key once",
}
EXCEPTIONS: dict[str, dict[str, str]] = {
    "no_bools": {
        "InferenceEngine.spec.env[].valueFrom.configMapKeyRef.optional": "as in pods",
        "InferenceEngine.spec.env[].valueFrom.secretKeyRef.optional": "as in pods",
        "KVCachePool.status.granting": "a fact, and no choice: the hub may have granted an epoch, or not",
    },
    "no_maps": {
        "InferenceEngine.spec.resources.limits": "quantities by resource name, as in pods",
        "InferenceEngine.spec.resources.requests": "quantities by resource name, as in pods",
    },
    "no_references": {"InferenceEngine.spec.model.volume.image.reference": "as in pods"},
}
# fmt: off
LINTERS = (
    "arrayofstruct", "commentstart", "conditions", "conflictingmarkers", "defaultorrequired", "defaults", "dependenttags",
    "duplicatemarkers", "forbiddenmarkers", "integers", "jsontags", "maxlength", "minlength", "namingconventions", "nobools",
    "nodurations", "nofloats", "nomaps", "nonpointerstructs", "nonullable", "nophase", "noreferences", "notimestamp",
    "optionalfields", "optionalorrequired", "preferredmarkers", "requiredfields", "ssatags", "statusoptional",
    "statussubresource", "uniquemarkers",
)
# fmt: on
"""All of kube-api-linter's, as its documentation lists them (docs/linters.md, 2026)."""


def found(rule: Rule, schemas: dict[str, Json]) -> list[str]:
    return [text for kind, schema in schemas.items() for path, node in nodes(schema, kind) for text in rule(path, node)]


@pytest.fixture(scope="module")
def schemas() -> dict[str, Json]:
    return {crd.kind: manifest(crd)["spec"]["versions"][0]["schema"]["openAPIV3Schema"] for crd in CRDS}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_rule(rule: Rule, schemas: dict[str, Json]) -> None:
    assert sorted(found(rule, schemas)) == sorted(EXCEPTIONS.get(rule.__name__, {}))


def test_every_linter_is_applied_or_has_a_reason() -> None:
    applied = {name.strip() for rule in RULES for name in (rule.__doc__ or "").split(":")[0].rstrip(".").split(",")} - {"Ours"}
    assert sorted([*applied, *NOT_APPLIED]) == sorted(LINTERS)


def test_a_status_has_its_subresource() -> None:
    for crd in CRDS:
        [version] = manifest(crd)["spec"]["versions"]
        assert "status" in version["subresources"]


BAD: dict[str, Json] = {
    "array_of_struct": {"type": "array", "items": {"type": "object", "properties": {"a": {"type": "string"}}}},
    "comment_start": {"type": "object", "properties": {"a": {"type": "string"}}},
    "default_or_required": {"type": "object", "properties": {"a": {"type": "string", "default": "x"}}, "required": ["a"]},
    "integers": {"type": "integer"},
    "json_tags": {"type": "object", "properties": {"snake_case": {"type": "string"}}},
    "max_length": {"type": "object", "additionalProperties": {"type": "string", "maxLength": 1}},
    "no_bools": {"type": "boolean"},
    "no_durations": {"type": "object", "properties": {"drainTimeout": {"type": "string"}}},
    "no_floats": {"type": "number"},
    "no_maps": {"type": "object", "additionalProperties": {"type": "integer"}},
    "no_nullable": {"type": "string", "nullable": True},
    "no_phase": {"type": "object", "properties": {"poolPhase": {"type": "string"}}},
    "no_references": {"type": "object", "properties": {"poolReference": {"type": "string"}}},
    "no_timestamp": {"type": "object", "properties": {"startTimestamp": {"type": "string"}}},
    "numeric_bounds": {"type": "integer", "minimum": 0},
    "ssa_tags": {"type": "array", "items": {"type": "object"}, "x-kubernetes-list-type": "set"},
}


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.__name__ in BAD], ids=lambda rule: rule.__name__)
def test_each_rule_notices(rule: Rule) -> None:
    schema = {"properties": {"spec": {"type": "object", "properties": {"bad": BAD[rule.__name__]}}}}
    assert any("bad" in text for text in found(rule, {"Kind": schema}))


@pytest.mark.parametrize(
    "bad",
    [
        {"type": "string"},
        {"type": "array", "items": {"type": "integer"}},
        {"x-kubernetes-int-or-string": True},
    ],
    ids=["string", "array", "int-or-string"],
)
def test_every_kind_of_unbounded_field_is_noticed(bad: Json) -> None:
    assert list(max_length("Kind.spec.bad", bad))


@pytest.mark.parametrize("change", ["order", "list", "required", "status"])
def test_the_rules_of_a_status_notice(schemas: dict[str, Json], change: str) -> None:
    schema = copy.deepcopy(schemas["KVCachePool"])
    status = schema["properties"]["status"]
    if change == "order":
        status["properties"] = {"epoch": status["properties"]["epoch"], **status["properties"]}
        status["properties"] = dict(sorted(status["properties"].items(), key=lambda item: item[0] != "epoch"))
    elif change == "list":
        status["properties"]["conditions"]["x-kubernetes-list-type"] = "atomic"
    elif change == "required":
        status["properties"]["conditions"]["items"]["required"] = ["type"]
    else:
        status["required"] = ["epoch"]
    assert found(status_optional if change == "status" else conditions, {"KVCachePool": schema})


def cel(schemas: dict[str, Json]) -> Iterator[tuple[str, Json]]:
    for kind, schema in schemas.items():
        for path, node in nodes(schema, kind):
            yield from ((path, entry) for entry in node.get("x-kubernetes-validations", ()))


def test_every_cel_rule_points_at_a_field_and_says_what_to_do(schemas: dict[str, Json]) -> None:
    """A rule of the whole object has no field of its own: without `fieldPath`, the API server writes `<nil>`."""
    entries = list(cel(schemas))
    assert len(entries) > 40
    for path, entry in entries:
        assert path.count(".") > 0 or entry.get("fieldPath"), f"{path}: {entry['message']}"
        assert entry["reason"] in ("FieldValueInvalid", "FieldValueForbidden", "FieldValueRequired")
        says = entry["message"]
        remedy = "must be|: |; |never|needs exactly one|cannot|set exactly"
        assert re.search(remedy, says), f"{path}: {says!r} does not say what to do"
        assert "\n" not in says
