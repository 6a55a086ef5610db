"""Keys are replaced under running engines, and what somebody does to a Secret is put right: nobody loses a lease, nothing restarts."""

import base64
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from epochkv_fence.net.keys import ClientKeys, generate_keypair
from hack.cluster.controlplane import ControlPlane
from hack.waiting import eventually
from tests.cluster.fault_proxy import Fault, FaultProxy
from tests.cluster.fence_engines import FenceEngine, client_keys
from tests.cluster.operator_harness import CHILDREN, POOLS, TAKEOVER_SECONDS, Namespace, OperatorProcess, condition, leading_operator
from tests.support.fence import LeaseWatch

POOL: dict[str, Any] = {"local": {"capacity": "64Mi"}, "reset": {"leaseSeconds": 2}}
ENGINE: dict[str, Any] = {"poolRef": {"name": "policy"}, "model": {"name": "tiny"}}


def secret(space: Namespace) -> dict[str, str]:
    """Content of the pool's Secret; empty while there is none."""
    found = space.get(CHILDREN["secrets"], "policy-fence")
    return {name: base64.b64decode(value).decode() for name, value in ((found or {}).get("data") or {}).items()}


def reader(space: Namespace) -> Callable[[], ClientKeys]:
    """Reads the keys from the Secret, as a kubelet brings them into a mounted volume."""

    def read() -> ClientKeys:
        content = secret(space)
        return ClientKeys(content["hub.pub"], content["client.pub"], content["client.key"])

    return read


def keys_now(space: Namespace) -> ClientKeys:
    return client_keys(eventually(lambda: space.get(CHILDREN["secrets"], "policy-fence"), "the pool's Secret"))


