"""What the chart has of the operator: its CRDs, wrapped so that `crds.install` and `crds.keep` decide about them, and its rights.

The chart keeps its CRDs in `templates/`, because Helm never upgrades what lies in a chart's `crds/` folder.

    python -m hack.sync_chart            write
    python -m hack.sync_chart --check    fail when a copy differs (lint)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from epochkv_operator.api.generate import CRDS, Crd, manifest
from epochkv_operator.api.resources import rights
from hack.generated import keep

TEMPLATES = Path("charts/epochkv/templates")

HEADER = "{{- /* Made from the models by hack/sync_chart.py; do not edit. */}}\n{{- if .Values.crds.install }}\n"
KEEP = """\
    {{- if .Values.crds.keep }}
    helm.sh/resource-policy: keep
    {{- end }}
    epochkv.io/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
"""


class _Dumper(yaml.SafeDumper):
    """Without anchors: each schema stands where it applies."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def template(crd: Crd) -> str:
    """The Helm template for one CRD: its own text with annotations."""
    text: str = yaml.dump(manifest(crd), Dumper=_Dumper, sort_keys=False, width=4096, allow_unicode=True)
    head, metadata, rest = text.replace("{{", '{{ "{{" }}').partition("\nmetadata:\n")
    return HEADER + head + metadata + "  annotations:\n" + KEEP + rest + "{{- end }}\n"


def rules() -> str:
    """The helper with what the operator may do in the namespaces that it serves, from `epochkv_operator/api/resources.py`."""
    verbs: dict[tuple[str, str, bool], list[str]] = {}
    for right in rights("home", (None,)):
        if right.namespace is None and not right.name:
            resource = f"{right.resource}/{right.subresource}" if right.subresource else right.resource
            verbs.setdefault((right.group, resource, right.optional), []).append(right.verb)
    merged: dict[tuple[str, tuple[str, ...], bool], list[str]] = {}
    for (group, resource, optional), allowed in verbs.items():
        merged.setdefault((group, tuple(allowed), optional), []).append(resource)
    lines = ["{{- /* Made by hack/sync_chart.py; do not edit. */}}", '{{- define "epochkv.rules" -}}']
    in_namespaces = {right.resource for right in rights("home", ("team",))}
    for (group, allowed, optional), resources in merged.items():
        rule = [f"- apiGroups: [{group or json.dumps('')}]", f"  resources: [{', '.join(resources)}]", f"  verbs: [{', '.join(allowed)}]"]
        of_cluster = in_namespaces.isdisjoint(resource.partition("/")[0] for resource in resources)
        only = ".Values.serve.gates" if optional else "not .Values.watchNamespaces" if of_cluster else ""
        lines += [f"{{{{- if {only} }}}}", *rule, "{{- end }}"] if only else rule
    return "\n".join([*lines, "{{- end }}"]) + "\n"


def main() -> int:
    crds = {TEMPLATES / "crds" / f"{crd.resource.group}_{crd.resource.plural}.yaml": template(crd) for crd in CRDS}
    return keep("hack.sync_chart", __doc__, {**crds, TEMPLATES / "_rules.tpl": rules()})


if __name__ == "__main__":
    sys.exit(main())
