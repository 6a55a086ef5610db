"""The manifests that users copy: valid by the API's own models, and none of them claims the epoch for itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from epochkv_operator.api.engine import InferenceEngine
from epochkv_operator.api.pool import KVCachePool

ROOT = Path(__file__).resolve().parents[3]
MODELS: dict[str, type[KVCachePool | InferenceEngine]] = {"KVCachePool": KVCachePool, "InferenceEngine": InferenceEngine}
FILES = sorted([*(ROOT / "config").glob("*/*.yaml")])


def objects(path: Path) -> list[dict[str, Any]]:
    return [obj for obj in yaml.safe_load_all(path.read_text()) if obj and "kind" in obj]


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_pools_and_engines_are_valid(path: Path) -> None:
    for obj in objects(path):
        if obj["kind"] in MODELS:
            # What the API server adds before the operator sees an object.
            obj["metadata"] = {"namespace": "default", "uid": "0", "generation": 1, "resourceVersion": "1", **obj["metadata"]}
            MODELS[obj["kind"]].model_validate(obj)


def test_no_manifest_sets_the_epoch() -> None:
    pools = [obj for path in FILES for obj in objects(path) if obj["kind"] == "KVCachePool"]
    assert len(pools) == 2
    assert all("resetEpoch" not in pool["spec"] for pool in pools)


def test_the_demo_runs_under_restricted_pod_security() -> None:
    (namespace,) = objects(ROOT / "config/demo/namespace.yaml")
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    demo = [obj for path in FILES if path.parent.name == "demo" for obj in objects(path) if obj["kind"] in MODELS]
    assert {obj["metadata"]["namespace"] for obj in demo} == {namespace["metadata"]["name"]}


def test_the_reference_differs_from_the_engine_only_in_having_no_cache() -> None:
    (engine,), (reference,) = (objects(ROOT / f"config/demo/{name}.yaml") for name in ("engine", "reference"))
    for key in ("model", "image", "env", "resources", "template"):
        assert engine["spec"][key] == reference["spec"][key], key
    assert [*engine["spec"]["args"], "--no-enable-prefix-caching"] == reference["spec"]["args"]
    assert "poolRef" not in reference["spec"]
