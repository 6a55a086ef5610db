"""`python -m epochkv_connector.config.reference [--check]`: write the reference of all keys, or fail when it differs.

Types and defaults are those of the structures in `config`, everything else is said in its table `SCHEMA`. Needs no vLLM.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from epochkv_connector.config.keys import EXTRA, SCHEMA, ConnectorConfig, DistributedTier, HubRef, LocalTier, PoolRef
from epochkv_connector.config.schema import Rule, Table

COMMAND: Final = "python -m epochkv_connector.config.reference"
PAGE: Final = Path("docs/reference/connector-config.md")
STRUCTURES: Final[dict[str, type[msgspec.Struct]]] = {
    "": ConnectorConfig,
    "pool.": PoolRef,
    "hub.": HubRef,
    "local.": LocalTier,
    "distributed.": DistributedTier,
}
"""By the prefix of their keys."""

_TYPES: Final[dict[Any, str]] = {int: "integer", float: "number", bool: "boolean"}
_HEADER: Final = (
    "# Configuration of the connector\n\n"
    f"Generated from the models by `{COMMAND}`; do not edit.\n\n"
    f"These are the keys of `{EXTRA}` in vLLM's `--kv-transfer-config`; [standalone](../standalone.md) has whole command lines, and the "
    "operator writes them itself. A value that is not allowed, or a key that is not here, ends the start with one line that names it.\n\n"
    "| key | type | default | allowed | meaning |\n|---|---|---|---|---|\n"
)


def markdown() -> str:
    """The whole page."""
    return _HEADER + "".join(_rows(SCHEMA, ""))


def _rows(table: Table, prefix: str) -> Iterator[str]:
    fields = {field.name: field for field in msgspec.structs.fields(STRUCTURES[prefix])}
    for key, rule in table.keys.items():
        field = fields.get(key)  # none: `config_file`, which says where the others are
        kind = "object" if isinstance(rule, Table) else _TYPES.get(field.type if field else str, "string")
        unit, allowed = (f", {rule.unit}" if rule.unit else "", rule.allowed) if isinstance(rule, Rule) else ("", "")
        cells = (f"`{prefix}{key}`", kind + unit, _default(rule, field), allowed, rule.does)
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"
        if isinstance(rule, Table):
            yield from _rows(rule, f"{prefix}{key}.")


def _default(rule: Rule | Table, field: msgspec.structs.FieldInfo | None) -> str:
    if not rule.optional:
        return "required"
    value = field.default if field else None
    return "" if value is None or value is msgspec.NODEFAULT else f"`{json.dumps(value)}`"


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 when the page is (now) up to date, 1 when `--check` finds a difference."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page differs")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[2], help="root of the repository")
    options = parser.parse_args(arguments)
    path, text = options.root / PAGE, markdown()
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return 0
    if options.check:
        print(f"{PAGE} is not what the models say: run {COMMAND} and commit the result", file=sys.stderr)
        return 1
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    print(f"wrote {PAGE}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
