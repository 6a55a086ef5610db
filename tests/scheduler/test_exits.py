"""Ways out of vLLM's waiting loop, after our answer or before our question: what was promised is kept, found again or given back.

vLLM has no callback for a hit that it drops (vllm#42372). The table `EXITS` names every `break` and `continue` of the loop by its
condition, and is compared with the source of the installed vLLM, so a new exit is noticed. To us they are alike: a request is asked for
again with its promise open, or is not asked for. A test traces `Scheduler.schedule` and proves that the request left it there.
"""

import ast
import functools
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler

from epochkv_connector.tiers.hits import PLAN_TTL_STEPS
from tests.scheduler.rigs import MakeRig, Patch, begin_load, filled, release
from tests.support.scheduler import BLOCK, RequestStatus, SharedStore, prompt

EXITS = {
    "no queue or no room for drafts": "not request_queue or input_budget <= draft_slots",
    "too many requests": "num_running >= self.max_num_active_reqs",
    "blocked": "not ready_to_schedule",
    "stale output": "request.num_stale_output_tokens and (not request.drop_stale_output)",
    "too many adapters": (
        "self.lora_config and request.lora_request and (len(scheduled_loras) == self.lora_config.max_loras "
        "and request.lora_request.lora_int_id not in scheduled_loras)"
    ),
    "asked again later": "ext_tokens is None",
    "encoder outputs on their way": "self._ec_transfer_pending(request, num_computed_tokens)",
    "prefill deferred": "defer_prefills and num_computed_tokens < request.num_tokens - 1",
    "no room for padding": "padded_num_tokens > request_token_budget",
    "prompt too long for one step": (
        "not self.scheduler_config.enable_chunked_prefill and num_new_tokens > request_token_budget and (not self.is_mm_encoder_only)"
    ),
    "no tokens left": "num_new_tokens == 0",
    "no blocks": "new_blocks is None",
    "load begun": "load_kv_async",
}


def waiting_loop() -> ast.While:
    """vLLM's loop over waiting requests; line numbers are those of its file."""
    lines, first = inspect.getsourcelines(Scheduler.schedule)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    (loop,) = [node for node in ast.walk(tree) if isinstance(node, ast.While) and ast.unparse(node.test) == "token_budget > 0"]
    return loop


@functools.cache
def exits() -> dict[int, str]:
    """Line of each `break` and `continue` of the loop -> the innermost condition it stands under."""
    found: dict[int, str] = {}

    def visit(statements: list[ast.stmt], condition: str) -> None:
        for statement in statements:
            if isinstance(statement, ast.Break | ast.Continue):
                found[statement.lineno] = condition
            elif isinstance(statement, ast.If):
                visit(statement.body, ast.unparse(statement.test))
                visit(statement.orelse, f"not ({ast.unparse(statement.test)})")

    visit(waiting_loop().body, "")
    return found


@contextmanager
def traced() -> Iterator[set[str]]:
    """The exits that `Scheduler.schedule` took inside the block."""
    lines, taken = exits(), set[str]()
    names = {condition: name for name, condition in EXITS.items()}

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_lineno in lines:
            taken.add(names.get(lines[frame.f_lineno], lines[frame.f_lineno]))
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, argument: local if frame.f_code is Scheduler.schedule.__code__ else None)
    try:
        yield taken
    finally:
        sys.settrace(before)


@dataclass
class Held:
    """A rig in which a request leaves the loop by one exit, step after step, until `lift` is called."""

    rig: Any
    request: Any
    lift: Callable[[], None]

    def step(self) -> set[str]:
        with traced() as taken:
            output = self.rig.scheduler.schedule()
        self.rig.update(output)
        assert self.request.request_id not in output.num_scheduled_tokens
        return taken

    def held(self) -> dict[str, int]:
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
def no_blocks(make_rig: MakeRig, monkeypatch: Patch) -> Held:
    rig, runner, tokens = blocked_by_a_runner(make_rig)
    return Held(rig, rig.add(tokens), end(rig, runner))


