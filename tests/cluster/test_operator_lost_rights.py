"""Rights that an operator never had, or loses while it runs, show on the objects that it cannot serve, until it has them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from epochkv_operator.api.resources import Right, rights
from hack.cluster.controlplane import ControlPlane
from hack.waiting import eventually
from tests.cluster.operator_harness import POOLS, Namespace, OperatorProcess, condition

RBAC = "/apis/rbac.authorization.k8s.io/v1/namespaces/{}/{}"


def grant(space: Namespace, *, but: Callable[[Right], bool] = lambda right: False) -> None:
    """All that the operator needs in this namespace, which is its home, too, but for some."""
    needed = [right for right in rights(space.name, [space.name]) if not but(right)]
    rules: list[Any] = [
        {
            "apiGroups": [right.group],
            "resources": [f"{right.resource}/{right.subresource}".rstrip("/")],
            "verbs": [right.verb],
            **({"resourceNames": [right.name]} if right.name else {}),
        }
        for right in needed
    ]
    body = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": {"name": "operator"}, "rules": rules}
    space.plane.api.apply(RBAC.format(space.name, "roles/operator"), body)


def bind(space: Namespace, account: str) -> Path:
    """Give an account what is granted here; its kubeconfig."""
    ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "operator"}
    subject = {"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": account}
    space.request("POST", RBAC.format(space.name, "rolebindings"), {"metadata": {"name": "o"}, "roleRef": ref, "subjects": [subject]})
    return space.plane.kubeconfig_for(account, ("system:authenticated",))


def no_pods(right: Right) -> bool:
    return (right.resource, right.verb) == ("pods", "list")


def test_missing_rights_show_on_objects(plane: ControlPlane, tmp_path: Path) -> None:
    space = Namespace.create_in(plane, "lost-rights")
    space.create_pool("policy", local={"capacity": "64Mi"})
    space.create_engine("rollout", poolRef={"name": "policy"}, model={"name": "tiny"})
    grant(space, but=no_pods)
    config = bind(space, "operator-that-loses-rights")
    with OperatorProcess(plane, space.name, tmp_path, kubeconfig=config, resync_seconds=2) as operator:

        def ready() -> list[tuple[str, str]]:
            found = [condition(status, "Ready") for status in (space.status("policy"), space.engine_status("rollout"))]
            return [(one.get("reason", ""), one.get("message", "")) for one in found]

        def shows_what_is_missing() -> None:
            eventually(lambda: [reason for reason, _ in ready()] == ["ReadForbidden"] * 2, "shown", 60)
            assert all('cannot list resource "pods"' in message and "epochkv doctor" in message for _, message in ready())
            grant(space)
            eventually(lambda: [reason for reason, _ in ready()] == ["Ready", "Starting"], "over", 60)

        shows_what_is_missing()
        assert space.names("deployments") == {"rollout"}
        operator.wait_ready()
        grant(space, but=no_pods)
        shows_what_is_missing()

        grant(space, but=lambda right: (right.resource, right.subresource) == ("kvcachepools", "status"))
        space.patch(POOLS, "policy", {"spec": {"local": {"capacity": "65Mi"}}})
        [event] = eventually(lambda: space.events("StatusForbidden"), "told", 60)
        assert event["regarding"]["name"] == "policy"
        assert 'cannot patch resource "kvcachepools/status"' in event["note"]
