"""The chart as an administrator meets it: what it renders, what it grants, and what it refuses."""

import json
from collections.abc import Callable

import pytest
import yaml

from .conftest import CHART, ROOT, Rendered

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
    ("", "serviceaccounts"): {"get", "list", "watch", "create", "patch"},
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
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {port["name"]: port["containerPort"] for port in container["ports"]} == {"hub": 7700, "probes": 8080, "metrics": 9090}
    assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "probes"}
    # A standby must become Ready too, or a rollout with two replicas would never end.
    assert container["readinessProbe"]["httpGet"] == {"path": "/livez", "port": "probes"}
    assert all("hostPath" not in volume for volume in pod["volumes"])


def test_cluster_wide_rights_are_exactly_those_the_operator_uses(render: Render) -> None:
    rendered = render()
    role = rendered.one("ClusterRole", "epochkv-operator")
    assert granted(role) == SERVED | {("", "namespaces"): {"list"}}
    assert named(role) == set()
    own = rendered.one("Role", "epochkv-operator-leader")
    assert own["metadata"]["namespace"] == "epochkv-system"
    creates = [("coordination.k8s.io", "leases"), ("", "secrets"), ("events.k8s.io", "events")]
    assert granted(own) == {resource: {"create"} for resource in creates}
    assert named(own) == {
        ("coordination.k8s.io", "leases", "epochkv-operator", "get"),
        ("coordination.k8s.io", "leases", "epochkv-operator", "update"),
        ("", "secrets", "epochkv-hub", "get"),
        ("", "secrets", "epochkv-hub", "delete"),
    }
    everything = [rule for kind in ("ClusterRole", "Role") for role in rendered.all(kind) for rule in role["rules"]]
    assert all("*" not in rule[field] for rule in everything for field in ("apiGroups", "resources", "verbs"))


def test_without_gates_the_operator_writes_no_pod_and_no_pod_waits_for_it(render: Render) -> None:
    def arguments(rendered: Rendered) -> list[str]:
        found: list[str] = rendered.one("Deployment", "epochkv-operator")["spec"]["template"]["spec"]["containers"][0]["args"]
        return found

    rendered = render("--set", "serve.gates=false")
    role = rendered.one("ClusterRole", "epochkv-operator")
    assert ("--no-gates" in arguments(rendered), "--no-gates" in arguments(render())) == (True, False)
    everywhere = SERVED | {("", "namespaces"): {"list"}}
    assert granted(role) == {resource: verbs for resource, verbs in everywhere.items() if resource != ("", "pods/status")}


def test_watch_namespaces_give_roles_there_and_no_cluster_role(render: Render) -> None:
    rendered = render("--set", "watchNamespaces={training,epochkv-system}")
    assert rendered.all("ClusterRole") == []
    assert rendered.all("ClusterRoleBinding") == []
    for namespace in ("training", "epochkv-system"):
        (role,) = [
            role
            for role in rendered.all("Role")
            if role["metadata"]["namespace"] == namespace and role["metadata"]["name"] == "epochkv-operator"
        ]
        assert granted(role) == SERVED
    arguments = rendered.one("Deployment", "epochkv-operator")["spec"]["template"]["spec"]["containers"][0]["args"]
    assert "--watch-namespace=training" in arguments
    assert "--watch-namespace=epochkv-system" in arguments


def test_the_network_policy_lets_in_three_ports_only(render: Render) -> None:
    policy = render("--set", "networkPolicy.metricsFrom[0].namespaceSelector.matchLabels.name=monitoring").one(
        "NetworkPolicy", "epochkv-operator"
    )
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert sorted(port["port"] for rule in policy["spec"]["ingress"] for port in rule["ports"]) == [7700, 8080, 9090]
    (metrics,) = [rule for rule in policy["spec"]["ingress"] if rule["ports"][0]["port"] == 9090]
    assert metrics["from"] == [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]
    assert render("--set", "networkPolicy.enabled=false").all("NetworkPolicy") == []


def test_rendered_crds_equal_the_generated_ones(render: Render) -> None:
    """Templating must not change a rule: compared after parsing, apart from the annotations that the chart adds."""
    rendered = {crd["metadata"]["name"]: crd["spec"] for crd in render().all("CustomResourceDefinition")}
    generated = {
        crd["metadata"]["name"]: crd["spec"] for crd in (yaml.safe_load(path.read_text()) for path in (ROOT / "crds").glob("*.yaml"))
    }
    assert rendered == generated


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
    assert render("--set", "dashboards.enable=true").status != 0


def test_service_monitor_only_on_request(render: Render) -> None:
    assert render().all("ServiceMonitor") == []
    monitor = render("--set", "monitoring.serviceMonitor.enabled=true").one("ServiceMonitor", "epochkv-operator")
    assert monitor["spec"]["endpoints"][0]["port"] == "metrics"
    assert monitor["spec"]["endpoints"][0]["honorLabels"] is True, "the boards find a pool by its own namespace"


@pytest.mark.parametrize(
    ("arguments", "named_in_error"),
    [
        (("--set", "imgae.tag=x"), "imgae"),
        (("--set", "replicas=-1"), "replicas"),
        (("--set", "watchNamespaces={Not_A_Name}"), "watchNamespaces"),
        (("--set", "hub.endpoint=epochkv-hub:7700"), "endpoint"),
        (("--set", "operator.leaseDurationSeconds=1"), "leaseDurationSeconds"),
        (("--set", "networkPolicy.hubFrom[0].podselector.a=b"), "podselector"),
        (("--set", "image.digest=sha256:1234"), "digest"),
        (("--set", "operator.extraVolumes[0].emptyDir.medium=Memory"), "extraVolumes"),
        (("--set", "topologySpreadConstraints[0].maxSkew=1"), "topologySpreadConstraints"),
        (("--set", "podDisruptionBudget.maxUnavailable=200%"), "maxUnavailable"),
    ],
)
def test_wrong_values_are_refused_by_name(render: Render, arguments: tuple[str, ...], named_in_error: str) -> None:
    rendered = render(*arguments)
    assert rendered.status != 0
    assert named_in_error in rendered.error


@pytest.mark.parametrize("version", ["1.35.0", "1.37.2-gke.100"])
def test_every_supported_kubernetes_gets_the_same(render: Render, version: str) -> None:
    rendered = render("--kube-version", version)
    assert rendered.status == 0, rendered.error
    assert rendered.objects == render().objects


def test_an_older_kubernetes_is_refused(render: Render) -> None:
    assert "kubeVersion: >=1.35.0-0" in render("--kube-version", "1.34.9").error
