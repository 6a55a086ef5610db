"""Our fence under vLLM's own connectors: whatever they keep, a request that comes after a change finds nothing from before it."""

from collections.abc import Callable
from typing import Any

import pytest

from tests.scheduler.fenced import FencedRig, MooncakeStore, Nixl, Offloading, SimpleCPUOffload, Stock
from tests.scheduler.rigs import LENGTH, TOKENS, WHOLE, FailsOnce, MakeRig, found, push_out
from tests.scheduler.transfers import HAND_OVER
from tests.support.scheduler import BLOCK, RequestStatus

STOCKS: dict[str, Callable[[], Stock]] = {
    "none": Stock,
    "mooncake": lambda: MooncakeStore({}),
    "offloading": Offloading,
    "simple": SimpleCPUOffload,
}
TIERED = {name: make for name, make in STOCKS.items() if name != "none"}
every_stock = pytest.mark.parametrize("make_stock", STOCKS.values(), ids=STOCKS.keys())
every_tier = pytest.mark.parametrize("make_stock", TIERED.values(), ids=TIERED.keys())
CHUNK = 3 * BLOCK


def fenced(make_rig: MakeRig, stock: Stock, **options: Any) -> FencedRig:
    """An engine in epoch 0 that has the fence."""
    rig: FencedRig = make_rig(FencedRig, stock=stock, **options)
    rig.adopt(0)
    return rig


def pushed_out(make_rig: MakeRig, stock: Stock, **options: Any) -> FencedRig:
    """One whose tier holds the prompt, which its GPU has lost."""
    rig = fenced(make_rig, stock, num_blocks=12, **options)
    rig.serve(TOKENS)
    push_out(rig)
    return rig


def begin_load(rig: FencedRig) -> Any:
    """A request whose load is under way."""
    rig.stock.hold_loads = True
    request = rig.add(TOKENS)
    rig.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    return request


# ---------------------------------------------------------------------------------------------- what each change hides
@every_stock
def test_an_epoch_hides_what_was_before_it(make_rig: MakeRig, make_stock: Callable[[], Stock]) -> None:
    rig = fenced(make_rig, make_stock())
    assert [found(rig), found(rig)] == [0, WHOLE]
    rig.adopt(1)
    assert [found(rig), found(rig)] == [0, WHOLE]


@every_tier
def test_a_tier_finds_its_names_and_after_an_epoch_none(make_rig: MakeRig, make_stock: Callable[[], Stock]) -> None:
    rig = pushed_out(make_rig, make_stock())
    assert found(rig) == WHOLE
    rig.adopt(1)
    push_out(rig)
    assert found(rig) == 0
    push_out(rig)
    assert found(rig) == WHOLE


@every_tier
def test_other_weights_hide_and_the_same_ones_find_again(make_rig: MakeRig, make_stock: Callable[[], Stock]) -> None:
    rig = pushed_out(make_rig, make_stock())
    rig.weights = "w1"
    assert found(rig) == 0
    rig.weights = "w0"
    push_out(rig)
    assert found(rig) == WHOLE


@every_tier
def test_without_a_lease_nothing_is_found(make_rig: MakeRig, make_stock: Callable[[], Stock]) -> None:
    rig = pushed_out(make_rig, make_stock())
    rig.lease_until = 0.0
    assert [found(rig), found(rig)] == [0, 0]
    rig.lease_until = float("inf")
    push_out(rig)
    assert found(rig) == WHOLE


@pytest.mark.unclean
@pytest.mark.parametrize("with_fence", [False, True])
def test_an_engine_that_is_late(make_rig: MakeRig, with_fence: bool) -> None:
    """A is pushed and resets everything; B still has the old weights, and serves the prompt after that. Stock shows what goes wrong."""
    objects: dict[str, Any] = {}
    a, b = (make_rig(FencedRig, stock=MooncakeStore(objects), fenced=with_fence) for _ in range(2))
    for rig in (a, b) if with_fence else ():
        rig.adopt(0)
    a.serve(TOKENS)
    a.weights = "w1"
    a.scheduler.reset_prefix_cache(reset_connector=True)
    b.serve(TOKENS)
    last = a.serve(TOKENS)
    assert a.cached[last] == a.stale_tokens[last] == (0 if with_fence else WHOLE)


