"""The rig itself: prefix reuse within an engine, through L1 and through L2, told apart by the oracle."""

from __future__ import annotations

from tests.scheduler.rigs import MakeRig
from tests.support.scheduler import BLOCK, SharedStore, prompt


def test_gpu_prefix_reuse_under_a_shared_root(make_rig: MakeRig) -> None:
    rig = make_rig(epoch=0)
    tokens = prompt(1, 8 * BLOCK + 3)
    first, second = rig.serve(tokens), rig.serve(tokens)
    assert rig.cached[first] == 0
    assert rig.cached[second] == 8 * BLOCK
    assert rig.outputs[first] == rig.outputs[second]
    rig.check_clean()


def test_l1_gives_back_what_the_gpu_lost(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=12, epoch=0)
    tokens = prompt(1, 8 * BLOCK + 3)
    first = rig.serve(tokens)
    for seed in range(2, 5):
        rig.serve(prompt(seed, 8 * BLOCK + 3))  # evict the GPU's copy
    again = rig.serve(tokens)
    assert rig.cached[again] == 8 * BLOCK
    assert rig.outputs[first] == rig.outputs[again]
    rig.check_clean()


def test_another_engine_reuses_through_l2(make_rig: MakeRig) -> None:
    store = SharedStore()
    first = make_rig(store=store)
    first.adopt(0)
    tokens = prompt(1, 8 * BLOCK + 3)
    made = first.serve(tokens)
    assert len(store.objects) == 8
    first.check_clean()
    second = make_rig(store=store)
    second.adopt(0)
    found = second.serve(tokens)
    assert second.cached[found] == 8 * BLOCK
    assert len(store.fetched) == 8
    assert second.outputs[found] == first.outputs[made]
    second.check_clean()
