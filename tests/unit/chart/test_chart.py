"""The chart as an administrator meets it: what it renders, what it grants, and what it refuses."""

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from epochkv_operator.api.generate import CRDS, manifest

from .conftest import CHART, Rendered

Render = Callable[..., Rendered]

#: Everything the operator may do in a namespace it serves: (group, resource) -> verbs. Written by hand, not read from the chart.
SERVED = {
    ("epochkv.io", "kvcachepools"): {"get", "list", "watch"},
    ("epochkv.io", "inferenceengines"): {"get", "list", "watch"},
    ("epochkv.io", "kvcachepools/status"): {"patch"},
    ("epochkv.io", "inferenceengines/status"): {"patch"},
    ("apps", "deployments"): {"get", "list", "watch", "create", "patch", "delete"},
    ("apps", "statefulsets"): {"get", "list", "watch", "create", "patch", "delete"},
    ("", "services"): {"get", "list", "watch", "create", "patch", "delete"},
    ("", "configmaps"): {"get", "list", "watch", "create", "patch", "delete", "update"},
    ("", "serviceaccounts"): {"get", "list", "watch", "create", "patch", "delete"},
    ("policy", "poddisruptionbudgets"): {"get", "list", "watch", "create", "patch", "delete"},
    ("networking.k8s.io", "networkpolicies"): {"get", "list", "watch", "create", "patch", "delete"},
    ("leaderworkerset.x-k8s.io", "leaderworkersets"): {"get", "list", "watch", "create", "patch", "delete"},
    ("monitoring.coreos.com", "podmonitors"): {"get", "list", "watch", "create", "patch", "delete"},
    ("", "pods"): {"list", "watch"},
    ("", "pods/status"): {"patch"},
    ("", "secrets"): {"get", "create", "update", "delete"},
    ("events.k8s.io", "events"): {"create"},
}


def granted(role: dict) -> dict[tuple[str, str], set[str]]:
    """(group, resource) -> verbs of the rules that are not bound to names."""
    result: dict[tuple[str, str], set[str]] = {}
    for rule in role["rules"]:
        if "resourceNames" not in rule:
            for group in rule["apiGroups"]:
                for resource in rule["resources"]:
                    result.setdefault((group, resource), set()).update(rule["verbs"])
    return result


def named(role: dict) -> set[tuple[str, str, str, str]]:
    """(group, resource, name, verb) of the rules that are bound to names."""
    return {
        (group, resource, name, verb)
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for name in rule.get("resourceNames", [])
        for verb in rule["verbs"]
    }


def test_the_operator_runs_under_restricted_pod_security(render: Render) -> None:
    pod = render().one("Deployment", "epochkv-operator")["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"] is True
    assert pod["securityContext"]["runAsUser"] == 65532
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert "--pod-security=restricted" in pod["containers"][0]["args"]
    platform = render("--set", "podSecurity=platform")
    tested = next(item for item in platform.objects if item["kind"] == "Pod")
    operator = platform.one("Deployment", "epochkv-operator")["spec"]["template"]["spec"]
    assert "--pod-security=platform" in operator["containers"][0]["args"]
    for spec in (operator, tested["spec"]):
        assert spec["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    (container,) = pod["containers"]
    restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    assert container["securityContext"] == {**restricted, "readOnlyRootFilesystem": True}
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {"hub": 7700, "probes": 8080, "metrics": 9090}
    assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "probes"}
    # A standby must become Ready too, or a rollout with two replicas would never end.
    assert container["readinessProbe"]["httpGet"] == {"path": "/livez", "port": "probes"}
    assert all("hostPath" not in volume for volume in pod["volumes"])


