"""The scheduler role's state machine: when it looks, what it believes meanwhile, and what it tells names. No vLLM."""

from typing import Any

import pytest

from epochkv_connector.weights.watch import IDLE_SECONDS, QUIET_SECONDS, STARTED, WRITING, fold
from epochkv_fence.protocol.messages import ASLEEP
from tests.unit.connector_naming.watch_world import World, digest_of, digest_of_one


@pytest.fixture
def world() -> World:
    """One rank, which was looked at."""
    return World("a").started()


# ---------------------------------------------------------------------------------------------- start and pushes
def test_it_looks_before_the_first_step_and_not_again() -> None:
    world = World("a", "b")
    assert world.watch.value is None
    assert world.watch.told == (None, "nobody has looked yet")
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


# ---------------------------------------------------------------------------------------------- transfers
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


def test_a_transfer_that_fails_is_over_and_what_it_left_is_named(world: World) -> None:
    world.watch.calling("start_weight_update")
    world.push("half", "update_weights")
    world.watch.called(idle=False, failed=True)
    assert world.step() == ["ask", ("hold", digest_of_one("half"))]


def test_a_call_that_fails_is_looked_at_again(world: World) -> None:
    world.watch.calling("update_weights")
    world.step()
    world.ranks = ["half"]
    world.watch.called(idle=False, failed=True)
    assert world.step(1.0) == ["ask", ("hold", digest_of_one("half"))]


@pytest.mark.parametrize("method", ["update_weights", "start_profile", print, object()])
def test_other_calls_start_no_transfer(method: Any, world: World) -> None:
    world.watch.calling(method)
    assert "ask" in world.step()


# ---------------------------------------------------------------------------------------------- sleep
def test_weights_are_never_read_while_asleep(world: World) -> None:
    world.watch.calling("sleep")
    world.asleep = True
    assert world.step() == [("hold", None, ASLEEP)]
    assert world.step(10.0) == []
    assert not world.watch.pending
    world.watch.when_idle()
    assert world.log == []
    world.asleep = False
    world.ranks = ["zeros"]
    assert world.watch.pending
    assert world.step() == ["ask", ("hold", digest_of_one("zeros"))]


# ---------------------------------------------------------------------------------------------- idle engines
def test_an_engine_that_was_idle_compares_before_it_names(world: World) -> None:
    assert world.step(IDLE_SECONDS + 0.1) == ["compare"]
    world.ranks = ["b"]
    assert world.step(IDLE_SECONDS / 2) == []  # it was not idle: the samples of steps see it
    assert world.step(IDLE_SECONDS + 0.1) == ["compare", "ask", ("hold", digest_of_one("b"))]
    assert world.watch.counters["unseen"] == 1


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


# ---------------------------------------------------------------------------------------------- names of calls
def test_an_idle_engine_looks_at_once_after_a_lone_call_and_nobody_hears_of_it(world: World) -> None:
    world.now += 5.0
    world.watch.calling("liveness_probe")
    world.log.clear()
    world.watch.called(idle=True)
    assert world.log == ["ask"]
    assert (world.told, world.watch.pending) == ([], False)


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
    assert world.told == [world.watch.told]
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
