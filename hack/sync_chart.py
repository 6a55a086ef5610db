"""Copy the generated CRDs into the chart, wrapped so that `crds.install` and `crds.keep` decide about them.

The chart keeps its CRDs in `templates/`, because Helm never upgrades what lies in a chart's `crds/` folder.

    python -m hack.sync_chart            write
    python -m hack.sync_chart --check    fail when a copy differs (lint)
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "crds"
TARGET = ROOT / "charts/epochkv/templates/crds"

HEADER = "{{- /* Made from crds/%s by hack/sync_chart.py; do not edit. */}}\n{{- if .Values.crds.install }}\n"
KEEP = """\
    {{- if .Values.crds.keep }}
    helm.sh/resource-policy: keep
    {{- end }}
    epochkv.io/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
"""


class BadCrd(ValueError):
    """A CRD file has no place for the annotations; the message names it."""


def template(name: str, text: str) -> str:
    """The Helm template for one CRD; the CRD's own text is kept byte for byte, apart from added annotations."""
    lines = text.replace("{{", '{{ "{{" }}').splitlines(keepends=True)
    if lines and lines[0].strip() == "---":
        lines = lines[1:]
    if "metadata:\n" not in lines:
        raise BadCrd(f"{name} has no top-level line 'metadata:'; generate it anew with 'make generate'")
    place = lines.index("metadata:\n") + 1
    if "  annotations:\n" in lines[place : place + 3]:
        place = lines.index("  annotations:\n", place) + 1
        block = KEEP
    else:
        block = "  annotations:\n" + KEEP
    return HEADER % name + "".join(lines[:place]) + block + "".join(lines[place:]).rstrip("\n") + "\n{{- end }}\n"


def expected() -> dict[str, str]:
    """File name -> content for every CRD; empty when none was generated yet."""
    return {path.name: template(path.name, path.read_text()) for path in sorted(SOURCE.glob("*.yaml"))}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hack.sync_chart", description="Copy the CRDs into the chart.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a copy differs")
    check = parser.parse_args().check
    wanted = expected()
    if not wanted:
        print(f"no CRDs in {SOURCE.relative_to(ROOT)}: run 'make generate'", file=sys.stderr)
        return 1
    present = {path.name: path.read_text() for path in sorted(TARGET.glob("*.yaml"))}
    stale = sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name))
    if check:
        for name in stale:
            print(f"charts/epochkv/templates/crds/{name} differs from crds/{name}: run 'make generate'", file=sys.stderr)
        return 1 if stale else 0
    TARGET.mkdir(parents=True, exist_ok=True)
    for name in stale:
        if name in wanted:
            (TARGET / name).write_text(wanted[name])
        else:
            (TARGET / name).unlink()
        print(f"charts/epochkv/templates/crds/{name}: {'written' if name in wanted else 'removed'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