def test_a_raised_generation_replaces_the_key_without_a_lost_lease_or_a_restart(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_pool("policy", **POOL)
    namespace.create_engine("rollout", **ENGINE)
    old = keys_now(namespace)
    before = secret(namespace)
    deployment = eventually(lambda: namespace.get(CHILDREN["deployments"], "rollout"), "the engine's Deployment")
    endpoint = f"tcp://127.0.0.1:{operator.hub_port}"
    with FenceEngine(endpoint, old, "engine-0", credentials=reader(namespace)) as engine:
        eventually(lambda: engine.leased, "joined")
        with LeaseWatch([engine.agent]) as leases:
            namespace.patch_spec("policy", keys={"generation": 1})
            eventually(lambda: secret(namespace).get("generation") == "1", "rotated")
            after = secret(namespace)
            assert after["client.pub"] != before["client.pub"]
            assert after["client.key"] != before["client.key"]
            assert (after["root.secret"], after["hub.pub"]) == (before["root.secret"], before["hub.pub"])
            eventually(lambda: engine.agent.counters["key_changes"] == 1, "the engine has the new key")
            eventually(lambda: "previous.pub" not in secret(namespace), "the old key retired")
            eventually(lambda: namespace.status("policy").get("keys") == {"generation": 1, "accepted": 1}, "reported")
            assert condition(namespace.status("policy"), "KeysRotated")["status"] == "True"
            namespace.bump("policy", 1)
            eventually(lambda: namespace.status("policy").get("epoch") == 1, "published")
            assert engine.epoch == 1
        assert (leases.gaps, leases.looks > 100) == (0, True)
    now = namespace.get(CHILDREN["deployments"], "rollout")
    assert now is not None
    assert now["metadata"]["generation"] == deployment["metadata"]["generation"], "a rotated key restarts no engine"
    with FenceEngine(endpoint, old, "thief") as thief:
        eventually(lambda: operator.logged("fence secret changed"), "logged")
        time.sleep(3)
        assert thief.epoch is None
        assert (namespace.status("policy").get("engines") or {}).get("total", 0) <= 1


def test_an_engine_that_keeps_the_old_key_is_named_and_can_be_cut_off(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_pool("policy", **POOL)
    with FenceEngine(f"tcp://127.0.0.1:{operator.hub_port}", keys_now(namespace), "stubborn") as engine:
        eventually(lambda: engine.leased, "joined")
        namespace.patch_spec("policy", keys={"generation": 1})
        found = eventually(
            lambda: c if "stubborn" in (c := condition(namespace.status("policy"), "KeysRotated")).get("message", "") else None, "named"
        )
        assert (found["status"], found["reason"]) == ("False", "OldKeyInUse")
        assert namespace.status("policy")["keys"] == {"generation": 1, "accepted": 2}
        time.sleep(5)  # more than lease and margin: it goes on as long as the key is used
        assert engine.leased
        assert "previous.pub" in secret(namespace)
        patch = json.loads(found["message"].split("-p ")[1].strip("'"))
        path = f"{CHILDREN['secrets'].format(namespace.name)}/policy-fence"
        namespace.request("PATCH", path, patch, "application/json-patch+json")
        eventually(lambda: not engine.leased, "cut off", 90)
        eventually(lambda: namespace.status("policy").get("keys") == {"generation": 1, "accepted": 1}, "reported")


def test_a_new_hub_key_goes_into_the_secret_in_place(namespace: Namespace, tmp_path: Path) -> None:
    """The pool's own keys stay; only engines that were given the older hub's key have to start again."""
    with leading_operator(namespace, tmp_path, lease_duration_seconds=TAKEOVER_SECONDS) as operator:
        namespace.create_pool("policy", **POOL)
        before = eventually(lambda: secret(namespace), "the pool's Secret")
        uid = namespace.get(CHILDREN["secrets"], "policy-fence")["metadata"]["uid"]  # type: ignore[index]
        operator.process.kill()
        namespace.delete(CHILDREN["secrets"], "epochkv-hub")
        operator.start().wait_ready()
        after = eventually(lambda: found if (found := secret(namespace))["hub.pub"] != before["hub.pub"] else None, "new")
        assert {**after, "hub.pub": before["hub.pub"]} == before
        assert namespace.get(CHILDREN["secrets"], "policy-fence")["metadata"]["uid"] == uid  # type: ignore[index]
        with FenceEngine(f"tcp://127.0.0.1:{operator.hub_port}", keys_now(namespace), "engine-0") as engine:
            eventually(lambda: engine.leased, "let in")


def test_the_hub_knows_the_new_key_before_anybody_can_have_it(
    namespace: Namespace, proxy: FaultProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The write to the Secret lands and its answer never comes: whoever reads the Secret now must be let in."""
    with leading_operator(namespace, tmp_path, kubeconfig=proxy.kubeconfig) as operator:
        namespace.create_pool("policy", **POOL)
        before = keys_now(namespace)
        proxy.decide = lambda method, path: Fault(0, carried_out=True) if method == "PUT" and "/secrets/policy-fence" in path else None
        namespace.patch_spec("policy", keys={"generation": 1})
        eventually(lambda: proxy.faults, "the write is held back")
        after = keys_now(namespace)
        assert after.public != before.public
        endpoint = f"tcp://127.0.0.1:{operator.hub_port}"
        with FenceEngine(endpoint, after, "newcomer") as newcomer, FenceEngine(endpoint, before, "oldtimer") as oldtimer:
            eventually(lambda: newcomer.leased and oldtimer.leased, "both are let in")
        refused = [record.getMessage() for record in caplog.records if "rejects our key" in record.getMessage()]
        assert not refused, "let in at once, not when the operator had looked again"
        proxy.decide = lambda method, path: None
        eventually(lambda: namespace.status("policy").get("keys") == {"generation": 1, "accepted": 1}, "done", 60)
        assert keys_now(namespace).public == after.public, "one rotation, one new key"


# -------------------- Secrets that somebody edits or deletes: put back, or replaced where they are lost, and said so
SECRETS = CHILDREN["secrets"]
OTHER = generate_keypair()


def write(space: Namespace, name: str, **fields: str | None) -> None:
    """Set fields of a Secret (`a_b` is `a.b`), or remove them."""
    data = {field.replace("_", "."): value and base64.b64encode(value.encode()).decode() for field, value in fields.items()}
    space.patch(SECRETS, name, {"data": data})


def look(space: Namespace) -> None:
    """Have the operator look at the pool now; it does so each minute by itself."""
    space.patch(POOLS, "policy", {"metadata": {"annotations": {"looked": str(time.monotonic_ns())}}})


def notes(space: Namespace, reason: str = "SecretRestored", kind: str = "KVCachePool") -> list[str]:
    return [event["note"] for event in space.events(reason) if event["regarding"]["kind"] == kind]


def revision(space: Namespace) -> str:
    """What engines restart by."""
    deployment = space.get(CHILDREN["deployments"], "rollout")
    assert deployment is not None
    return str(deployment["metadata"]["generation"])


def settled(space: Namespace) -> dict[str, str]:
    """The Secret's content once pool and engine are made."""
    eventually(lambda: space.get(CHILDREN["deployments"], "rollout"), "the engine's Deployment")
    eventually(lambda: condition(space.status("policy"), "EpochConverged").get("status") == "True", "reported")
    return secret(space)


NO_BINARY = "%" * 40
"""As long as a key, and of its characters, and no key."""
EDITS: list[Mapping[str, str | None]] = [
    *({"root_secret": "ab" * 32}, {"generation": "5"}, {"client_pub": NO_BINARY}, {"client_key": None}, {"check": None}),
    *({"hub_pub": OTHER.public}, {"previous_pub": OTHER.public}, {"client_pub": OTHER.public, "client_key": OTHER.secret}),
    {name.replace(".", "_"): None for name in ("hub.pub", "client.pub", "client.key", "root.secret", "generation")},
]


def test_whatever_is_changed_comes_back_and_one_event_names_it(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_pool("policy", **POOL)
    namespace.create_engine("rollout", **ENGINE)
    before = settled(namespace)
    generation = revision(namespace)
    with FenceEngine(f"tcp://127.0.0.1:{operator.hub_port}", keys_now(namespace), "engine-0", credentials=reader(namespace)) as engine:
        eventually(lambda: engine.leased, "joined")
        edits: list[Mapping[str, str | None]] = [*EDITS, {"client_pub": before["client.pub"][::-1], "previous_pub": NO_BINARY}]
        for number, edit in enumerate(edits, 1):
            write(namespace, "policy-fence", **edit)
            look(namespace)
            eventually(lambda: secret(namespace) == before, f"{edit} put right")
            told = eventually(lambda n=number: found if len(found := notes(namespace)) >= n else None, f"{edit} told")
            assert len(told) == number
            assert [note for note in told if all(field.replace("_", ".") in note for field in edit)], (edit, told)
        namespace.delete(SECRETS, "policy-fence")
        look(namespace)
        eventually(lambda: secret(namespace) == before, "back")
        eventually(lambda: any("was deleted: it is back with the same keys" in note for note in notes(namespace)), "told")
        # One that somebody has made immutable is made again.
        write(namespace, "policy-fence", root_secret="cd" * 32, generation="9")
        namespace.patch(SECRETS, "policy-fence", {"immutable": True})
        look(namespace)
        eventually(lambda: secret(namespace) == before, "made again")
        assert not namespace.get(SECRETS, "policy-fence").get("immutable")  # type: ignore[union-attr]
        told = eventually(lambda: found if len(found := notes(namespace)) > len(edits) + 1 else None, "told")
        # A rotation that the spec asks for is none of these, and neither is the end of the older key.
        namespace.patch_spec("policy", keys={"generation": 1})
        eventually(lambda: namespace.status("policy").get("keys") == {"generation": 1, "accepted": 1}, "rotated", 60)
        eventually(lambda: engine.leased, "still in")
    assert len(notes(namespace)) == len(told)
    assert revision(namespace) == generation, "nothing restarts"
    said = operator.log_file.read_text() + str(notes(namespace))
    assert not [name for name in ("root.secret", "client.key") if before[name] in said]


def test_a_secret_without_its_owner_or_with_a_foreign_field_stays_the_pools(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_pool("policy", **POOL)
    namespace.create_engine("rollout", **ENGINE)
    before = settled(namespace)
    owners = namespace.get(SECRETS, "policy-fence")["metadata"]["ownerReferences"]  # type: ignore[index]
    namespace.patch(SECRETS, "policy-fence", {"metadata": {"ownerReferences": None}, "data": {"theirs": "eA=="}})
    look(namespace)

    def owned() -> bool:
        return bool(namespace.get(SECRETS, "policy-fence")["metadata"].get("ownerReferences") == owners)  # type: ignore[index]

    eventually(owned, "its owner is back")
    assert secret(namespace) == {**before, "theirs": "x"}
    write(namespace, "policy-fence", root_secret="ab" * 32)
    look(namespace)
    eventually(lambda: secret(namespace) == {**before, "theirs": "x"}, "put right")


def test_what_was_changed_or_deleted_while_no_operator_ran_is_new(namespace: Namespace, tmp_path: Path) -> None:
    """And it is said. The hub's key pair is as it was: its secret part counts. No key is in the log, at debug level neither."""
    with leading_operator(namespace, tmp_path, log_level="debug") as operator:
        namespace.create_pool("policy", **POOL)
        namespace.create_engine("rollout", **ENGINE)
        namespace.create_pool("other", **POOL)
        before = settled(namespace)
        generation = revision(namespace)
        eventually(lambda: namespace.get(SECRETS, "other-fence"), "the other pool's Secret")
        eventually(lambda: namespace.status("other").get("keys"), "reported")
        assert notes(namespace) == [], "a new pool's Secret is no news"
        old = keys_now(namespace)
        operator.terminate()
        hub = namespace.get(SECRETS, "epochkv-hub")
        assert hub is not None
        namespace.delete(SECRETS, "epochkv-hub")
        data = {**hub["data"], "hub.pub": base64.b64encode(OTHER.public.encode()).decode()}
        namespace.create(SECRETS, {**hub, "metadata": {"name": "epochkv-hub", "labels": hub["metadata"]["labels"]}, "data": data})
        write(namespace, "policy-fence", root_secret="ab" * 32, previous_pub="no key")
        namespace.delete(SECRETS, "other-fence")
        operator.start().wait_ready()
        with FenceEngine(f"tcp://127.0.0.1:{operator.hub_port}", old, "engine-0", credentials=reader(namespace)) as engine:
            eventually(lambda: engine.leased, "it has read the new key")
        after = secret(namespace)
        assert after["hub.pub"] == before["hub.pub"]
        assert after["client.pub"] != before["client.pub"]
        assert after["root.secret"] not in (before["root.secret"], "ab" * 32)
        eventually(lambda: revision(namespace) != generation, "engines restart")
        told = eventually(lambda: found if len(found := notes(namespace)) == 2 else None, "both are told")
        assert all("its keys are new, engines restart" in note for note in told)
        assert sorted("was deleted" in note for note in told) == [False, True]
        restored = eventually(
            lambda: s if (s := namespace.get(SECRETS, "epochkv-hub")) and s["data"] == hub["data"] else None, "the hub's is right again", 60
        )
        assert restored["immutable"] is True
        said = operator.log_file.read_text() + str(told)
        assert '"level": "debug"' in said
        secrets = [content[name] for content in (before, after) for name in ("root.secret", "client.key")] + [hub["data"]["hub.key"]]
        assert not [value for value in secrets if value in said or base64.b64encode(value.encode()).decode() in said]


def hub_keys(space: Namespace) -> Any:
    return (space.get(SECRETS, "epochkv-hub") or {}).get("data")


def test_the_hubs_secret_comes_back_with_the_same_keys(operator: OperatorProcess) -> None:
    home = operator.home
    before = hub_keys(home)
    home.delete(SECRETS, "epochkv-hub")
    eventually(lambda: hub_keys(home) == before, "back")
    home.delete(SECRETS, "epochkv-hub")
    home.create(SECRETS, {"metadata": {"name": "epochkv-hub"}, "stringData": {"hub.pub": OTHER.public, "hub.key": OTHER.secret}})
    eventually(lambda: hub_keys(home) == before, "put right")
    told = eventually(lambda: found if len(found := notes(home, kind="Secret")) == 2 else None, "told twice")
    assert sorted("was deleted" in note for note in told) == [False, True]
    assert all("stop the operator, delete the Secret" in note for note in told)
    assert operator.process.alive()


def test_a_hub_secret_without_a_key_is_said_and_waited_for(plane: ControlPlane, namespace: Namespace, tmp_path: Path) -> None:
    labels = {"app.kubernetes.io/managed-by": "epochkv-operator"}
    body = {"metadata": {"name": "epochkv-hub", "labels": labels}, "stringData": {"hub.pub": OTHER.public, "hub.key": "garbage"}}
    namespace.create(SECRETS, body)
    with OperatorProcess(plane, namespace.name, tmp_path) as operator:
        [note] = eventually(lambda: notes(namespace, "SecretUnusable", "Secret"), "told")
        assert "hub.key is not a CURVE key" in note
        assert "restore the Secret, or delete it" in note
        write(namespace, "epochkv-hub", hub_key=OTHER.secret)
        operator.wait_ready()
        assert base64.b64decode(hub_keys(namespace)["hub.pub"]).decode() == OTHER.public
