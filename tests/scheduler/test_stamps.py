"""Which weights made which token of an answer, on vLLM's real schedulers: what the stamp says is what the device computed with."""

import hashlib
import random
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from epochkv_connector.naming.identity import Pin
from epochkv_connector.scheduler.stamps import Stamps, reports_of, shown
from epochkv_connector.weights.watch import fold
from epochkv_connector.wire import WorkerReport
from epochkv_fence.protocol.messages import STAMP_KEY as KEY
from epochkv_fence.protocol.messages import UNKNOWN_WEIGHTS as UNKNOWN
from tests.scheduler.rigs import LENGTH, TOKENS, WHOLE, MakeRig, every_layout, filled, found
from tests.scheduler.test_adapters import adapter, add, load
from tests.scheduler.test_fenced import FencedRig, Stock
from tests.support.ahead import AheadRig, AsyncRig
from tests.support.scheduler import RequestStatus, Rig, SharedStore, prompt

ASKED = {KEY: {"stamp": True}}


def digest(*ranks: str) -> str:
    return fold(hashlib.sha256(held.encode()).digest() for held in ranks)[:16].hex()


class Truth:
    """What the device computed each token with, by request, as stamps say it: of an update that was begun and not ended, nobody knows."""

    def __init__(self, rig: Any) -> None:
        self.made: dict[str, list[str]] = {}
        self._rig, self._forward = rig, rig._forward
        rig._forward = self._forwarding

    def _forwarding(self, output: Any) -> Any:
        runner = self._forward(output)
        updates = [call for call in self._rig.executor.calls if call.endswith("_weight_update")]
        held = UNKNOWN if updates[-1:] == ["start_weight_update"] else digest(*self._rig.executor.ranks)
        for name, tokens in zip(runner.req_ids, runner.sampled_token_ids, strict=True):
            self.made.setdefault(name, []).extend([held] * len(tokens))
        return runner

    def check(self, name: str, unknown: int = 0) -> None:
        """The stamp of this answer says the same, but for so many tokens of which it says that they are unknown."""
        said = told(self._rig, name)
        other = [index for index, one in enumerate(said) if one != self.made[name][index]]
        assert {said[index] for index in other} <= {UNKNOWN}, f"{name}: {said} instead of {self.made[name]}"
        assert len(other) == unknown


def told(rig: Any, name: str) -> list[str]:
    tokens = rig.handed[name][KEY]["tokens"]
    starts = [one["from_token"] for one in tokens]
    assert starts == sorted(set(starts)), starts
    assert starts[0] == 0
    ends = [*starts[1:], len(rig.outputs[name])]
    return [one["weights"] for one, start, end in zip(tokens, starts, ends, strict=True) for _ in range(start, end)]


def warm(rig: Any, tokens: list[int]) -> int:
    """Asks until L2 holds the prompt, as `epochkv_fence.client.warm` does; returns how many tokens of it."""
    for _ in range(3):
        said = rig.handed[rig.serve(tokens, params={KEY: {"stamp": True, "stored": True}})][KEY]
        if said["stored_tokens"] == said["storable_tokens"]:
            return int(said["stored_tokens"])
    raise AssertionError(f"L2 never holds it: {said}")


@every_layout
@pytest.mark.parametrize("options", [{}, {"l1_bytes": None, "extra": {"staging_slots": 16}}], ids=["L1", "GPU alone"])
def test_what_l2_lost_is_stored_again_for_who_waits_for_it(
    make_rig: MakeRig, store: SharedStore, layout: tuple[str, ...], options: dict[str, Any]
) -> None:
    """The store restarts empty: what the engine gave it before says nothing."""
    rig = make_rig(store=store, epoch=0, groups=layout, num_blocks=64, **options)
    assert warm(rig, TOKENS[:WHOLE]) == WHOLE
    store.objects.clear()
    assert warm(rig, TOKENS[:WHOLE]) == WHOLE
    assert found(make_rig(store=store, epoch=0, groups=layout, num_blocks=64), TOKENS) == WHOLE


def test_an_engine_that_only_saves_says_what_l2_holds(make_rig: MakeRig, store: SharedStore) -> None:
    transfer = {"kv_role": "kv_producer"}
    assert warm(make_rig(store=store, epoch=0, transfer=transfer), TOKENS[:WHOLE]) == WHOLE
    other = make_rig(store=store, epoch=0, transfer=transfer)
    said = other.handed[other.serve(TOKENS, params={KEY: {"stamp": True, "stored": True}})][KEY]
    assert (said["stored_tokens"], said["cached_tokens"]) == (WHOLE, {"gpu": 0, "l1": 0, "l2": 0})