# ---------------------------------------------------------------------------------------------- who was there before
@every_stock
def test_a_request_that_runs_ends_on_what_it_had(make_rig: MakeRig, make_stock: Callable[[], Stock]) -> None:
    rig = fenced(make_rig, make_stock(), max_batched_tokens=CHUNK)
    request = rig.add(TOKENS)
    rig.step()
    rig.adopt(1)
    assert rig.pins.old_epoch_requests() == 1
    rig.run()
    assert request.request_id in rig.finished
    assert rig.pins.old_epoch_requests() == 0
    assert found(rig) == 0


@every_stock
@pytest.mark.parametrize("back", [False, True])
def test_a_request_that_runs_over_a_push_names_nothing_more(make_rig: MakeRig, make_stock: Callable[[], Stock], back: bool) -> None:
    """Weights return. KV that was computed with others meanwhile must not be found under the names that return, too."""
    rig = fenced(make_rig, make_stock(), num_blocks=12, max_batched_tokens=CHUNK)
    rig.add(TOKENS)
    rig.step()
    rig.weights = "w1"
    rig.run()
    if back:
        rig.weights = "w0"
    push_out(rig)
    assert found(rig) <= (CHUNK if back else 0)


@every_stock
def test_a_request_that_waits_finds_nothing_old(make_rig: MakeRig, make_stock: Callable[[], Stock]) -> None:
    rig = fenced(make_rig, make_stock())
    rig.serve(TOKENS)
    request = rig.add(TOKENS)
    rig.adopt(1)
    rig.run()
    assert rig.cached[request.request_id] == 0
    assert found(rig) == WHOLE


def test_an_answer_of_the_store_to_older_names_is_dropped(make_rig: MakeRig) -> None:
    stock = MooncakeStore({})
    rig = pushed_out(make_rig, stock)
    stock.hold_lookups = True
    request = rig.add(TOKENS)
    rig.step()
    assert request.request_id in stock.open
    rig.adopt(1)
    rig.step()
    stock.hold_lookups = False
    rig.run()
    assert rig.cached[request.request_id] == 0


@every_tier
def test_a_load_that_is_under_way_ends_and_is_nobody_elses(make_rig: MakeRig, make_stock: Callable[[], Stock]) -> None:
    rig = pushed_out(make_rig, make_stock())
    request = begin_load(rig)
    rig.adopt(1)
    assert rig.pins.old_epoch_requests() == 1
    rig.release()
    rig.run()
    assert rig.cached[request.request_id] == WHOLE
    assert found(rig) == 0


@every_tier
@pytest.mark.parametrize("back", [False, True])
def test_a_load_over_a_push_is_nobody_elses(make_rig: MakeRig, make_stock: Callable[[], Stock], back: bool) -> None:
    rig = pushed_out(make_rig, make_stock())
    request = begin_load(rig)
    rig.weights = "w1"
    rig.release()
    rig.run()
    assert rig.stale_tokens.pop(request.request_id) == WHOLE  # what it was there for before the push
    if back:
        rig.weights = "w0"
    push_out(rig)
    assert found(rig) == (WHOLE if back else 0)


@every_tier
def test_a_preempted_request_is_named_anew(make_rig: MakeRig, make_stock: Callable[[], Stock]) -> None:
    """vLLM's reset of running requests takes their blocks, and they look again."""
    rig = fenced(make_rig, make_stock(), num_blocks=12, max_batched_tokens=CHUNK)
    request = rig.add(TOKENS)
    rig.steps(2)
    rig.adopt(1)
    rig.scheduler.reset_prefix_cache(reset_running_requests=True)
    rig.stock.hold_lookups = True  # vLLM's Mooncake connector cannot resume a request in the step that it hears of its preemption in
    rig.step()
    rig.stock.hold_lookups = False
    rig.run()
    assert request.request_id in rig.finished
    push_out(rig)
    assert found(rig) == WHOLE


