"""A pool whose store image cannot be pulled says so; an engine of it starts and serves; when the master comes, it joins."""

from __future__ import annotations

import pytest

from hack.demo.journey import ANSWER_TOKENS, BLOCKS, MODEL, NEW_WEIGHTS, REFERENCE, make_prompts
from hack.demo.kube import Kube
from hack.waiting import eventually
from tests.e2e.conftest import apply, engine_manifest, pool_manifest, wait_condition

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


def stored(kube: Kube, namespace: str, pool: str) -> int:
    """Objects in the pool's store; 0 while there is no master."""
    masters = kube.pods(namespace, f"epochkv.io/pool={pool},app.kubernetes.io/component=master")
    for master in masters:
        status, body = kube.pod_http(namespace, master["metadata"]["name"], 9003, "GET", "/get_all_keys")
        if status == 200:
            return len(body.decode().split())
    return 0


def test_engine_starts_without_master_and_joins_later(kube: Kube, namespace: str) -> None:
    apply(kube, pool_manifest("late", "epochkv/absent:dev"), engine_manifest("late", "late"))
    for kind in ("StoreAvailable", "MasterAvailable"):
        wait_condition(kube, "kvcachepools", "late", kind, "False")
        seen = {}

        def pull_failed(kind: str = kind, seen: dict[str, str] = seen) -> bool:
            seen.update(wait_condition(kube, "kvcachepools", "late", kind, "False"))
            return seen["reason"] == "ImagePullFailed"

        eventually(pull_failed, lambda seen=seen: f"{seen}", 120, 0.5)
        assert "epochkv/absent:dev" in seen["message"]

    wait_condition(kube, "inferenceengines", "late", "Available", "True")
    assert wait_condition(kube, "kvcachepools", "late", "MasterAvailable", "False")["reason"] == "ImagePullFailed"
    (engine,) = kube.engines(namespace, "late", MODEL)
    (reference,) = kube.engines(namespace, REFERENCE, MODEL)
    for each in (engine, reference):
        each.reload_weights(NEW_WEIGHTS)
    first, second, third = make_prompts(11, 3)
    answer = engine.complete(first, ANSWER_TOKENS)
    assert answer.cached == 0
    assert answer.tokens == reference.complete(first, ANSWER_TOKENS).tokens

    image = '{"spec":{"distributed":{"mooncake":{"image":"epochkv/store:dev"}}}}'
    kube.kubectl("-n", namespace, "patch", "kvp", "late", "--type=merge", "-p", image)
    wait_condition(kube, "kvcachepools", "late", "StoreAvailable", "True")
    wait_condition(kube, "kvcachepools", "late", "MasterAvailable", "True")
    # The connector looks for its master again by itself; prompts that come meanwhile are served as before.
    prompts = iter([second, third, *make_prompts(12, 58)])

    def saved() -> bool:
        prompt = next(prompts)
        assert engine.complete(prompt, ANSWER_TOKENS).tokens == reference.complete(prompt, ANSWER_TOKENS).tokens
        return stored(kube, namespace, "late") >= BLOCKS

    eventually(saved, lambda: f"{stored(kube, namespace, 'late')} blocks in the store", 110, pause=2.0)
    (same,) = kube.engines(namespace, "late", MODEL)
    assert same.name == engine.name, "the engine must join without being replaced"
