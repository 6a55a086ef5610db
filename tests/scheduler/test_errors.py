"""Errors of our own code: each costs a miss or a recompute, and never an old answer, a lost block or a request that waits for ever."""

import operator
from typing import Any

import pytest

from epochkv_connector.wire import Phase
from tests.scheduler.rigs import LENGTH, TOKENS, FailsOnce, MakeRig, begin_load, filled, found, preempt_last, release
from tests.support.scheduler import BLOCK, SharedStore, prompt

pytestmark = pytest.mark.unclean  # `check_unharmed` instead


def check_unharmed(rig: Any) -> None:
    """Nothing old or foreign was used, every GPU block is back, the engine may sleep."""
    assert not any(rig.foreign_tokens.values())
    assert not any(rig.stale_tokens.values())
    assert rig.block_pool.get_num_free_blocks() == rig.free_at_start
    assert not rig.connector.has_pending_push_work()
    assert rig.pins.old_epoch_requests() == 0
    assert not rig.pins.busy()
    assert sum(rig.connector._guard.errors.values()) > 0, "nothing was counted"


@pytest.mark.parametrize("failing", ["forget_request", "begin", "answer", "forget_request in bypass"])
def test_a_local_hit_found_under_the_old_root_is_dropped(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, failing: str) -> None:
    """vLLM looks into its own cache before it asks us; an error in our answer must not let it keep what it found."""
    rig = make_rig(store=SharedStore(), epoch=0)
    rig.serve(TOKENS)
    request = rig.add(TOKENS)
    function, _, bypass = failing.partition(" in ")
    if bypass:  # the request has a name of its own by the time of the error, and not yet when vLLM looked for it
        rig.executor.collective_rpc("start_weight_update")
        rig.write_past("w1")
    else:
        rig.adopt(1, weights="w1")
    failure = FailsOnce(rig.tiers.hits, function, monkeypatch)
    rig.run()
    assert failure.raised
    assert rig.cached[request.request_id] == 0
    check_unharmed(rig)
    rig.serve(TOKENS)
    assert found(rig) == (0 if bypass else 8 * BLOCK)


@pytest.mark.parametrize("failed", [False, True])
def test_a_load_that_ends_while_our_code_fails(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, failed: bool) -> None:
    """Overtaken by an adoption, it is no success; failed, it is over, and no adoption overtakes it any more."""
    rig, tokens = filled(make_rig)
    request = begin_load(rig, tokens, max_tokens=2)
    rig.workers[0].fail_loads = lambda job: failed
    output = rig.scheduler.schedule()
    if not failed:
        rig.adopt(1, weights="w1")
    release(rig)
    failure = FailsOnce(rig.side.steps, "_record_loads", monkeypatch)
    rig.update(output)
    assert failure.raised
    if failed:
        rig.adopt(1, weights="w1")
    rig.run()
    assert request.request_id in rig.finished
    rig.adopt(2, weights="w2")
    rig.serve(prompt(2, LENGTH))
    check_unharmed(rig)
    assert rig.side.state.counters["invalidated_loads"] == (not failed)


