"""Write the reference of the connector's keys from the fields of its models, or fail when it differs. Needs no vLLM.

python -m hack.config_reference             write
python -m hack.config_reference --check     fail when the page differs (lint)
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from msgspec import inspect

from epochkv_connector.config import PAGE, ConnectorConfig
from epochkv_fence.launch import EXTRA
from hack.generated import keep

_HEADER: Final = (
    "# Configuration of the connector\n\n"
    "Generated from the models by `python -m hack.config_reference`; do not edit.\n\n"
    f"These are the keys of `{EXTRA}` in vLLM's `--kv-transfer-config`. The operator writes them into its engines. "
    "[L2 without Kubernetes](../standalone.md) has whole command lines.\n\n"
    "A value that is not allowed, or a key that is not here, ends the start with one line that names it.\n\n"
    "| key | type | default | allowed | meaning |\n|---|---|---|---|---|\n"
)


def markdown() -> str:
    """The whole page."""
    model = inspect.type_info(ConnectorConfig)
    assert isinstance(model, inspect.StructType)
    return _HEADER + "".join(_rows(model, ""))


def _rows(model: inspect.StructType, path: str) -> Iterator[str]:
    """One for each key; an object comes before its keys."""
    for field in model.fields:
        meta = field.type
        assert isinstance(meta, inspect.Metadata), f"{field.name} has no description"
        words, inner = meta.extra or {}, meta.type
        kinds = inner.types if isinstance(inner, inspect.UnionType) else (inner,)
        *others, one = (kind for kind in kinds if not isinstance(kind, inspect.NoneType))
        kind, allowed = ("string or object", words["allowed"]) if others else _allowed(one, words)
        default = "required" if field.required else "" if field.default is None else f"`{json.dumps(field.default)}`"
        unit = f", {words['unit']}" if "unit" in words else ""
        cells = (f"`{path}{field.name}`", kind + unit, default, allowed, (meta.extra_json_schema or {})["description"])
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"
        if isinstance(one, inspect.StructType):
            yield from _rows(one, f"{path}{field.name}.")


def _allowed(kind: inspect.Type, words: Mapping[str, Any]) -> tuple[str, str]:
    """The type's name, and the values it may hold."""
    match kind:
        case inspect.BoolType():
            return "boolean", "true or false"
        case inspect.IntType():
            unit = f" of {words['unit']}" if "unit" in words else ""
            return "integer", f"a whole number{unit} from {kind.ge} to {kind.le}"
        case inspect.FloatType():
            bounds = f"from {kind.ge:g} to {kind.le:g}" if kind.gt is None else f"above {kind.gt:g}, at most {kind.le:g}"
            return "number", f"a number of {words['unit']} {bounds}"
        case inspect.LiteralType(values=values):
            return "string", " or ".join(f'"{word}"' for word in values)
        case inspect.StructType():
            return "object", ""
    return "string", words["allowed"]


def main() -> int:
    return keep("hack.config_reference", __doc__, {Path(PAGE): markdown()})


if __name__ == "__main__":
    sys.exit(main())
