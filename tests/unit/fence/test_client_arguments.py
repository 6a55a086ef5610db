"""What the client refuses before anything is asked: the parameter, what was given, and what is allowed."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from epochkv_fence.client import ArgumentError, AsyncPool, Pool, Standing
from tests.helpers_hub import HubWorld, hub_world

EPOCHS = "give an integer from 0 to 9007199254740991"


@pytest.fixture
def world(tmp_path: Path) -> Iterator[HubWorld]:
    with hub_world(tmp_path / "state", join_after_seconds=0.0) as made:
        yield made


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
@pytest.mark.parametrize(("call", "first"), [("reset", ()), ("wait", (1,)), ("weight_update", ("step-1",))])
def test_a_progress_that_nobody_would_await(world: HubWorld, call: str, first: tuple[object, ...], progress: object) -> None:
    for error in refusals(world, call, *first, progress=progress):
        assert isinstance(error, TypeError)
        assert (error.parameter, error.problem) == (
            "progress",
            f"is {progress!r}, and nobody would await it; give a plain function that takes a Standing",
        )
