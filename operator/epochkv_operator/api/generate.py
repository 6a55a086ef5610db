"""`python -m epochkv_operator.api.generate [--check]`: write the CRDs and the API reference from the models, or fail when they differ."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

from epochkv_operator.api.crd import CRDS, Crd, manifest
from epochkv_operator.api.reference import markdown

_HEADER = "# Generated from the models by `python -m epochkv_operator.api.generate`; do not edit.\n"
COMMAND = "python -m epochkv_operator.api.generate"


class _Dumper(yaml.SafeDumper):
    """Without anchors: each schema stands where it applies."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def render(crd: Crd) -> str:
    """The YAML file of one CRD."""
    text: str = yaml.dump(manifest(crd), Dumper=_Dumper, sort_keys=False, width=4096, allow_unicode=True)
    return _HEADER + text


def files(root: Path) -> dict[Path, str]:
    """Every generated file and what it must contain."""
    return {root / "crds" / crd.file_name: render(crd) for crd in CRDS} | {root / "docs" / "reference" / "api.md": markdown()}


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 when everything is (now) up to date, 1 when `--check` finds a difference."""
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a file differs")
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parents[3], help="root of the repository")
    options = parser.parse_args(arguments)
    stale = {path: text for path, text in files(options.root).items() if not path.exists() or path.read_text(encoding="utf-8") != text}
    for path, text in stale.items():
        name = path.relative_to(options.root)
        if options.check:
            print(f"{name} is not what the models say: run {COMMAND} and commit the result", file=sys.stderr)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    return 1 if options.check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
