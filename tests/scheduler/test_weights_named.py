"""KV is named after the weights that the ranks hold, on the real scheduler: requests in every state, and weights that return."""

from __future__ import annotations

from typing import Any

import pytest

from epochkv_connector.engine import blocks
from tests.scheduler.rigs import LENGTH, TOKENS, WHOLE, MakeRig, every_layout, found, names, push_out
from tests.support.scheduler import BLOCK, RequestStatus, SharedStore

# ---------------------------------------------------------------------------------------------- requests in every state


@every_layout
def test_a_push_while_a_request_runs_strands_it_and_nobody_finds_what_it_computes(make_rig: MakeRig) -> None:
    store = SharedStore()
    rig = make_rig(store=store, epoch=0)
    running = rig.add(TOKENS, max_tokens=3 * BLOCK)
    rig.steps(4)
    old = rig.watch.value
    rig.weights = "w1"
    before = len(store.objects)
    rig.run()
    said = list(running.all_token_ids)
    assert len(said) > LENGTH + 2 * BLOCK
    assert len(names(store, old)) == before == len(store.objects)
    assert found(rig, [*said, 7]) == 0
    rig.weights = "w0"
    assert found(rig, [*said, 8]) == WHOLE  # what it computed before, and not a block more
    rig.check_clean()


@every_layout
@pytest.mark.parametrize("push", ["rpc", "load_weights", "past"])
def test_a_push_while_a_request_waits_for_a_load(make_rig: MakeRig, push: str) -> None:
    rig = make_rig(num_blocks=12, epoch=0)
    rig.serve(TOKENS)
    push_out(rig)
    (worker,) = rig.workers
    worker.hold_loads = True
    request = rig.add(TOKENS)
    rig.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    if push == "rpc":
        rig.weights = "w1"
    else:
        rig.write_past("w1")
        if push == "load_weights":
            compat_held(rig).writes += 2
        else:
            rig.watch._scheduled_at -= 1.0  # it was idle
    rig.step()
    worker.hold_loads = False
    worker.work()
    rig.run()
    assert worker.invalidated == [request.request_id]
    assert rig.cached[request.request_id] == 0
    rig.weights = "w0"
    assert found(rig) == WHOLE
    rig.check_clean()


def compat_held(rig: Any) -> Any:
    """The rank of this process, as `load_weights` of a model in it finds it."""
    return rig.watch._ranks._held


@every_layout
def test_a_push_while_a_request_is_preempted(make_rig: MakeRig) -> None:
    rig = make_rig(epoch=0)
    request = rig.add(TOKENS, max_tokens=BLOCK)
    rig.steps(3)
    rig.scheduler._preempt_request(rig.scheduler.running.pop(), 0.0)
    assert not blocks.holds_blocks(request)
    rig.weights = "w1"
    rig.run()
    assert rig.pins.pin_of(request).saveable  # it holds nothing, so it is named anew
    assert found(rig) == WHOLE
    rig.weights = "w0"
    assert found(rig) == WHOLE  # of the first run
    rig.check_clean()


@every_layout
def test_a_preemption_after_the_push_names_the_request_anew(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=24, epoch=0)
    request = rig.add(TOKENS, max_tokens=BLOCK)
    rig.steps(3)
    rig.weights = "w1"
    rig.step()
    assert not rig.pins.pin_of(request).saveable
    rig.scheduler._preempt_request(rig.scheduler.running.pop(), 0.0)
    rig.run()
    assert found(rig) == WHOLE
    rig.check_clean()


def test_a_push_while_a_session_waits_for_its_next_turn(make_rig: MakeRig) -> None:
    store = SharedStore()
    rig = make_rig(store=store, epoch=0)
    session = rig.request(TOKENS, max_tokens=2 * BLOCK)
    session.resumable = True
    rig.scheduler.add_request(session)
    rig.steps(3)
    before = len(store.objects)
    rig.weights = "w1"
    rig.steps(3 * BLOCK)
    assert len(store.objects) == before
    said = list(session.all_token_ids)
    rig.scheduler.finish_requests(session.request_id, RequestStatus.FINISHED_ABORTED)
    rig.run()
    assert found(rig, [*said, 5]) == 0
    rig.weights = "w0"
    assert found(rig, [*said, 6]) == WHOLE
    rig.check_clean()
