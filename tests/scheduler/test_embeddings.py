"""Prompts of embeddings, and what else vLLM's workers are told of a new request: each input that decides KV is in its names."""

from dataclasses import fields
from typing import Any

import pytest
import torch
from vllm.v1.core.sched.output import NewRequestData
from vllm.v1.request import Request

from tests.scheduler.rigs import MakeRig
from tests.support.scheduler import BLOCK, SharedStore, prompt

WHOLE = 4
LENGTH = WHOLE * BLOCK + 3
ROWS = torch.arange(LENGTH * 2, dtype=torch.float16).reshape(LENGTH, 2)

JUDGED = {
    "req_id": "decides nothing",
    "prompt_token_ids": "hashed by vLLM",
    "prefill_token_ids": "the same, and outputs so far",
    "mm_features": "identifiers and places are hashed by vLLM; see test_pictures.py",
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


def serve(rig: Any, rows: torch.Tensor, is_token: list[bool] | None, tokens: list[int] | None) -> int:
    """Run a prompt of these rows, of which `is_token` are read from the tokens; blocks that were found."""
    plain = rig.request(prompt(1, LENGTH))
    request = Request(
        plain.request_id, tokens, plain.sampling_params, None, prompt_embeds=rows, prompt_is_token_ids=is_token, block_hasher=rig.hasher
    )
    rig.scheduler.add_request(request)
    rig.run()
    return int(rig.cached[request.request_id]) // BLOCK


@pytest.mark.parametrize("tier", ["gpu", "l1", "l2"])
def test_rows_that_are_tokens_and_rows_that_are_not_have_different_names(make_rig: MakeRig, tier: str) -> None:
    """The id of the tokens is 0, as vLLM's own stand-in for rows that are none."""
    options: dict[str, Any] = {"l1_bytes": None, "store": SharedStore()} if tier == "l2" else {}
    rig = make_rig(num_blocks=12, **options, epoch=0)
    ids = [0] * LENGTH
    prompts: list[tuple[torch.Tensor, list[bool] | None, list[int] | None]] = [
        (ROWS, [False] * LENGTH, ids),
        (ROWS, [True] * BLOCK + [False] * (LENGTH - BLOCK), ids),
        (ROWS, None, None),
        (ROWS, None, ids),
        (ROWS.view(torch.bfloat16), None, None),  # the same bytes
    ]
    for one in prompts:
        for found in (0, WHOLE):
            assert serve(rig, *one) == found
            if tier != "gpu":
                for seed in range(100, 104):
                    rig.serve(prompt(seed, 8 * BLOCK))


def test_every_field_of_a_new_request_is_judged() -> None:
    """A new version of vLLM may tell its workers more. Say here whether that decides KV, and put it into the names if it does."""
    assert {field.name for field in fields(NewRequestData)} <= JUDGED.keys()
