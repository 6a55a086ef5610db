"""What an adapter's tensors are on a rank, whether a rank still uses them, and what the scheduler role makes of the answers."""

import gc
import logging
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.lora import lora_weights
from vllm.lora.lora_model import LoRAModel
from vllm.lora.lora_weights import LoRALayerWeights, PackedLoRALayerWeights
from vllm.lora.request import LoRARequest

from epochkv_connector.weights.adapters import LATER, MAX_ADAPTERS, MAX_ANSWERS, RETRY_SECONDS, Adapters
from epochkv_connector.weights.digest import Unreadable
from epochkv_connector.weights.rank import HeldAdapters, digest_of
from epochkv_connector.wire import StepMetadata
from epochkv_connector.worker.role import WorkerRole
from tests.support.scheduler_worker import RankAdapters

A, B = torch.arange(8.0).view(2, 4), torch.arange(10.0, 16.0).view(3, 2)


def model(a: Any = A, b: Any = B, *, module: str = "q", alpha: int = 2, number: int = 1, full: torch.Tensor | None = None) -> LoRAModel:
    layer = LoRALayerWeights(module, 2, alpha, a.clone(), b.clone())
    if full is None:
        return LoRAModel(number, 2, {module: layer})
    return LoRAModel(number, 2, {module: layer}, modules_to_save={"score": lora_weights.LoRAFullModuleWeights("score", full)})


def value(one: Any, dtype: torch.dtype | None = torch.float32) -> bytes:
    return digest_of(one, dtype)


# ---------------------------------------------------------------------------------------------- digests
CHANGES: dict[str, Callable[[], LoRAModel]] = {
    "one element": lambda: model(A + torch.nn.functional.one_hot(torch.tensor([1, 2]), 4)),
    "rows swapped": lambda: model(A.flip(0)),
    "negated": lambda: model(-A, -B),
    "other module": lambda: model(module="k"),
    "other shape": lambda: model(A.view(4, 2), B),
    "scaled": lambda: model(alpha=4),
    "another layer": lambda: LoRAModel(1, 2, {**model().loras, **model(module="k").loras}),
}
if hasattr(lora_weights, "LoRAFullModuleWeights"):  # vLLM 0.30 has no whole modules in adapters
    CHANGES |= {"a whole module": lambda: model(full=A), "another whole module": lambda: model(full=B)}


def test_every_change_of_an_adapter_changes_its_digest() -> None:
    found = {name: value(make()) for name, make in CHANGES.items()}
    assert len({*found.values(), value(model())}) == len(CHANGES) + 1


SAME: dict[str, Callable[[], LoRAModel]] = {
    "another id": lambda: model(number=7),
    "on the way from a file of another type": lambda: model(A.double(), B.to(torch.bfloat16)),
    "a view": lambda: LoRAModel(1, 2, {"q": LoRALayerWeights("q", 2, 2, A.t().contiguous().t(), B.repeat(2, 1)[:3])}),
    "a rank that pads nothing": lambda: LoRAModel(1, 16, model().loras),
    "merged by vLLM before": lambda: LoRAModel(1, 2, {"q": LoRALayerWeights("q", 2, 4, A.clone(), B / 2).optimize()}),
}


@pytest.mark.parametrize("name", SAME)
def test_how_tensors_lie_and_what_they_are_called_changes_nothing(name: str) -> None:
    assert value(SAME[name]()) == value(model())


def test_packed_layers_count_part_by_part() -> None:
    q, k = model().loras["q"], model(A + 1, B + 1, module="k").loras["k"]

    def packed(*parts: LoRALayerWeights | None) -> LoRAModel:
        return LoRAModel(1, 2, {"qkv": PackedLoRALayerWeights.pack(list(parts))})

    found = [value(packed(*parts)) for parts in ((q, k, None), (k, q, None), (q, None, k), (q, k, k))]
    assert len(set(found)) == 4
    assert value(packed(q, k, None)) == found[0]


