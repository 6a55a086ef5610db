"""What `epochkv doctor` says of objects of a cluster. Pure: objects as the API server gives them, and its time."""

import asyncio
import subprocess
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest

from epochkv_fence.cli.doctor import ClusterScope, Finding, Level
from epochkv_fence.net.keys import generate_keypair
from epochkv_operator import doctor
from epochkv_operator.api.resources import rights
from epochkv_operator.doctor import Operator, judge_lease, judge_object, judge_rights
from epochkv_operator.keys import content, encoded, made
from epochkv_operator.kube.client import KubeClient

NOW = datetime(2026, 1, 1, 12, 0, 0, tzinfo=UTC)
Json = dict[str, Any]


def before(seconds: float) -> str:
    return (NOW - timedelta(seconds=seconds)).isoformat().replace("+00:00", "Z")


def obj(kind: str = "KVCachePool", *conditions: Json, made: float = 3600.0, **metadata: Any) -> Json:
    fields = {"name": "policy", "namespace": "rl", "creationTimestamp": before(made), **metadata}
    return {"kind": kind, "metadata": fields, "status": {"conditions": list(conditions)} if conditions else {}}


def condition(kind: str, status: str, reason: str, seconds: float = 3600.0) -> Json:
    return {"type": kind, "status": status, "reason": reason, "message": f"message of {reason}", "lastTransitionTime": before(seconds)}


def operator(ready: int = 2, replicas: int = 2, *args: str) -> Operator:
    container = {"name": "operator", "image": "epochkv/operator:0.1.0", "args": ["run", *args]}
    metadata = {"name": "epochkv-operator", "namespace": "home", "labels": {"app.kubernetes.io/instance": "kv"}}
    spec = {"replicas": replicas, "template": {"spec": {"serviceAccountName": "op", "containers": [container]}}}
    return Operator({"metadata": metadata, "spec": spec, "status": {"readyReplicas": ready}})


def lease(holder: str = "pod-1_abc", written: float = 2.0) -> Json:
    metadata = {"name": "epochkv-operator", "namespace": "home", "managedFields": [{"time": before(500)}, {"time": before(written)}]}
    return {"metadata": metadata, "spec": {"holderIdentity": holder, "leaseDurationSeconds": 15}}


def test_what_a_deployment_says_of_its_operator() -> None:
    made = operator(2, 2, "--watch-namespace=a", "--watch-namespace=b")
    assert (made.scopes, made.account) == (("a", "b"), "system:serviceaccount:home:op")
    assert operator().scopes == (None,)


@pytest.mark.parametrize(
    ("lease", "level", "says"),
    [
        (lease(), Level.OK, "held by pod-1_abc, renewed 2 s ago"),
        (lease(written=17.0), Level.OK, "renewed 17 s ago"),
        (lease(written=19.0), Level.WRONG, "has not renewed it for 19 s"),
        (lease(holder=""), Level.WRONG, "nobody holds it"),
        (None, Level.WRONG, "nobody holds it"),
    ],
)
def test_a_lease_is_told_by_the_api_servers_clock_alone(lease: Json | None, level: Level, says: str) -> None:
    found = judge_lease(operator(), lease, NOW)
    assert (found.level, says in found.text) == (level, True), found


def test_rights_that_are_missing_are_listed_with_the_chart_that_grants_them() -> None:
    needed = rights("home", ("rl",))
    assert judge_rights(operator(), [], len(needed)).level is Level.OK
    found = judge_rights(operator(), needed[:8], len(needed))
    assert (found.level, found.text.count(" in rl"), "and 2 more" in found.text) == (Level.WRONG, 6, True)
    pieces = "helm -n home get manifest kv --revision $(helm -n home list --deployed", " | kubectl apply -f -"  # each where it says
    assert [found.fix.count(piece) for piece in pieces] == [1, 1]


def test_the_port_of_who_leads_is_forwarded() -> None:
    shell = f"kubectl() {{ [ $3 = get ] && echo pod-1_abc || echo $4; }}; {doctor.FORWARD.format(home='home').partition(' &')[0]}"
    assert subprocess.check_output(["bash", "-c", shell], text=True) == "pod-1\n"


@pytest.mark.parametrize(
    ("found", "level", "says"),
    [
        (condition("EpochConverged", "False", "WaitingForEngines"), Level.WRONG, "EpochConverged=False for 1h"),
        (condition("EpochConverged", "False", "WaitingForEngines", 20.0), Level.WARNING, "EpochConverged=False for 20s"),
        (condition("TiersUsable", "False", "SavesOnly"), Level.WARNING, "message of SavesOnly"),
        (condition("TiersUsable", "False", "LayoutUnsupported", 1.0), Level.WRONG, "message of LayoutUnsupported"),
        (condition("WeightsConverged", "False", "Diverged"), Level.WRONG, "message of Diverged"),
        (condition("Drained", "False", "OldEpochRequests"), Level.WARNING, "message of OldEpochRequests"),
        (condition("Available", "Unknown", "Strange"), Level.WRONG, "Available=Unknown"),
    ],
)
def test_a_condition_that_is_not_true_is_told_with_a_command(found: Json, level: Level, says: str) -> None:
    ready = condition("Ready", "False", found["reason"])
    (said,) = judge_object(obj("KVCachePool", ready, found, condition("MasterAvailable", "True", "Available")), NOW)
    assert (said.level, said.about, says in said.text) == (level, "pool rl/policy", True), said
    assert said.fix.startswith("kubectl -n rl ")


