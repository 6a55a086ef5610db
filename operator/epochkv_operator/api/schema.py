"""Pydantic models to structural OpenAPI v3, the dialect of CustomResourceDefinitions.

Kubernetes wants no `$ref`, no `title`, no `null` branches and no `additionalProperties: false` (pruning and strict field
validation do that);
everything else a model says is carried over, `x-kubernetes-*` extensions included.
"""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel

Schema = dict[str, Any]

_DROPPED: Final = ("title", "$defs")
_ORDER: Final = ("description", "type", "format", "anyOf", "enum", "default", "required", "properties", "items")


def structural(model: type[BaseModel]) -> Schema:
    """The structural schema of a model, nested models inlined."""
    schema = model.model_json_schema(by_alias=True)
    converted: Schema = _convert(schema, schema.get("$defs", {}))
    return converted


def _convert(node: Any, definitions: Schema) -> Any:
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


def _inline(node: Schema, definitions: Schema) -> Schema:
    """Resolve a reference or an optional branch; what stands beside it (description, default, extensions) wins."""
    while True:
        branches = [branch for branch in node.get("anyOf", ()) if branch != {"type": "null"}]
        if len(branches) == 1:
            inner = branches[0]
            del node["anyOf"]
        elif "$ref" in node:
            inner = definitions[node.pop("$ref").rsplit("/", 1)[1]]
        else:
            return _exclusive(node)
        node = {**inner, **node}


def _exclusive(node: Schema) -> Schema:
    """`exclusiveMaximum: 2**31` says int32, which `format` already does."""
    if node.get("exclusiveMaximum") == 2**31:
        del node["exclusiveMaximum"]
    return node
