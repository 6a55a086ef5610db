"""Whether the CRDs that are installed are those of this version."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from epochkv_fence import VERSION
from epochkv_fence.doctor.finding import CannotLook, Finding, Say
from epochkv_operator.api.generate import CRDS, Crd, manifest
from epochkv_operator.doctor.cluster import Cluster
from epochkv_operator.doctor.operators import find_operators
from epochkv_operator.kube.client import Json
from epochkv_operator.kube.resources import Resource

DEFINITIONS: Final = Resource("apiextensions.k8s.io", "v1", "customresourcedefinitions", "CustomResourceDefinition")
APPLY: Final = "epochkv-operator crds | kubectl apply --server-side --force-conflicts -f -"
SHOWN: Final = 3
COMPARED: Final = ("subresources", "additionalPrinterColumns", "selectableFields", "schema")


async def look_at_definitions(cluster: Cluster) -> list[Finding]:
    try:
        versions = {operator.version for operator in await find_operators(cluster) if operator.version}
    except CannotLook:
        versions = set()
    other = "" if not versions or VERSION in versions else min(versions)
    return [finding for crd in CRDS for finding in judge_definition(crd, await cluster.get(DEFINITIONS, None, crd.name), other)]


def judge_definition(crd: Crd, installed: Json | None, operator: str = "") -> list[Finding]:
    """`operator`: its version, where this command is not of that."""
    say = Say("crds", crd.name)
    if installed is None:
        return [say.wrong("it is not installed", APPLY)]
    conditions = {one["type"]: one for one in (installed.get("status") or {}).get("conditions") or ()}
    for kind in ("NamesAccepted", "Established"):
        if conditions.get(kind, {}).get("status") != "True":
            return [say.wrong(f"it is not served: {kind} is not True: {conditions.get(kind, {}).get('message', '')}", APPLY)]
    wanted = manifest(crd)["spec"]["versions"][0]
    live = next((one for one in installed["spec"]["versions"] if one["name"] == wanted["name"]), None)
    if live is None or not live.get("served"):
        return [say.wrong(f"it does not serve {wanted['name']}", APPLY)]
    found = [path for key in COMPARED for path in differences(wanted.get(key), live.get(key), key)]
    if not found:
        return [say.ok(f"it is that of {VERSION or 'this version'}")]
    paths = [path.removeprefix("schema.openAPIV3Schema.").replace("properties.", "") for path in found]
    more = f" and {len(paths) - SHOWN} more places" if len(paths) > SHOWN else ""
    text = f"it differs from that of this version in {', '.join(paths[:SHOWN])}{more}"
    if operator[:1].isdigit():
        fix = f"pip install 'epochkv[operator]=={operator}'   # and run this command again"
        return [say.unknown(f"{text}; but the operator is {operator}, and this command {VERSION}", fix)]
    return [say.wrong(f"{text}: fields would be dropped, or refused by rules of another version", APPLY)]


def differences(wanted: Any, live: Any, path: str) -> Iterator[str]:
    """Paths at which two JSON values differ. Defaults that the API server adds to a definition are not among what is compared."""
    if isinstance(wanted, dict) and isinstance(live, dict):
        for key in sorted(wanted.keys() | live.keys()):
            yield from differences(wanted.get(key), live.get(key), f"{path}.{key}")
    elif isinstance(wanted, list) and isinstance(live, list) and len(wanted) == len(live):
        for index, (one, other) in enumerate(zip(wanted, live, strict=True)):
            yield from differences(one, other, f"{path}[{index}]")
    elif wanted != live:
        yield path
