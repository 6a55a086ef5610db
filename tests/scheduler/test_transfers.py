"""P/D: KV that NIXL brings from another engine has our names if that engine has shown our tag. If not, it is its request's alone."""

from typing import Any

import pytest

from tests.scheduler.rigs import LENGTH, TOKENS, WHOLE, FailsOnce, MakeRig, found, push_out
from tests.scheduler.transfers import TransferRig, engines
from tests.support.scheduler import BLOCK, RequestStatus

BLOCKS = WHOLE // BLOCK


def begin(make_rig: MakeRig, **options: Any) -> tuple[TransferRig, TransferRig, Any]:
    """A request whose transfer is under way."""
    producer, consumer = engines(make_rig, **options)
    consumer.hold_reads = True
    request = consumer.take_over(TOKENS, producer.produce(TOKENS))
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert set(consumer.reading) == {request.request_id}
    return producer, consumer, request


def end(producer: TransferRig, consumer: TransferRig) -> None:
    """All that is under way ends."""
    consumer.hold_reads = False
    consumer.run()
    producer.run()


@pytest.mark.parametrize("ours_first", [True, False])
def test_kv_under_our_tag_is_shared_and_saved(make_rig: MakeRig, ours_first: bool) -> None:
    producer, consumer, request = begin(make_rig, ours_first=ours_first)
    assert consumer.store.objects == {}
    end(producer, consumer)
    assert consumer.cached[request.request_id] == LENGTH - 1
    assert set(consumer.store.objects) == set(producer.store.objects)
    assert len(consumer.store.objects) == BLOCKS
    assert found(consumer) == WHOLE
    end(producer, consumer)
    assert consumer.pins.counters["foreign_kv_requests"] == 0


