"""Recurrent states: which are saved and found again."""

import random
from functools import partial
from typing import Any

import pytest

from epochkv_connector.tiers.hits import PromptBlocks
from epochkv_connector.tiers.layout import longest_hit
from tests.scheduler.rigs import TOKENS, WHOLE, MakeRig, found, on_layouts, preempt_last
from tests.support.scheduler import BLOCK, prompt
from tests.support.scheduler_config import STATE


@pytest.fixture(params=[False, True], ids=["", "checkpoints"])
def make_rig(make_rig: MakeRig, request: pytest.FixtureRequest) -> MakeRig:
    """Engines whose layers hand out states between chunks, and others that hand out those inside of a chunk as well."""
    if request.param:
        pytest.importorskip("vllm.model_executor.layers.mamba.checkpoint", reason="this version of vLLM has no states inside of chunks")
    return partial(make_rig, checkpoints=request.param)


@on_layouts(("full", STATE), ("full", STATE, "48"), ("full", "48"))
def test_what_a_request_resumes_at_on_the_gpu_is_saved_if_no_tier_has_it(make_rig: MakeRig) -> None:
    rig = make_rig(retention=0, epoch=0)
    rig.serve(TOKENS)
    index = rig.tiers.state.index
    for group in range(len(rig.options.groups)):  # L1 forgets all; the GPU does not
        for name in list(index._maps[group]):
            index.forget(group, name)
    assert found(rig) == WHOLE
    assert rig.scheduler.reset_prefix_cache()
    assert found(rig) == WHOLE


def kept_and_saved(rig: Any, tokens: list[int]) -> tuple[int, int]:
    """How many tokens vLLM's own cache gives, and how many L1 alone."""
    request = rig.request(tokens)
    kept = int(rig.scheduler.kv_cache_manager.get_computed_blocks(request)[1])
    state = rig.tiers.state
    held = PromptBlocks(state.index, request.block_hashes, [1] * len(rig.options.groups))
    return kept, longest_hit(state.layout, 0, len(tokens) - 1, held.present, held.first_absent)


@on_layouts(("full", STATE), (STATE, "full", STATE), ("full", "48"), ("full", STATE, "48"))
@pytest.mark.parametrize("retention", [0, 2 * BLOCK])
@pytest.mark.parametrize("seed", range(2))
def test_l1_gives_all_that_vllm_keeps(make_rig: MakeRig, seed: int, retention: int) -> None:
    """Both have room for all. Prompts part, answers are continued, and requests are preempted. With retention 0, vLLM's default, states are
    kept at the end of prompts, and where prompts were seen to part.
    """
    source = random.Random(seed)
    rig = make_rig(retention=retention, num_blocks=1000, l1_bytes=1 << 24, max_batched_tokens=source.choice([64, 8192]), epoch=0)
    texts = [prompt(family, 12 * BLOCK) for family in range(3)]
    for _ in range(150):
        (name,) = source.choices(["step", "add", "preempt"], [80, 15, 5])
        if name == "add" and len(rig.scheduler.requests) < 6:
            text = source.choice(texts[:3] + texts[-5:])
            texts.append([*text[: source.randrange(1, len(text))], *prompt(source.randrange(10**6), source.randrange(1, 3 * BLOCK))])
            rig.add(texts[-1], max_tokens=source.choice([1, 5, 3 * BLOCK]))
        elif name == "preempt" and rig.scheduler.running:
            texts.append([*rig.scheduler.running[-1].all_token_ids, 1])
            preempt_last(rig)
        else:
            rig.step()
    rig.run(3000)
    found = [kept_and_saved(rig, text) for text in texts]
    assert sum(kept > 0 for kept, _ in found) > 5
    assert [pair for pair in found if pair[0] > pair[1]] == []