def test_a_version_with_a_digest_makes_no_label_that_is_refused(helm: str, tmp_path: Path) -> None:
    """Flux installs charts from an OCIRepository as such a version."""
    subprocess.run([helm, "package", CHART, "--version", "0.1.0+3f2a9c1e4b5d", "--destination", tmp_path], check=True, timeout=60)
    [packed] = tmp_path.iterdir()
    told = subprocess.run([helm, "template", "demo", packed], capture_output=True, text=True, check=True, timeout=60).stdout
    labels = {value for obj in yaml.safe_load_all(told) if obj for value in obj["metadata"].get("labels", {}).values()}
    assert "epochkv-0.1.0_3f2a9c1e4b5d" in labels
    assert all(re.fullmatch(r"(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?", value) for value in labels), labels


def test_cluster_wide_rights_are_exactly_those_the_operator_uses(render: Render) -> None:
    rendered = render()
    role = rendered.one("ClusterRole", "epochkv-operator")
    assert granted(role) == SERVED | {("", "namespaces"): {"list"}}
    assert named(role) == set()
    own = rendered.one("Role", "epochkv-operator-leader")
    assert own["metadata"]["namespace"] == "epochkv-system"
    creates = [("coordination.k8s.io", "leases"), ("", "secrets"), ("events.k8s.io", "events")]
    assert granted(own) == {resource: {"create"} for resource in creates}
    lease, secret = ("coordination.k8s.io", "leases", "epochkv-operator"), ("", "secrets", "epochkv-hub")
    assert named(own) == {(*lease, "get"), (*lease, "update"), (*secret, "get"), (*secret, "delete")}
    everything = [rule for kind in ("ClusterRole", "Role") for role in rendered.all(kind) for rule in role["rules"]]
    assert all("*" not in rule[field] for rule in everything for field in ("apiGroups", "resources", "verbs"))


def test_without_gates_the_operator_writes_no_pod_and_no_pod_waits_for_it(render: Render) -> None:
    rendered = render("--set", "serve.gates=false")
    role = rendered.one("ClusterRole", "epochkv-operator")
    told = [str(one.one("Deployment", "epochkv-operator")["spec"]["template"]["spec"]["containers"]) for one in (rendered, render())]
    assert ["'--no-gates'" in arguments for arguments in told] == [True, False]
    everywhere = SERVED | {("", "namespaces"): {"list"}}
    assert granted(role) == {resource: verbs for resource, verbs in everywhere.items() if resource != ("", "pods/status")}


def test_watch_namespaces_give_roles_there_and_no_cluster_role(render: Render) -> None:
    rendered = render("--set", "watchNamespaces={training,epochkv-system}")
    assert rendered.all("ClusterRole") == []
    assert rendered.all("ClusterRoleBinding") == []
    for namespace in ("training", "epochkv-system"):
        roles = {(role["metadata"]["namespace"], role["metadata"]["name"]): role for role in rendered.all("Role")}
        assert granted(roles[namespace, "epochkv-operator"]) == SERVED
    arguments = rendered.one("Deployment", "epochkv-operator")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--watch-namespace=training" in arguments
    assert "--watch-namespace=epochkv-system" in arguments


def test_a_namespace_of_digits_is_a_name(render: Render) -> None:
    more = "networkPolicy.hubFrom[0].podSelector.a=b,monitoring.serviceMonitor.enabled=true,monitoring.prometheusRule.enabled=true"
    rendered = render("--namespace", "2024", "--set", f"watchNamespaces={{0123}},dashboards.enabled=true,{more}")
    assert rendered.one("Role", "epochkv-operator")["metadata"]["namespace"] == "0123"
    assert re.findall(r"(?:[:,] |\[)(?:2024|83)\b", json.dumps(rendered.objects)) == []


def test_the_network_policy_lets_in_three_ports_only(render: Render) -> None:
    rendered = render("--set", "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.name=monitoring")
    policy = rendered.one("NetworkPolicy", "epochkv-operator")
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert sorted(port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]) == [7700, 8080, 9090]
    (metrics,) = [rule for rule in policy["spec"]["ingress"] if rule["ports"][0]["port"] == 9090]
    assert metrics["from"] == [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]
    assert render("--set", "networkPolicy.enabled=false").all("NetworkPolicy") == []


