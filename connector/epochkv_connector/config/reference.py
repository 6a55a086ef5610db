"""`python -m epochkv_connector.config.reference [--check]`: write the reference of all keys, or fail when it differs.

The page is generated from the fields of the models in `config`. Needs no vLLM.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Final

from epochkv_connector.config import EXTRA, KEYS, Key, every

COMMAND: Final = "python -m epochkv_connector.config.reference"
PAGE: Final = Path("docs/reference/connector-config.md")
_HEADER: Final = (
    "# Configuration of the connector\n\n"
    f"Generated from the models by `{COMMAND}`; do not edit.\n\n"
    f"These are the keys of `{EXTRA}` in vLLM's `--kv-transfer-config`. The operator writes them into its engines. "
    "[L2 without Kubernetes](../standalone.md) has whole command lines.\n\n"
    "A value that is not allowed, or a key that is not here, ends the start with one line that names it.\n\n"
    "| key | type | default | allowed | meaning |\n|---|---|---|---|---|\n"
)


def markdown() -> str:
    """The whole page."""
    return _HEADER + "".join(_row(name, key) for name, key in every(KEYS))


def _row(name: str, key: Key) -> str:
    default = "required" if key.required else "" if key.default is None else f"`{json.dumps(key.default)}`"
    cells = (f"`{name}`", key.kind, default, "" if key.keys is not None else key.allowed, key.does)
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 when the page is (now) up to date, 1 when `--check` finds a difference."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when the page differs")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[3], help="root of the repository")
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
