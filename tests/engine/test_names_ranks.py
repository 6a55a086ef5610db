"""Two tensor-parallel ranks: an engine is named after what both hold, and a block reaches the store from both or from none."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from epochkv_fence.protocol.messages import UNKNOWN_WEIGHTS as UNKNOWN
from hack.standalone.mooncake import Mooncake
from tests.engine.conftest import Prompts, Reference, Weights
from tests.engine.names_lab import BLOCK_TOKENS, FLIPPED, OPENING, Lab, Orders, Streams, derive, open_pool
from tests.support.nursery import Nursery

pytestmark = pytest.mark.slow
NUM_RANKS = 2
GPU_BLOCKS = 64
"""So few that an engine soon forgets what it has computed, and reads it from the store: there is no L1 here."""
NUM_FILLING = 10
"""So many prompts of the usual length take more blocks than that."""
REPLACED = "model.layers.0.self_attn.k_proj.weight"
HEAD_DIM = 32


@pytest.fixture(scope="module")
def lab(folder: Path, mooncake: Mooncake, servers: Nursery, weights: Weights, prompts: Prompts, reference: Reference) -> Iterator[Lab]:
    with open_pool(folder) as pool, closing(Lab(folder, pool, mooncake, servers, weights, prompts, reference)) as lab:
        pool.configure(reclaim="Retain")  # or a new epoch removes what `whole` is to look at
        lab.local_bytes, lab.num_shards = None, NUM_RANKS
        lab.args = ("--tensor-parallel-size", str(NUM_RANKS), "--num-gpu-blocks-override", str(GPU_BLOCKS))
        lab.environ = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(map(str, range(NUM_RANKS)))}
        lab.begin()
        yield lab


def skew(tensors: dict[str, Any]) -> None:
    """What the order `FLIPPED` does on rank 1 alone: the keys of its head point the other way."""
    tensors[REPLACED][HEAD_DIM:] *= -1.0


@pytest.fixture(scope="module")
def skewed(folder: Path, weights: Weights) -> Path:
    return derive(folder / "skewed", weights.base, skew)


def whole(lab: Lab) -> int:
    """How many blocks the store has, each with the shards of all ranks."""
    shards = Counter((key.epoch, key.weights, key.group, key.block_hash) for key in lab.stored())
    torn = {name: count for name, count in shards.items() if count != NUM_RANKS}
    assert not torn, f"wrong tokens may be read: {len(torn)} of {len(shards)} blocks have the shard of one rank alone"
    return len(shards)


def test_one_rank_is_written_to_past_vllm_in_the_middle_of_requests(lab: Lab, weights: Weights, skewed: Path, prompts: Prompts) -> None:
    """That rank alone sees it. What the other one has of the blocks must not reach the store: the honest engine would add the rest."""
    lab.have(weights.base)
    orders = Orders(lab.folder / "orders", lab.a, rank=1)
    lab.wait_named(lab.a)
    lab.share(weights.base)
    epoch, late, base = lab.pool.snapshot().target, lab.late(lab.a), lab.digest(lab.a)
    asked: list[list[int]] = []
    with lab.written(lab.a):
        for times in (1, 2):
            with Streams(lab.a, [prompts(OPENING) for _ in range(3)]) as streams:
                streams.arrive(10)
                orders(FLIPPED, -1.0)
                streams.move_on(BLOCK_TOKENS + 10)
                if times == 2:
                    orders(FLIPPED, -1.0)
                    streams.move_on(BLOCK_TOKENS + 10)
                streams.wait()
            for stream in streams.all:
                assert stream.stamp is not None
                first, between, new, *others = [one.weights[:8] for one in stream.stamp.made]
                assert (first, between, new in (base, UNKNOWN), others) == (base, UNKNOWN, False, [UNKNOWN, base][: 2 * times - 2])
                until = stream.stamp.made[1].from_token
                assert lab.reference.answer(stream.prompt, weights.base, until) == tuple(stream.tokens[:until]), "wrong tokens"
            asked += streams.prefixes()
            assert whole(lab) > 0
            lab.all_right(streams.prefixes(), (lab.b, weights.base))
            assert whole(lab) > 0
            lab.wait_published(epoch + times)
            assert lab.late(lab.a) >= late + times
            if times == 1:
                lab.apart(lab.a, skewed, lab.b, weights.base)
                orders(FLIPPED, -1.0)
                lab.share(weights.base)
    for _ in range(NUM_FILLING):  # B forgets
        lab.b.complete(lab.prompts(), 1)
    assert sum(lab.right(lab.b, prompt, weights.base) for prompt in asked) > 0, "nothing was read from the store"
    lab.all_right(asked, (lab.a, weights.base))
    lab.share(weights.base)
