"""Dynamo's own indexer follows two real engines over an epoch and new weights. The rules of other routers follow vLLM's scheduler
(`tests/scheduler/test_routers.py`)."""

from collections.abc import Iterator

import pytest

from hack.waiting import eventually
from tests.engine.conftest import BLOCKS, CACHED, Pair, Prompts, Reference, Weights, check
from tests.support.routers.dynamo import DynamoIndexer

A, B = 1, 2
BLOCK_TOKENS = CACHED // BLOCKS


def knows_nothing(dynamo: DynamoIndexer, what: str) -> None:
    eventually(lambda: not dynamo.blocks(A) + dynamo.blocks(B), f"{what}: Dynamo holds no block", 30.0)


def believes(dynamo: DynamoIndexer, *numbers: int, what: str, prompt: list[int]) -> None:
    """It finds the whole prompt with these engines and no other."""
    eventually(lambda: dynamo.find(prompt) == dict.fromkeys(numbers, BLOCKS), lambda: f"{what}: Dynamo finds {dynamo.find(prompt)}", 30.0)


@pytest.fixture
def dynamo(pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DynamoIndexer]:
    """Follows A and B, and believes nothing of what was before. In the test, no event comes before what it builds on."""
    prompts = Prompts(7)
    with DynamoIndexer(tmp_path_factory.mktemp("dynamo"), BLOCK_TOKENS) as dynamo:
        for number, engine in enumerate(pair.both, A):
            dynamo.follow(number, pair.events_of(engine.name))

        def heard() -> bool:  # a subscription takes effect late
            pair.pool.bump()
            prompt = prompts(BLOCK_TOKENS + 1)
            for engine in pair.both:
                engine.complete(prompt, 2)
            return set(dynamo.find(prompt)) == {A, B}

        eventually(heard, "Dynamo hears both engines", 30.0)
        pair.pool.bump()
        knows_nothing(dynamo, "the epoch of the test begins")
        missed = len(dynamo.dropped)
        yield dynamo
        assert len(dynamo.dropped) == missed, dynamo.dropped


@pytest.mark.parametrize("change", ["epoch", pytest.param("weights", marks=pytest.mark.slow)])
def test_dynamo_follows_engines_over_a_change_of_names(
    pair: Pair, prompts: Prompts, reference: Reference, weights: Weights, dynamo: DynamoIndexer, change: str
) -> None:
    prompt = prompts()
    pair.check_sharing(prompt, reference(prompt, pair.model))
    believes(dynamo, A, B, what="A has computed a prompt, and B has loaded it", prompt=prompt)
    if change == "epoch":
        pair.pool.bump()
    else:
        pair.push(weights.after(pair.model))
    knows_nothing(dynamo, f"{change} changed, and both engines idle")
    check(pair.b.complete(prompt), 0, reference(prompt, pair.model))
    believes(dynamo, B, what="B has computed it again", prompt=prompt)
    assert pair.b.reset_prefix_cache(external=False)
    believes(dynamo, B, what="B has it in L1 alone", prompt=prompt)
    check(pair.b.complete(prompt), CACHED, reference(prompt, pair.model))
