"""The API reference page, generated from the same CRDs that the API server enforces."""

from __future__ import annotations

from collections.abc import Iterator

from epochkv_operator.api.base import API_VERSION, Json
from epochkv_operator.api.crd import CRDS, manifest

_HEADER = """# API reference

Generated from the models by `python -m epochkv_operator.api.generate`; do not edit.
Group and version: `{version}`. Unknown fields are rejected (`kubectl` validates strictly by default).
"""


def markdown() -> str:
    """The whole page."""
    parts = [_HEADER.format(version=API_VERSION)]
    for crd in CRDS:
        schema = manifest(crd)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        parts.append(f"\n## {crd.kind} (`{crd.short_name}`)\n\n{schema['description']}\n")
        for section in ("spec", "status"):
            parts.append(f"\n### {section}\n\n| field | type | default | meaning |\n|---|---|---|---|\n")
            parts.extend(_rows(schema["properties"][section], section))
        parts.append("\n### Rejected at admission\n\n")
        parts.extend(f"- {message}\n" for message in sorted(set(_messages(schema))))
    return "".join(parts)


def _rows(schema: Json, path: str) -> Iterator[str]:
    required = schema.get("required", ())
    for name, child in schema.get("properties", {}).items():
        if any(entry["rule"] == "false" for entry in child.get("x-kubernetes-validations", ())):
            continue  # it is gone, and among what is refused
        here = f"{path}.{name}"
        default = f"`{_plain(child['default'])}`" if "default" in child else ("required" if name in required else "")
        yield f"| `{here}` | {_type(child)} | {default} | {child.get('description', '').replace('|', chr(92) + '|')} |\n"
        if child.get("type") == "object":
            yield from _rows(child, here)
        elif child.get("type") == "array":
            yield from _rows(child["items"], f"{here}[]")


def _type(schema: Json) -> str:
    if schema.get("x-kubernetes-int-or-string"):
        return "quantity"
    if "enum" in schema:
        return " \\| ".join(f"`{value}`" for value in schema["enum"])
    kind = schema.get("type", "object")
    if kind == "array":
        return f"list of {_type(schema['items'])}"
    if kind == "object" and "additionalProperties" in schema:
        return f"map to {_type(schema['additionalProperties'])}"
    bounds = [f"{word} {schema[key]}" for key, word in (("minimum", "at least"), ("maximum", "at most")) if key in schema]
    return f"{kind}, {', '.join(bounds)}" if bounds else str(kind)


def _plain(value: object) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_plain(item)}" for key, item in value.items()) + "}"
    return str(value)


def _messages(schema: Json) -> Iterator[str]:
    for entry in schema.get("x-kubernetes-validations", ()):
        yield entry["message"]
    for child in schema.get("properties", {}).values():
        yield from _messages(child)
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from _messages(schema[key])
