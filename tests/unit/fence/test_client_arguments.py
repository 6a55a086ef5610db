"""What the client refuses before anything is asked: the parameter, what was given, and what is allowed."""

import asyncio

import pytest

from epochkv_fence.client import ArgumentError, AsyncPool, Pool
from tests.support.hub import HubWorld

EPOCHS = "give an integer from 0 to 9007199254740991"
WEIGHTS = ("wait_weights", "weight_update")


@pytest.mark.parametrize(
    ("calls", "keys", "text"),
    [
        (("reset",), {"epoch": -1}, f"epoch is -1; {EPOCHS}, or None for the next one"),
        (("reset",), {"on_failure": "stop"}, "on_failure is 'stop'; use 'bypass' or 'crash'"),
        (WEIGHTS, {"engines": "engine-0"}, "engines is 'engine-0'; give names of engines, or None for all"),
        (WEIGHTS, {"engines": []}, "engines is []; give names"),
        (("wait_weights",), {"other_than": ["0A" * 16]}, f"other_than is ['{'0A' * 16}']; give digests of 32 hex digits"),
        (WEIGHTS, {"label": "x" * 254}, "label is "),
        (WEIGHTS, {"label": "step-\udcff"}, "label is 'step-\\udcff'; give one printable line"),
        (WEIGHTS, {"label": "step-42\n"}, "label is 'step-42\\n'; give one printable line of 1 to 253 characters, such as step-42"),
        (("status", *WEIGHTS), {"timeout_s": "5"}, "timeout_s is '5'; give seconds"),
        (("status", *WEIGHTS), {"timeout_s": -1}, "timeout_s is -1; give seconds"),
    ],
)
def test_what_cannot_be_meant_is_named(world: HubWorld, calls: tuple[str, ...], keys: dict[str, object], text: str) -> None:
    async def awaited(call: str) -> None:
        async with await AsyncPool.connect(world.folder) as pool:
            made = getattr(pool, call)(**keys)
            await (made.__aenter__() if hasattr(made, "__aenter__") else made)

    def called(call: str) -> None:
        with Pool.connect(world.folder) as pool:
            getattr(pool, call)(**keys).__enter__()

    for call in calls:
        with pytest.raises(ArgumentError) as caught:
            called(call)
        with pytest.raises(ArgumentError) as caught_too:
            asyncio.run(awaited(call))
        for error in (caught.value, caught_too.value):
            assert error.parameter in keys
            assert str(error).startswith(text)
    assert world.snapshot().target == 0