# ---------------------------------------------------------------------------------------------- resets
@pytest.mark.unclean
@pytest.mark.parametrize("with_fence", [False, True])
def test_a_reset_of_one_engine_empties_no_store(make_rig: MakeRig, with_fence: bool) -> None:
    stock = MooncakeStore({})
    rig = make_rig(FencedRig, stock=stock, fenced=with_fence)
    if with_fence:
        rig.adopt(0)
    rig.serve(TOKENS)
    assert stock.objects
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert bool(stock.wiped) is not with_fence
    assert bool(stock.objects) is with_fence
    if with_fence:
        assert rig.pins.root.waiting_after_reset
        assert found(rig) == 0
        rig.adopt(1)
        assert found(rig) == 0
        rig.check_clean()


@every_stock
def test_a_reset_asks_for_the_next_epoch(make_rig: MakeRig, make_stock: Callable[[], Stock], monkeypatch: pytest.MonkeyPatch) -> None:
    rig = fenced(make_rig, make_stock())
    asked: list[int] = []
    monkeypatch.setattr(rig.side.weights.link, "propose", asked.append)
    rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert asked == []  # nothing was named yet
    rig.serve(TOKENS)
    rig.scheduler.reset_prefix_cache(reset_connector=True)
    assert asked == [1]


# ---------------------------------------------------------------------------------------------- errors of ours
@pytest.mark.unclean
@every_stock
@pytest.mark.parametrize("method", ["pin", "repin"])
def test_a_request_that_cannot_be_named_is_served_alone(
    make_rig: MakeRig, make_stock: Callable[[], Stock], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = fenced(make_rig, make_stock())
    rig.serve(TOKENS)
    rig.adopt(1)
    broken = FailsOnce(rig.pins, method, monkeypatch)
    served = rig.serve(TOKENS)
    assert broken.raised
    assert rig.cached[served] == 0
    assert sum(rig.stale_tokens.values()) == 0
    assert rig.leaks() == {}


@pytest.mark.unclean
def test_a_connector_that_cannot_follow_ends_the_names(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = fenced(make_rig, Offloading(), max_batched_tokens=CHUNK)
    rig.add(TOKENS)
    rig.step()
    broken = FailsOnce(rig.pins, "on_rename", monkeypatch)
    rig.weights = "w1"
    rig.run()
    assert broken.raised
    assert [found(rig), found(rig)] == [0, 0]
    assert rig.pins.root.snapshot.in_use is False


# ---------------------------------------------------------------------------------------------- P/D
def transfers(make_rig: MakeRig) -> tuple[FencedRig, FencedRig, dict[str, Any]]:
    """A producer and a consumer, and what the producer says of the prompt."""
    producer, consumer = (fenced(make_rig, Nixl()) for _ in range(2))
    assert isinstance(consumer.stock, Nixl)
    config: Any = producer.vllm_config.kv_transfer_config
    consumer.stock.producers[str(config.engine_id)] = producer
    request = producer.add(TOKENS, params=dict(HAND_OVER))
    while request.request_id not in producer.finished:
        producer.step()
    return producer, consumer, producer.handed[request.request_id]


@pytest.mark.parametrize("tagged", [True, False])
def test_kv_of_another_engine_has_our_names_only_with_its_tag(make_rig: MakeRig, tagged: bool) -> None:
    producer, consumer, handed = transfers(make_rig)
    assert handed["epochkv_tag"]["epoch"] == 0
    if not tagged:
        del handed["epochkv_tag"]
    request = consumer.add(TOKENS, params=handed)
    consumer.run()
    assert consumer.cached[request.request_id] == LENGTH - 1
    assert found(consumer) == (WHOLE if tagged else 0)
    producer.run()