def asked_again_later(make_rig: MakeRig, monkeypatch: Patch) -> Held:
    store = SharedStore()
    rig, tokens = filled(make_rig, store=store, l1_bytes=None, extra={"lookup_wait_ms": 0.1, "lookup_deadline_ms": 60_000.0})
    store.answer_exists = False
    return Held(rig, rig.add(tokens), store.answer_pending)


def encoder_pending(make_rig: MakeRig, monkeypatch: Patch) -> Held:
    rig, tokens = filled(make_rig)
    monkeypatch.setattr(rig.scheduler, "_ec_transfer_pending", lambda request, num_computed: True)
    return Held(rig, rig.add(tokens), lambda: monkeypatch.setattr(rig.scheduler, "_ec_transfer_pending", lambda *_: False))


def encoder_pending_after_the_load(make_rig: MakeRig, monkeypatch: Patch) -> Held:
    rig, tokens = filled(make_rig)
    request = begin_load(rig, tokens)
    release(rig)
    while request.request_id not in rig.scheduler.finished_recving_kv_req_ids:
        rig.step()
    monkeypatch.setattr(rig.scheduler, "_ec_transfer_pending", lambda request, num_computed: True)
    return Held(rig, request, lambda: monkeypatch.setattr(rig.scheduler, "_ec_transfer_pending", lambda *_: False))


def load_begun(make_rig: MakeRig, monkeypatch: Patch) -> Held:
    rig, tokens = filled(make_rig)
    rig.workers[0].hold_loads = True
    return Held(rig, rig.add(tokens), lambda: release(rig))


AFTER = {
    no_blocks: "no blocks",
    asked_again_later: "asked again later",
    encoder_pending: "encoder outputs on their way",
    encoder_pending_after_the_load: "encoder outputs on their way",
    load_begun: "load begun",
}


@pytest.mark.parametrize("cancelled", [False, True], ids=["lifted", "cancelled"])
@pytest.mark.parametrize("scenario", AFTER, ids=lambda scenario: scenario.__name__)
def test_dropped_after_our_answer(make_rig: MakeRig, monkeypatch: Patch, scenario: Callable[..., Held], cancelled: bool) -> None:
    """Asked again, nothing is pinned or looked up twice; cancelled, all is given back at once; let go, the hit is used."""
    held = scenario(make_rig, monkeypatch)
    rig = held.rig
    others = held.held()
    assert AFTER[scenario] in held.step()
    first, asked = held.held(), len(rig.store.asked) if rig.store is not None else 0
    opened = rig.tiers.stats()["plans_opened"]
    for _ in range(2 * PLAN_TTL_STEPS):
        assert scenario is load_begun or AFTER[scenario] in held.step()
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


# -- before our question, with a plan from an earlier step -----------------------------------------------------------
def planned(make_rig: MakeRig, **kwargs: Any) -> tuple[Any, Any, Any]:
    """A plan is open: the scheduler asked, and had no blocks."""
    rig, runner, tokens = blocked_by_a_runner(make_rig, **kwargs)
    request = rig.add(tokens)
    with traced() as taken:
        rig.step()
    assert "no blocks" in taken
    assert rig.tiers.leak_report()["plan_slots"] == 8
    return rig, runner, request


def too_many_requests(rig: Any, runner: Any, request: Any) -> Callable[[], None]:
    rig.scheduler.max_num_active_reqs = 1
    return lambda: setattr(rig.scheduler, "max_num_active_reqs", 16)


def stale_output(rig: Any, runner: Any, request: Any) -> Callable[[], None]:
    request.num_stale_output_tokens, request.drop_stale_output = 1, False
    return lambda: setattr(request, "num_stale_output_tokens", 0)


def no_tokens_in_the_budget(rig: Any, runner: Any, request: Any) -> Callable[[], None]:
    rig.scheduler.max_num_scheduled_tokens = 1
    return lambda: setattr(rig.scheduler, "max_num_scheduled_tokens", 8192)


def paused_for_all(rig: Any, runner: Any, request: Any) -> Callable[[], None]:
    rig.scheduler.set_pause_state(PauseState.PAUSED_ALL)
    return lambda: rig.scheduler.set_pause_state(PauseState.UNPAUSED)