def test_a_digest_of_copies_does_not_take_one_for_another() -> None:
    """Copies that are given back while others are made may lie in the same place."""
    layers = {f"m{i}": LoRALayerWeights(f"m{i}", 2, 2, torch.full((512, 512), float(i)).t(), torch.ones(2)) for i in range(4)}
    for layer in layers.values():
        layer.lora_a = layer.lora_a.to(torch.float64)
    other = {**layers, "m3": LoRALayerWeights("m3", 2, 2, torch.full((512, 512), 9.0), torch.ones(2))}
    assert value(LoRAModel(1, 2, layers)) != value(LoRAModel(1, 2, other))


def test_an_adapter_without_tensors_has_no_digest() -> None:
    with pytest.raises(Unreadable):
        value(LoRAModel(1, 2, {}))


# ---------------------------------------------------------------------------------------------- on a rank
def request(number: int = 1, path: str = "/a", *, load_inplace: bool = False) -> LoRARequest:
    return LoRARequest("a", number, path, load_inplace=load_inplace)


class Rank:
    """vLLM's cache of adapters on one rank, and ours."""

    def __init__(self, num_adapters: int = 4) -> None:
        self.adapters = RankAdapters({"/a": "one", "/b": "two", "/copy": "one"}, num_adapters)
        self.held = self.adapters.held

    def ask(self, number: int, *wanted: tuple[int, Any, bool], afresh: bool = False) -> dict[int, tuple[bytes | None, str]]:
        return self.held.digest(self.adapters.worker, number, list(wanted), afresh)

    def step(self, *used: LoRARequest, epoch: int = 0) -> list[tuple[int, int]]:
        self.adapters.set_active_adapters(set(used), None)
        return self.held.replaced(epoch)


def test_a_rank_loads_what_it_is_asked_for_and_says_nothing_of_what_is_gone() -> None:
    rank = Rank()
    found = rank.ask(1, (1, request(), False), (2, request(2, "/copy"), False), (3, None, False))
    assert found.keys() == {1, 2}
    assert found[1] == found[2]
    assert rank.adapters.loads == ["/a", "/copy"]
    rank.ask(2, (1, request(), False))
    assert rank.adapters.loads == ["/a", "/copy"]
    rank.adapters.disk["/a"] = "two"
    assert rank.ask(3, (1, request(), False))[1] == found[1], "it is what is loaded that counts"
    assert rank.ask(4, (1, request(load_inplace=True), True))[1] != found[1]


def test_a_rank_says_why_it_cannot_load() -> None:
    rank = Rank()
    found = rank.ask(1, (1, request(path="/nowhere"), False), (2, request(2), False))
    assert found[1][0] is None
    assert "/nowhere" in found[1][1]
    assert found[2][0] is not None


def test_loading_takes_no_longer_than_a_step_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epochkv_connector.weights.rank.LOAD_SECONDS", -1.0)
    rank = Rank()
    rank.adapters.add_adapter(request(2))
    found = rank.ask(1, (1, request(), False), (2, request(2), False))
    assert found[1] == (None, LATER)
    assert found[2][0] is not None, "what is there is not loaded"


def test_the_same_tensors_read_again_are_unchanged_and_others_are_not() -> None:
    rank = Rank(num_adapters=1)
    rank.ask(1, (1, request(), False))
    assert rank.step(request()) == []
    assert rank.step(request(2, "/b")) == []
    assert rank.step(request()) == [], "evicted and read again: another object, the same tensors"
    assert rank.held.are_unchanged([(1, 1)])
    assert not rank.held.are_unchanged([(1, 2)])
    assert not rank.held.are_unchanged([(2, 1)]), "nobody asked about it"
    rank.step(request(2, "/b"))
    rank.adapters.disk["/a"] = "two"
    assert rank.step(request()) == [(1, 1)]
    assert rank.step(request()) == [], "once"
    assert not rank.held.are_unchanged([(1, 1)])


