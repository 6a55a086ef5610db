"""What samples of trainers mount is what the operator makes for the pool of the samples: names, keys, paths and label."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from epochkv_fence.connection import ATTACH_ENV, CONFIG_ENV
from epochkv_operator.api import parse_pool
from epochkv_operator.planning.names import component_name
from epochkv_operator.planning.pool import desired_pool
from tests.support.planning import CONTEXT, one

Json = dict[str, Any]
SAMPLES = Path(__file__).parents[3] / "config/samples"
NAMES = ("trainer.yaml", "trainer-job.yaml", "kuberay/raycluster.yaml")


def pods(sample: Json) -> list[Json]:
    """Every pod, or template of one, of a manifest."""
    spec = sample["spec"]
    if sample["kind"] == "RayCluster":
        return [spec["headGroupSpec"]["template"], *(group["template"] for group in spec["workerGroupSpecs"])]
    return [sample if sample["kind"] == "Pod" else spec["template"]]


@pytest.fixture(scope="module")
def pool() -> Any:
    manifest = yaml.safe_load((SAMPLES / "pool.yaml").read_text())
    manifest["metadata"] |= {"namespace": "default", "uid": "u-1", "generation": 1}
    return parse_pool(manifest)


@pytest.mark.parametrize("name", NAMES)
def test_mounts_are_what_the_operator_makes(name: str, pool: Any) -> None:
    connection = one(desired_pool(pool, CONTEXT), "ConfigMap")
    document = json.loads(connection["data"]["connection.json"])
    found = pods(yaml.safe_load((SAMPLES / name).read_text()))
    assert found
    for pod in found:
        assert pod["metadata"]["labels"] == {"epochkv.io/pool": pool.metadata.name}
        (container,) = pod["spec"]["containers"]
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        paths = {mount["name"]: mount for mount in container["volumeMounts"]}
        assert volumes["connection"]["configMap"] == {"name": connection["metadata"]["name"]}
        assert volumes["fence"]["secret"] == {"secretName": component_name(pool.metadata.name, "fence")}
        assert paths["fence"]["mountPath"] == document["hub"]["credentials_dir"]
        assert all("subPath" not in mount for mount in paths.values())
        environ = {variable["name"]: variable["value"] for variable in container["env"]}
        folder, _, key = environ[CONFIG_ENV].rpartition("/")
        assert (folder, key in connection["data"]) == (paths["connection"]["mountPath"], True)
        assert environ.get(ATTACH_ENV) == (None if name == "trainer.yaml" else "1")
