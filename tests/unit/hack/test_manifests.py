"""The manifests that users copy, and those of the demo."""

from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[3]


def objects(path: Path) -> list[dict[str, Any]]:
    return [obj for obj in yaml.safe_load_all(path.read_text()) if obj and "kind" in obj]


def test_no_manifest_sets_the_epoch() -> None:
    pools = [obj for path in (ROOT / "config").glob("*/*.yaml") for obj in objects(path) if obj["kind"] == "KVCachePool"]
    assert len(pools) == 2
    assert all("resetEpoch" not in pool["spec"] for pool in pools)


def test_the_reference_differs_from_the_engine_only_in_having_no_cache() -> None:
    (engine,), (reference,) = (objects(ROOT / f"config/demo/{name}.yaml") for name in ("engine", "reference"))
    for key in ("model", "image", "env", "resources", "template"):
        assert engine["spec"][key] == reference["spec"][key], key
    assert [*engine["spec"]["args"], "--no-enable-prefix-caching"] == reference["spec"]["args"]
    assert "poolRef" not in reference["spec"]
