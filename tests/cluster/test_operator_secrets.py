"""Secrets that somebody edits or deletes: put back, or replaced where they are lost, and said so."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from epochkv_fence.net import generate_keypair
from hack.cluster.controlplane import ControlPlane
from hack.waiting import eventually
from tests.cluster.fence_engines import FenceEngine
from tests.cluster.operator_harness import CHILDREN, POOLS, Namespace, OperatorProcess, condition
from tests.cluster.test_operator_keys import ENGINE, POOL, keys_now, reader, secret

SECRETS = CHILDREN["secrets"]
OTHER = generate_keypair()


def write(space: Namespace, name: str, **fields: str | None) -> None:
    """Set fields of a Secret (`a_b` is `a.b`), or remove them."""
    data = {field.replace("_", "."): value and base64.b64encode(value.encode()).decode() for field, value in fields.items()}
    space.patch(SECRETS, name, {"data": data})


def look(space: Namespace) -> None:
    """Have the operator look at the pool now; it does so each minute by itself."""
    annotations = {"looked": str(len(space.events("SecretRestored")))}
    space.patch(POOLS, "policy", {"metadata": {"annotations": annotations}})


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


EDITS: list[dict[str, str | None]] = [
    {"root_secret": "ab" * 32},
    {"generation": "5"},
    {"hub_pub": OTHER.public},
    {"client_pub": OTHER.public, "client_key": OTHER.secret},
    {"client_key": None},
    {"first_pub": OTHER.public},
    {"root_check": None},
    {"previous_pub": OTHER.public},
    {name.replace(".", "_"): None for name in ("hub.pub", "client.pub", "client.key", "root.secret", "generation", "first.pub")},
]


def test_every_field_comes_back_and_one_event_names_it(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_pool("policy", **POOL)
    namespace.create_engine("rollout", **ENGINE)
    before = settled(namespace)
    generation = revision(namespace)
    with FenceEngine(f"tcp://127.0.0.1:{operator.hub_port}", keys_now(namespace), "engine-0", credentials=reader(namespace)) as engine:
        eventually(lambda: engine.leased, "joined")
        for number, edit in enumerate(EDITS, 1):
            write(namespace, "policy-fence", **edit)
            look(namespace)
            eventually(lambda: secret(namespace) == before, f"{edit} put right; log:\n{operator.tail()}")
            told = eventually(lambda n=number: found if len(found := notes(namespace)) >= n else None, f"{edit} told")
            assert len(told) == number
            assert [note for note in told if all(field.replace("_", ".") in note for field in edit)], (edit, told)
        # A rotation that the spec asks for is none of these, and neither is the end of the older key.
        namespace.patch_spec("policy", keys={"generation": 1})
        eventually(lambda: namespace.status("policy").get("keys") == {"generation": 1, "accepted": 1}, f"rotated\n{operator.tail()}", 60)
        eventually(lambda: engine.leased, "still in")
    assert len(notes(namespace)) == len(EDITS)
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

    eventually(owned, f"its owner is back; log:\n{operator.tail()}")
    assert secret(namespace) == {**before, "theirs": "x"}
    write(namespace, "policy-fence", root_secret="ab" * 32)
    look(namespace)
    eventually(lambda: secret(namespace) == {**before, "theirs": "x"}, f"put right; log:\n{operator.tail()}")


def test_an_orphan_of_a_deleted_pool_gives_its_names_to_nobody(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_pool("policy", **POOL)
    namespace.create_engine("rollout", **ENGINE)
    before = settled(namespace)
    namespace.request("DELETE", f"{POOLS.format(namespace.name)}/policy", {"propagationPolicy": "Orphan"})
    eventually(lambda: namespace.pool("policy") is None, "gone")
    assert not (namespace.get(SECRETS, "policy-fence") or {"metadata": {}})["metadata"].get("ownerReferences")
    namespace.create_pool("policy", **POOL)
    eventually(lambda: secret(namespace).get("root.secret") not in (None, before["root.secret"]), f"new keys; log:\n{operator.tail()}")
    assert secret(namespace)["client.pub"] != before["client.pub"]


def test_a_deleted_secret_says_that_it_is_back(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_pool("policy", **POOL)
    namespace.create_engine("rollout", **ENGINE)
    before = settled(namespace)
    namespace.delete(SECRETS, "policy-fence")
    look(namespace)
    eventually(lambda: secret(namespace) == before, f"back; log:\n{operator.tail()}")
    [note] = eventually(lambda: notes(namespace), "told")
    assert "was deleted: it is back with the same keys" in note


def test_what_was_changed_while_no_operator_ran(plane: ControlPlane, namespace: Namespace, tmp_path: Path) -> None:
    """Both Secrets: the hub's public part, and of the pool's a lost client key, another root and a generation that nobody asked for."""
    with OperatorProcess(plane, namespace.name, tmp_path) as operator:
        operator.wait_ready()
        namespace.create_pool("policy", **POOL)
        namespace.create_engine("rollout", **ENGINE)
        before = settled(namespace)
        generation = revision(namespace)
        old = keys_now(namespace)
        operator.terminate()
        hub = namespace.get(SECRETS, "epochkv-hub")
        assert hub is not None
        namespace.delete(SECRETS, "epochkv-hub")
        data = {**hub["data"], "hub.pub": base64.b64encode(OTHER.public.encode()).decode()}
        namespace.create(SECRETS, {**hub, "metadata": {"name": "epochkv-hub", "labels": hub["metadata"]["labels"]}, "data": data})
        write(namespace, "policy-fence", client_key=None, root_secret="ab" * 32, generation="7", previous_pub="no key", hub_pub="no key")
        operator.start().wait_ready()
        with FenceEngine(f"tcp://127.0.0.1:{operator.hub_port}", old, "engine-0", credentials=reader(namespace)) as engine:
            eventually(lambda: engine.leased, f"its key is accepted, or it has the new one; log:\n{operator.tail()}")
            after = secret(namespace)
            assert after["hub.pub"] == before["hub.pub"]
            assert after["client.pub"] != before["client.pub"]
            assert after["generation"] == "0"
            assert after["root.secret"] == "ab" * 32, "the older one is lost"
            eventually(lambda: revision(namespace) != generation, f"engines restart with the other root; log:\n{operator.tail()}")
            eventually(lambda: "previous.pub" not in secret(namespace), f"the older key is retired; log:\n{operator.tail()}", 60)
            eventually(lambda: engine.leased, "with the new key")
        [note] = notes(namespace)
        for field in ("client.key", "root.secret", "generation", "previous.pub", "hub.pub"):
            assert field in note
        restored = eventually(
            lambda: s if (s := namespace.get(SECRETS, "epochkv-hub")) and s["data"] == hub["data"] else None, "the hub's is right again", 60
        )
        assert restored["immutable"] is True


def test_a_pool_secret_deleted_while_no_operator_ran_is_new_and_said(plane: ControlPlane, namespace: Namespace, tmp_path: Path) -> None:
    with OperatorProcess(plane, namespace.name, tmp_path) as operator:
        operator.wait_ready()
        namespace.create_pool("policy", **POOL)
        namespace.create_engine("rollout", **ENGINE)
        before = settled(namespace)
        generation = revision(namespace)
        assert notes(namespace) == [], "a new pool's Secret is no news"
        operator.terminate()
        namespace.delete(SECRETS, "policy-fence")
        operator.start().wait_ready()
        eventually(lambda: secret(namespace).get("root.secret") not in (None, before["root.secret"]), f"made; log:\n{operator.tail()}")
        eventually(lambda: revision(namespace) != generation, f"engines restart; log:\n{operator.tail()}")
        [note] = eventually(lambda: notes(namespace), "told")
        assert "its keys are new, engines restart" in note


def hub_keys(space: Namespace) -> Any:
    return (space.get(SECRETS, "epochkv-hub") or {}).get("data")


def test_the_hubs_secret_comes_back_with_the_same_keys(namespace: Namespace, operator: OperatorProcess) -> None:
    before = hub_keys(namespace)
    namespace.delete(SECRETS, "epochkv-hub")
    eventually(lambda: hub_keys(namespace) == before, f"back; log:\n{operator.tail()}")
    namespace.delete(SECRETS, "epochkv-hub")
    namespace.create(
        SECRETS,
        {
            "metadata": {"name": "epochkv-hub"},
            "stringData": {"hub.pub": OTHER.public, "hub.key": OTHER.secret},
        },
    )
    eventually(lambda: hub_keys(namespace) == before, f"put right; log:\n{operator.tail()}")
    told = eventually(lambda: found if len(found := notes(namespace, kind="Secret")) == 2 else None, "told twice")
    assert sorted("was deleted" in note for note in told) == [False, True]
    assert all("stop the operator, delete the Secret" in note for note in told)
    assert operator.process.alive()


@pytest.mark.parametrize("remedy", ["restored", "deleted"])
def test_a_hub_secret_without_a_key_is_said_and_waited_for(plane: ControlPlane, namespace: Namespace, tmp_path: Path, remedy: str) -> None:
    labels = {"app.kubernetes.io/managed-by": "epochkv-operator"}
    body = {"metadata": {"name": "epochkv-hub", "labels": labels}, "stringData": {"hub.pub": OTHER.public, "hub.key": "garbage"}}
    namespace.create(SECRETS, body)
    with OperatorProcess(plane, namespace.name, tmp_path) as operator:
        [note] = eventually(lambda: notes(namespace, "SecretUnusable", "Secret"), f"told; log:\n{operator.tail()}")
        assert "hub.key is not a CURVE key" in note
        assert "restore the Secret, or delete it" in note
        if remedy == "restored":
            write(namespace, "epochkv-hub", hub_key=OTHER.secret)
        else:
            namespace.delete(SECRETS, "epochkv-hub")
        operator.wait_ready()
        assert (base64.b64decode(hub_keys(namespace)["hub.pub"]).decode() == OTHER.public) == (remedy == "restored")