def test_a_name_that_was_used_for_others_is_refused_to_every_id_until_the_next_epoch() -> None:
    """A request of another id may have found the block in vLLM's own cache before the scheduler role heard of it."""
    rank = Rank()
    rank.ask(1, (1, request(), False), (2, request(2, "/copy"), False))
    rank.adapters.disk["/a"] = "two"
    assert rank.step(request(load_inplace=True)) == [(1, 1)]
    assert not rank.held.are_unchanged([(2, 1)])
    rank.ask(2, (1, request(), False), (2, request(2, "/copy"), False))
    assert rank.held.are_unchanged([(1, 2)])
    assert not rank.held.are_unchanged([(2, 2)])
    rank.step(epoch=1)
    assert rank.held.are_unchanged([(2, 2)])


def test_a_worker_saves_nothing_of_a_step_that_used_other_tensors_and_reports_it_once() -> None:
    rank, named = Rank(), []
    runner = SimpleNamespace(start_step=lambda step: None, finish_step=lambda as_named, settled: named.append(as_named()))
    side = WorkerRole(0, runner, adapters=rank.held)  # type: ignore[arg-type]
    rank.ask(1, (1, request(), False))

    def step(*adapters: tuple[int, int]) -> list[tuple[int, int]]:
        rank.adapters.set_active_adapters({request(load_inplace=True)}, None)
        side.new_step()
        side.finish(StepMetadata(adapters=adapters))
        return side.acks().replaced

    assert step((1, 1)) == []
    rank.adapters.disk["/a"] = "two"
    assert step((1, 1)) == [(1, 1)]
    assert step((1, 1)) == []
    assert step() == []
    assert named == [True, False, False, True]


def test_afresh_reads_tensors_that_were_written_to_and_copies_them_to_the_device_once_more() -> None:
    rank = Rank()
    before = rank.ask(1, (1, request(), False))[1]
    manager = rank.adapters._adapter_manager
    manager.pin_adapter(1)
    manager.list_adapters()[1].loras["m"].lora_a.add_(1)
    assert rank.ask(2, (1, request(), False))[1] == before, "objects are known by what they were"
    copied: list[int] = []
    activate = manager.activate_adapter
    manager.activate_adapter = lambda number: copied.append(number) or activate(number)
    assert rank.ask(3, (1, request(), False), afresh=True)[1] != before
    assert copied[0] == 1
    assert manager._active_adapters.pinned_items == {1}


def test_a_load_that_broke_off_in_the_middle_of_a_copy_is_copied_again() -> None:
    rank = Rank()
    manager = rank.adapters._adapter_manager
    activate, broken = manager.activate_adapter, [True]

    def half(number: int) -> bool:
        done = activate(number)
        if broken:
            broken.clear()
            raise MemoryError("no room on the device")
        return done

    manager.activate_adapter = half
    assert rank.ask(1, (1, request(), False))[1][0] is None
    copied: list[int] = []
    manager.activate_adapter = lambda number: copied.append(number) or activate(number)
    assert rank.ask(2, (1, request(), False))[1][0] is not None
    assert copied == [1]


def test_a_digest_keeps_no_adapter_in_memory() -> None:
    rank = Rank()
    rank.ask(1, (1, request(), False))
    there = weakref.ref(rank.adapters._adapter_manager.list_adapters()[1])
    rank.adapters.remove_adapter(1)
    gc.collect()
    assert there() is None


def test_a_worker_without_adapters_says_so() -> None:
    with pytest.raises(Unreadable, match="no manager"):
        HeldAdapters().digest(SimpleNamespace(model_runner=SimpleNamespace()), 1, [(1, request(), False)], False)


# ------------------------------------------------------------------ the scheduler role: which it asks ranks for, when, what it names
class Ranks:
    """Answers, as `rank.digest_adapters` gives them."""

    def __init__(self, num: int = 1) -> None:
        self.num = num
        self.values: dict[int, str] = {1: "one"}
        self.asked: list[tuple[list[int], bool]] = []
        self.change: Callable[[dict[str, Any]], dict[str, Any]] = lambda answer: answer

    def digest_adapters(self, number: int, wanted: Any, afresh: bool) -> list[dict[str, Any]]:
        self.asked.append(([one[0] for one in wanted], afresh))
        found = {one: (text.encode(), "") for one, text in self.values.items()}
        return [self.change({"number": number, "adapters": dict(found), "note": "", "rank": rank}) for rank in range(self.num)]


