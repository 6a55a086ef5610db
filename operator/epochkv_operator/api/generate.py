"""`python -m epochkv_operator.api.generate [--check]`: write the CRDs and the API reference from the models, or fail when they differ."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import yaml
from pydantic import BaseModel

from epochkv_operator.api.base import API_VERSION, GROUP, VERSION, Json
from epochkv_operator.api.engine import InferenceEngine
from epochkv_operator.api.pool import KVCachePool

_DROPPED: Final = ("title", "$defs")
_ORDER: Final = ("description", "type", "format", "anyOf", "enum", "default", "required", "properties", "items")


def _column(name: str, kind: str, path: str, *, wide: bool = False) -> Json:
    return {"name": name, "type": kind, "jsonPath": path} | ({"priority": 1} if wide else {})


def _condition(name: str, part: str) -> str:
    return f'.status.conditions[?(@.type=="{name}")].{part}'


@dataclass(frozen=True)
class Crd:
    """What a CRD says beyond its schema."""

    model: type[BaseModel]
    plural: str
    short_name: str
    columns: tuple[Json, ...]
    scale: Json
    selectable: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return self.model.__name__

    @property
    def name(self) -> str:
        return f"{self.plural}.{GROUP}"

    @property
    def file_name(self) -> str:
        return f"{GROUP}_{self.plural}.yaml"


POOL = Crd(
    KVCachePool,
    "kvcachepools",
    "kvp",
    (
        _column("Ready", "string", _condition("Ready", "status")),
        _column("Epoch", "integer", ".status.epoch"),
        _column("Target", "integer", ".status.targetEpoch"),
        _column("Engines", "string", ".status.engines.summary"),
        _column("Weights", "string", ".status.weightsSummary"),
        _column("Stores", "integer", ".status.store.readyReplicas"),
        _column("Reason", "string", _condition("Ready", "reason"), wide=True),
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
    "inferenceengines",
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
    {
        "specReplicasPath": ".spec.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    },
    (".spec.poolRef.name",),
)
CRDS = (POOL, ENGINE)


def manifest(crd: Crd) -> Json:
    """The CustomResourceDefinition as JSON."""
    schema = _structural(crd.model)
    for key in ("apiVersion", "kind"):
        del schema["properties"][key]
    # Declared only so that the rule about the name can point at it; the API server knows the rest of metadata by itself.
    schema["properties"]["metadata"] = {"type": "object", "properties": {"name": {"type": "string"}}}
    schema["required"] = ["spec"]
    version: Json = {
        "name": VERSION,
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
            "group": GROUP,
            "names": {
                "kind": crd.kind,
                "plural": crd.plural,
                "singular": crd.kind.lower(),
                "shortNames": [crd.short_name],
                "categories": ["inference"],
            },
            "scope": "Namespaced",
            "versions": [version],
        },
    }


def _structural(model: type[BaseModel]) -> Json:
    """The structural schema of a model, nested models inlined."""
    schema = model.model_json_schema(by_alias=True)
    converted: Json = _convert(schema, schema.get("$defs", {}))
    return converted


def _convert(node: Any, definitions: Json) -> Any:
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


_COMMAND = "python -m epochkv_operator.api.generate"
_HEADER = f"# Generated from the models by `{_COMMAND}`; do not edit.\n"
_PAGE_HEADER = """# API reference

Generated from the models by `python -m epochkv_operator.api.generate`; do not edit.
Group and version: `{version}`. Unknown fields are rejected (`kubectl` validates strictly by default).
"""


class _Dumper(yaml.SafeDumper):
    """Without anchors: each schema stands where it applies."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _render(crd: Crd) -> str:
    text: str = yaml.dump(manifest(crd), Dumper=_Dumper, sort_keys=False, width=4096, allow_unicode=True)
    return _HEADER + text


def _files(root: Path) -> dict[Path, str]:
    """Every generated file and what it must contain."""
    return {root / "crds" / crd.file_name: _render(crd) for crd in CRDS} | {root / "docs" / "reference" / "api.md": _markdown()}


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 when everything is (now) up to date, 1 when `--check` finds a difference."""
    parser = argparse.ArgumentParser(prog=_COMMAND, description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file differs")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[3], help="root of the repository")
    options = parser.parse_args(arguments)
    stale = {path: text for path, text in _files(options.root).items() if not path.exists() or path.read_text(encoding="utf-8") != text}
    for path, text in stale.items():
        name = path.relative_to(options.root)
        if options.check:
            print(f"{name} is not what the models say: run {_COMMAND} and commit the result", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    return 1 if options.check and stale else 0


def _markdown() -> str:
    """The API reference page, from the same CRDs that the API server enforces."""
    parts = [_PAGE_HEADER.format(version=API_VERSION)]
    for crd in CRDS:
        schema = manifest(crd)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        parts.append(f"\n## {crd.kind} (`{crd.short_name}`)\n\n{schema['description']}\n")
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
        percent = any("percentage" in entry["message"] for entry in schema.get("x-kubernetes-validations", ()))
        return "number or percentage" if percent else "quantity"
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