BEFORE: dict[Callable[..., Callable[[], None]], str | None] = {
    too_many_requests: "too many requests",
    stale_output: "stale output",
    no_tokens_in_the_budget: None,  # the loop is not entered
    paused_for_all: None,  # the loop is not entered
}


@pytest.mark.parametrize("cancelled", [False, True], ids=["lifted", "cancelled"])
@pytest.mark.parametrize("condition", BEFORE, ids=lambda condition: condition.__name__)
def test_not_asked_again(make_rig: MakeRig, condition: Callable[..., Callable[[], None]], cancelled: bool) -> None:
    """A plan that nobody asks for is given back after a few steps, or at once with its request."""
    rig, runner, request = planned(make_rig)
    lift = condition(rig, runner, request)
    lookups = rig.tiers.stats()["lookups"]
    for step in range(1 if cancelled else PLAN_TTL_STEPS + 1):
        with traced() as taken:
            rig.step()
        assert BEFORE[condition] in taken if BEFORE[condition] else taken == set(), f"step {step}"
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


@pytest.mark.parametrize("status", ["grammar", "load"])
def test_a_blocked_request_is_not_asked_and_gives_back_what_was_begun_for_it(make_rig: MakeRig, status: str, store: SharedStore) -> None:
    rig, tokens = filled(make_rig, store=store, l1_bytes=None, extra={"lookup_wait_ms": 0.1, "lookup_deadline_ms": 60_000.0})
    if status == "load":
        request = begin_load(rig, tokens)
    else:
        store.answer_exists = False
        request = rig.add(tokens, structured_outputs=StructuredOutputsParams(regex="a+"))
        assert rig.tiers.leak_report()["queries"] == 1, "the lookup began with the request"
    lookups = rig.tiers.stats()["lookups"]
    for _ in range(3):
        with traced() as taken:
            rig.step()
        assert taken - {"no queue or no room for drafts"} == {"blocked"}
    assert rig.tiers.stats()["lookups"] == lookups
    rig.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    assert rig.tiers.leak_report()["queries"] == 0
    release(rig)
    rig.run()


# -- shrunk ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(("replay", "loaded"), [(200, 0), (BLOCK // 2, 8 * BLOCK)])
def test_a_hit_that_vllm_replays(make_rig: MakeRig, monkeypatch: Patch, replay: int, loaded: int) -> None:
    """Bounded replay recomputes the end of a hit, and drops a hit that is no longer than what it would recompute."""
    rig, tokens = filled(make_rig)
    monkeypatch.setattr(rig.scheduler, "prefix_replay_tokens", replay)
    request = rig.serve(tokens)
    stats = rig.tiers.stats()
    assert (stats["plans_opened"], stats["plans_committed"], stats["plans_aborted"]) == (1, bool(loaded), not loaded)
    assert rig.cached[request] == max(0, loaded - replay)


def test_a_partial_tail_of_the_local_hit_is_dropped_for_a_longer_one_of_ours(make_rig: MakeRig, monkeypatch: Patch) -> None:
    rig, tokens = filled(make_rig)
    rig.serve(tokens[: 2 * BLOCK])  # two blocks are on the GPU again
    find = rig.scheduler._get_local_prefix_cache_hit
    asked: list[tuple[int, int | None]] = []

    def with_a_tail(request: Any) -> Any:
        blocks, num_local, boundary, diverged = find(request)
        assert num_local == 2 * BLOCK
        return blocks, num_local - 11, boundary, diverged

    answer = rig.connector.get_num_new_matched_tokens

    def noted(request: Any, num_local: int) -> Any:
        found = answer(request, num_local)
        asked.append((num_local, found[0]))
        return found

    monkeypatch.setattr(rig.scheduler, "_get_local_prefix_cache_hit", with_a_tail)
    monkeypatch.setattr(rig.connector, "get_num_new_matched_tokens", noted)
    request = rig.serve(tokens)
    assert asked == [(BLOCK, 7 * BLOCK)]
    assert rig.cached[request] == 8 * BLOCK


def test_every_exit_is_in_the_table() -> None:
    assert set(exits().values()) == set(EXITS.values())