class Half:
    """What is named: the scheduler role's other side."""

    def __init__(self, num_ranks: int = 1, **whys: str) -> None:
        self.now = 0.0
        self.ranks = Ranks(num_ranks)
        self.adapters = Adapters(self.ranks, num_ranks, lambda: self.now, **whys)  # type: ignore[arg-type]  # asks for no weights
        self.in_use: dict[int, Any] = {1: request()}
        self.changed: list[set[int]] = []
        self.ended: list[bytes] = []
        self.awake = True
        self.adapters.join(self, lambda: self.awake)

    def adapters_in_use(self) -> dict[int, Any]:
        return self.in_use

    def adapters_changed(self, numbers: set[int]) -> None:
        self.changed.append(numbers)

    def end_adapter(self, value: bytes) -> None:
        self.ended.append(value)

    def known(self, number: int = 1) -> bytes | None:
        self.adapters.before_schedule()
        return self.adapters.of(request(number)).value


def test_ranks_are_asked_once_and_then_when_something_may_have_changed() -> None:
    half = Half()
    half.adapters.of(request())
    first = half.known()
    assert first is not None
    assert half.known() == first
    assert half.ranks.asked == [([1], False)]
    half.adapters.calling("add_lora", request())
    half.adapters.ask()
    half.adapters.suspect_all()
    assert half.known() == first
    assert half.ranks.asked[1:] == [([1], False), ([1], True)]
    assert half.changed == [{1}], "the same tensors are no change"


def test_a_turn_never_comes_back() -> None:
    half = Half()
    versions = [half.adapters.of(request()).version]
    for text in ("one", "two", "one"):
        half.ranks.values[1] = text
        half.adapters.calling("add_lora", 1)
        half.adapters.ask()
        versions.append(half.adapters.version(1))
    assert sorted(set(versions)) == versions


def test_what_the_next_step_computes_with_is_not_said_of_an_id_that_stands_for_something_else() -> None:
    half = Half()
    half.adapters.calling("add_lora", request())
    first = half.known()
    assert half.adapters.held == {1: first}
    half.awake = False  # a push has begun
    half.adapters.calling("add_lora", request())
    half.known()
    assert half.adapters.held == {1: None}
    half.awake = True
    half.known()
    assert half.adapters.held == {1: first}
    half.in_use, half.ranks.values = {}, {}
    half.adapters.calling("remove_lora", 1)
    half.adapters.ask()
    half.in_use = {1: request()}
    half.adapters.of(request())
    half.known()
    assert half.adapters.held == {1: None}, "the ranks hold nothing that they could name"


def test_ids_that_come_and_go_leave_nothing() -> None:
    half = Half()
    for number in range(1, 50):
        for values, method in (({number: "one"}, "add_lora"), ({}, "remove_lora")):
            half.ranks.values, half.in_use = values, {}
            half.adapters.calling(method, number)
            half.known(number)
    assert len(half.adapters.held) <= 1


def test_a_late_word_about_an_earlier_question_ends_what_was_named_then() -> None:
    half = Half()
    half.ranks.values[2] = "one"
    half.in_use[2] = request(2)
    half.adapters.of(request(2))
    half.adapters.of(request())
    then = half.known()
    number = half.adapters.number(1)
    half.ranks.values[1] = "two"
    half.adapters.calling("add_lora", 1)
    half.adapters.ask()
    half.changed.clear()
    half.adapters.late(1, number)
    assert half.ended == [then]
    assert half.changed == [{2}], "whoever has it, and not who has another one now"
    half.adapters.late(1, number)
    assert half.ended == [then], "once"


def test_a_late_word_about_an_adapter_that_is_always_in_use_counts_whatever_was_asked_since() -> None:
    half = Half()
    half.ranks.values[2] = "two"
    half.adapters.of(request())
    then = half.known()
    for _ in range(MAX_ANSWERS + 1):
        half.adapters.calling("add_lora", 2)
        half.adapters.ask()
    half.adapters.late(1, half.adapters.number(1))
    assert half.ended == [then]


