"""Defects of connectors in public use that no other test looks for (docs/reference/peers-defects.md lists all): ours has none."""

import pytest

from tests.scheduler.rigs import LENGTH, MakeRig, filled, found, release
from tests.support.scheduler import BLOCK, RequestStatus, SharedStore, prompt


def test_a_request_that_a_reset_preempted_is_loaded_although_the_same_step_names_it_as_preempted(make_rig: MakeRig) -> None:
    """vllm PR#57810: who drops the load of a preempted request loses it for ever."""
    rig, tokens = filled(make_rig, num_blocks=48)
    request = rig.add(tokens, max_tokens=4)
    while request.num_output_tokens < 2:
        rig.step()
    rig.workers[0].hold_loads = True
    assert rig.scheduler.reset_prefix_cache(reset_running_requests=True)  # not the connector's
    output = rig.step()
    assert request.request_id in (output.preempted_req_ids or ())
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    release(rig)
    rig.run()
    assert request.request_id in rig.finished
    assert rig.tiers.stats()["loads_done"] == 1


def test_a_save_outlives_its_request_and_a_namesake_gets_nothing_of_it(make_rig: MakeRig, store: SharedStore) -> None:
    """vllm#52360: jobs keyed by request id took the second request for the first."""
    rig = make_rig(store=store, epoch=0)
    rig.workers[0].hold_saves = True
    first = rig.add(prompt(1, LENGTH), max_tokens=8, request_id="same")
    rig.step()
    rig.scheduler.finish_requests("same", RequestStatus.FINISHED_ABORTED)
    second = rig.add(prompt(2, LENGTH), max_tokens=3, request_id="same")
    assert first is not second
    rig.step()
    release(rig)
    rig.run()
    assert len(store.objects) == 16
    rig.scheduler.reset_prefix_cache()
    for seed in (1, 2):
        assert found(rig, prompt(seed, LENGTH)) == 8 * BLOCK  # the oracle compares every position


def test_a_preempted_requests_save_reads_its_own_blocks(make_rig: MakeRig) -> None:
    """vllm#51637: the blocks were freed by the preemption and given to another request, whose KV was stored under the victim's key."""
    rig = make_rig(num_blocks=30, epoch=0)
    rig.workers[0].hold_saves = True
    victim = rig.add(prompt(1, LENGTH), max_tokens=4)
    rig.step()
    assert len(rig.workers[0].saves) == 1
    rig.scheduler._preempt_request(rig.scheduler.running.pop(), 0.0)
    rig.scheduler.finish_requests(victim.request_id, RequestStatus.FINISHED_ABORTED)
    assert rig.free_at_start - rig.block_pool.get_num_free_blocks() == 8, "the save let go of its blocks"
    others = [rig.add(prompt(seed, LENGTH)) for seed in (2, 3)]  # they take every block that is free
    while not {other.request_id for other in others} <= rig.finished:
        rig.step()
    release(rig)
    rig.run()
    rig.scheduler.reset_prefix_cache()
    assert found(rig, prompt(1, LENGTH)) == 8 * BLOCK


@pytest.mark.parametrize("groups", [("full",), ("48", "full")])
@pytest.mark.parametrize("beyond", [-1, 0, 1])
def test_a_hit_of_a_whole_prompt(make_rig: MakeRig, groups: tuple[str, ...], beyond: int) -> None:
    """vllm PR#55113, #54870: a hit that leaves nothing to compute was an assertion."""
    rig = make_rig(groups=groups, num_blocks=40, epoch=0)
    tokens = prompt(1, 8 * BLOCK + beyond)
    first = rig.serve(tokens, max_tokens=3)
    rig.scheduler.reset_prefix_cache()
    again = rig.serve(tokens, max_tokens=3)
    assert rig.cached[again] == (8 if beyond > 0 else 7) * BLOCK
    assert rig.outputs[again] == rig.outputs[first]


def test_a_failed_load_of_a_hybrid_model_names_requests_and_no_blocks(make_rig: MakeRig) -> None:
    """vllm#45474: block ids are ambiguous over groups, and naming them ends the engine."""
    rig = make_rig(groups=("48", "full"), num_blocks=40, epoch=0)
    tokens = prompt(1, LENGTH)
    first = rig.serve(tokens, max_tokens=3)
    rig.scheduler.reset_prefix_cache()
    rig.workers[0].fail_loads = lambda job: True
    again = rig.serve(tokens, max_tokens=3)
    assert rig.tiers.stats()["loads_failed"] == 1
    assert rig.cached[again] == 0
    assert rig.outputs[again] == rig.outputs[first]
    assert rig.connector.get_block_ids_with_load_errors() == set()


def test_a_lost_key_is_asked_for_once_by_each_request(make_rig: MakeRig, store: SharedStore) -> None:
    """vllm PR#55297: the same broken key was looked up and loaded again without end."""
    rig, tokens = filled(make_rig, store=store, l1_bytes=None)
    store.lose = lambda key: True
    for count in (1, 2):
        request = rig.serve(tokens, max_tokens=2)
        assert rig.cached[request] == 0
        assert rig.tiers.stats()["loads_failed"] == count
        rig.scheduler.reset_prefix_cache()
