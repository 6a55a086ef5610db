"""Each input that decides KV is in its names: pictures, embeddings, and what else vLLM's workers are told of a new request.

On whole engines vLLM's CPU build cannot show pictures without torchvision: its vision models import a processor that needs it.
"""

import hashlib
from dataclasses import fields
from typing import Any

import pytest
import torch
from vllm.multimodal import inputs as mm
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.multimodal.parse import AudioProcessorItems, MultiModalDataItems
from vllm.multimodal.processing import ProcessorInputs
from vllm.pooling_params import PoolingParams
from vllm.renderers.base import BaseRenderer
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
from vllm.v1.core.sched import output
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.request import Request

from epochkv_connector.engine import blocks, patches
from tests.scheduler.rigs import TOKENS, MakeRig, push_out
from tests.scheduler.test_fenced import FencedRig, MooncakeStore
from tests.support.scheduler import BLOCK, SharedStore

WHOLE = len(TOKENS) // BLOCK
PATCHES = 4
ENCODER_TOKENS = 64


def content(picture: str) -> str:
    return blocks.CONTENT_MARK + digest(picture)


def digest(picture: str) -> str:
    return hashlib.sha256(picture.encode()).hexdigest()


def run(rig: Any, tokens: list[int] | None, **inputs: Any) -> int:
    plain = rig.request(TOKENS)
    rig.scheduler.add_request(Request(plain.request_id, tokens, plain.sampling_params, None, block_hasher=rig.hasher, **inputs))
    rig.run()
    return int(rig.cached[plain.request_id]) // BLOCK


def serve(rig: Any, picture: str, before: int, salt: str | None = None) -> int:
    """Run the text with the picture of this name behind so many blocks and a token; blocks that were found."""
    position = PlaceholderRange(offset=before * BLOCK + 1, length=PATCHES)
    feature = MultiModalFeatureSpec(None, "image", picture.removeprefix(blocks.CONTENT_MARK), position, picture)
    rig.scheduler.max_num_encoder_input_tokens = ENCODER_TOKENS
    rig.scheduler.encoder_cache_manager = EncoderCacheManager(ENCODER_TOKENS)
    return run(rig, TOKENS, mm_features=[feature], cache_salt=salt)


def of_tier(tier: str) -> dict[str, Any]:
    """Options of an engine that has this one alone."""
    return {"l1_bytes": None, "store": SharedStore()} if tier == "l2" else {}


@pytest.mark.parametrize("before", [0, 2])
@pytest.mark.parametrize("groups", [("full",), ("full", "48")])
@pytest.mark.parametrize("tier", ["l1", "l2"])
def test_pictures_tell_prompts_apart(make_rig: MakeRig, tier: str, groups: tuple[str, ...], before: int) -> None:
    """The first block is hashed by us and the others by vLLM, so the picture stands once in each."""
    rig = make_rig(groups=groups, num_blocks=12 * len(groups), **of_tier(tier), epoch=0)
    assert serve(rig, content("one"), before) == 0
    push_out(rig)
    assert serve(rig, content("one"), before) == WHOLE
    push_out(rig)
    loads = rig.tiers.stats()["loads_done"]
    assert serve(rig, content("two"), before) == before
    assert rig.tiers.stats()["loads_done"] - loads == (before > 0)
    push_out(rig)
    assert serve(rig, content("two"), before) == WHOLE


@pytest.mark.parametrize("picture", [digest("holiday"), blocks.CLIENT_MARK + blocks.owner_of("mine") + "a.png"], ids=["unmarked", "marked"])
@pytest.mark.parametrize("tier", ["l1", "l2"])
def test_blocks_behind_an_id_of_a_client_reach_no_tier(make_rig: MakeRig, tier: str, picture: str) -> None:
    """The client may use it again for other bytes. What stands before it is shared, and so is all of it if the id is of the salt."""
    rig = make_rig(num_blocks=12, **of_tier(tier), epoch=0)
    assert serve(rig, picture, 2) == 0
    assert serve(rig, picture, 2) == WHOLE, "the engine's own cache is vLLM's matter"
    push_out(rig)
    assert serve(rig, picture, 2) == 2
    push_out(rig)
    for found in (0, WHOLE if picture.startswith(blocks.CLIENT_MARK) else 2):
        assert serve(rig, picture, 2, salt="mine") == found
        push_out(rig)


def test_ids_of_clients_are_shared_where_the_user_vouches_for_them(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=12, extra={"trust_media_ids": True}, epoch=0)
    for found in (0, WHOLE):
        assert serve(rig, "holiday.png", 2) == found
        push_out(rig)


def test_media_that_a_hit_covers_are_sent_all_the_same(make_rig: MakeRig) -> None:
    """Named anew, the request computes them; vLLM's first runner of models is sent them once."""
    make_rig()
    strip = getattr(output, "strip_covered_mm_data", None) or pytest.skip("this vLLM sends all")
    data = mm.MultiModalKwargsItem({"pixels": mm.MultiModalFieldElem(torch.zeros(4), mm.MultiModalBatchedField())})
    feature = MultiModalFeatureSpec(data, "image", "a", PlaceholderRange(offset=1, length=PATCHES))
    assert strip([feature], len(TOKENS), uses_mrope=False) == [feature]


