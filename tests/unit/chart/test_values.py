"""Every value: described, refused when it is unknown, and found again in what is rendered."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

from .conftest import CHART, Rendered

Render = Callable[..., Rendered]
DIGEST = "sha256:" + "ab" * 32

#: What a platform team asks of any operator, with something that only this test would write.
TEST = "epochkv-test-9235b215"
"""The pod of `helm test`, and its pool: the release `demo` in `epochkv-system`."""
PLACEMENT: dict[str, Any] = {
    "imagePullSecrets": [{"name": "registry"}],
    "priorityClassName": "system-cluster-critical",
    "nodeSelector": {"pool": "control"},
    "tolerations": [{"key": "control", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 1, "preference": {"matchFields": []}}]}},
    "podAnnotations": {"team": "ml"},
    "podLabels": {"cost": "42"},
    "topologySpreadConstraints": [
        {"maxSkew": 2, "topologyKey": "topology.kubernetes.io/zone", "whenUnsatisfiable": "DoNotSchedule"},
        {"maxSkew": 1, "topologyKey": "rack", "whenUnsatisfiable": "ScheduleAnyway", "labelSelector": {"matchLabels": {"a": "b"}}},
    ],
    "operator": {
        "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
        "extraEnvFrom": [{"configMapRef": {"name": "more"}}],
        "extraVolumes": [{"name": "ca", "configMap": {"name": "ca"}}],
        "extraVolumeMounts": [{"name": "ca", "mountPath": "/etc/ssl/ca", "readOnly": True}],
    },
    "podDisruptionBudget": {"maxUnavailable": "50%"},
}


def schema_paths(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, child in schema.get("properties", {}).items():
        here = f"{path}.{name}".lstrip(".")
        yield here, child
        yield from schema_paths(child, here)


def value_paths(values: Any, known: set[str], path: str = "") -> Iterator[str]:
    """Paths of a values.yaml, down to what the schema knows as one value."""
    for name, child in values.items():
        here = f"{path}.{name}".lstrip(".")
        yield here
        if isinstance(child, dict) and any(other.startswith(here + ".") for other in known):
            yield from value_paths(child, known, here)


def test_every_value_has_a_description_and_every_description_a_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    described = dict(schema_paths(schema))
    assert [path for path, child in described.items() if not child.get("description", "").endswith(".")] == []
    values = set(value_paths(yaml.safe_load((CHART / "values.yaml").read_text()), set(described)))
    # `global` is what Helm hands down from a parent chart.
    assert values == set(described) - {"global"}


def test_nothing_unknown_is_accepted_at_any_depth() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    objects = [(path, child) for path, child in schema_paths(schema) if "properties" in child]
    assert objects
    assert [path for path, child in objects if child.get("additionalProperties") is not False] == []


def test_quantities_are_those_of_kubernetes() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    [pattern] = [node["additionalProperties"]["pattern"] for name, node in schema["definitions"].items() if name == "quantities"]
    assert all(re.fullmatch(pattern, text) for text in ("2", "500m", "64Gi", "1.5G", "1e9", ".5", "100u", "1e+3", "5."))
    assert not any(re.fullmatch(pattern, text) for text in ("", "5GB", "1 Gi", "Gi", "1e", "lots"))


def rendered_with(render: Render, tmp_path: Path, values: dict[str, Any]) -> Rendered:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    rendered = render("--values", str(tmp_path / "values.yaml"))
    assert rendered.status == 0, rendered.error
    return rendered


def test_placement_reaches_the_operators_pods(render: Render, tmp_path: Path) -> None:
    rendered = rendered_with(render, tmp_path, PLACEMENT)
    template = rendered.one("Deployment", "epochkv-operator")["spec"]["template"]
    spec, metadata = template["spec"], template["metadata"]
    for key in ("imagePullSecrets", "priorityClassName", "nodeSelector", "tolerations", "affinity"):
        assert spec[key] == PLACEMENT[key]
    assert metadata["annotations"] == {"team": "ml"}
    assert metadata["labels"]["cost"] == "42"
    zone, rack = spec["topologySpreadConstraints"]
    assert (zone["maxSkew"], zone["topologyKey"], zone["whenUnsatisfiable"]) == (2, "topology.kubernetes.io/zone", "DoNotSchedule")
    assert zone["labelSelector"]["matchLabels"].items() <= metadata["labels"].items()
    assert rack["labelSelector"] == {"matchLabels": {"a": "b"}}
    (container,) = spec["containers"]
    extra = PLACEMENT["operator"]
    assert extra["extraEnv"][0] in container["env"]
    assert container["envFrom"] == extra["extraEnvFrom"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/tmp", "/etc/ssl/ca"]
    assert extra["extraVolumes"][0] in spec["volumes"]
    assert rendered.one("PodDisruptionBudget", "epochkv-operator")["spec"]["maxUnavailable"] == "50%"


def test_a_digest_wins_over_the_tag(render: Render) -> None:
    rendered = render(
        *("--set", f"image.repository=mirror.example/operator,image.tag=dev,image.digest={DIGEST}"),
        *("--set", f"defaults.storeImage=mirror.example/store@{DIGEST},defaults.engineImage=mirror.example/engine:1@{DIGEST}"),
    )
    (container,) = rendered.one("Deployment", "epochkv-operator")["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"mirror.example/operator@{DIGEST}"
    assert rendered.one("Pod", TEST)["spec"]["containers"][0]["image"] == container["image"]
    assert f"--store-image=mirror.example/store@{DIGEST}" in container["args"]
    assert f"--engine-image=mirror.example/engine:1@{DIGEST}" in container["args"]


def test_the_test_resets_its_own_pool_or_the_given_one_where_the_operator_serves(render: Render) -> None:
    def tested(*values: str) -> tuple[str, str, list[str]]:
        rendered = render(*values)
        pod, pools = rendered.one("Pod", TEST), [obj for obj in rendered.objects if obj["kind"] == "KVCachePool"]
        assert pod["spec"]["automountServiceAccountToken"] is False
        (connection,) = [volume["configMap"]["name"] for volume in pod["spec"]["volumes"] if "configMap" in volume]
        return pod["metadata"]["namespace"], connection, [f"{obj['metadata']['namespace']}/{obj['metadata']['name']}" for obj in pools]

    assert tested() == ("epochkv-system", f"{TEST}-connection", [f"epochkv-system/{TEST}"])
    assert tested("--set", "test.pool=policy,test.namespace=team") == ("team", "policy-connection", [])
    # A namespace that no operator of this release serves would wait for ever.
    assert tested("--set", "watchNamespaces={team-a,team-b}")[0] == "team-a"
    assert tested("--set", "watchNamespaces={team-a,epochkv-system}")[0] == "epochkv-system"


def test_the_test_may_dial_a_hub_that_is_closed_to_others(render: Render) -> None:
    rendered = render("--set", "networkPolicy.hubFrom[0].namespaceSelector.matchLabels.team=ml")
    (hub,) = [rule for rule in rendered.one("NetworkPolicy", "epochkv-operator")["spec"]["ingress"] if rule["ports"][0]["port"] == 7700]
    team, test = hub["from"]
    assert team == {"namespaceSelector": {"matchLabels": {"team": "ml"}}}
    assert test["podSelector"]["matchLabels"].items() <= rendered.one("Pod", TEST)["metadata"]["labels"].items()
