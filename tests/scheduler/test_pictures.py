"""Multi-modal hashes on the real scheduler: one text with two pictures shares what stands before the picture, in every tier.

On whole engines vLLM's CPU build cannot show it without torchvision: its vision models import a processor that needs it.
"""

from __future__ import annotations

from typing import Any

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.request import Request

from tests.scheduler.rigs import MakeRig
from tests.support.scheduler import BLOCK, SharedStore, prompt

WHOLE = 8
TOKENS = prompt(1, WHOLE * BLOCK + 3)
PATCHES = 4
ENCODER_TOKENS = 64


def serve(rig: Any, picture: str, before: int) -> int:
    """Run the text with this picture behind so many blocks and a token; blocks that were found."""
    plain = rig.request(TOKENS)
    position = PlaceholderRange(offset=before * BLOCK + 1, length=PATCHES)
    feature = MultiModalFeatureSpec(None, "image", picture, position, picture)
    request = Request(plain.request_id, TOKENS, plain.sampling_params, None, mm_features=[feature], block_hasher=rig.hasher)
    rig.scheduler.max_num_encoder_input_tokens = ENCODER_TOKENS
    rig.scheduler.encoder_cache_manager = EncoderCacheManager(ENCODER_TOKENS)
    rig.scheduler.add_request(request)
    rig.run()
    return int(rig.cached[request.request_id]) // BLOCK


def flood(rig: Any) -> None:
    """Others take every block of the engine's own cache."""
    for seed in range(100, 108):
        rig.serve(prompt(seed, len(TOKENS)))


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("groups", [("full",), ("full", "48")])
@pytest.mark.parametrize("tier", ["l1", "l2"])
def test_pictures_tell_prompts_apart(make_rig: MakeRig, tier: str, groups: tuple[str, ...], before: int) -> None:
    """The first block is hashed by us and the others by vLLM, so the picture stands once in each."""
    options: dict[str, Any] = {"l1_bytes": None, "store": SharedStore()} if tier == "l2" else {}
    rig = make_rig(groups=groups, num_blocks=12 * len(groups), **options, epoch=0)
    assert serve(rig, "one", before) == 0
    flood(rig)
    assert serve(rig, "one", before) == WHOLE
    flood(rig)
    loads = rig.tiers.stats()["loads_done"]
    assert serve(rig, "two", before) == before
    assert rig.tiers.stats()["loads_done"] - loads == (before > 0)
    flood(rig)
    assert serve(rig, "two", before) == WHOLE
    rig.check_clean()
