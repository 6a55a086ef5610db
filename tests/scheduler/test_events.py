"""KV events of L1 as a router hears them: over vLLM's own ZeroMQ publisher, in order with vLLM's events of GPU blocks."""

from collections.abc import Callable
from typing import Any

from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

from epochkv_connector.engine.events import EventStream, Private, Renamed
from tests.scheduler.rigs import LENGTH, TOKENS, MakeRig
from tests.scheduler.router import findable
from tests.support.scheduler import BLOCK, SharedStore, prompt


def test_a_router_learns_what_is_in_l1(listened: Callable[..., Any]) -> None:
    rig, router = listened()
    rig.adopt(0)
    rig.serve(TOKENS)
    news = router.listen()
    assert [event.medium for event in news if type(event).__name__ == "BlockStored"].count("CPU") == 8
    assert router.blocks("CPU") == findable(rig)
    assert len(router.blocks("CPU")) == 8
    assert router.blocks("CPU") == router.blocks("GPU")  # the same names, so that a router needs no second table
    chain, parent = [], None
    by_parent = {parent: (name, held) for name, (held, parent) in router.tokens.items()}
    for _ in range(8):
        parent, held = by_parent[parent]
        chain += held
    assert chain == TOKENS[: 8 * BLOCK]
    stored = next(event for event in news if getattr(event, "medium", None) == "CPU")
    assert (stored.block_size, stored.lora_name, stored.locality, stored.kv_cache_spec_kind) == (BLOCK, None, "LOCAL", "full_attention")


def test_an_eviction_is_told(listened: Callable[..., Any]) -> None:
    rig, router = listened(l1_bytes=10 * 2304)  # ten blocks
    rig.adopt(0)
    assert rig.tiers.state.index.num_slots == 10
    rig.serve(prompt(1, LENGTH))
    rig.serve(prompt(2, LENGTH))
    router.listen()
    assert router.blocks("CPU") == findable(rig)
    removed = [event for event in router.heard if type(event).__name__ == "BlockRemoved" and event.medium == "CPU"]
    assert len(removed) == 6
    rig.adopt(1)
    rig.serve(prompt(3, LENGTH))  # takes the slots of the old root, whose names nobody believes in any more
    news = router.listen()
    assert [type(event).__name__ for event in news].count("AllBlocksCleared") == 1
    assert not [event for event in news if type(event).__name__ == "BlockRemoved" and event.medium == "CPU"]
    assert router.blocks("CPU") == findable(rig)


def test_what_l2_brings_into_l1_is_told(listened: Callable[..., Any], make_rig: MakeRig, store: SharedStore) -> None:
    writer = make_rig(store=store)
    writer.adopt(0)
    writer.serve(TOKENS)
    rig, router = listened(store=store)
    rig.adopt(0)
    rig.serve(TOKENS)
    router.listen()
    assert len(store.fetched) == 8
    assert router.blocks("CPU") == findable(rig)
    assert len(router.blocks("CPU")) == 8


def test_groups_are_told_apart(listened: Callable[..., Any]) -> None:
    groups = ("full", "48", "32")
    rig, router = listened(groups=groups)
    rig.adopt(0)
    rig.serve(prompt(1, LENGTH))
    router.listen()
    for group in range(len(groups)):
        assert router.blocks("CPU", group) == findable(rig, group)
        assert router.blocks("CPU", group)


def stored(*names: int, parent: int | None = None, medium: str = "GPU", group: int = 0) -> BlockStored:
    return BlockStored(list(names), parent, [0] * len(names), 1, None, medium, None, group_idx=group)


def removed(*names: int, medium: str = "GPU") -> BlockRemoved:
    return BlockRemoved(list(names), medium, group_idx=0)


def host(name: int, parent: int | None = None, group: int = 0) -> BlockStored:
    return stored(name, parent=parent, medium="CPU", group=group)


def stream(*in_host: Any) -> EventStream:
    return EventStream([0], lambda: in_host)


def test_a_child_in_l1_waits_for_its_parent_wherever_that_appears() -> None:
    grandchild, child, parent = host(3, 2), host(2, 1), host(1)
    assert stream().pass_on([grandchild, child, parent]) == [parent, child, grandchild]
    told = stream()
    assert told.pass_on([host(3, 2)]) == []
    device = stored(1, 2)
    assert told.pass_on([device]) == [device, host(3, 2)]


def test_a_child_that_left_l1_while_it_waited_is_never_told() -> None:
    assert stream().pass_on([host(2, 1), host(3, 1), removed(2, medium="CPU"), host(1)]) == [host(1), host(3, 1)]


def test_a_group_that_needs_no_parents_has_none() -> None:
    window = host(2, 1, group=1)
    assert stream().pass_on([window]) == [window]


def test_a_clearing_forgets_what_waits() -> None:
    assert stream().pass_on([host(2, 1), Renamed(), host(1)]) == [AllBlocksCleared(), host(1)]


def test_what_is_private_is_told_neither_when_it_comes_nor_when_it_goes() -> None:
    told = stream()
    assert told.pass_on([Private(stored(1, 2)), removed(1), stored(3), removed(2, 3)]) == [stored(3), removed(3)]
    assert told.pass_on([removed(1)]) == [removed(1)], "it is forgotten, and routers make nothing of it"


def test_after_other_names_blocks_of_before_leave_in_silence() -> None:
    told = stream()
    assert told.pass_on([stored(1), Renamed(), removed(1), stored(2), removed(2)]) == [
        *(stored(1), AllBlocksCleared()),
        *(stored(2), removed(2)),
    ]


def test_a_child_of_a_block_that_was_cleared_is_not_told_unless_l1_tells_of_the_parent() -> None:
    assert stream().pass_on([stored(1), Renamed(), stored(2, parent=1), removed(2)]) == [stored(1), AllBlocksCleared()]
    events = [stored(1), Renamed(), host(1), stored(2, parent=1)]
    assert stream().pass_on(events) == [stored(1), AllBlocksCleared(), host(1), stored(2, parent=1)]


def test_what_came_to_l1_behind_a_reset_is_told_once() -> None:
    assert stream(host(1)).pass_on([AllBlocksCleared(), host(1), removed(1, medium="CPU")]) == [
        *(AllBlocksCleared(), host(1)),
        removed(1, medium="CPU"),
    ]


def test_nothing_is_kept_of_what_is_gone() -> None:
    told = stream()
    told.pass_on([host(2, 1), host(3, 1), removed(2, medium="CPU"), removed(3, medium="CPU"), Private(stored(4)), removed(4)])
    told.pass_on([stored(5), removed(5), host(6), removed(6, medium="CPU")])
    assert not any((told._orphans, told._parents, told._private, told._on_device, told._of_host))
