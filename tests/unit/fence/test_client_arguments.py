"""What the client refuses before anything is asked: the parameter, what was given, and what is allowed."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import pytest

from epochkv_fence.client import ArgumentError, AsyncPool, Pool, Standing
from tests.support.hub import HubWorld

EPOCHS = "give an integer from 0 to 9007199254740991"


def refusals(world: HubWorld, call: str, *arguments: object, **keys: object) -> list[ArgumentError]:
    """What `Pool` and `AsyncPool` raise for one call."""
    found = []

    async def awaited() -> None:
        async with await AsyncPool.connect(world.folder) as pool:
            await entered(getattr(pool, call)(*arguments, **keys))

    async def entered(made: Any) -> None:
        await (made.__aenter__() if hasattr(made, "__aenter__") else made)

    def called() -> None:
        with Pool.connect(world.folder) as pool:
            made = getattr(pool, call)(*arguments, **keys)
            if hasattr(made, "__enter__"):
                made.__enter__()

    for ask in (called, lambda: asyncio.run(awaited())):
        with pytest.raises(ArgumentError) as caught:
            ask()
        found.append(caught.value)
    assert world.snapshot().target == 0
    return found


@pytest.mark.parametrize(
    ("call", "epoch", "kind", "text"),
    [
        ("wait", None, TypeError, f"epoch is None; {EPOCHS}"),
        ("wait", "x", TypeError, f"epoch is 'x'; {EPOCHS}"),
        ("wait", True, TypeError, f"epoch is True; {EPOCHS}"),
        ("wait", 1.0, TypeError, f"epoch is 1.0; {EPOCHS}"),
        ("wait", -1, ValueError, "epoch is -1; it must be from 0 to 9007199254740991"),
        ("reset", "x", TypeError, f"epoch is 'x'; {EPOCHS}, or None for the next one"),
    ],
)
def test_an_epoch_that_is_none(world: HubWorld, call: str, epoch: object, kind: type[Exception], text: str) -> None:
    for error in refusals(world, call, epoch):
        assert isinstance(error, kind)
        assert (error.parameter, str(error)) == ("epoch", text)


@pytest.mark.parametrize("value", ["no", "", 0, 1, None])
@pytest.mark.parametrize("parameter", ["wait", "force"])
def test_a_flag_is_true_or_false(world: HubWorld, parameter: str, value: object) -> None:
    for error in refusals(world, "reset", **{parameter: value}):
        assert isinstance(error, TypeError)
        assert (error.parameter, str(error)) == (parameter, f"{parameter} is {value!r}; give True or False")


async def tell(standing: Standing) -> None:
    raise AssertionError(standing)


class Teller:
    async def __call__(self, standing: Standing) -> None:
        raise AssertionError(standing)

    async def tell(self, standing: Standing) -> None:
        raise AssertionError(standing)


@pytest.mark.parametrize(
    "progress", [tell, functools.partial(tell), Teller(), Teller().tell], ids=["function", "partial", "call", "method"]
)
@pytest.mark.parametrize(("call", "first"), [("reset", ()), ("wait", (1,)), ("weight_update", ("step-1",)), ("wait_weights", ())])
def test_a_progress_that_nobody_would_await(world: HubWorld, call: str, first: tuple[object, ...], progress: object) -> None:
    standing = "Standing" if call in ("reset", "wait") else "WeightsStanding"
    for error in refusals(world, call, *first, progress=progress):
        assert isinstance(error, TypeError)
        assert (error.parameter, error.problem) == (
            "progress",
            f"is {progress!r}, and nobody would await it; give a plain function that takes a {standing}",
        )


@pytest.mark.parametrize(
    ("keys", "kind", "text"),
    [
        ({"engines": "engine-0"}, TypeError, "engines is 'engine-0'; give names of engines, or None for all"),
        ({"engines": [b"engine-0"]}, TypeError, "engines is [b'engine-0']; give names"),
        ({"engines": 7}, TypeError, "engines is 7; give names"),
        ({"engines": []}, ValueError, "engines is empty; give names"),
        ({"other_than": "0a" * 16}, TypeError, f"other_than is {'0a' * 16!r}; give digests of weights"),
        ({"other_than": ["0A" * 16]}, ValueError, f"other_than has {'0A' * 16!r}; give digests of 32 hex digits"),
        ({"other_than": ["3f2a9c1e"]}, ValueError, "other_than has '3f2a9c1e'; give digests of 32 hex digits"),
        ({"other_than": None}, TypeError, "other_than is None; give digests"),
        ({"label": ""}, ValueError, "label has 0 characters; give 1 to 253"),
        ({"label": "x" * 254}, ValueError, "label has 254 characters"),
        ({"label": 7}, TypeError, "label is 7; give text"),
        ({"label": "step-\udcff"}, ValueError, "label is 'step-\\udcff', which is no Unicode text"),
        ({"label": "step-42\n"}, ValueError, "label is 'step-42\\n'; give one line without control characters, such as step-42"),
        ({"label": "step-\u202842"}, ValueError, "label is 'step-\\u202842'; give one line"),
        ({"timeout_s": "5"}, TypeError, "timeout_s is '5'; give seconds"),
        ({"timeout_s": -1}, ValueError, "timeout_s is -1; give seconds"),
        ({"progress": 5}, TypeError, "progress is 5; give a function that takes a WeightsStanding, or None"),
    ],
)
def test_a_wait_for_weights_that_cannot_be_meant(world: HubWorld, keys: dict[str, object], kind: type[Exception], text: str) -> None:
    calls = ("wait_weights", "weight_update") if "other_than" not in keys else ("wait_weights",)
    for call in calls:
        for error in refusals(world, call, **keys):
            assert isinstance(error, kind)
            assert error.parameter in keys
            assert str(error).startswith(text)
