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


def template(name: str, text: str) -> str:
    """The Helm template for one CRD; the CRD's own text is kept, apart from added annotations."""
    head, metadata, rest = text.replace("{{", '{{ "{{" }}').partition("\nmetadata:\n")
    return HEADER % name + head + metadata + "  annotations:\n" + KEEP + rest + "{{- end }}\n"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m hack.sync_chart", description="Copy the CRDs into the chart.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail when a copy differs")
    check = parser.parse_args().check
    wanted = {TARGET / path.name: template(path.name, path.read_text()) for path in sorted(SOURCE.glob("*.yaml"))}
    stale = [path for path, text in wanted.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        if check:
            print(f"{path.relative_to(ROOT)} differs from crds/{path.name}: run 'make generate'", file=sys.stderr)
        else:
            path.write_text(wanted[path])
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