@pytest.mark.parametrize("options", [{}, {"sampling_rate": 8000}], ids=["as it is", "hashed with options"])
def test_vllms_front_end_tells_the_core_which_ids_are_a_clients(monkeypatch: pytest.MonkeyPatch, options: dict[str, object]) -> None:
    """No cache has one under a name that a digest has, or the id of another salt, whatever the client writes."""
    monkeypatch.setattr(BaseRenderer, "_process_tokens", lambda renderer, prompt: prompt["multi_modal_uuids"]["audio"])
    kept = (
        (MultiModalFeatureSpec, "__init__"),
        (ProcessorInputs, "get_mm_hashes"),
        (InputProcessor, "_get_mm_identifier"),
        (BaseRenderer, "_process_tokens_async"),
    )
    for owner, name in kept:
        monkeypatch.setattr(owner, name, getattr(owner, name))  # put back at the end
    processor = InputProcessor.__new__(InputProcessor)
    seen: list[str] = []

    def ask(ids: list[str | None]) -> list[str]:
        items = MultiModalDataItems({"audio": AudioProcessorItems([[0.5], [0.25]])})
        return ProcessorInputs([1], items, {"audio": ids}, hf_processor_mm_kwargs=options).get_mm_hashes("model", "sha256")["audio"]

    plain = ask([None, None])
    patches.mark_media_ids()
    patches.mark_media_ids()
    for salt, name in ((None, plain[0]), (None, content("holiday")), (None, "4:mine:holiday"), ("mine", "holiday"), ("min", "e:holiday")):
        prompt = {"cache_salt": salt, "multi_modal_uuids": {"audio": [name, None]}}
        clients, digest = ask(BaseRenderer._process_tokens(None, prompt))  # type: ignore[arg-type]
        assert processor._get_mm_identifier(digest, None) == plain[1]
        with_tensors = [str(clients), str(digest), "an id"]  # of another front end, or of a client that writes marks
        seen += [clients, *(processor._get_mm_identifier(one, None) for one in (clients, *with_tensors))]
        for mark, stops in ((clients, salt is None), (digest, False), *((one, True) for one in with_tensors)):
            feature = MultiModalFeatureSpec(None, "audio", "", PlaceholderRange(offset=3, length=1), mark)
            request = Request("r", [1], None, PoolingParams(), mm_features=[feature], cache_salt=salt)
            assert (blocks.first_client_media(request), type(feature.mm_hash)) == (3 if stops else None, str)
    assert len(set(seen)) == 5 + 5 + 2
    assert not set(seen) & {*plain, *map(content, ("holiday",))}
    monkeypatch.setenv("VLLM_USE_RUST_FRONTEND", "1")
    assert blocks.first_client_media(request) == 3


def test_an_id_of_a_client_is_this_engines_under_the_fence(make_rig: MakeRig) -> None:
    """No connector of vLLM's own stops saving where the id begins."""
    objects: dict[str, Any] = {}
    a, b = (make_rig(FencedRig, stock=MooncakeStore(objects), epoch=0) for _ in range(2))
    clients = blocks.CLIENT_MARK + blocks.owner_of("mine") + digest("holiday")
    assert [serve(rig, clients, 2) for rig in (a, b, a)] == [0, 0, WHOLE]
    assert [serve(rig, clients, 2, salt="mine") for rig in (a, b)] == [0, WHOLE]
    assert [serve(rig, content("holiday"), 2) for rig in (a, b)] == [0, WHOLE]


# ---------------------------------------------------------------------------------------------- embeddings, and all fields
NUM_ROWS = 4 * BLOCK + 3
ROWS = torch.arange(NUM_ROWS * 2, dtype=torch.float16).reshape(NUM_ROWS, 2)
JUDGED = {
    "req_id": "decides nothing",
    "prompt_token_ids": "hashed by vLLM",
    "prefill_token_ids": "the same, and outputs so far",
    "mm_features": "identifiers and places are hashed by vLLM; tested above",
    "prompt_embeds": "bytes are hashed by vLLM, their type is in the root",
    "prompt_is_token_ids": "in the root",
    "lora_request": "in the root; see test_adapters.py",
    "sampling_params": "decides what is made of KV. Salts are not in it",
    "pooling_params": "decides what is made of KV. Its token types are for encoders, which have no KV cache",
    "block_ids": "where KV lies",
    "num_computed_tokens": "how much of it there is",
    "replay_start": "which tokens are computed again, for groups that are in no tier",
}
"""Whether each field of a new request decides KV, and what names then say of it."""


@pytest.mark.parametrize("tier", ["gpu", "l1", "l2"])
def test_rows_that_are_tokens_and_rows_that_are_not_have_different_names(make_rig: MakeRig, tier: str) -> None:
    """The id of the tokens is 0, as vLLM's own stand-in for rows that are none."""
    rig = make_rig(num_blocks=12, **of_tier(tier), epoch=0)
    ids = [0] * NUM_ROWS
    prompts: list[tuple[torch.Tensor, list[bool] | None, list[int] | None]] = [
        (ROWS, [False] * NUM_ROWS, ids),
        (ROWS, [True] * BLOCK + [False] * (NUM_ROWS - BLOCK), ids),
        (ROWS, None, None),
        (ROWS, None, ids),
        (ROWS.view(torch.bfloat16), None, None),  # the same bytes
    ]
    for rows, is_token, tokens in prompts:
        for found in (0, NUM_ROWS // BLOCK):
            assert run(rig, tokens, prompt_embeds=rows, prompt_is_token_ids=is_token) == found
            if tier != "gpu":
                push_out(rig)


def test_every_field_of_a_new_request_is_judged() -> None:
    """A new version of vLLM may tell its workers more. Say here whether that decides KV, and put it into the names if it does."""
    assert {field.name for field in fields(NewRequestData)} <= JUDGED.keys()
