"""What a pool's Secret holds, and when it is as some operator wrote it: whole, or with what operators make of it, or not at all."""

from dataclasses import replace
from typing import Any
from unittest.mock import AsyncMock, Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epochkv_fence.net.keys import generate_keypair
from epochkv_operator import keys as fence
from epochkv_operator.control.reconcile import EngineReconciler, PoolReconciler
from epochkv_operator.hub.service import HubSnapshot
from epochkv_operator.kube.client import ApiError, Conflict, KubeClient, NotFound, Unavailable
from epochkv_operator.kube.store import Store, engine_key, indexed, pool_key
from epochkv_operator.settings import Settings
from tests.support.planning import ENGINE_SPECS, POOL_SPECS, pool

POOL, KEY, HUB_PUBLIC = "uid-1", pool_key("rl", "policy"), generate_keypair().public
OTHER = generate_keypair()
KEYS = fence.made(HUB_PUBLIC, 0)
ROTATED = replace(KEYS, client=generate_keypair(), generation=1, previous=KEYS.client.public)
NO_BINARY = "%" * 40
"""Characters of z85 that stand for a number above 32 bits."""


@pytest.mark.parametrize("keys", [KEYS, ROTATED, replace(ROTATED, previous=None)])
def test_what_was_written_is_whole_for_its_own_pool_alone(keys: fence.FenceKeys) -> None:
    fields = fence.decoded({"data": fence.encoded(fence.content(keys, POOL))})
    assert fence.whole(fields, POOL) == keys
    assert fence.whole(fields, "uid-2") is None


VALUES = {
    fence.PUBLIC: [OTHER.public, KEYS.client.public[::-1], NO_BINARY],
    fence.KEY: [OTHER.secret, KEYS.client.secret[::-1], NO_BINARY, ""],
    fence.ROOT: ["ab" * 32, KEYS.root_secret[::-1], ""],
    fence.GENERATION: ["7", "-1", "many", "1" * 400],
    fence.CHECK: ["0" * 32, "", "\u00e9"],
    fence.PREVIOUS: ["no key", NO_BINARY],
}


CASES = [(field, number, value) for field, values in VALUES.items() for number, value in enumerate((*values, None))]


# Keys are drawn anew in each process, so names of tests cannot hold them.
@pytest.mark.parametrize(("field", "value"), [pytest.param(field, value, id=f"{field}-{number}") for field, number, value in CASES])
def test_a_changed_or_missing_field_is_seen(field: str, value: str | None) -> None:
    fields = {**fence.content(ROTATED, POOL)}
    fields.pop(field)
    if value is not None:
        fields[field] = value
    found = fence.whole(fields, POOL)
    assert found == (replace(ROTATED, previous=None) if (field, value) == (fence.PREVIOUS, None) else None)


def test_another_key_of_the_hub_leaves_the_rest_whole() -> None:
    """The hub's key pair may be new: then every Secret has the one before."""
    assert fence.whole({**fence.content(KEYS, POOL), fence.HUB: OTHER.public}, POOL) == replace(KEYS, hub_public=OTHER.public)


def test_only_the_end_of_an_older_key_and_a_rotation_follow() -> None:
    retired = replace(ROTATED, previous=None)
    assert fence.follows(KEYS, KEYS, None)
    assert fence.follows(ROTATED, retired, None), "removed by hand, or by the operator before"
    assert fence.follows(KEYS, ROTATED, None), "rotated by the operator before"
    assert fence.follows(KEYS, retired, ROTATED.client), "our own rotation, and removed by hand since"
    assert not fence.follows(KEYS, retired, None), "engines with the older key would be rejected"
    assert not fence.follows(ROTATED, KEYS, None), "an old copy of the Secret"
    assert not fence.follows(KEYS, replace(KEYS, previous=OTHER.public), None)
    assert not fence.follows(KEYS, replace(ROTATED, root_secret="ab" * 32), None)
    assert not fence.follows(KEYS, replace(ROTATED, previous=OTHER.public), None)
    assert not fence.follows(KEYS, replace(KEYS, hub_public=OTHER.public), None)