@pytest.mark.parametrize("kind", [Rig, AheadRig, AsyncRig, partial(FencedRig, stock=Stock())], ids=["Rig", "AheadRig", "AsyncRig", "fence"])
def test_an_answer_says_what_made_each_token(make_rig: MakeRig, kind: Callable[..., Rig]) -> None:
    rig = make_rig(kind, epoch=0)
    truth = Truth(rig)
    request, plain = rig.add(TOKENS, max_tokens=12, params=ASKED), rig.add(TOKENS, max_tokens=12)
    rig.steps(4)
    rig.weights = "w1"
    rig.steps(3)
    rig.weights = "w2"
    rig.weights = "w3"
    rig.run()
    truth.check(request.request_id)
    stamp = rig.handed[request.request_id][KEY]
    assert [one["weights"] for one in stamp["tokens"]] == [digest("w0"), digest("w1"), digest("w3")]
    assert stamp["epoch"] == 0
    assert stamp["cached_tokens"] == {"gpu": 0, "l1": 0, "l2": 0}
    assert KEY not in rig.handed.get(plain.request_id, {})


@pytest.mark.parametrize("kind", [Rig, AheadRig, AsyncRig])
@pytest.mark.parametrize("seed", range(12))
def test_stamps_follow_random_pushes(make_rig: MakeRig, kind: Callable[..., Rig], seed: int) -> None:
    drafts = 0 if kind is AsyncRig else seed % 3
    rig = make_rig(kind, epoch=0, num_blocks=24, num_ranks=1 + seed % 2, num_drafts=drafts if kind is AheadRig else 0)
    truth, source = Truth(rig), random.Random(seed)
    answers: list[str] = []
    for count in range(120):
        luck = source.random()
        if luck < 0.25:
            length = source.randrange(2, LENGTH)
            answers.append(rig.add(prompt(count, length), max_tokens=source.randrange(1, 30), params=ASKED).request_id)
        elif luck < 0.35:
            rig.weights = f"w{count}"
        elif luck < 0.38:
            rig.executor.collective_rpc("start_weight_update")
        elif luck < 0.41:
            rig.executor.collective_rpc("finish_weight_update")
        elif luck < 0.43:
            rig.executor.collective_rpc("anything")
        elif luck < 0.45 and kind is Rig:
            rig.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
        elif luck < 0.47:
            rig.adopt(count)
        if rig.scheduler.has_requests():
            rig.step()
    rig.executor.collective_rpc("finish_weight_update")
    rig.run()
    for name in answers:
        truth.check(name)
    assert len(rig.side.stamps) == 0


@pytest.mark.parametrize("epoch", [0, None], ids=["in an epoch", "in bypass"])
def test_tokens_of_a_step_in_which_somebody_wrote_past_vllm_are_unknown(make_rig: MakeRig, epoch: int | None) -> None:
    rig = make_rig(epoch=epoch)
    truth = Truth(rig)
    ends_with_it = rig.add(prompt(1, LENGTH), max_tokens=4, params=ASKED).request_id
    goes_on = rig.add(prompt(2, LENGTH), max_tokens=9, params=ASKED).request_id
    rig.steps(3)
    output = rig.scheduler.schedule()
    rig.write_past("w1")
    rig.update(output)
    rig.run()
    assert told(rig, ends_with_it) == [*[digest("w0")] * 2, UNKNOWN, UNKNOWN]
    assert told(rig, goes_on) == [*[digest("w0")] * 2, UNKNOWN, UNKNOWN, *[digest("w1")] * 5]
    truth.check(ends_with_it, unknown=2)
    truth.check(goes_on, unknown=2)


def test_half_a_push_is_neither_the_old_weights_nor_the_new(make_rig: MakeRig) -> None:
    rig = make_rig(epoch=0, num_ranks=2)
    truth = Truth(rig)
    request = rig.add(TOKENS, max_tokens=9, params=ASKED)
    rig.steps(3)
    rig.executor.fails.add("update_weights")
    with pytest.raises(RuntimeError):
        rig.executor.collective_rpc("update_weights", kwargs={"weights": "w1"})
    rig._weights = rig.executor.engine_weights
    rig.run()
    truth.check(request.request_id)
    assert [one["weights"] for one in rig.handed[request.request_id][KEY]["tokens"]] == [digest("w0", "w0"), digest("w1", "w0")]


