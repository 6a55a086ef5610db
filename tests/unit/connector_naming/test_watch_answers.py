"""What the watch makes of what ranks answer: none, late ones, and those that an encoder has to wait for. No vLLM."""

import logging
from collections.abc import Callable
from typing import Any

import pytest

from epochkv_connector.weights.watch import ENCODING, IDLE_SECONDS, REMEMBERED, RETRY_SECONDS, SHARE
from tests.unit.connector_naming.watch_world import World, digest_of_one, silent

# ---------------------------------------------------------------------------------------------- ranks that cannot say


BAD: dict[str, tuple[Callable[[list[dict[str, Any]]], Any], str]] = {
    "a rank cannot": (silent(1, "it is on meta"), "rank 1: it is on meta"),
    "a rank is missing": (lambda given: given[:1], "1 of 2 ranks answered"),
    "one answered twice": (lambda given: [*given, given[0]], "3 of 2 ranks answered"),
    "another question": (lambda given: [given[0], {**given[1], "number": 0}], "another question"),
    "nonsense": (lambda given: [None, 3], "could not be asked"),
    "text": (lambda given: [given[0], {**given[1], "weights": "ab"}], "rank 1"),
}


@pytest.mark.parametrize("case", list(BAD))
def test_whatever_ranks_answer_but_digests_is_unknown_with_a_note(case: str, caplog: pytest.LogCaptureFixture) -> None:
    answers, note = BAD[case]
    world = World("a", "b").started()
    world.answers = answers
    world.push("c")
    with caplog.at_level(logging.INFO, logger="vllm.epochkv.weights"):
        (asked, held) = world.step()
        for _ in range(20):
            world.step(RETRY_SECONDS + 0.1)
    assert asked == "ask"
    assert held[:2] == ("hold", None)
    assert note in held[2]
    assert world.watch.value is None
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1  # said once, however often it is tried
    assert note in warnings[0].getMessage()
    world.answers = lambda given: given
    assert world.step(RETRY_SECONDS + 0.1) == ["ask", ("hold", world.value())]


@pytest.mark.parametrize("seconds", [0.01, 7.0])
def test_it_is_asked_again_after_a_second_or_ten_times_what_it_took(seconds: float) -> None:
    world = World("a").started()
    world.answers = silent(0, "loading")
    world.seconds = seconds
    world.push("b")
    world.step(1000.0)
    pause = max(RETRY_SECONDS, 10 * seconds)
    assert "ask" not in world.step(pause * 0.99)
    assert "ask" in world.step(pause * 0.02)
    asked = sum("ask" in world.step(0.05) for _ in range(400))
    assert asked <= 1 + (400 * 0.05) / pause


def test_of_the_time_a_share_may_go_into_looks() -> None:
    """A push in hundreds of calls with steps between them."""
    world = World("a").started()
    world.seconds = 0.02
    began, looked = world.now, 0.0
    for layer in range(400):
        world.push(f"b{layer}", "update_weight")
        looked += world.step(0.005).count("ask") * world.seconds
        if world.watch.value is not None:
            assert world.watch.value == digest_of_one(f"b{layer}")  # never the one before
    assert looked <= (world.now - began) / SHARE + world.seconds
    assert looked > (world.now - began) / SHARE / 2
    assert world.step(1.0)[-1] == ("hold", digest_of_one("b399"))


# ---------------------------------------------------------------------------------------------- late
def test_every_rank_may_report_it_and_steps_under_way_too() -> None:
    world = World("a").started()
    number = world.watch.number
    world.watch.late(number)
    world.watch.late(number)
    world.step()
    world.log.clear()
    world.watch.late(number)
    assert world.log == []
    assert world.watch.counters["late"] == 1


def test_a_late_report_of_an_older_question_ends_its_digest_alone() -> None:
    world = World("a").started()
    was, number = world.watch.value, world.watch.number
    world.push("b")
    world.step()
    world.log.clear()
    world.watch.late(number)
    assert world.log == [("end", was)]
    assert world.watch.value == digest_of_one("b")
    assert world.step(0.01) == []


def test_questions_are_remembered_for_ranks_that_report_late() -> None:
    world = World("a").started()
    number, was = world.watch.number, world.watch.value
    for index in range(REMEMBERED - 1):
        world.push(f"b{index}")
        world.step(1.0)
    world.log.clear()
    world.watch.late(number)
    assert world.log == [("end", was)]


# ---------------------------------------------------------------------------------------------- encoders
def test_while_they_are_in_use_nothing_is_named_and_nothing_is_read_again() -> None:
    world = World("a", has_encoder=True).started()
    world.encoder_free = False
    world.push("b")
    assert world.step() == ["ask", "clear", ("hold", None, ENCODING)]
    assert world.step(0.01) == ["clear"]
    world.encoder_free = True
    assert world.step(0.01) == ["clear", ("hold", digest_of_one("b"))]
    assert world.step(0.01) == []


@pytest.mark.parametrize("between", ["waits", "unknown", "transfer", "asleep", "writing", "late"])
def test_weights_that_come_back_after_steps_with_others_need_it_too(between: str) -> None:
    """What those steps have encoded is kept by what was encoded alone."""
    world = World("a", has_encoder=True).started()
    world.seconds = 0.1 if between == "writing" else 0.0
    match between:
        case "waits":
            world.encoder_free = False
        case "unknown":
            world.answers = silent(0, "nobody knows")
        case "transfer":
            world.watch.calling("start_weight_update")
        case "asleep":
            world.asleep = True
        case "writing":
            world.push("a")
            world.step()
        case "late":
            world.watch.late(world.watch.number)
    if between != "late":
        world.push("b")
        world.step(0.001)
        assert world.watch.value is None
    world.encoder_free, world.asleep, world.answers = True, False, lambda given: given
    world.push("a", "finish_weight_update")
    assert "clear" in world.step(RETRY_SECONDS + 0.1)
    assert world.watch.value == digest_of_one("a")


def test_steps_before_the_weights_were_first_known_may_have_encoded_too() -> None:
    world = World("a", has_encoder=True)
    world.answers = silent(0, "loading")
    world.step()
    world.answers = lambda given: given
    assert "clear" in world.step(RETRY_SECONDS + 0.1)


def test_weights_written_past_vllm_while_the_encoder_waits_are_not_named_as_those_before() -> None:
    world = World("a", has_encoder=True).started()
    world.encoder_free = False
    world.push("b")
    world.step()
    world.encoder_free = True
    world.ranks = ["c"]
    assert world.step(IDLE_SECONDS + 0.1)[:2] == ["compare", "ask"]
    assert world.watch.value == digest_of_one("c")


# ---------------------------------------------------------------------------------------------- names of calls
def test_a_late_report_on_weights_that_are_held_again_ends_their_names() -> None:
    world = World("a").started()
    known, number = world.watch.value, world.watch.number
    world.push("b")
    world.step()
    world.push("a")
    world.step()
    assert world.watch.value == known
    world.log.clear()
    world.watch.late(number)
    assert world.log[0] == ("end", known)
    assert world.watch.value is None
