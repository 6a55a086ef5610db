"""Ways out of vLLM's waiting loop, after our answer or before our question: what was promised is kept, found again or given back.

vLLM has no callback for a hit that it drops (vllm#42372).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState

from epochkv_connector.tiers.hits import PLAN_TTL_STEPS
from tests.scheduler.rigs import MakeRig, begin_load, filled, release
from tests.support.scheduler import BLOCK, RequestStatus, SharedStore, prompt


@dataclass
class Held:
    """A rig in which a request leaves the loop step after step, until `lift` is called."""

    rig: Any
    request: Any
    lift: Callable[[], None]

    def step(self) -> None:
        assert self.request.request_id not in self.rig.step().num_scheduled_tokens

    def held(self) -> dict[str, int]:
        """What the bookkeeping holds."""
        return {name: count for name, count in self.rig.tiers.leak_report().items() if count}


def blocked_by_a_runner(make_rig: MakeRig, **kwargs: Any) -> tuple[Any, Any, list[int]]:
    """A request that runs on half of the GPU, and a prompt in L1 that needs more than the other half."""
    rig, tokens = filled(make_rig, **kwargs)
    runner = rig.add(prompt(50, 6 * BLOCK), max_tokens=30)
    rig.step()
    assert runner.status is RequestStatus.RUNNING
    return rig, runner, tokens


def end(rig: Any, request: Any) -> Callable[[], None]:
    return lambda: rig.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)


# -- after our answer ------------------------------------------------------------------------------------------------


def no_blocks(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> Held:
    rig, runner, tokens = blocked_by_a_runner(make_rig)
    return Held(rig, rig.add(tokens), end(rig, runner))


def asked_again_later(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> Held:
    store = SharedStore()
    rig, tokens = filled(make_rig, store=store, l1_bytes=None, extra={"lookup_wait_ms": 0.1, "lookup_deadline_ms": 60_000.0})
    store.answer_exists = False
    return Held(rig, rig.add(tokens), store.answer_pending)


def encoder_pending_after_the_load(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> Held:
    rig, tokens = filled(make_rig)
    request = begin_load(rig, tokens)
    release(rig)
    while request.request_id not in rig.scheduler.finished_recving_kv_req_ids:
        rig.step()
    monkeypatch.setattr(rig.scheduler, "_ec_transfer_pending", lambda request, num_computed: True)
    return Held(rig, request, lambda: monkeypatch.setattr(rig.scheduler, "_ec_transfer_pending", lambda *_: False))


def load_begun(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> Held:
    rig, tokens = filled(make_rig)
    rig.workers[0].hold_loads = True
    return Held(rig, rig.add(tokens), lambda: release(rig))


@pytest.mark.parametrize("cancelled", [False, True], ids=["lifted", "cancelled"])
@pytest.mark.parametrize(
    "scenario", [no_blocks, asked_again_later, encoder_pending_after_the_load, load_begun], ids=lambda scenario: scenario.__name__
)
def test_dropped_after_our_answer(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, scenario: Callable[..., Held], cancelled: bool
) -> None:
    """Asked again, nothing is pinned or looked up twice; cancelled, all is given back at once; let go, the hit is used."""
    held = scenario(make_rig, monkeypatch)
    rig = held.rig
    others = held.held()
    held.step()
    first, asked = held.held(), len(rig.store.asked) if rig.store is not None else 0
    opened = rig.tiers.stats()["plans_opened"]
    for _ in range(2 * PLAN_TTL_STEPS):
        held.step()
        assert held.held() == first
    assert asked == (len(rig.store.asked) if rig.store is not None else 0)
    assert opened == rig.tiers.stats()["plans_opened"]
    if not cancelled:
        held.lift()
        rig.run()
        assert rig.cached[held.request.request_id] == 8 * BLOCK
    else:
        rig.scheduler.finish_requests(held.request.request_id, RequestStatus.FINISHED_ABORTED)
        if scenario is not load_begun:
            assert {name: count for name, count in held.held().items() if count > others.get(name, 0)} == {}
        held.lift()
        rig.run()
    rig.check_clean()


# -- before our question, with a plan from an earlier step -----------------------------------------------------------


def planned(make_rig: MakeRig, **kwargs: Any) -> tuple[Any, Any, Any]:
    """A plan is open: the scheduler asked, and had no blocks."""
    rig, runner, tokens = blocked_by_a_runner(make_rig, **kwargs)
    request = rig.add(tokens)
    rig.step()
    assert rig.tiers.leak_report()["plan_slots"] == 8
    return rig, runner, request


def too_many_requests(rig: Any, runner: Any, request: Any) -> Callable[[], None]:
    rig.scheduler.max_num_active_reqs = 1
    return lambda: setattr(rig.scheduler, "max_num_active_reqs", 16)


def paused_for_all(rig: Any, runner: Any, request: Any) -> Callable[[], None]:
    rig.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    return lambda: rig.scheduler.set_pause_state(PauseState.UNPAUSED)


@pytest.mark.parametrize("cancelled", [False, True], ids=["lifted", "cancelled"])
@pytest.mark.parametrize("condition", [too_many_requests, paused_for_all], ids=lambda condition: condition.__name__)
def test_not_asked_again(make_rig: MakeRig, condition: Callable[..., Callable[[], None]], cancelled: bool) -> None:
    """A plan that nobody asks for is given back after a few steps, or at once with its request."""
    rig, runner, request = planned(make_rig)
    lift = condition(rig, runner, request)
    lookups = rig.tiers.stats()["lookups"]
    rig.steps(1 if cancelled else PLAN_TTL_STEPS + 1)
    assert rig.tiers.stats()["lookups"] == lookups, "it was asked for"
    assert rig.tiers.leak_report()["plan_slots"] == (8 if cancelled else 0)
    assert rig.tiers.stats()["plans_expired"] == (0 if cancelled else 1)
    if cancelled:
        rig.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        assert rig.tiers.leak_report()["plan_slots"] == rig.tiers.leak_report()["plans"] == 0
        assert rig.tiers.stats()["plans_aborted"] == 1
    lift()
    end(rig, runner)()
    rig.run()
    if not cancelled:
        assert rig.cached[request.request_id] == 8 * BLOCK
    rig.check_clean()


def test_a_blocked_request_is_not_asked_and_gives_back_the_lookup_that_was_begun_for_it(make_rig: MakeRig) -> None:
    store = SharedStore()
    rig, tokens = filled(make_rig, store=store, l1_bytes=None, extra={"lookup_wait_ms": 0.1, "lookup_deadline_ms": 60_000.0})
    store.answer_exists = False
    request = rig.add(tokens, structured_outputs=StructuredOutputsParams(regex="a+"))
    assert rig.tiers.leak_report()["queries"] == 1, "the lookup began with the request"
    lookups = rig.tiers.stats()["lookups"]
    rig.steps(3)
    assert rig.tiers.stats()["lookups"] == lookups
    rig.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    assert rig.tiers.leak_report()["queries"] == 0
    rig.run()
    rig.check_clean()
