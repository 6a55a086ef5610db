"""The scheduler role's state machine: when it looks, what it believes meanwhile, what it makes of answers that are missing, late, or wait
for an encoder, and what it tells names. No vLLM."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from epochkv_connector.weights import watch
from epochkv_connector.weights.watch import ENCODING, IDLE_SECONDS, QUIET_SECONDS, RETRY_SECONDS, SHARE, STARTED, WRITING, Watch, fold


def digest_of(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


class World:
    """Ranks that hold a text each, names that are written down, and a clock that stands still.

    Attributes:
        log: everything that the watch did, in order.
        seconds: what a look takes.
        answers: changes what the ranks answer.
    """

    def __init__(self, *weights: str, has_encoder: bool = False) -> None:
        self.ranks = list(weights or ("a",))
        self.log: list[Any] = []
        self.now = 1000.0
        self.seconds = 0.0
        self.asleep, self.naps = False, 0
        self.writes = 0
        self.asked: list[str] = []
        self.answers: Callable[[list[dict[str, Any]]], Sequence[dict[str, Any]]] = lambda answers: answers
        self.encoder_free = True
        # It never asks for adapters.
        self.watch = Watch(self, self, len(self.ranks), lambda: self.now, has_encoder=has_encoder)  # type: ignore[arg-type]

    def are_asleep(self) -> bool:
        return self.asleep

    @property
    def num_writes(self) -> int:
        return self.writes

    def digest_weights(self, number: int) -> Sequence[dict[str, Any]]:
        self.log.append("ask")
        self.now += self.seconds
        self.asked = list(self.ranks)
        said = {"number": number, "note": "", "naps": self.naps, "alone": ""}
        held = [b"" if self.asleep else digest_of(held) for held in self.ranks]
        return self.answers([{"rank": index, "weights": weights, **said} for index, weights in enumerate(held)])

    def are_unchanged(self, number: int) -> bool:
        self.log.append("compare")
        return number == self.watch.number and self.asked == self.ranks

    def end_device_work(self) -> None:
        self.log.append("wait")

    def hold(self, weights: bytes | None) -> None:
        self.log.append(("hold", *self.watch.told) if weights is None else ("hold", weights))

    def end(self, weights: bytes) -> None:
        self.log.append(("end", weights))

    def keep_own(self, why: str) -> None:
        self.log.append("own")

    def lost_blocks(self) -> None:
        self.log.append("lost")

    def clear_encoder(self) -> bool:
        self.log.append("clear")
        return self.encoder_free

    def value(self) -> bytes:
        return fold(digest_of(held) for held in self.ranks)

    def step(self, seconds: float = 0.0) -> list[Any]:
        """A step after so long; what the watch did before it."""
        self.now += seconds
        self.log.clear()
        self.watch.before_schedule()
        return list(self.log)

    def push(self, weights: str, method: Any = "update_weights") -> None:
        self.watch.calling(method)
        self.ranks = [weights] * len(self.ranks)

    def started(self) -> World:
        self.step()
        self.log.clear()
        return self


def silent(rank: int, note: str) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    def answers(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
        given[rank] |= {"weights": None, "note": note}
        return given

    return answers


def digest_of_one(text: str) -> bytes:
    return fold([digest_of(text)])


@pytest.fixture
def world() -> World:
    return World("a").started()


def test_it_looks_before_the_first_step_and_not_again() -> None:
    world = World("a", "b")
    assert world.watch.value is None
    assert world.watch.told == (None, "the weights were not digested yet")
    assert world.step() == ["ask", ("hold", world.value())]
    assert world.watch.value == fold([digest_of("a"), digest_of("b")])
    assert [world.step(0.01) for _ in range(5)] == [[]] * 5
    assert world.watch.counters == {"digests": 1, "changes": 1}


def test_ranks_are_told_apart_and_folded_in_their_order() -> None:
    first, second = World("a", "b").started(), World("b", "a").started()
    assert first.watch.value != second.watch.value
    backwards = World("a", "b")
    backwards.answers = lambda answers: answers[::-1]
    assert backwards.started().watch.value == first.watch.value


def test_the_device_is_waited_for_once_between_two_steps() -> None:
    world = World("a")
    world.watch.calling("update_weights")
    assert world.log == []  # no step has run
    world.started()
    for _ in range(5):
        world.watch.calling("update_weights")
    assert world.log == ["wait"]
    world.step()
    world.log.clear()
    world.watch.calling("update_weights")
    assert world.log == ["wait"]


def test_a_write_while_the_ranks_were_asked_is_looked_at_again(world: World) -> None:
    """The number of writes is read before the question: a write that comes during it is not taken for known."""
    world.push("b")

    def written(answers: list[dict[str, Any]]) -> list[dict[str, Any]]:
        world.writes += 2
        return answers

    world.answers = written
    world.step()
    world.answers = lambda answers: answers
    assert world.step(0.01)[0] == "ask"


@pytest.mark.parametrize("start", ["start_weight_update", "start_draft_weight_update", "skyrl_start_weight_update"])
@pytest.mark.parametrize("finish", ["finish_weight_update", "skyrl_finish_weight_update", "reload_weights"])
def test_nothing_is_named_between_the_start_and_the_end_of_a_transfer(start: str, finish: str, world: World) -> None:
    world.watch.calling(start)
    assert world.step() == [("hold", None, STARTED)]
    assert world.step(5.0) == []  # not even compared
    for part in ("b1", "b2"):
        world.push(part, "update_weights")
        assert world.step() == []
        assert world.watch.value is None
    world.push("b", finish)
    assert world.step() == ["ask", ("hold", digest_of_one("b"))]


@pytest.mark.parametrize("method", ["update_weights", "start_profile", print, object()])
def test_other_calls_start_no_transfer(method: Any, world: World) -> None:
    world.watch.calling(method)
    assert "ask" in world.step()


def test_a_comparison_that_raises_is_one_that_differs(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    def broken(number: int) -> bool:
        raise RuntimeError("gone")

    monkeypatch.setattr(world, "are_unchanged", broken)
    assert world.step(IDLE_SECONDS + 0.1) == ["ask"]


def test_an_idle_engine_looks_when_the_push_has_gone_quiet(world: World) -> None:
    world.push("b1")
    world.now += QUIET_SECONDS * 0.9
    world.push("b2")
    world.now += QUIET_SECONDS * 0.9
    world.watch.when_idle()
    assert "ask" not in world.log
    assert world.watch.quiet_at() > world.now
    world.now += QUIET_SECONDS * 0.2
    world.watch.when_idle()
    assert world.log[-2:] == ["ask", ("hold", digest_of_one("b2"))]
    assert not world.watch.pending
    world.log.clear()
    world.watch.when_idle()
    assert world.log == []


def test_an_idle_engine_looks_at_once_after_a_lone_call_and_nobody_hears_of_it(world: World) -> None:
    world.now += 5.0
    world.watch.calling("liveness_probe")
    world.log.clear()
    world.watch.called(idle=True)
    assert world.log == ["ask"]
    assert not world.watch.pending


def test_who_asks_during_a_long_call_hears_that_weights_are_written_and_the_hub_hears_of_its_end(world: World) -> None:
    known = (world.watch.value, "")
    world.now += 5.0
    world.watch.calling("update_weights")
    assert (world.watch.tells(), world.watch.updating) == (known, False)
    world.now += 75.0
    assert (world.watch.tells(), world.watch.updating) == ((None, WRITING), True)
    world.log.clear()
    world.watch.called(idle=True)
    assert world.log == ["ask", ("hold", known[0])], "also where it has changed nothing: heartbeats said otherwise"
    assert (world.watch.tells(), world.watch.updating) == (known, False)


def test_a_rank_that_says_nothing_is_named(world: World) -> None:
    one: Any = world.watch
    one.told, one._peers = (None, watch.NO_PASS), SimpleNamespace(foretold=None, missing="3")
    assert one.tells()[1].startswith("data-parallel rank 3 has not been heard from")
    one._peers.missing = ""
    assert one.tells() == (None, watch.NO_PASS)


def test_a_transfer_that_was_started_is_an_update_until_it_is_finished(world: World) -> None:
    world.watch.calling("start_weight_update")
    world.watch.called(idle=True)
    world.step()
    assert world.watch.updating
    world.push("b", "finish_weight_update")
    world.watch.called(idle=True)
    world.step(5.0)
    assert not world.watch.updating


def test_while_calls_follow_each_other_nobody_is_told_that_the_weights_are_known(world: World) -> None:
    world.now += 5.0
    for part in ("ab", "abc", "abcd"):
        world.push(part, "update_weights")
        world.watch.called(idle=True)
    assert world.watch.value == fold([digest_of("ab")]), "the first call was looked at"
    assert world.watch.told[0] is None
    assert world.log[-1] == ("hold", world.watch.value), "so the hub is told, too"
    world.now += 0.3
    world.watch.when_idle()
    assert world.watch.told == (fold([digest_of("abcd")]), "")


def test_a_busy_engine_tells_that_it_does_not_know_until_its_next_step_has_looked(world: World) -> None:
    known = world.watch.value
    world.watch.calling("something")
    world.watch.called(idle=False)
    assert world.watch.told[0] is None
    assert world.step() == ["ask", ("hold", known)]
    assert world.watch.told == (known, "")


def test_a_step_that_may_not_look_yet_names_nothing_whatever_was_told_before(world: World) -> None:
    world.seconds = 1.0
    world.push("b")
    world.step()
    assert world.watch.value is not None
    world.push("c")
    world.watch.called(idle=False)
    assert world.watch.told[0] is None, "the call has returned"
    world.log.clear()
    assert world.step(0.1) == [("hold", None, WRITING)], "the last look has just used the share of the time that looks may have"
    assert world.watch.value is None


BAD: dict[str, tuple[Callable[[list[dict[str, Any]]], Any], str]] = {
    "a rank cannot": (silent(1, "it is on meta"), "rank 1: it is on meta"),
    "a rank is missing": (lambda given: given[:1], "1 of 2 ranks answered"),
    "one answered twice": (lambda given: [*given, given[0]], "3 of 2 ranks answered"),
    "another question": (lambda given: [given[0], {**given[1], "number": 0}], "another question"),
    "nonsense": (lambda given: [None, 3], "could not be asked"),
    "no answer": (lambda given: (_ for _ in ()).throw(TimeoutError("RPC call to ask timed out")), "could not be asked"),
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
def test_it_is_asked_again_after_a_second_or_ten_times_what_it_took(seconds: float, world: World) -> None:
    world.answers = silent(0, "loading")
    world.seconds = seconds
    world.push("b")
    world.step(1000.0)
    pause = max(RETRY_SECONDS, 10 * seconds)
    assert "ask" not in world.step(pause * 0.99)
    assert "ask" in world.step(pause * 0.02)
    asked = sum("ask" in world.step(0.05) for _ in range(400))
    assert asked <= 1 + (400 * 0.05) / pause


def test_of_the_time_a_share_may_go_into_looks(world: World) -> None:
    """A push in hundreds of calls with steps between them."""
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


def test_a_late_report_of_an_older_question_ends_its_digest_alone(world: World) -> None:
    was, number = world.watch.value, world.watch.number
    world.push("b")
    world.step()
    world.log.clear()
    world.watch.late(number)
    assert world.log == [("end", was)]
    assert world.watch.value == digest_of_one("b")
    assert world.step(0.01) == []


def test_while_they_are_in_use_nothing_is_named_and_nothing_is_read_again() -> None:
    world = World("a", has_encoder=True).started()
    world.encoder_free = False
    world.push("b")
    assert world.step() == ["ask", "clear", ("hold", None, ENCODING)]
    assert world.step(0.01) == ["clear"]
    assert world.watch.awaits, "new requests would refer to newer outputs all the time"
    world.encoder_free = True
    assert world.step(0.01) == ["clear", ("hold", digest_of_one("b"))]
    assert (world.step(0.01), world.watch.awaits) == ([], False)


@pytest.mark.parametrize("model", ["its passes", "a push past vLLM", "writes between many steps", "pushes"])
def test_a_model_whose_passes_undo_each_digest_keeps_its_cache_to_itself(world: World, model: str) -> None:
    for number in range(3 * watch.UNDONE):
        if model == "pushes":
            world.push(f"pushed {number}")
            world.watch.called(idle=False)
        for _ in range(watch.SOON_STEPS + 1 if model == "writes between many steps" else 2):
            world.step(0.1 if model == "a push past vLLM" else watch.UNDONE_SECONDS / watch.UNDONE)
        world.ranks = [f"written {number}"]
        world.watch.late(world.watch.number)
    own = model == "its passes"
    assert ("no digest lasts" in world.watch.told[1], world.watch.known is None) == (own, True)
    assert (world.watch.counters["late"] < watch.UNDONE) == (model == "a push past vLLM"), "each asks the pool for an epoch"
    assert ("ask" in world.step(watch.UNDONE_SECONDS)) == (not own)
    assert world.watch.value is not None
    assert (world.watch.known is None) == own


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


def test_a_late_report_on_weights_that_are_held_again_ends_their_names(world: World) -> None:
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
