"""Multi-modal hashes on the real scheduler: one text with two pictures shares what stands before the picture, in every tier.

On whole engines vLLM's CPU build cannot show it without torchvision: its vision models import a processor that needs it.
"""

import hashlib
from typing import Any

import pytest
from vllm.multimodal.hasher import MultiModalHasher
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.parse import AudioProcessorItems, MultiModalDataItems
from vllm.multimodal.processing import ProcessorInputs
from vllm.pooling_params import PoolingParams
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.request import Request

from epochkv_connector.engine import blocks, patches
from tests.scheduler.rigs import MakeRig
from tests.support.scheduler import BLOCK, SharedStore, prompt

WHOLE = 8
TOKENS = prompt(1, WHOLE * BLOCK + 3)
PATCHES = 4
ENCODER_TOKENS = 64


def content(picture: str) -> str:
    """As vLLM names it."""
    return hashlib.sha256(picture.encode()).hexdigest()


def serve(rig: Any, picture: str, before: int, salt: str | None = None) -> int:
    """Run the text with the picture of this name behind so many blocks and a token; blocks that were found."""
    plain = rig.request(TOKENS)
    position = PlaceholderRange(offset=before * BLOCK + 1, length=PATCHES)
    feature = MultiModalFeatureSpec(None, "image", picture.removeprefix(blocks.CLIENT_MARK), position, picture)
    request = Request(
        plain.request_id, TOKENS, plain.sampling_params, None, mm_features=[feature], cache_salt=salt, block_hasher=rig.hasher
    )
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
    assert serve(rig, content("one"), before) == 0
    flood(rig)
    assert serve(rig, content("one"), before) == WHOLE
    flood(rig)
    loads = rig.tiers.stats()["loads_done"]
    assert serve(rig, content("two"), before) == before
    assert rig.tiers.stats()["loads_done"] - loads == (before > 0)
    flood(rig)
    assert serve(rig, content("two"), before) == WHOLE


@pytest.mark.parametrize("picture", ["holiday.png", blocks.CLIENT_MARK + content("holiday")], ids=["name", "digest"])
@pytest.mark.parametrize("tier", ["l1", "l2"])
def test_blocks_behind_an_id_of_a_client_reach_no_tier(make_rig: MakeRig, tier: str, picture: str) -> None:
    """The client may use it again for other bytes. What stands before it is shared, and so is all of it under a salt."""
    options: dict[str, Any] = {"l1_bytes": None, "store": SharedStore()} if tier == "l2" else {}
    rig = make_rig(num_blocks=12, **options, epoch=0)
    assert serve(rig, picture, 2) == 0
    assert serve(rig, picture, 2) == WHOLE, "the engine's own cache is vLLM's matter"
    flood(rig)
    assert serve(rig, picture, 2) == 2
    flood(rig)
    for found in (0, WHOLE):
        assert serve(rig, picture, 2, salt="mine") == found
        flood(rig)


def test_ids_of_clients_are_shared_where_the_user_vouches_for_them(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=12, extra={"trust_media_ids": True}, epoch=0)
    for found in (0, WHOLE):
        assert serve(rig, "holiday.png", 2) == found
        flood(rig)


@pytest.mark.parametrize("options", [{}, {"sampling_rate": 8000}], ids=["as it is", "hashed with options"])
def test_vllms_front_end_tells_the_core_which_ids_are_a_clients(monkeypatch: pytest.MonkeyPatch, options: dict[str, object]) -> None:
    """Also one that looks like a digest. What vLLM hashes and tells others is what it was without us."""
    for owner, name in ((ProcessorInputs, "get_mm_hashes"), (MultiModalHasher, "hash_kwargs"), (InputProcessor, "_get_mm_identifier")):
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back at the end
    items = MultiModalDataItems({"audio": AudioProcessorItems([[0.5], [0.25]])})
    inputs = ProcessorInputs([1], items, {"audio": [content("holiday"), None]}, hf_processor_mm_kwargs=options)
    processor = InputProcessor.__new__(InputProcessor)
    plain = inputs.get_mm_hashes("model", "sha256")["audio"]
    patches.mark_media_ids()
    patches.mark_media_ids()
    clients, digest = inputs.get_mm_hashes("model", "sha256")["audio"]
    assert [processor._get_mm_identifier(one, None) for one in (clients, digest)] == plain
    position = PlaceholderRange(offset=3, length=1)
    features = [MultiModalFeatureSpec(None, "audio", name, position, given) for name, given in zip(plain, (clients, digest), strict=True)]
    assert [blocks.first_client_media(Request("r", [1], None, PoolingParams(), mm_features=[one])) for one in features] == [3, None]
