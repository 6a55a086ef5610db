"""An engine whose poolRef names nothing serves, without shared KV, and a condition says so."""

from __future__ import annotations

import pytest

from hack.demo.journey import ANSWER_TOKENS, BASE_WEIGHTS, MODEL, REFERENCE, make_prompts
from hack.demo.kube import Kube
from tests.e2e.conftest import apply, engine_manifest, wait_condition

pytestmark = pytest.mark.timeout(1500)


def test_engine_without_its_pool_serves_and_says_so(kube: Kube, namespace: str) -> None:
    apply(kube, engine_manifest("orphan", "nowhere"))
    bound = wait_condition(kube, "inferenceengines", "orphan", "PoolBound", "False")
    assert bound["reason"] == "PoolNotFound"
    assert f"{namespace}/nowhere" in bound["message"]

    wait_condition(kube, "inferenceengines", "orphan", "Available", "True")
    (pod,) = kube.pods(namespace, "epochkv.io/engine=orphan")
    assert "--kv-transfer-config" not in pod["spec"]["containers"][0]["args"]
    (engine,) = kube.engines(namespace, "orphan", MODEL)
    (reference,) = kube.engines(namespace, REFERENCE, MODEL)
    for each in (engine, reference):
        each.reload_weights(BASE_WEIGHTS)
    (prompt,) = make_prompts(21, 1)
    assert engine.complete(prompt, ANSWER_TOKENS).tokens == reference.complete(prompt, ANSWER_TOKENS).tokens
    assert engine.metric("vllm:prompt_tokens_by_source_total", source="external_kv_transfer") == 0
