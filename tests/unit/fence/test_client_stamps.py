"""What a trainer reads of an answer's stamp."""

from types import SimpleNamespace
from typing import Any

import pytest

from epochkv_fence.client import Made, Stamp, stamps

OLD, NEW = "b253cb79" + "0" * 24, "3f2a9c1e" + "1" * 24
TOKENS = [{"from_token": 0, "weights": OLD, "label": "step-41"}, {"from_token": 37, "weights": NEW}]
SAID = {"tokens": TOKENS, "epoch": 7, "cached_tokens": {"gpu": 0, "l1": 128, "l2": 0}}


@pytest.mark.parametrize(
    "response",
    [
        {"choices": [{}], "kv_transfer_params": {"epochkv": SAID}},
        SimpleNamespace(outputs=[1], kv_transfer_params={"epochkv": SAID, "other": 1}),
        {"choices": [{}, {}], "kv_transfer_params": {"epochkv": {"samples": [SAID]}}},
    ],
)
def test_an_answer_as_json_and_as_an_object(response: Any) -> None:
    (stamp,) = stamps(response)
    assert stamp == Stamp((Made(0, OLD, "step-41"), Made(37, NEW)), 7, {"gpu": 0, "l1": 128, "l2": 0})
    assert [stamp.of(token).weights for token in (0, 36, 37, 500)] == [OLD, OLD, NEW, NEW]
    assert stamp.weights == ""
    assert not stamp.is_of("step-41")


def test_an_answer_of_one_policy() -> None:
    (stamp,) = stamps({"kv_transfer_params": {"epochkv": {"tokens": TOKENS[:1]}}})
    assert stamp is not None
    assert stamp.weights == OLD
    assert all(stamp.is_of(name) for name in ("step-41", OLD, OLD[:8]))
    assert not any(stamp.is_of(name) for name in (OLD[:7], NEW, "step-4", ""))


def test_nobody_knows() -> None:
    (stamp,) = stamps({"kv_transfer_params": {"epochkv": {"tokens": [{"from_token": 0, "weights": "unknown"}]}}})
    assert stamp is not None
    assert stamp.weights == ""
    assert not stamp.is_of("unknown")


@pytest.mark.parametrize("params", [None, {}, {"epochkv": None}, {"epochkv": {"samples": [None, {}]}}, {"do_remote_decode": True}])
def test_no_stamp(params: Any) -> None:
    assert stamps({"choices": [{}, {}], "kv_transfer_params": params}) == [None, None]


@pytest.mark.parametrize("token", [-1, 0])
def test_a_token_that_is_not_there(token: int) -> None:
    with pytest.raises(IndexError):
        Stamp(()).of(token)