def test_rendered_crds_equal_the_generated_ones(render: Render) -> None:
    """Templating must not change a rule: compared after parsing, apart from the annotations that the chart adds."""
    rendered = {crd["metadata"]["name"]: crd["spec"] for crd in render().all("CustomResourceDefinition")}
    assert rendered == {crd.name: manifest(crd)["spec"] for crd in CRDS}


def test_boards_only_on_request_as_the_sidecar_of_grafana_finds_them(render: Render) -> None:
    assert not [found for found in render().all("ConfigMap") if "dashboard" in found["metadata"]["name"]]
    rendered = render("--set", "dashboards.enabled=true,dashboards.namespace=monitoring,dashboards.annotations.grafana_folder=EpochKV")
    boards = [found for found in rendered.all("ConfigMap") if "dashboard" in found["metadata"]["name"]]
    assert [found["metadata"]["name"] for found in boards] == [f"epochkv-{board}-dashboard" for board in ("engine", "fleet", "pool")]
    for found in boards:
        assert found["metadata"]["namespace"] == "monitoring"
        assert found["metadata"]["labels"]["grafana_dashboard"] == "1"
        assert found["metadata"]["annotations"] == {"grafana_folder": "EpochKV"}
        ((name, text),) = found["data"].items()
        assert json.loads(text) == json.loads((CHART / "dashboards" / name).read_text()), "Helm took a legend for a template"
    own = render("--set", "dashboards.enabled=true", "--set-json", 'dashboards.labels={"grafana_dashboard":null,"board":"yes"}')
    (fleet,) = [found for found in own.all("ConfigMap") if found["metadata"]["name"] == "epochkv-fleet-dashboard"]
    assert fleet["metadata"]["namespace"] == "epochkv-system"
    assert fleet["metadata"]["labels"]["board"] == "yes"
    assert "grafana_dashboard" not in fleet["metadata"]["labels"]


def test_the_policy_for_pods_that_join_is_there_on_request_or_where_its_kind_is_served(render: Render) -> None:
    values = ("auto", "true", "false", "auto,watchNamespaces={a}", "true,watchNamespaces={a}")
    served = "--api-versions=admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"
    for more, expected in ((), [0, 2, 0, 0, 2]), ((served,), [2, 2, 0, 0, 2]):
        rendered = (render("--set", f"join.enabled={value}", *more) for value in values)
        assert [len(one.all("MutatingAdmissionPolicy")) for one in rendered] == expected
    rendered = (render("--set", f"serve.policy={value}") for value in (*values, "true,serve.gates=false"))
    assert [len(one.all("ValidatingAdmissionPolicy")) for one in rendered] == [1, 1, 0, 0, 1, 0]


def test_the_policy_of_an_operator_that_serves_some_namespaces(render: Render) -> None:
    values = "watchNamespaces={a,b},join.enabled=true,serve.gates=false,defaults.connectorImage=registry.example/c@sha256:0"
    names = ("epochkv-join-epochkv-system", "epochkv-join-epochkv-system-shared")
    admission, _ = (render("--set", values).one("MutatingAdmissionPolicy", name)["spec"] for name in names)
    assert admission["matchConstraints"]["namespaceSelector"]["matchExpressions"][0]["values"] == ["a", "b"]
    assert "image: 'registry.example/c@sha256:0'" in admission["mutations"][0]["jsonPatch"]["expression"]
    assert [one["expression"].split(" &&")[0] for one in admission["variables"] if one["name"] == "gated"] == ["false"]


def test_service_monitor_only_on_request(render: Render) -> None:
    assert render().all("ServiceMonitor") == []
    rendered = render("--set", "monitoring.serviceMonitor.enabled=true", "--set", r"monitoring.serviceMonitor.labels.helm\.sh/chart=mine")
    monitor = rendered.one("ServiceMonitor", "epochkv-operator")
    assert (monitor["metadata"]["labels"]["helm.sh/chart"], monitor["spec"]["endpoints"][0]["port"]) == ("mine", "metrics")
    assert monitor["spec"]["endpoints"][0]["honorLabels"] is True, "the boards find a pool by its own namespace"


