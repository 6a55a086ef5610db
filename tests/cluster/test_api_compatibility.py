"""The CRDs against those of the last release: schemas by crdify, rules and stored objects by a real API server that is upgraded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from epochkv_operator.api import parse_engine, parse_pool
from hack.cluster.controlplane import ControlPlane
from hack.crds import ACCEPTED, CRDS, RELEASED, breaks, release
from hack.waiting import eventually
from tests.cluster.operator_harness import install_crds
from tests.cluster.test_api_validation import collection, create, manifest, send
from tests.support.api.cases import Case
from tests.support.api.corpus import CASES

Json = dict[str, Any]
POOLS, ENGINES = "epochkv.io_kvcachepools.yaml", "epochkv.io_inferenceengines.yaml"


def test_nothing_breaks_that_the_last_release_took() -> None:
    assert [str(one) for one in breaks(RELEASED, CRDS)] == []


def remove(field: str) -> Callable[[Json], None]:
    def change(spec: Json) -> None:
        del spec["properties"][field]

    return change


def deepen(*path: str, **values: Any) -> Callable[[Json], None]:
    def change(spec: Json) -> None:
        for step in path:
            spec = spec["properties"][step]
        spec.update(values)

    return change


BREAKS: list[tuple[str, Callable[[Json], None], tuple[str, str]]] = [
    (POOLS, remove("keys"), ("^", "existingFieldRemoval")),
    (POOLS, deepen("reset", "reclaimPolicy", enum=["Delete", "Retain"]), ("^.spec.reset.reclaimPolicy", "enum")),
    (POOLS, deepen("reset", "leaseSeconds", maximum=60), ("^.spec.reset.leaseSeconds", "maximum")),
    (POOLS, deepen("reset", "leaseSeconds", default=31), ("^.spec.reset.leaseSeconds", "default")),
    (POOLS, deepen(required=["local"]), ("^.spec", "required")),
    (ENGINES, deepen("image", maxLength=8), ("^.spec.image", "maxLength")),
    (ENGINES, deepen("args", minItems=1), ("^.spec.args", "minItems")),
    (ENGINES, deepen("replicas", type="string", format=None), ("^.spec.replicas", "type")),
]


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """What was released, and a copy of it to change."""
    released, current = tmp_path / "released", tmp_path / "current"
    shutil.copytree(RELEASED, released)
    shutil.copytree(RELEASED, current)
    (released / ACCEPTED).write_text("# reasons\n[]\n")
    return released, current


@pytest.mark.parametrize(("file", "change", "found"), BREAKS, ids=[f"{entry[2][1]}-{index}" for index, entry in enumerate(BREAKS)])
def test_what_breaks_somebody_is_noticed(
    folders: tuple[Path, Path], file: str, change: Callable[[Json], None], found: tuple[str, str]
) -> None:
    released, current = folders
    crd = yaml.safe_load((current / file).read_text())
    change(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"])
    (current / file).write_text(yaml.safe_dump(crd))
    assert found in {(one.path, one.check) for one in breaks(released, current)}


def test_a_break_can_be_meant_and_a_reason_that_is_over_is_noticed(folders: tuple[Path, Path]) -> None:
    released, current = folders
    crd = yaml.safe_load((current / ENGINES).read_text())
    deepen("image", maxLength=8)(crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"])
    (current / ENGINES).write_text(yaml.safe_dump(crd))
    entry = {"crd": "inferenceengines", "path": "^.spec.image", "check": "maxLength", "reason": "nobody has longer names"}
    (released / ACCEPTED).write_text("# reasons\n" + yaml.safe_dump([entry]))
    assert breaks(released, current) == []
    release(current, released)
    assert (released / ACCEPTED).read_text() == "# reasons\n[]\n"
    assert breaks(released, current) == []
    (released / ACCEPTED).write_text(yaml.safe_dump([entry]))
    assert [one.text for one in breaks(released, current)] == [f"stands in {ACCEPTED}, and did not happen: remove it"]


def ours(case: Case) -> bool:
    """What the corpus says that the released CRDs took: it is good, or only newer rules refuse it."""
    return case.says is None or (case.stored and not case.id.startswith("gone-"))


@pytest.fixture(scope="module")
def upgraded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ControlPlane, dict[str, Case]]]:
    """An API server with objects that were stored under the released CRDs, and ours now; the cases by the names of their objects."""
    with ControlPlane(tmp_path_factory.mktemp("released") / "cp") as plane:
        for file in sorted(RELEASED.glob("epochkv.io_*.yaml")):
            crd = yaml.safe_load(file.read_text())
            plane.api.apply(f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{crd['metadata']['name']}", crd)
            plural = crd["spec"]["names"]["plural"]
            eventually(lambda p=plural: plane.api.ok(f"/apis/epochkv.io/v1alpha1/{p}"), f"{plural} served")
        stored: dict[str, Case] = {}
        for number, case in enumerate(filter(ours, CASES)):
            name = f"case-{number}"
            status, _ = create(plane, manifest(case.kind, name, case.spec), dry=False)
            if status == 201:  # else a field or value that the release did not have yet
                stored[name] = case
        install_crds(plane)
        new = manifest("KVCachePool", "new", {"local": {"capacity": "1e30"}})
        eventually(lambda: create(plane, new, dry=True)[0] == 422, "the new rules in force")
        yield plane, stored


def test_what_was_stored_under_the_last_release_goes_on_and_new_rules_hold_for_new_input(
    upgraded: tuple[ControlPlane, dict[str, Case]],
) -> None:
    plane, stored = upgraded
    assert any(case.stored for case in stored.values()), "nothing that newer rules refuse was stored"
    refused = [f"{case.id}: {text}" for name, case in stored.items() for text in go_on(plane, name, case)]
    assert refused == []
    for name, case in stored.items():
        if case.stored and case.spec is not None:
            not_anew(plane, name, case)


def go_on(plane: ControlPlane, name: str, case: Case) -> Iterator[str]:
    """The object can be changed in other fields, and the operator reads it. Yields what is refused."""
    path = f"{collection(case.kind)}/{name}"
    epoch = (case.spec or {}).get("resetEpoch", 0)
    field: Json = {"replicas": 7} if case.kind == "InferenceEngine" else {"resetEpoch": min(epoch + 10**13, 2**53 - 1)}
    for patch in ({"metadata": {"labels": {"touched": "yes"}}}, {"spec": field}):
        status, answer = send(plane, "PATCH", path, patch, "application/merge-patch+json")
        if status != 200:
            yield answer["message"]
    status, live = send(plane, "GET", path)
    assert status == 200
    (parse_pool if case.kind == "KVCachePool" else parse_engine)(live)


def not_anew(plane: ControlPlane, name: str, case: Case) -> None:
    """Newer rules hold for new objects, and for fields that change."""
    assert case.spec is not None
    status, answer = create(plane, manifest(case.kind, "again", case.spec), dry=True)
    assert status == 422, (case.id, answer)
    if "args" in case.spec:
        patch = {"spec": {"args": [*case.spec["args"], "--enforce-eager"]}}
        status, answer = send(plane, "PATCH", f"{collection(case.kind)}/{name}?dryRun=All", patch, "application/merge-patch+json")
        assert status == 422, json.dumps(answer)
