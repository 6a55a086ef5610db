"""Secrets that somebody edits or deletes: put back, or replaced where they are lost, and said so."""

import base64
from pathlib import Path
from typing import Any

from epochkv_fence.net.keys import generate_keypair
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


NO_BINARY = "%" * 40
"""As long as a key, and of its characters, and no key."""
EDITS: list[dict[str, str | None]] = [
    {"root_secret": "ab" * 32},
    {"generation": "5"},
    {"hub_pub": OTHER.public},
    {"client_pub": OTHER.public, "client_key": OTHER.secret},
    {"client_pub": NO_BINARY},
    {"client_key": None},
    {"check": None},
    {"previous_pub": OTHER.public},
    {name.replace(".", "_"): None for name in ("hub.pub", "client.pub", "client.key", "root.secret", "generation")},
]


def test_whatever_is_changed_comes_back_and_one_event_names_it(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_pool("policy", **POOL)
    namespace.create_engine("rollout", **ENGINE)
    before = settled(namespace)
    generation = revision(namespace)
    with FenceEngine(f"tcp://127.0.0.1:{operator.hub_port}", keys_now(namespace), "engine-0", credentials=reader(namespace)) as engine:
        eventually(lambda: engine.leased, "joined")
        edits: list[dict[str, str | None]] = [*EDITS, {"client_pub": before["client.pub"][::-1], "previous_pub": NO_BINARY}]
        for number, edit in enumerate(edits, 1):
            write(namespace, "policy-fence", **edit)
            look(namespace)
            eventually(lambda: secret(namespace) == before, f"{edit} put right")
            told = eventually(lambda n=number: found if len(found := notes(namespace)) >= n else None, f"{edit} told")
            assert len(told) == number
            assert [note for note in told if all(field.replace("_", ".") in note for field in edit)], (edit, told)
        # One that somebody has made immutable is made again.
        write(namespace, "policy-fence", root_secret="cd" * 32, generation="9")
        namespace.patch(SECRETS, "policy-fence", {"immutable": True})
        look(namespace)
        eventually(lambda: secret(namespace) == before, "made again")
        assert not namespace.get(SECRETS, "policy-fence").get("immutable")  # type: ignore[union-attr]
        told = eventually(lambda: found if len(found := notes(namespace)) > len(EDITS) + 1 else None, "told")
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


def test_a_deleted_secret_says_that_it_is_back(namespace: Namespace, operator: OperatorProcess) -> None:
    namespace.create_pool("policy", **POOL)
    namespace.create_engine("rollout", **ENGINE)
    before = settled(namespace)
    namespace.delete(SECRETS, "policy-fence")
    look(namespace)
    eventually(lambda: secret(namespace) == before, "back")
    [note] = eventually(lambda: notes(namespace), "told")
    assert "was deleted: it is back with the same keys" in note


def test_what_was_changed_or_deleted_while_no_operator_ran_is_new(plane: ControlPlane, namespace: Namespace, tmp_path: Path) -> None:
    """And it is said. The hub's key pair is as it was: its secret part counts."""
    with OperatorProcess(plane, namespace.name, tmp_path) as operator:
        operator.wait_ready()
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