@pytest.mark.parametrize(
    ("arguments", "named_in_error"),
    [
        (("--set", "imgae.tag=x"), "imgae"),
        (("--set", "replicas=-1"), "replicas"),
        (("--set", "watchNamespaces={Not_A_Name}"), "watchNamespaces"),
        (("--set", "hub.endpoint=epochkv-hub:7700"), "endpoint"),
        (("--set", "networkPolicy.hubFrom[0].podselector.a=b"), "podselector"),
        (("--set", "operator.extraVolumes[0].emptyDir.medium=Memory"), "extraVolumes"),
        (("--set", "topologySpreadConstraints[0].maxSkew=1"), "topologySpreadConstraints"),
        (("--set", "podDisruptionBudget.maxUnavailable=200%"), "maxUnavailable"),
        (("--set", "operator.leaseDurationSeconds=1"), "leaseDurationSeconds"),
        (("--set", "image.digest=sha256:1234"), "digest"),
        (("--set", "operator.workers=null"), "missing property 'workers'"),
        (("--set", "podSecurity=null"), "missing property 'podSecurity'"),
    ],
)
def test_wrong_values_are_refused_by_name(render: Render, arguments: tuple[str, ...], named_in_error: str) -> None:
    rendered = render(*arguments)
    assert rendered.status != 0
    assert named_in_error in rendered.error


def test_every_supported_kubernetes_gets_the_same_and_an_older_one_is_refused(render: Render) -> None:
    for version in ("1.35.0", "1.37.2-gke.100"):
        rendered = render("--kube-version", version)
        assert rendered.status == 0, rendered.error
        assert rendered.objects == render().objects
    assert "kubeVersion: >=1.35.0-0" in render("--kube-version", "1.34.9").error


# ------------------------------------------------------------------------------------------------------------ values

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
    "podLabels": {"cost": "42", "app.kubernetes.io/part-of": "control"},
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


def test_every_value_has_a_description_and_every_description_a_value(render: Render) -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    described = dict(schema_paths(schema))
    assert [path for path, child in described.items() if not child.get("description", "").endswith(".")] == []
    values = set(value_paths(yaml.safe_load((CHART / "values.yaml").read_text()), set(described)))
    # What a parent chart gives: `global` is handed down by Helm, and `enabled` is how most write `condition: epochkv.enabled`.
    assert values == set(described) - {"global", "enabled"}
    assert render("--set", "enabled=true,global.registry=example").error == ""
    objects = {path: child for path, child in described.items() if "properties" in child}
    assert objects
    assert [path for path, child in objects.items() if child.get("additionalProperties") is not False] == [], "more would be accepted there"


def test_quantities_are_those_of_kubernetes() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    [pattern] = [node["additionalProperties"]["pattern"] for name, node in schema["definitions"].items() if name == "quantities"]
    assert all(re.fullmatch(pattern, text) for text in ("2", "500m", "64Gi", "1.5G", "1e9", ".5", "100u", "1e+3", "5."))
    assert not any(re.fullmatch(pattern, text) for text in ("", "5GB", "1 Gi", "Gi", "1e", "lots"))


def test_placement_reaches_the_operators_pods(render: Render, tmp_path: Path) -> None:
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(PLACEMENT))
    rendered = render("--values", str(tmp_path / "values.yaml"))
    assert rendered.status == 0, rendered.error
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


def test_images_lie_beside_the_operators(render: Render) -> None:
    """Those that are given by digest: `test_release.py`."""
    served = "--api-versions=admissionregistration.k8s.io/v1/MutatingAdmissionPolicy"
    rendered = render(served, "--set", "image.repository=mirror.example/epochkv-operator,image.tag=dev")
    (container,) = rendered.one("Deployment", "epochkv-operator")["spec"]["template"]["spec"]["containers"]
    assert {f"--{name}-image=mirror.example/epochkv-{name}:dev" for name in ("store", "engine")} <= set(container["args"])
    assert "'mirror.example/epochkv-connector:dev'" in str(rendered.all("MutatingAdmissionPolicy")[0]["spec"]["mutations"])


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
