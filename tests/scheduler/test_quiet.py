"""Engines that save nothing: vLLM names their blocks all the same, and later requests of the same engine find them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.scheduler.rigs import MakeRig
from tests.support.scheduler import BLOCK, SharedStore, prompt

KINDS: dict[str, dict[str, Any]] = {
    "no tier": {"l1_bytes": None},
    "loads alone": {"store": SharedStore(), "transfer": {"kv_role": "kv_consumer"}},
    "its bookkeeping has failed": {},
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_write_past_vllm_is_noticed_behind_the_next_step(make_rig: MakeRig, kind: str) -> None:
    rig = make_rig(**KINDS[kind])
    rig.adopt(1)
    rig.side.state.broken = kind == "its bookkeeping has failed"
    tokens = prompt(1, 3 * BLOCK)
    rig.serve(tokens)
    before = rig.serve(tokens)
    assert rig.cached[before] == 2 * BLOCK
    rig.write_past("w1")
    rig.serve(prompt(2, 3 * BLOCK))
    after = rig.serve(tokens)
    assert rig.cached[after] == 0
    assert rig.watch.counters["late"] == 1
    rig.serve(tokens)
    rig.check_clean()
