"""Write the API reference from the models, or fail when it differs.

python -m hack.api_reference             write
python -m hack.api_reference --check     fail when a file differs (lint)
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from epochkv_operator.api.base import API_VERSION, Json
from epochkv_operator.api.generate import CRDS, manifest
from hack.generated import keep

_PAGE_HEADER = """# API reference

Generated from the models by `python -m hack.api_reference`; do not edit.
Group and version: `{version}`. `kubectl apply` rejects unknown fields; `kubectl patch` warns of them and drops them.
"""


def main() -> int:
    return keep("hack.api_reference", __doc__, {Path("docs/reference/api.md"): _markdown()})


def _markdown() -> str:
    """The API reference page, from the same CRDs that the API server enforces."""
    parts = [_PAGE_HEADER.format(version=API_VERSION)]
    for crd in CRDS:
        schema = manifest(crd)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        parts.append(f"\n## {crd.resource.kind} (`{crd.short_name}`)\n\n{schema['description']}\n")
        for section in ("spec", "status"):
            parts.append(f"\n### {section}\n\n| field | type | default | meaning |\n|---|---|---|---|\n")
            parts.extend(_rows(schema["properties"][section], section))
        parts.append("\n### Rejected at admission\n\n")
        parts.extend(f"- {line}\n" for line in sorted(set(_messages(schema, ""))))
    return "".join(parts)


def _rows(schema: Json, path: str) -> Iterator[str]:
    required = schema.get("required", ())
    for name, child in schema.get("properties", {}).items():
        here = f"{path}.{name}"
        default = f"`{_plain(child['default'])}`" if "default" in child else ("required" if name in required else "")
        yield f"| `{here}` | {_type(child)} | {default} | {child.get('description', '').replace('|', chr(92) + '|')} |\n"
        if child.get("type") == "object":
            yield from _rows(child, here)
        elif child.get("type") == "array":
            yield from _rows(child["items"], f"{here}[]")


def _type(schema: Json) -> str:
    if schema.get("x-kubernetes-int-or-string"):
        said = " ".join(entry["message"] for entry in schema.get("x-kubernetes-validations", ()))
        return "number or percentage" if "percentage" in said else "quantity" if "quantity" in said else "number or string"
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


def _messages(schema: Json, path: str) -> Iterator[str]:
    for entry in schema.get("x-kubernetes-validations", ()):
        yield f"`{(path + entry.get('fieldPath', '')).removeprefix('.')}`: {entry['message']}"
    for name, child in schema.get("properties", {}).items():
        yield from _messages(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if isinstance(schema.get(key), dict):
            yield from _messages(schema[key], f"{path}[]")


if __name__ == "__main__":
    sys.exit(main())