def test_cached_tokens_say_where_they_came_from(make_rig: MakeRig, store: SharedStore) -> None:
    rig, tokens = filled(make_rig, store=store)

    def cached(rig: Any) -> dict[str, int]:
        found: dict[str, int] = rig.handed[rig.serve(tokens, params=ASKED)][KEY]["cached_tokens"]
        return found

    assert cached(rig) == {"gpu": 0, "l1": WHOLE, "l2": 0}
    assert cached(rig) == {"gpu": WHOLE, "l1": 0, "l2": 0}
    assert cached(make_rig(store=store, epoch=0)) == {"gpu": 0, "l1": 0, "l2": WHOLE}


def test_a_load_that_failed_is_no_cached_token(make_rig: MakeRig) -> None:
    rig, tokens = filled(make_rig)
    rig.workers[0].fail_loads = lambda job: True
    assert rig.handed[rig.serve(tokens, params=ASKED)][KEY]["cached_tokens"] == {"gpu": 0, "l1": 0, "l2": 0}


def test_every_answer_has_a_stamp_where_the_configuration_says_so(make_rig: MakeRig) -> None:
    rig = make_rig(epoch=0, extra={"stamp": True})
    assert rig.handed[rig.serve(TOKENS)][KEY]["tokens"] == [{"from_token": 0, "weights": digest("w0")}]
    rig.side.hooks.labelled(bytes.fromhex(digest("w0")), "step-41")
    assert rig.handed[rig.serve(TOKENS)][KEY]["tokens"] == [{"from_token": 0, "weights": digest("w0"), "label": "step-41"}]


@pytest.mark.parametrize("params", [{KEY: True}, {KEY: {"stamp": "yes"}}, {KEY: {}}, {KEY: "yes"}, {"other": 1}, {}, None])
def test_nobody_gets_a_stamp_unasked(make_rig: MakeRig, params: Any) -> None:
    rig = make_rig(epoch=0)
    assert KEY not in rig.handed.get(rig.serve(TOKENS, params=params), {})


def test_the_front_end_has_the_stamp_of_an_answer_that_is_aborted(make_rig: MakeRig) -> None:
    """It ends answers by itself, and then no output of the engine comes: at a stop string, or when all are aborted for a push."""
    rig = make_rig(epoch=0)
    request = rig.add(TOKENS, max_tokens=12, params=ASKED)
    rig.step()
    assert told(rig, request.request_id) == [digest("w0")]
    rig.weights = "w1"
    rig.steps(2)
    assert told(rig, request.request_id) == [digest("w0"), *[digest("w1")] * 2]
    rig.scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
    rig.run()
    assert len(rig.side.stamps) == 0


def test_an_adapter_that_is_replaced_is_another_one(make_rig: MakeRig) -> None:
    rig = make_rig(epoch=0, extra={"stamp": True})
    load(rig, adapter(), "first")
    request = add(rig, adapter(), TOKENS, max_tokens=6)
    rig.steps(2)
    before = rig.side.weights.adapters.held[1]
    rig.core.model_executor.collective_rpc("remove_lora", args=(1,))
    load(rig, adapter(), "second")
    rig.run()
    after = rig.side.weights.adapters.held[1]
    assert before != after
    made = rig.handed[request.request_id][KEY]["tokens"]
    assert [(one["from_token"], one["weights"]) for one in made] == [(0, digest("w0")), (2, digest("w0"))]
    assert [one["adapter"] for one in made] == [before[:16].hex(), after[:16].hex()]


# ------------------------------------------------------------------ what reports and front ends of GPUs bring about, step by step
W1, W2 = b"1" * 32, b"2" * 32


class Steps:
    """A request, and steps that sample a token each. A rank's report of a step may come with the results of the next."""

    def __init__(self, tokens_per_step: int = 1, kv_transfer_params: Any = None, **request: Any) -> None:
        self.watch = SimpleNamespace(known=W1, overwritten=None, found={5: W1}.get)
        self.root = SimpleNamespace(lost="")
        self.adapters = SimpleNamespace(held={}, found=lambda adapter, number: b"a")
        told: Any = (lambda: self.watch), self.adapters, self.root, lambda request: (64, 96)
        self.stamps = Stamps(*told, all_requests=True, tokens_per_step=tokens_per_step)
        known = SimpleNamespace(request_id="r", num_output_tokens=0, kv_transfer_params=kv_transfer_params, lora_request=None, **request)
        self.request = known
        self.stamps.open(self.request)

    def schedule(self, new: int | None = None) -> Any:
        """`new`: the request is new to the ranks, so many tokens of it computed."""
        output = SimpleNamespace(scheduled_new_reqs=[] if new is None else [SimpleNamespace(req_id="r", num_computed_tokens=new)])
        self.stamps.scheduled(output)
        return output

    def step(self, *reports: WorkerReport, new: int | None = None) -> None:
        self.end(self.schedule(new), *reports)

    def end(self, output: Any, *reports: WorkerReport, num_tokens: int = 1) -> None:
        self.stamps.made(output, reports)
        self.request.num_output_tokens += num_tokens

    def told(self, key: str = "weights") -> list[tuple[int, str]]:
        tokens = self.stamps.finish(self.request)["tokens"]  # type: ignore[index]
        return [(one["from_token"], one[key]) for one in tokens]