async def test_a_secret_that_cannot_be_read_holds_up_nothing_else_of_its_pool() -> None:
    """While the KMS that decrypts Secrets is away, the API server answers 500 for them, and serves everything else: gates have to open."""

    class Server(KubeClient):
        def __init__(self) -> None:
            self.refusal: ApiError = NotFound(404, "NotFound", "", "GET")

        async def get(self, *_: Any) -> Any:
            raise self.refusal

        async def create(self, *_: Any) -> Any:
            return {}

    server, obj = Server(), {"metadata": {"namespace": "rl", "name": "policy", "uid": POOL}, "spec": {}}
    reconciler = PoolReconciler.__new__(PoolReconciler)
    reconciler.secrets, reconciler.store = fence.FenceSecrets(server, HUB_PUBLIC), Store(indexed)
    keys, *_ = await reconciler._keys(KEY, obj)
    assert keys is not None
    server.refusal = Unavailable(500, "InternalError", "rpc error: KMS", "GET")
    assert await reconciler._keys(KEY, obj) == (keys, None, server.refusal)
    reconciler.hub, due = Mock(), pool({"local": {"capacity": "1Gi"}, "keys": {"generation": 1}}, uid=POOL)
    assert await reconciler._serve(KEY, {**obj, "spec": {"keys": {"generation": 1}}}, due, keys) == (keys, None, server.refusal)
    reconciler.secrets = fence.FenceSecrets(server, HUB_PUBLIC)
    assert "reason='SecretRefused'" in str(await reconciler._keys(KEY, obj)), "a new operator"
    for server.refusal in (Unavailable(0, "Timeout", "", "GET"), Unavailable(429, "", "", "GET"), Conflict(409, "", "", "GET")):
        with pytest.raises(type(server.refusal)):
            await reconciler._keys(KEY, obj)


@pytest.mark.parametrize("runs", [False, True])
async def test_an_engine_that_runs_is_left_alone_while_nobody_knows_its_keys(runs: bool) -> None:
    """A new operator finds somebody else's Secret. One that does not run yet serves without sharing, and is looked after."""
    store, executor = Store(indexed), Mock(bring_about=AsyncMock(return_value=(None, None)))

    def there(kind: str, name: str) -> None:
        spec = POOL_SPECS["l1"] if kind == "KVCachePool" else ENGINE_SPECS["minimal"]
        metadata = {"namespace": "rl", "name": name, "uid": kind, "resourceVersion": "1"}
        store.upsert(kind, {"apiVersion": "epochkv.io/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec})

    there("KVCachePool", "policy")
    there("InferenceEngine", "rollout")
    known, hub = fence.PoolKeys(conflict=True, refusal="it is somebody else's"), Mock(return_value=HubSnapshot())
    given = (store, executor, Mock(report=AsyncMock()), Mock(**{"of.return_value": known}), hub, Mock(), Mock(), frozenset, Mock())
    engines = EngineReconciler(Settings("epochkv-system"), *given, ())
    if not runs:
        await engines.reconcile(engine_key("rl", "rollout"))
    there("Deployment", "rollout")
    await engines.reconcile(engine_key("rl", "rollout"))
    assert executor.bring_about.call_count == (0 if runs else 2)


def test_engines_restart_for_another_hub_or_root_and_not_for_a_rotation() -> None:
    assert ROTATED.revision == KEYS.revision
    assert len({KEYS.revision, replace(KEYS, hub_public=OTHER.public).revision, replace(KEYS, root_secret="ab" * 32).revision}) == 3


TEXTS = st.sampled_from(["", "garbage", "0" * 64, NO_BINARY, OTHER.public, OTHER.secret, HUB_PUBLIC, "1", "\u00e9" * 64])


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(fence.FIELDS), TEXTS | st.none()), st.booleans())
def test_no_edit_raises_or_brings_another_secret_key(edit: dict[str, str | None], rotating: bool) -> None:
    base = ROTATED if rotating else KEYS
    found = fence.whole({name: value for name, value in ({**fence.content(base, POOL), **edit}).items() if value is not None}, POOL)
    assert found is None or (found.client, found.root_secret, found.generation) == (base.client, base.root_secret, base.generation)


def test_fields_that_are_no_text_are_empty() -> None:
    broken = {fence.KEY: "!", fence.PUBLIC: "/w==", fence.GENERATION: None}
    assert fence.decoded({"data": broken}) == dict.fromkeys(broken, "")
