"""The models read what the API server accepts, and refuse what its schema does; the CRDs that are made from them."""

from __future__ import annotations

from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from epochkv_fence import quantity
from epochkv_operator.api import InferenceEngine, InvalidObject, KVCachePool, parse_engine, parse_pool
from epochkv_operator.api.generate import CRDS, Crd, main, manifest
from tests.support.api.cases import Case, master
from tests.support.api.corpus import CASES, CHANGES

Json = dict[str, Any]


def parse(kind: str, name: str, spec: Json | None) -> KVCachePool | InferenceEngine:
    obj: Json = {"apiVersion": "epochkv.io/v1alpha1", "kind": kind, "metadata": {"name": name, "namespace": "default"}}
    obj |= {} if spec is None else {"spec": spec}
    return parse_pool(obj) if kind == "KVCachePool" else parse_engine(obj)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind[:3]}-{case.id}")
def test_the_models_read_what_is_accepted_and_nothing_that_the_schema_refuses(case: Case) -> None:
    """Rules in CEL are the API server's; lists without duplicates are, too."""
    if case.says is None:
        assert parse(case.kind, case.name, case.spec).metadata.name == case.name
    elif case.schema and case.says != ("Duplicate value",):
        with pytest.raises(InvalidObject, match=f"^{case.kind} default/{case.name}: spec") as refusal:
            parse(case.kind, case.name, case.spec)
        assert "hunter2" not in str(refusal.value)


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"reset": {"leaseSeconds": "30s"}}, "spec.reset.leaseSeconds: Input should be a valid integer"),
        ({"local": {}}, "spec.local.capacity: it is required"),
        ({"local": {"capacity": "64GB"}}, "spec.local.capacity: '64GB' must be a Kubernetes quantity such as 64Gi"),
        (master(highAvailability={"etc": 1}), "spec.distributed.mooncake.master.highAvailability.etc: unknown field"),
    ],
)
def test_a_refusal_names_the_field(spec: Any, says: str) -> None:
    with pytest.raises(InvalidObject) as refused:
        parse("KVCachePool", "policy", spec)
    assert says in str(refused.value)


@pytest.mark.parametrize("change", [change for change in CHANGES if change.says is None], ids=lambda change: change.id)
def test_models_accept_both_sides_of_an_accepted_change(change: Any) -> None:
    parse(change.kind, "changing", change.old)
    parse(change.kind, "changing", change.new)


def test_a_status_of_a_newer_operator_is_read() -> None:
    """Unknown status fields are somebody's; they must not stop this operator."""
    obj = {
        "metadata": {"name": "p", "namespace": "n", "uid": "u", "resourceVersion": "7", "managedFields": []},
        "spec": {"local": {"capacity": "1Gi"}},
        "status": {"epoch": 3, "targetEpoch": 4, "somethingNew": {"a": 1}},
    }
    pool = parse_pool(obj)
    assert pool.status is not None
    assert (pool.status.epoch, pool.status.target_epoch) == (3, 4)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1Ki", 1024),
        ("1.5Gi", 1610612736),
        ("1k", 1000),
        ("1M", 10**6),
        ("1e3", 1000),
        ("1E3", 1000),
        ("1E", 10**18),
        ("1Ei", 2**60),
        ("500m", Decimal("0.5")),
        ("3u", Decimal("0.000003")),
        ("7n", Decimal("0.000000007")),
        (".5", Decimal("0.5")),
        ("5.", 5),
        ("+2", 2),
        ("-2Mi", -2 * 2**20),
        (12, 12),
    ],
)
def test_quantities(text: str | int, value: int | Decimal) -> None:
    assert quantity.parse(text) == value


@pytest.mark.parametrize("text", ["", "Gi", "1GB", "1 Gi", "1KiB", "0x10", "1e", "--1", "1.2.3", "१"])
def test_no_quantities(text: str) -> None:
    with pytest.raises(ValueError, match="must be a Kubernetes quantity such as"):
        quantity.parse(text)


def test_bytes_are_rounded_up_and_printed_exactly() -> None:
    assert quantity.to_bytes("1.0001Ki") == 1025
    assert [quantity.from_bytes(size) for size in (0, 5 * 2**30, 3 * 2**29, 1536, 1025)] == ["0", "5Gi", "1536Mi", "1536", "1025"]


def test_generated_files_are_up_to_date() -> None:
    assert main(["--check"]) == 0


def test_check_notices_a_difference(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--root", str(tmp_path)]) == 0
    assert main(["--check", "--root", str(tmp_path)]) == 0
    changed = tmp_path / "crds" / "epochkv.io_kvcachepools.yaml"
    changed.write_text(changed.read_text().replace("minimum: 1", "minimum: 0", 1))
    assert main(["--check", "--root", str(tmp_path)]) == 1
    assert "crds/epochkv.io_kvcachepools.yaml is not what the models say" in capsys.readouterr().err


BOUNDS = {
    "string": {"minLength", "maxLength", "pattern", "format", "enum"},
    "integer": {"minimum", "maximum", "format"},
    "boolean": set(),
    "array": {"minItems", "maxItems", "items"},
    "object": {"maxProperties", "properties", "additionalProperties", "required"},
}


def nodes(schema: Json, path: str) -> Iterator[tuple[str, Json]]:
    yield path, schema
    for name, child in schema.get("properties", {}).items():
        yield from nodes(child, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


@pytest.mark.parametrize("crd", CRDS, ids=lambda crd: crd.kind)
def test_schemas_say_nothing_without_effect(crd: Crd) -> None:
    """A bound on the wrong type is silently ignored by the API server, an unbounded string or list makes CEL too expensive."""
    schema = manifest(crd)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    for path, node in nodes(schema, crd.kind):
        if node.get("x-kubernetes-int-or-string"):
            assert "maxLength" in node
            continue
        said = {key for key in node if not key.startswith("x-kubernetes-")} - {"description", "type", "default"}
        assert said <= BOUNDS[node["type"]], f"{path}: {said - BOUNDS[node['type']]}"
        if path.startswith(f"{crd.kind}.spec"):
            assert "description" in node or path.endswith("[]"), f"{path} is not explained"
            if node["type"] == "string":
                assert "maxLength" in node or "enum" in node, f"{path} is unbounded"
            if node["type"] == "array":
                assert "maxItems" in node, f"{path} is unbounded"
                assert node["x-kubernetes-list-type"] in ("atomic", "set", "map"), path