def test_a_stamp_is_of_its_request_alone() -> None:
    """What was written while nobody wanted a stamp, and other adapters, are nothing to it."""
    steps = Steps()
    steps.stamps.finish(steps.request)
    steps.watch.overwritten = W1
    steps.stamps.open(steps.request)
    steps.step(new=0)
    steps.adapters.held = {1: b"b"}
    steps.step()
    assert len(steps.stamps._open["r"].made) == 1
    assert steps.told() == [(0, shown(W1))]


def test_tokens_that_several_steps_decide_are_of_unknown_weights() -> None:
    steps = Steps(tokens_per_step=0)
    steps.step(new=0)
    assert steps.told() == [(0, UNKNOWN)]


@pytest.mark.parametrize("between", [W1, W2, None], ids=["nothing", "a push", "a push under way"])
def test_a_report_that_comes_with_the_next_step_counts_whatever_came_between(between: bytes | None) -> None:
    steps = Steps()
    steps.step(new=0)
    steps.step()  # somebody writes
    steps.watch.known = between
    steps.step(WorkerReport(late=[5]))
    after = [(2, shown(W2))] if between == W2 else []
    assert steps.told() == [(0, shown(W1)), (1, UNKNOWN), *after]


def test_a_late_report_doubts_all_that_the_steps_under_way_may_have_made() -> None:
    """Drafts, and two steps scheduled ahead: those hold what was doubted, too."""
    steps = Steps(tokens_per_step=4)
    outputs = [steps.schedule(0), *(steps.schedule() for _ in range(5))]
    for output in outputs[:4]:
        steps.end(output, num_tokens=4)
    steps.watch.known = W2
    outputs.append(steps.schedule())
    reported = WorkerReport(late=[5])
    child: Any = SimpleNamespace(kv_connector_output=SimpleNamespace(kv_connector_worker_meta=SimpleNamespace(metadata=[None, reported])))
    steps.end(outputs[4], *reports_of(child), num_tokens=4)
    for output in outputs[5:]:
        steps.end(output, num_tokens=4)
    assert steps.told() == [(0, shown(W1)), (4, UNKNOWN), (24, shown(W2))]


def test_the_same_of_an_adapter() -> None:
    steps = Steps()
    steps.stamps._open["r"].adapter = 1
    steps.adapters.held = {1: b"a"}
    steps.step(new=0)
    steps.step()
    steps.adapters.held = {1: b"b"}
    steps.step(WorkerReport(replaced=[(1, 7)]))
    assert steps.told("adapter") == [(0, shown(b"a")), (1, UNKNOWN), (2, shown(b"b"))]


def test_nobody_knows_what_a_step_was_made_with_where_changes_are_not_followed_any_more() -> None:
    steps = Steps()
    steps.step(new=0)
    steps.root.lost = "restart the engine"
    steps.step()
    assert steps.told() == [(0, shown(W1)), (1, UNKNOWN)]


@pytest.mark.parametrize(("epoch", "said"), [(0, 0), (-1, None)], ids=["in an epoch", "without a hub"])
def test_a_request_that_resumes_as_a_new_one_keeps_its_epoch_and_what_was_cached(epoch: int, said: int | None) -> None:
    """Its epoch is that of its names, whatever is adopted inside of the step."""
    steps = Steps(prefill_stats=None, epochkv_pin=Pin(b"", 0, epoch=epoch))
    steps.step(new=64)
    steps.request.epochkv_pin.epoch += 1
    steps.step(new=65)
    stamp = steps.stamps.finish(steps.request)
    assert stamp is not None
    assert (stamp["epoch"], stamp["cached_tokens"]["gpu"]) == (said, 64)


def test_a_session_has_no_stamp() -> None:
    """vLLM counts its tokens anew with each input."""
    steps = Steps(resumable=True)
    assert len(steps.stamps) == 0


def test_only_an_answer_of_l2_says_how_much_of_a_prompt_it_holds() -> None:
    for answered in (False, True):
        steps = Steps(kv_transfer_params={KEY: {"stored": True}})
        hear = steps.stamps.hearer_of_l2(steps.request)
        assert hear is not None
        if answered:
            hear()
        stamp = steps.stamps.finish(steps.request)
        assert stamp is not None
        assert (stamp["stored_tokens"], stamp["storable_tokens"]) == (64 * answered, 96)
