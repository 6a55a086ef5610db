"""`save`: which part of a request the tiers get, on vLLM's real scheduler."""

from typing import Any

import pytest

from tests.scheduler.rigs import MakeRig, on_layouts
from tests.support.scheduler import BLOCK, SharedStore, prompt
from tests.support.scheduler_config import STATE

PROMPT, ANSWER = 4 * BLOCK, 3 * BLOCK + 1


def saved(rig: Any, params: Any = None) -> int:
    """Tokens of a request of 4 blocks and its answer of 3 that the tiers would give to somebody."""
    request = rig.add(prompt(1, PROMPT), max_tokens=ANSWER, params=params)
    rig.run()
    whole = prompt(1, PROMPT) + rig.outputs[request.request_id]
    rig.scheduler.reset_prefix_cache()
    return int(rig.cached[rig.serve([*whole, 5])])


@pytest.mark.parametrize(
    ("save", "expected"),
    [
        ("All", 7),
        ("Prompts", 4),
        ({"max_tokens": 2 * BLOCK + 3}, 2),
        ({"max_tokens": 5 * BLOCK}, 5),
        ({"max_tokens": BLOCK - 1}, 0),
        ({"max_tokens": 0}, 0),
    ],
)
def test_the_tiers_get_what_the_configuration_says(make_rig: MakeRig, store: SharedStore, save: Any, expected: int) -> None:
    rig = make_rig(store=store, epoch=0, extra={"save": save})
    assert saved(rig) == expected * BLOCK


@pytest.mark.parametrize("asked", ["Prompts", {"max_tokens": 4 * BLOCK}])
def test_a_request_may_say_otherwise(make_rig: MakeRig, asked: Any) -> None:
    assert saved(make_rig(epoch=0), {"epochkv": {"save": asked}}) == 4 * BLOCK
    assert saved(make_rig(epoch=0, extra={"save": "Prompts"}), {"epochkv": {"save": "All"}}) == 7 * BLOCK


@pytest.mark.parametrize("asked", ["prompts", {"max_tokens": -1}, {"max_tokens": "2"}, {}, None, 3])
def test_what_nobody_understands_changes_nothing(make_rig: MakeRig, asked: Any) -> None:
    assert saved(make_rig(epoch=0), {"epochkv": {"save": asked}}) == 7 * BLOCK


@on_layouts(("full", STATE), ("48", "full"))
def test_layers_with_states_and_windows_end_with_the_prompt_too(make_rig: MakeRig) -> None:
    rig = make_rig(epoch=0, extra={"save": "Prompts"})
    assert saved(rig) == 4 * BLOCK