WRONG: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "another question": lambda answer: {**answer, "number": 99},
    "no adapters": lambda answer: {**answer, "adapters": None, "note": "tired"} if answer["rank"] else answer,
    "not this one": lambda answer: {**answer, "adapters": {}} if answer["rank"] else answer,
    "broken": lambda answer: {},
}


@pytest.mark.parametrize("name", WRONG)
def test_an_adapter_that_some_rank_cannot_say_is_unknown_and_the_reason_is_said_once(name: str, caplog: pytest.LogCaptureFixture) -> None:
    half = Half(num_ranks=2)
    half.ranks.change = WRONG[name]
    with caplog.at_level(logging.WARNING, "vllm.epochkv.adapters"):
        for _ in range(3):
            half.adapters.of(request())
            assert half.known() is None
            half.now += RETRY_SECONDS
    assert len(caplog.records) == 1
    half.ranks.change = lambda answer: answer
    half.adapters.of(request())
    assert half.known() is not None


def test_what_ranks_could_not_say_is_asked_again_after_a_while_and_for_requests_only() -> None:
    half = Half()
    half.ranks.values.clear()
    for _ in range(5):
        half.adapters.of(request())
        half.known()
    assert len(half.ranks.asked) == 1
    half.now += RETRY_SECONDS
    half.adapters.before_schedule()
    assert len(half.ranks.asked) == 1
    half.adapters.of(request())
    half.known()
    assert len(half.ranks.asked) == 2


def test_what_is_not_loaded_yet_is_asked_for_with_every_step() -> None:
    half = Half()
    half.ranks.change = lambda answer: {**answer, "adapters": {1: (None, LATER)}}
    half.adapters.of(request())
    for _ in range(3):
        assert half.known() is None
    assert len(half.ranks.asked) == 3


def test_adapters_that_are_never_named_are_not_asked_for() -> None:
    half = Half(why_not="an encoder")
    half.adapters.of(request())
    assert half.known() is None
    assert not half.ranks.asked


def test_adapters_that_their_tensors_do_not_name_have_another_name_after_each_call() -> None:
    half = Half(why_alone="a wide model")
    half.adapters.of(request())
    first = half.known()
    assert first == half.known() is not None
    half.adapters.calling("add_lora", request())
    assert half.known() not in (None, first)
    assert half.adapters.held == {1: None}, "answers are stamped with what is known"
    assert not half.ranks.asked


def test_ids_that_nobody_uses_are_forgotten() -> None:
    half = Half()
    for number in range(2, MAX_ADAPTERS + 3):
        half.ranks.values[number] = str(number)
        half.adapters.calling("add_lora", number)
        half.adapters.ask()
    half.adapters.of(request())
    assert half.known() is not None
    assert len(half.adapters._known) < MAX_ADAPTERS


def test_what_others_have_unloaded_is_not_loaded_by_us() -> None:
    """They may be about to load something else under its id, which vLLM does only where there is nothing."""
    half = Half()
    seen: list[Any] = []
    ask = half.ranks.digest_adapters

    def note(number: int, wanted: Any, afresh: bool) -> list[dict[str, Any]]:
        seen.append(wanted[0][1])
        return ask(number, wanted, afresh)

    half.ranks.digest_adapters = note  # type: ignore[method-assign]
    half.adapters.of(request())
    assert half.known() is not None
    half.ranks.values.clear()
    half.adapters.calling("remove_lora", 1)
    half.adapters.ask()
    assert half.known() is None
    half.ranks.values[1] = "two"
    assert half.known() is not None, "asked about before every step, as vLLM loads it with one of them"
    assert seen[0] is not None
    assert seen[1:] == [None] * 3
    half.ranks.values.clear()
    half.adapters.suspect_all()
    half.known()
    assert seen[4] is not None, "what is there again is looked after as before"