def changed(handed: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {**handed, "epochkv_tag": {**handed["epochkv_tag"], **fields}}


BAD = {
    "none": lambda handed: {key: value for key, value in handed.items() if key != "epochkv_tag"},
    "text": lambda handed: {**handed, "epochkv_tag": "yes"},
    "empty": lambda handed: {**handed, "epochkv_tag": {}},
    "pool": lambda handed: changed(handed, pool="another"),
    "epoch": lambda handed: changed(handed, epoch=1),
    "weights": lambda handed: changed(handed, weights="00" * 32),
    "fingerprint": lambda handed: changed(handed, fingerprint="00" * 32),
    "adapter": lambda handed: changed(handed, adapter="00" * 32),
    "early": lambda handed: changed(handed, made=handed["epochkv_tag"]["made"] - 3600),
    "late": lambda handed: changed(handed, made=handed["epochkv_tag"]["made"] + 3600),
    "never": lambda handed: changed(handed, made=None),
    "nan": lambda handed: changed(handed, made=float("nan")),
    "forever": lambda handed: changed(handed, seconds="forever"),
}


@pytest.mark.parametrize("spoil", BAD.values(), ids=BAD.keys())
def test_kv_under_another_tag_belongs_to_its_request_alone(make_rig: MakeRig, spoil: Any) -> None:
    producer, consumer = engines(make_rig)
    handed = producer.produce(TOKENS)
    request = consumer.take_over(TOKENS, spoil(handed))
    end(producer, consumer)
    assert consumer.cached[request.request_id] == LENGTH - 1
    assert consumer.store.objects == {}
    assert consumer.pins.counters["foreign_kv_requests"] == 1
    assert found(consumer) == 0
    end(producer, consumer)


@pytest.mark.unclean
def test_the_tag_is_beside_what_nixl_says(make_rig: MakeRig) -> None:
    producer, _ = engines(make_rig)
    handed = producer.produce(TOKENS)
    assert handed["do_remote_prefill"] is True
    assert handed["remote_engine_id"] == producer.engine_id
    assert set(handed["epochkv_tag"]) == {"pool", "epoch", "fingerprint", "weights", "made", "seconds"}
    assert handed["epochkv_tag"]["seconds"] == 15.0


@pytest.mark.unclean
def test_a_producer_whose_weights_change_meanwhile_shows_no_tag(make_rig: MakeRig) -> None:
    producer, _ = engines(make_rig, max_batched_tokens=4 * BLOCK)
    request = producer.add(TOKENS, params={"do_remote_decode": True})
    producer.step()
    producer.weights = "w1"
    producer.step()
    producer.weights = "w0"
    while request.request_id not in producer.finished:
        producer.step()
    assert "epochkv_tag" not in producer.handed[request.request_id]


@pytest.mark.parametrize(("late", "shared"), [(-6, False), (-4, True), (4, True), (6, False)])
def test_half_of_the_lease_is_for_clocks_that_differ(make_rig: MakeRig, late: float, shared: bool) -> None:
    producer, consumer = engines(make_rig, lease=10)
    handed = producer.produce(TOKENS)
    consumer.pins.maker.clock = lambda: handed["epochkv_tag"]["made"] + late
    consumer.take_over(TOKENS, handed)
    end(producer, consumer)
    assert found(consumer) == (WHOLE if shared else 0)


# ---------------------------------------------------------------------------------------------- while the transfer runs
def test_an_epoch_during_the_transfer_leaves_its_blocks_unnamed(make_rig: MakeRig) -> None:
    producer, consumer, request = begin(make_rig)
    consumer.adopt(1)
    assert consumer.pins.old_epoch_requests() == 1
    end(producer, consumer)
    assert consumer.cached[request.request_id] == LENGTH - 1
    assert consumer.store.objects == {}
    assert found(consumer) == 0


@pytest.mark.parametrize("back", [False, True])
def test_other_weights_during_the_transfer_leave_its_blocks_unnamed(make_rig: MakeRig, back: bool) -> None:
    producer, consumer, request = begin(make_rig)
    consumer.weights = "w1"
    if back:
        consumer.step()
        consumer.weights = "w0"
    consumer.hold_reads = False
    consumer.run()
    assert consumer.stale_tokens.pop(request.request_id) == (0 if back else LENGTH - 1)
    assert consumer.store.objects == {}
    assert found(consumer) == 0
    end(producer, consumer)


def test_a_lease_that_ends_during_the_transfer_leaves_its_blocks_unnamed(make_rig: MakeRig) -> None:
    producer, consumer, _ = begin(make_rig)
    consumer.lease_until = 0.0
    end(producer, consumer)
    consumer.lease_until = float("inf")
    assert consumer.store.objects == {}
    assert found(consumer) == 0


def test_what_is_read_after_the_producer_gave_the_blocks_away_has_no_name(make_rig: MakeRig) -> None:
    """NIXL does not tell the consumer. Its request is lost; no other request may find the blocks."""
    producer, consumer, request = begin(make_rig, num_blocks=12)
    producer.let_go()
    push_out(producer)
    now = consumer.pins.maker.clock()
    consumer.pins.maker.clock = lambda: now + 30
    consumer.hold_reads = False
    consumer.run()
    assert consumer.foreign_tokens.pop(request.request_id) > 0
    assert consumer.store.objects == {}
    assert found(consumer) == 0
    end(producer, consumer)


@pytest.mark.parametrize("ours_first", [True, False])
def test_a_transfer_that_fails_is_computed_and_shared(make_rig: MakeRig, ours_first: bool) -> None:
    producer, consumer, request = begin(make_rig, ours_first=ours_first)
    consumer.fail_reads = True
    consumer.hold_reads = False
    consumer.run()
    assert consumer.cached[request.request_id] == 0
    assert len(consumer.store.objects) == BLOCKS
    assert found(consumer) == WHOLE
    producer.let_go()
    end(producer, consumer)


def test_a_request_that_ends_during_its_transfer_saves_nothing(make_rig: MakeRig) -> None:
    """vLLM counts its tokens as computed."""
    producer, consumer, request = begin(make_rig)
    assert request.num_computed_tokens == LENGTH
    consumer.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    consumer.steps(2)
    assert consumer.store.objects == {}
    assert consumer.tiers.stats()["slots_indexed"] == 0
    end(producer, consumer)


@pytest.mark.unclean
def test_an_error_of_ours_when_the_transfer_ends_costs_a_recompute(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    producer, consumer, request = begin(make_rig)
    broken = FailsOnce(consumer.side.requests, "report", monkeypatch)
    consumer.hold_reads = False
    consumer.run()
    producer.run()
    assert broken.raised
    assert consumer.workers[0].invalidated == [request.request_id]
    assert consumer.cached[request.request_id] == 0
    assert consumer.store.objects == {}
    assert consumer.leaks() == {}


# ---------------------------------------------------------------------------------------------- who answers
@pytest.mark.parametrize("ours_first", [True, False])
def test_no_tier_answers_for_what_another_engine_keeps(make_rig: MakeRig, ours_first: bool) -> None:
    producer, consumer = engines(make_rig, num_blocks=12, ours_first=ours_first)
    consumer.serve(TOKENS)
    push_out(consumer)
    asked = len(consumer.store.asked)
    request = consumer.take_over(TOKENS, producer.produce(TOKENS))
    end(producer, consumer)
    assert consumer.cached[request.request_id] == LENGTH - 1
    assert len(consumer.store.asked) == asked
    assert consumer.side.counters["tokens_hit_host"] == 0
    push_out(consumer)
    assert found(consumer) == WHOLE  # they do for anybody else


def test_a_prompt_that_the_gpu_holds_is_not_read_again(make_rig: MakeRig) -> None:
    producer, consumer = engines(make_rig)
    whole = [*TOKENS[:WHOLE], 7]
    consumer.serve(whole)
    handed = producer.produce(whole)
    consumer.hold_reads = True
    consumer.take_over(whole, handed)
    assert [len(order.local_block_ids[0]) for order in consumer.reading.values()] == [1]
    end(producer, consumer)


@pytest.mark.parametrize(("policy", "loads"), [("recompute", True), ("fail", False)])
def test_the_policy_of_the_multiconnector_counts(make_rig: MakeRig, policy: str, loads: bool) -> None:
    producer, _ = engines(make_rig, num_blocks=12, policy=policy)
    producer.serve(TOKENS)
    push_out(producer)
    assert found(producer) == (WHOLE if loads else 0)
    assert producer.scheduler.recompute_kv_load_failures is loads
