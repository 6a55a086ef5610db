"""KV is named after the weights that the ranks hold, on the real scheduler: requests in every state, and weights that return."""

from typing import Any

from epochkv_connector.engine import blocks
from tests.scheduler.rigs import TOKENS, WHOLE, MakeRig, begin_load, every_layout, filled, found, release
from tests.support.scheduler import BLOCK, RequestStatus, SharedStore


# ---------------------------------------------------------------------------------------------- requests in every state
def test_a_push_while_a_request_waits_for_a_load(make_rig: MakeRig) -> None:
    rig, tokens = filled(make_rig)
    request = begin_load(rig, tokens)
    rig.weights = "w1"
    rig.step()
    release(rig)
    rig.run()
    assert rig.workers[0].invalidated == [request.request_id]
    assert rig.cached[request.request_id] == 0
    rig.weights = "w0"
    assert found(rig) == WHOLE


@every_layout
def test_a_push_while_a_request_is_preempted(rig: Any) -> None:
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


def test_a_push_while_a_session_waits_for_its_next_turn(make_rig: MakeRig, store: SharedStore) -> None:
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