def test_one_cause_is_one_line() -> None:
    """What starts may take its time, and who does not run does not report."""
    starting = [condition(kind, "False", "Starting", 300.0) for kind in ("Ready", "Available")]
    silent = [condition("EpochCurrent", "False", "NotReporting", 300.0), condition("TiersUsable", "Unknown", "NotReporting", 300.0)]
    (said,) = judge_object(obj("InferenceEngine", *starting, *silent), NOW)
    assert (said.level, said.text) == (Level.WARNING, "Available=False for 5m00s (Starting): message of Starting")
    (late,) = judge_object(obj("InferenceEngine", condition("Available", "False", "Starting", 3600.0)), NOW)
    assert late.level is Level.WRONG
    pulled = [condition(kind, "False", "ImagePullFailed") for kind in ("Ready", "Progressing", "Available")]
    (said,) = judge_object(obj("InferenceEngine", *pulled, *silent), NOW)
    assert (said.level, said.text.startswith("Progressing=False for 1h00m (ImagePullFailed), and so Available: ")) == (Level.WRONG, True)
    alone = list(judge_object(obj("InferenceEngine", condition("Ready", "False", "NotReporting"), *silent), NOW))
    assert [one.text.partition(":")[0] for one in alone] == ["EpochCurrent=False for 5m00s (NotReporting), and so TiersUsable"]


def test_what_is_well_new_or_going() -> None:
    asked = [condition("Ready", "True", "ScaledToZero"), condition("Available", "False", "ScaledToZero")]
    assert list(judge_object(obj("InferenceEngine", *asked), NOW)) == [], "somebody scaled it to zero"
    assert list(judge_object(obj("InferenceEngine", condition("Ready", "True", "Ready")), NOW)) == []
    (problem,) = judge_object(obj("InferenceEngine", condition("Ready", "False", "InvalidTemplate")), NOW)
    assert (problem.level, problem.about) == (Level.WRONG, "engine rl/policy")
    assert [one.level for one in judge_object(obj(), NOW)] == [Level.WRONG]
    assert [one.level for one in judge_object(obj(made=5.0), NOW)] == [Level.WARNING]
    (going,) = judge_object(obj(deletionTimestamp=before(90)), NOW)
    assert (going.level, "still there" in going.text) == (Level.WARNING, True)
    (crash,) = judge_object(obj("InferenceEngine", condition("Available", "False", "CrashLooping")), NOW)
    assert crash.fix == "kubectl -n rl logs -l epochkv.io/engine=policy --previous --tail=50"
    (silent,) = judge_object(obj("KVCachePool", condition("ServingGate", "False", "NotReporting")), NOW)
    assert silent.fix.startswith("kubectl -n rl logs -l epochkv.io/pool=policy ")


@pytest.mark.parametrize(("uid", "fix"), [("u", "kubectl get pods"), ("of another pool", "kubectl -n rl delete secret policy-fence ")])
async def test_a_secret_is_deleted_only_where_it_is_not_whole(uid: str, fix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """New keys restart all engines: no remedy for an operator that may not read the Secret."""
    monkeypatch.setattr(doctor, "_get", AsyncMock(return_value={"data": encoded(content(made(generate_keypair().public, 0), uid))}))
    monkeypatch.setattr(doctor, "probe_hub", AsyncMock(return_value=Mock(dialled="", trouble="key", text="refused")))
    (found,) = await doctor._hub(Mock(), ClusterScope(hub="tcp://127.0.0.1:7700"), obj(uid="u"))
    assert found.fix.startswith(fix)


async def test_pools_that_were_asked_in_time_count_where_a_hub_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    class Pools(KubeClient):
        async def list(self, *_: Any) -> tuple[list[Json], int]:
            return [obj(name=f"p{number}") for number in range(100)], 1

    asked = []

    async def hub(_client: object, _scope: object, pool: Json) -> list[Finding]:
        asked.append(pool)
        if len(asked) > 3:
            await asyncio.sleep(3600)
        return [Finding("hub", Level.WRONG, "it hangs", about=pool["metadata"]["name"])]

    monkeypatch.setattr(doctor, "_hub", hub)
    monkeypatch.setattr(doctor, "HUBS_SECONDS", 0.2)
    found = await doctor._hubs(Pools.__new__(Pools), ClusterScope())
    assert [one.about for one in found] == ["p0", "p1", "p2", ""]
    assert (found[-1].level, found[-1].text) == (Level.UNKNOWN, "97 of 100 pools were not asked within 0.2 s")
