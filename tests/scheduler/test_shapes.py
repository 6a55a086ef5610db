"""Other shapes of engine and request: hybrid groups, no prefix caching, streaming sessions, many waiting requests."""

from typing import Any

import pytest

from tests.scheduler.rigs import LENGTH, TOKENS, MakeRig, found
from tests.support.scheduler import BLOCK, SharedStore, prompt

WINDOWS = [("full", "48"), ("48", "full"), ("full", "32", "80")]
STATES = [("full", "state"), ("state", "full"), ("full", "state", "48")]
CHUNKS = [("full", "chunk64"), ("full", "chunk40")]


@pytest.mark.parametrize("tier", ["l1", "l2"])
@pytest.mark.parametrize("groups", [*WINDOWS, *STATES, *CHUNKS], ids="+".join)
def test_hybrid_groups_come_back_whole(make_rig: MakeRig, groups: tuple[str, ...], tier: str) -> None:
    """Windows, chunks and states load only what the next token needs; the oracle checks all that it needs."""
    store = SharedStore() if tier == "l2" else None
    options: dict[str, Any] = {"l1_bytes": None, "extra": {"staging_slots": 64}} if tier == "l2" else {}
    rig = make_rig(groups=groups, num_blocks=12 * len(groups), store=store, **options, epoch=0)
    tokens = prompt(1, LENGTH)
    first = rig.serve(tokens, max_tokens=4)
    for seed in range(100, 108):
        rig.serve(prompt(seed, LENGTH))
    again = rig.serve(tokens, max_tokens=4)
    assert rig.tiers.stats()["loads_done"] >= 1
    assert rig.cached[again] == 8 * BLOCK
    assert rig.outputs[again] == rig.outputs[first]
    rig.adopt(1, weights="w1")
    assert found(rig, tokens) == 0


def test_without_prefix_caching_the_tiers_still_work(make_rig: MakeRig) -> None:
    rig = make_rig(caching=False, epoch=0)
    rig.serve(TOKENS)
    assert found(rig) == 8 * BLOCK
    rig.adopt(1, weights="w1")
    assert found(rig) == 0


def test_rehashing_is_spread_over_steps(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a budget that one request exceeds, each step re-hashes one and the others wait their turn."""
    monkeypatch.setattr("epochkv_connector.naming.pins.REHASH_BUDGET_SECONDS", 1e-9)
    rig = make_rig(num_blocks=128, epoch=0)
    waiting = [rig.add(prompt(seed, LENGTH)) for seed in range(5)]
    rig.adopt(1, weights="w1")
    scheduled_in: dict[str, int] = {}
    for step in range(12):
        for request_id in rig.step().num_scheduled_tokens:
            scheduled_in.setdefault(request_id, step)
    assert len(scheduled_in) == len(waiting)
    assert len(set(scheduled_in.values())) == len(waiting)  # one a step
    rig.run()


def test_a_streaming_session_keeps_its_root_and_is_counted_apart(rig: Any) -> None:
    session = rig.request(prompt(1, LENGTH), max_tokens=3)
    session.resumable = True
    rig.scheduler.add_request(session)
    rig.step()
    rig.adopt(1, weights="w1")
    assert rig.pins.old_epoch_requests() == 0
    assert rig.pins.old_epoch_requests(sessions=True) == 1
    root = rig.pins.pin_of(session).root
    rig.steps(4)
    assert rig.pins.pin_of(session).root == root
    from vllm.v1.request import RequestStatus

    rig.scheduler.finish_requests(session.request_id, RequestStatus.FINISHED_ABORTED)
    rig.run()
    assert rig.pins.old_epoch_requests(sessions=True) == 0
    assert found(rig, prompt(1, LENGTH)) == 0


def test_a_session_that_never_ran_is_repinned(rig: Any) -> None:
    tokens = prompt(1, LENGTH)
    rig.serve(tokens)
    session = rig.request(tokens, max_tokens=2)
    session.resumable = True
    rig.scheduler.add_request(session)
    rig.adopt(1, weights="w1")
    rig.steps(3)
    assert rig.cached[session.request_id] == 0
    from vllm.v1.request import RequestStatus

    rig.scheduler.finish_requests(session.request_id, RequestStatus.FINISHED_ABORTED)
    rig.run()
