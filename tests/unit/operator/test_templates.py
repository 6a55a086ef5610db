"""Pod templates of the owner: merged like strategic patches, or refused."""

from dataclasses import replace
from typing import Any

import pytest

from epochkv_operator.api.base import PodSecurity
from epochkv_operator.planning.engine import desired_engine
from epochkv_operator.planning.podspec import InvalidTemplate
from epochkv_operator.planning.pool import desired_pool
from tests.support.planning import CONTEXT, ENGINE_SPECS, engine, one, pool, variables

Json = dict[str, Any]


def engine_template(spec: Json) -> Json:
    wanted = {**ENGINE_SPECS["minimal"], "template": {"spec": spec}}
    result: Json = one(desired_engine(engine(wanted), pool(), CONTEXT), "Deployment")["spec"]["template"]["spec"]
    return result


def test_templates_merge_like_strategic_patches() -> None:
    full = one(desired_engine(engine("full"), pool(), CONTEXT), "Deployment")["spec"]["template"]
    assert full["metadata"]["labels"]["team"] == "rl"
    spec = full["spec"]
    own, sidecar = spec["containers"]
    assert (own["name"], sidecar["name"]) == ("engine", "sidecar")
    assert own["startupProbe"]["failureThreshold"] == 720
    assert own["startupProbe"]["httpGet"]["path"] == "/health"
    assert [mount["mountPath"] for mount in own["volumeMounts"]] == ["/tmp", "/dev/shm", "/etc/epochkv/fence", "/models"]
    shm = next(volume for volume in spec["volumes"] if volume["name"] == "shm")
    assert shm == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Gi"}}
    replaced = engine_template({"volumes": [{"name": "tmp", "persistentVolumeClaim": {"claimName": "scratch"}}]})
    tmp = next(volume for volume in replaced["volumes"] if volume["name"] == "tmp")
    assert tmp == {"name": "tmp", "persistentVolumeClaim": {"claimName": "scratch"}}
    for gone in (None, {"$patch": "delete"}):
        removed = engine_template({"containers": [{"name": "engine", "livenessProbe": gone}], "securityContext": {"runAsUser": gone}})
        assert "livenessProbe" not in removed["containers"][0]
        assert removed["securityContext"] == {key: value for key, value in spec["securityContext"].items() if key != "runAsUser"}
        assert "terminationGracePeriodSeconds" not in engine_template({"terminationGracePeriodSeconds": gone})
    env = engine_template({"containers": [{"name": "engine", "env": [{"name": "HOME", "value": "/h"}, {"name": "A", "value": "b"}]}]})
    values = variables(env["containers"][0])
    assert (values["HOME"], values["A"], values["USER"]) == ("/h", "b", "vllm")


IDS = {"runAsUser", "runAsGroup", "fsGroup"}


@pytest.mark.parametrize(("default", "own", "fixed"), [("restricted", "platform", False), ("platform", "restricted", True)])
def test_who_chooses_the_ids_of_pods(default: PodSecurity, own: str, fixed: bool) -> None:
    """Of an object's own choice; and of the operator's, where it makes none."""
    context = replace(CONTEXT, settings=replace(CONTEXT.settings, pod_security=default))
    for said, ids in (({"podSecurity": own}, fixed), ({}, not fixed)):
        wanted = pool({"distributed": {"mooncake": {"store": {"segmentSize": "1Gi"}, **said}}})
        made = desired_pool(wanted, context)
        [deployment] = [one(desired_engine(engine({**ENGINE_SPECS["minimal"], **said}), wanted, context), "Deployment")]
        for workload in (one(made, "Deployment"), one(made, "StatefulSet"), deployment):
            security = workload["spec"]["template"]["spec"]["securityContext"]
            assert security.keys() & IDS == (IDS if ids else set())
            assert security["runAsNonRoot"] is True
        fence = next(item for item in deployment["spec"]["template"]["spec"]["volumes"] if item["name"] == "epochkv-fence")
        assert fence["secret"]["defaultMode"] == (0o440 if ids else 0o444), "without fsGroup, others must be able to read the key"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"containers": [{"name": "engine", "command": ["sh"]}]}, "containers[engine].command belongs to the operator: use spec.args"),
        ({"containers": [{"name": "engine", "args": ["--kv-transfer-config={}"]}]}, "containers[engine].args belongs to the operator"),
        ({"containers": [{"name": "engine", "image": "x"}]}, "use spec.image"),
        ({"containers": [{"name": "engine", "env": [{"name": "PYTHONHASHSEED", "value": "0"}]}]}, "PYTHONHASHSEED"),
        ({"containers": [{"name": "engine", "env": [{"name": "MC_X", "value": "0"}]}]}, "belong to the operator: remove it"),
        ({"containers": [{"name": "engine", "volumeMounts": [{"mountPath": "/etc/epochkv/fence/", "name": "x"}]}]}, "mount elsewhere"),
        ({"volumes": [{"name": "epochkv-fence", "emptyDir": {}}]}, "choose another volume name"),
        ({"volumes": [{"emptyDir": {}}]}, "spec.template.spec.volumes[0] has no name"),
        ({"containers": {"name": "engine"}}, "spec.template.spec.containers must be a list of objects"),
        ({"containers": [{"name": "engine", "$patch": "delete"}]}, "the only directive is {$patch: delete}"),
        ({"securityContext": {"$patch": "replace"}}, "the only directive is {$patch: delete}"),
        ({"volumes": {"$patch": "delete"}}, "volumes is removed, and with it the operator's own volumes"),
        ({"securityContext": "none"}, "it must be an object"),
        ({"containers": None}, "containers is removed, and with it the operator's own"),
        ({"volumes": None}, "volumes is removed, and with it the operator's own"),
        ({"containers": [{"name": "engine", "env": None}]}, "containers[engine].env is removed"),
        ({"containers": [{"name": "engine", "volumeMounts": None}]}, "containers[engine].volumeMounts is removed"),
        ({"containers": [{"name": "sidecar", "securityContext": "none"}]}, "containers[sidecar].securityContext is 'none'"),
        ({"initContainers": [{"name": "prepare", "securityContext": [1]}]}, "initContainers[prepare].securityContext is [1]"),
        ({"terminationGracePeriodSeconds": "soon"}, "terminationGracePeriodSeconds is 'soon'; it must be a number of seconds"),
        ({"terminationGracePeriodSeconds": -1}, "terminationGracePeriodSeconds is -1"),
    ],
)
def test_templates_that_are_refused(spec: Json, says: str) -> None:
    with pytest.raises(InvalidTemplate) as refusal:
        engine_template(spec)
    assert says in str(refusal.value)
    assert str(refusal.value).startswith("spec.template.spec")


def test_store_and_master_templates_are_guarded_too() -> None:
    base = {"store": {"segmentSize": "1Gi"}}
    for component in ("master", "store"):
        part = {**base.get(component, {}), "template": {"spec": {"containers": [{"name": component, "command": ["sh"]}]}}}
        with pytest.raises(InvalidTemplate, match=rf"^spec\.distributed\.mooncake\.{component}\.template\.spec\.containers\[{component}\]"):
            desired_pool(pool({"distributed": {"mooncake": {**base, component: part}}}), CONTEXT)
