"""The scheduler role of adapters: which it asks ranks for, when, and what it names. No vLLM."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from epochkv_connector.weights.adapters import LATER, MAX_ADAPTERS, RETRY_SECONDS, Adapters


def request(number: int = 1) -> LoRARequest:
    return LoRARequest("a", number, "/a")


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

    def __init__(self, num_ranks: int = 1, why_not: str | None = None) -> None:
        self.now = 0.0
        self.ranks = Ranks(num_ranks)
        self.adapters = Adapters(self.ranks, num_ranks, lambda: self.now, why_not)  # type: ignore[arg-type]  # asks for no weights
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


def test_an_engine_that_sleeps_or_does_not_know_its_weights_is_not_asked() -> None:
    half = Half()
    half.awake = False
    half.adapters.of(request())
    assert half.known() is None
    assert not half.ranks.asked
    half.awake = True
    assert half.known() is not None


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
