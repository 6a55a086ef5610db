"""vLLM calls a request's hasher for every token: ours stands before it only until the first block has its name."""

from typing import Any

from epochkv_connector.naming.pins import PinnedHasher, plain_hasher
from tests.scheduler.rigs import MakeRig
from tests.support.scheduler import BLOCK, RequestStatus, global_root, prompt


def first_name(rig: Any, request: Any, root: bytes) -> Any:
    """What the request's first block has to be called under this root."""
    return rig.connector.scheduler.hashing.first(request, root)


def test_a_short_prompt_gives_its_first_hash_to_us_and_the_next_to_vllm(rig: Any) -> None:
    request = rig.add(prompt(1, BLOCK - 3), max_tokens=2 * BLOCK)
    root = rig.pins.pin_of(request).root
    rig.step()
    assert isinstance(request._block_hasher, PinnedHasher)
    assert plain_hasher(request) is rig.hasher
    rig.adopt(1)
    while not request.block_hashes:
        rig.step()
    assert request.block_hashes[0] == first_name(rig, request, root) != first_name(rig, request, global_root())
    assert request._block_hasher is rig.hasher
    rig.run()
    assert len(request.block_hashes) == 2


def test_a_session_whose_only_hash_vllm_cuts_off_is_named_by_its_pin_again(make_rig: MakeRig) -> None:
    # 15 tokens and one sampled are a block; the next input takes the place of the sampled one, and the hash goes with it.
    rig = make_rig(epoch=0)
    session = rig.request(prompt(1, BLOCK - 1), max_tokens=1)
    session.resumable = True
    rig.scheduler.add_request(session)
    rig.step()
    assert session.status is RequestStatus.WAITING_FOR_STREAMING_REQ
    assert len(session.block_hashes) == 1
    root = rig.pins.pin_of(session).root
    rig.adopt(1, weights="w1")
    rig.pins.root.refresh()
    more = rig.request(prompt(2, BLOCK), max_tokens=1, request_id=session.request_id)
    more.resumable = True
    rig.scheduler.add_request(more)
    assert session.num_tokens == 2 * BLOCK - 1
    assert session.block_hashes == [first_name(rig, session, root)]
    assert session.block_hashes != [first_name(rig, session, global_root())]
    rig.scheduler.finish_requests(session.request_id, RequestStatus.FINISHED_ABORTED)
    rig.run()