def test_one_acknowledgement_that_cannot_be_applied_loses_no_other(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.workers[0].hold_saves = True
    for seed in (1, 2):
        rig.add(prompt(seed, LENGTH))
    rig.step()
    failure = FailsOnce(rig.tiers.state.index, "insert", monkeypatch)
    release(rig)
    rig.run()
    assert failure.raised
    check_unharmed(rig)


@pytest.mark.parametrize("owner", ["tiers.end_step", "tiers.hits.end_step", "tiers.saves.planner.draft", "tiers.saves.collect"])
def test_saves_that_were_never_sent_give_their_blocks_back(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, owner: str) -> None:
    rig = make_rig(store=SharedStore(), epoch=0)
    owner, _, failing = owner.rpartition(".")
    failure = FailsOnce(operator.attrgetter(owner)(rig), failing, monkeypatch, after=failing == "draft")
    requests = [rig.add(prompt(seed, LENGTH), max_tokens=3) for seed in (1, 2)]
    rig.run()
    assert failure.raised
    assert {request.request_id for request in requests} <= rig.finished
    check_unharmed(rig)


def test_saves_of_several_ranks_do_not_keep_an_engine_awake_after_an_error(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks wait for word that all of them have copied a save, and the engine steps until they were told."""
    rig = make_rig(store=SharedStore(), num_ranks=2, epoch=0)
    for worker in rig.workers:
        worker.hold_saves = True
    rig.add(TOKENS, max_tokens=4)
    rig.step()
    failure = FailsOnce(rig.tiers, "end_step", monkeypatch)
    rig.step()
    assert failure.raised
    release(rig)
    rig.run()
    check_unharmed(rig)


@pytest.mark.parametrize("how", ["unsent", "sent", "not begun"])
def test_a_hit_that_no_rank_is_told_of_is_a_failed_load(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    rig, tokens = filled(make_rig)
    if how == "unsent":
        monkeypatch.setattr(rig.tiers.loads, "_bind", lambda *_: None)
    failure = FailsOnce(rig.tiers.loads, "commit", monkeypatch) if how == "not begun" else FailsOnce(rig.tiers, "end_step", monkeypatch)
    request = rig.serve(tokens)
    assert failure.raised
    assert rig.cached[request] == 0
    check_unharmed(rig)


def test_a_report_that_was_not_counted_is_not_asked_for_again(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM dies of a finished load that it does not wait for."""
    rig, tokens = filled(make_rig)
    failure = FailsOnce(rig.tiers, "on_acks", monkeypatch)
    request = rig.serve(tokens, max_tokens=4)
    assert failure.raised
    assert rig.cached[request] == 8 * BLOCK
    check_unharmed(rig)


def test_what_is_computed_after_an_error_counts_as_used(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or a reset with requests running would keep the root, and KV of the old weights under it."""
    failure = FailsOnce(rig.tiers.hits, "forget_request", monkeypatch)
    rig.add(prompt(1, LENGTH), max_tokens=3)
    rig.step()
    assert failure.raised
    root = rig.pins.root.snapshot.root
    rig.scheduler.reset_connector_cache()
    assert rig.pins.root.snapshot.root != root
    assert rig.pins.old_epoch_requests() == 1
    rig.run()
    check_unharmed(rig)


def test_a_request_that_cannot_be_forgotten_is_not_carried_for_ever(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    failure = FailsOnce(rig.tiers, "finish", monkeypatch)
    rig.serve(prompt(1, LENGTH))
    rig.adopt(1, weights="w1")
    assert failure.raised
    assert {name: count for name, count in rig.leaks().items() if not name.startswith("tiers.")} == {}
    check_unharmed(rig)


def test_an_error_at_the_end_of_a_step_does_not_hold_acknowledgements_back(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make_rig(epoch=0)
    rig.add(prompt(1, LENGTH), max_tokens=3)
    rig.step()
    rig.adopt(1, weights="w1")
    failure = FailsOnce(rig.side.state.events, "cleared", monkeypatch)
    rig.scheduler.schedule()
    assert failure.raised
    assert not rig.pins.busy()


def test_a_reset_that_fails_is_no_success(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.serve(TOKENS)
    FailsOnce(rig.pins.root, "reset", monkeypatch)
    assert not rig.scheduler.reset_prefix_cache(reset_connector=True)
    FailsOnce(rig.tiers, "reset", monkeypatch)
    assert rig.scheduler.reset_prefix_cache(reset_connector=True)  # the names changed, which makes it true
    assert found(rig) == 0
    check_unharmed(rig)


def test_blocks_that_requests_hold_anyhow_do_not_put_preemption_off(rig: Any) -> None:
    rig.workers[0].hold_saves = True
    request = rig.add(prompt(1, LENGTH), max_tokens=4)
    rig.step()
    assert rig.tiers.state.jobs.num_gpu_blocks
    assert not rig.connector.has_pending_block_frees()  # the end of the save would free nothing
    while request.request_id not in rig.finished:
        rig.step()
    assert rig.connector.has_pending_block_frees()
    release(rig)
    rig.run()
    rig.check_clean()


def test_a_lost_acknowledgement_of_a_load_costs_hits_and_no_request(make_rig: MakeRig) -> None:
    """A rank's report of acknowledgements can be lost to an error of ours. No second load may be promised while that one is open."""
    rig, tokens = filled(make_rig)
    request = begin_load(rig, tokens, max_tokens=4)
    release(rig)
    lost = [ack for ack in rig.workers[0].acks if ack.phase is Phase.LOADED]
    assert lost
    rig.workers[0].acks = [ack for ack in rig.workers[0].acks if ack not in lost]
    while not rig.scheduler.running:
        rig.step()
    assert rig.tiers.loads.is_open(request.request_id)
    preempt_last(rig)
    assert rig.block_pool.reset_prefix_cache()  # L1 still has them
    rig.run()
    assert request.request_id in rig.finished


def test_a_lost_acknowledgement_of_a_save_holds_nobody_up_beyond_its_deadline(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its blocks stay taken, as the rank may still read them. But others are preempted again, and the engine comes to rest."""
    rig = make_rig(epoch=0, num_blocks=12)
    rig.workers[0].hold_saves = True
    rig.add(prompt(1, 4 * BLOCK))
    rig.steps(2)
    rig.workers[0].saves.clear()
    rig.workers[0].hold_saves = False
    requests = [rig.add(prompt(seed, 2 * BLOCK), max_tokens=4 * BLOCK) for seed in (2, 3)]
    rig.steps(10 * BLOCK)
    assert {request.request_id for request in requests}.isdisjoint(rig.finished), "both wait for the blocks of the save"
    monkeypatch.setattr(rig.tiers.state, "clock", lambda: 1e9)
    rig.run()
    assert {request.request_id for request in requests} <= rig.finished
    assert rig.tiers.stats()["jobs_overdue"] == 1
