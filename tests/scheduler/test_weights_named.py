"""KV is named after the weights that the ranks hold, on the real scheduler: every call that may write, requests in every state, several
ranks, and engines that cannot know their weights."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest

from epochkv_connector.engine import blocks
from epochkv_connector.weights.adapters import ADAPTER_CALLS
from epochkv_connector.weights.watch import HARMLESS
from tests.support.scheduler import BLOCK, RequestStatus, Rig, SharedStore, prompt
from tests.support.scheduler_names import several
from tests.support.scheduler_worker import FakeExecutor

MakeRig = Callable[..., Any]
LENGTH = 8 * BLOCK + 3
TOKENS = prompt(1, LENGTH)
WHOLE = 8 * BLOCK


def push_out(rig: Any) -> None:
    """Evict everything idle from a GPU cache of 12 blocks."""
    for seed in range(100, 104):
        rig.serve(prompt(seed, LENGTH))


def found(rig: Any, tokens: list[int] = TOKENS) -> int:
    """Tokens that a new request with this prompt finds computed."""
    return int(rig.cached[rig.serve(tokens)])


def names(store: SharedStore, weights: bytes) -> list[str]:
    """What is stored under names of these weights."""
    return [key for key in store.objects if f"/w{weights.hex()[:16]}/" in key]


# ---------------------------------------------------------------------------------------------- every call


def touch(worker: Any) -> None:
    """Any function, as `apply_model` sends one."""


WRITING: dict[str, tuple[Any, ...]] = {
    "vLLM": (
        "start_weight_update",
        "start_draft_weight_update",
        "update_weights",
        "finish_weight_update",
        "reload_weights",
        "reset_weights",
        "load_model",
        "wake_up",
        "sleep",
        "discard",
        "elastic_ep_execute",
        touch,
    ),
    "verl": ("update_weights_from_ipc", "update_verl_delta_weights"),
    "SkyRL": ("skyrl_start_weight_update", "update_weights_ipc", "update_weights_nccl", "skyrl_finish_weight_update"),
    "TRL": ("update_named_param",),
    "OpenRLHF": ("update_weight", "update_weight_cuda_ipc"),
    "NeMo-RL": (
        "update_weights_via_ipc_zmq",
        "update_weights_from_collective",
        "nccl_reshard_refit",
        "sparse_delta_refit",
        "load_mtp_weights_from_disk",
    ),
    "prime-rl": ("update_weights_from_path",),
    "AReaL": ("areal_update_weights", "areal_update_weight_xccl", "areal_update_weights_lora", "areal_update_weight_lora_xccl"),
}
"""Every call of the frameworks that writes (the dossier of trainers, section 1.2), and vLLM's own."""

BESIDE: tuple[str, ...] = (
    "init_weight_transfer_engine",
    "shutdown_weight_transfer_engine",
    "update_config",
    "apply_model",
    "monkey_patch_model",
    "init_process_group",
    "report_device_id",
    "prepare_refit_info",
    "init_collective",
    "liveness_probe",
    "areal_init_update_weight_group",
    "areal_set_weight_meta",
    "never_heard_of",
)
"""Other calls that the frameworks make on workers: nobody vouches for them, so each costs a digest."""

ALL = [pytest.param(method, id=f"{owner}-{getattr(method, '__name__', method)}") for owner, those in WRITING.items() for method in those]


@pytest.mark.parametrize("method", ALL)
def test_every_call_that_writes_ends_the_names_before_it_is_delegated(make_rig: MakeRig, method: Any) -> None:
    store = SharedStore()
    rig = make_rig(store=store)
    rig.adopt(0)
    assert found(rig) == 0
    assert found(rig) == WHOLE
    running = rig.add(prompt(2, LENGTH), max_tokens=2 * BLOCK)
    rig.step()
    old, stored = rig.watch.value, len(store.objects)
    order: list[tuple[str, bool]] = []
    rig.executor.on_call = lambda name: order.append((name, rig.watch.pending))
    rig.executor.collective_rpc(method, kwargs={"weights": "w1"})
    rig._weights = "w1"
    name = method if isinstance(method, str) else "touch"
    assert (name, True) in order
    assert order.index(("end_device_work", True)) < order.index((name, True))
    if "start" in name:  # its end is a call of its own
        rig.step()
        assert rig.watch.value is None
        rig.executor.collective_rpc("finish_weight_update")
    if name == "sleep":
        rig.executor.collective_rpc("wake_up")
    order.clear()
    assert found(rig) == 0
    assert order[0][0] == "digest_weights"
    assert rig.watch.value not in (None, old)
    rig.run()
    assert running.request_id in rig.finished
    assert len(names(store, old)) == stored  # nothing more under the old names
    assert found(rig) == WHOLE  # and sharing goes on with the new ones
    rig.check_clean()


@pytest.mark.parametrize("method", BESIDE)
def test_an_unknown_call_costs_a_digest_and_no_sharing(make_rig: MakeRig, method: str) -> None:
    rig = make_rig(num_blocks=12)
    rig.adopt(0)
    found(rig)
    push_out(rig)
    looks, root = rig.watch.counters["looks"], rig.pins.root.snapshot.root
    for _ in range(3):
        rig.executor.collective_rpc(method)
    assert found(rig) == WHOLE
    assert rig.watch.counters["looks"] == looks + 1
    assert rig.pins.root.snapshot.root is root
    rig.check_clean()


RUNNER = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
WORKER = "vllm.v1.worker.gpu_worker.Worker"
BASE = "vllm.v1.worker.worker_base.WorkerBase"
HARMLESS_BECAUSE = {
    "add_lora": (RUNNER, "add_lora", "self.lora_manager.add_adapter(lora_request)"),
    "check_health": (WORKER, "check_health", "return"),
    "compile_or_warm_up_model": (WORKER, "compile_or_warm_up_model", "self.model_runner._dummy_run("),
    "compute_weight_checksums": (WORKER, "compute_weight_checksums", "compute_tensor_digests(self.model_runner.get_model())"),
    "determine_available_memory": (WORKER, "determine_available_memory", "self.model_runner.profile_run("),
    "execute_dummy_batch": (WORKER, "execute_dummy_batch", "self.model_runner._dummy_run("),
    "execute_model": (WORKER, "execute_model", "self.model_runner.execute_model("),
    "get_kv_cache_spec": (WORKER, "get_kv_cache_spec", "return self.model_runner.get_kv_cache_spec()"),
    "get_kv_connector_handshake_metadata": (WORKER, "get_kv_connector_handshake_metadata", "connector.get_handshake_metadata()"),
    "get_supported_kv_cache_layouts": (BASE, "get_supported_kv_cache_layouts", "get_current_attn_backends(self.vllm_config)"),
    "get_supported_tasks": (WORKER, "get_supported_tasks", "return self.model_runner.get_supported_tasks()"),
    "list_loras": (RUNNER, "list_loras", "return self.lora_manager.list_adapters()"),
    "pin_lora": (RUNNER, "pin_lora", "return self.lora_manager.pin_adapter(lora_id)"),
    "profile": (WORKER, "profile", "self.profiler.start("),
    "release_late_interaction_query_cache": (RUNNER, "release_late_interaction_query_cache", "release_queries(query_keys)"),
    "remove_lora": (RUNNER, "remove_lora", "return self.lora_manager.remove_adapter(lora_id)"),
    "reset_encoder_cache": (RUNNER, "reset_encoder_cache", "self.encoder_cache.clear()"),
    "reset_mm_cache": (RUNNER, "reset_mm_cache", "self.mm_budget.reset_cache()"),
    "sample_tokens": (WORKER, "sample_tokens", "return self.model_runner.sample_tokens(grammar_output)"),
    "shutdown": (WORKER, "shutdown", "ensure_kv_transfer_shutdown()"),
    "supports_draft_weight_updates": (BASE, "supports_draft_weight_updates", "return False"),
    "synchronize_device": (BASE, "synchronize_device", "torch.accelerator.synchronize()"),
    "take_draft_token_ids": (WORKER, "take_draft_token_ids", "return self.model_runner.take_draft_token_ids()"),
}
"""Of each harmless name the class and method of vLLM that it ends in, and a line of it that says what it does instead of writing."""
WRITERS = ("load_weights", "reload_weights", "load_model(", ".copy_(", "process_weights_after_loading", "set_(")


def test_every_harmless_name_is_accounted_for() -> None:
    assert set(HARMLESS_BECAUSE) == HARMLESS
    assert not HARMLESS & {method for those in WRITING.values() for method in those}


@pytest.mark.parametrize("method", sorted(HARMLESS_BECAUSE))
def test_vllms_source_shows_that_a_harmless_name_leaves_weights_alone(method: str) -> None:
    owner, function, line = HARMLESS_BECAUSE[method]
    module, _, kind = owner.rpartition(".")
    owner_type = getattr(import_module(module), kind)
    held = [found for name in (function, f"_{function}") if (found := getattr(owner_type, name, None)) is not None]
    if not held:
        pytest.skip(f"this version of vLLM has no {function}")
    source = "".join(inspect.getsource(inspect.unwrap(found)) for found in held)  # some versions have it in two roles
    assert line in source
    assert not [writer for writer in WRITERS if writer in source]


@pytest.mark.parametrize("method", sorted(HARMLESS - ADAPTER_CALLS))
def test_a_harmless_name_costs_nothing(make_rig: MakeRig, method: str) -> None:
    rig = make_rig()
    rig.adopt(0)
    found(rig)
    rig.executor.calls.clear()
    rig.executor.collective_rpc(method)
    assert found(rig) == WHOLE
    assert rig.executor.calls == [method]
    rig.check_clean()


# ---------------------------------------------------------------------------------------------- requests in every state


def test_a_push_while_a_request_runs_strands_it_and_nobody_finds_what_it_computes(make_rig: MakeRig) -> None:
    store = SharedStore()
    rig = make_rig(store=store)
    rig.adopt(0)
    running = rig.add(TOKENS, max_tokens=3 * BLOCK)
    for _ in range(4):
        rig.step()
    old = rig.watch.value
    rig.weights = "w1"
    before = len(store.objects)
    rig.run()
    said = list(running.all_token_ids)
    assert len(said) > LENGTH + 2 * BLOCK
    assert len(names(store, old)) == before == len(store.objects)
    assert found(rig, [*said, 7]) == 0
    rig.weights = "w0"
    assert found(rig, [*said, 8]) == WHOLE  # what it computed before, and not a block more
    rig.check_clean()


@pytest.mark.parametrize("push", ["rpc", "load_weights", "past"])
def test_a_push_while_a_request_waits_for_a_load(make_rig: MakeRig, push: str) -> None:
    rig = make_rig(num_blocks=12)
    rig.adopt(0)
    rig.serve(TOKENS)
    push_out(rig)
    (worker,) = rig.workers
    worker.hold_loads = True
    request = rig.add(TOKENS)
    rig.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    if push == "rpc":
        rig.weights = "w1"
    else:
        rig.write_past("w1")
        if push == "load_weights":
            compat_held(rig).writes += 2
        else:
            rig.watch._scheduled_at -= 1.0  # it was idle
    rig.step()
    worker.hold_loads = False
    worker.work()
    rig.run()
    assert worker.poison_orders == [request.request_id]
    assert rig.cached[request.request_id] == 0
    rig.weights = "w0"
    assert found(rig) == WHOLE
    rig.check_clean()


def compat_held(rig: Any) -> Any:
    """The rank of this process, as `load_weights` of a model in it finds it."""
    return rig.watch._ranks._held


def test_a_push_while_a_request_is_preempted(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.adopt(0)
    request = rig.add(TOKENS, max_tokens=BLOCK)
    for _ in range(3):
        rig.step()
    rig.scheduler._preempt_request(rig.scheduler.running.pop(), 0.0)
    assert not blocks.holds_blocks(request)
    rig.weights = "w1"
    rig.run()
    assert rig.pins.pin_of(request).saveable  # it holds nothing, so it is named anew
    assert found(rig) == WHOLE
    rig.weights = "w0"
    assert found(rig) == WHOLE  # of the first run
    rig.check_clean()


def test_a_preemption_after_the_push_names_the_request_anew(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=24)
    rig.adopt(0)
    request = rig.add(TOKENS, max_tokens=BLOCK)
    for _ in range(3):
        rig.step()
    rig.weights = "w1"
    rig.step()
    assert not rig.pins.pin_of(request).saveable
    rig.scheduler._preempt_request(rig.scheduler.running.pop(), 0.0)
    rig.run()
    assert found(rig) == WHOLE
    rig.check_clean()


def test_a_push_while_a_session_waits_for_its_next_turn(make_rig: MakeRig) -> None:
    store = SharedStore()
    rig = make_rig(store=store)
    rig.adopt(0)
    session = rig.request(TOKENS, max_tokens=2 * BLOCK)
    session.resumable = True
    rig.scheduler.add_request(session)
    for _ in range(3):
        rig.step()
    before = len(store.objects)
    rig.weights = "w1"
    for _ in range(3 * BLOCK):
        rig.step()
    assert len(store.objects) == before
    said = list(session.all_token_ids)
    rig.scheduler.finish_requests(session.request_id, RequestStatus.FINISHED_ABORTED)
    rig.run()
    assert found(rig, [*said, 5]) == 0
    rig.weights = "w0"
    assert found(rig, [*said, 6]) == WHOLE
    rig.check_clean()


def test_several_pushes_between_two_steps_are_one_change(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.adopt(0)
    found(rig)
    changes = rig.watch.counters["changes"]
    for index in range(20):
        rig.weights = f"w{index + 1}"
    rig.weights = "w0"
    assert found(rig) == WHOLE
    assert rig.watch.counters["changes"] <= changes + 2, "there and back: the first call of a push is looked at while the engine idles"


# ---------------------------------------------------------------------------------------------- H1: weights that return


def test_a_roll_back_while_requests_run_across_both_changes_brings_no_wrong_block_to_anybody(make_rig: MakeRig) -> None:
    engines = several(make_rig, 2, num_blocks=64)
    first = engines[0]
    carried = [first.add(prompt(seed, LENGTH), max_tokens=6 * BLOCK) for seed in (1, 2)]
    for _ in range(3):
        first.step()
    first.weights = "w1"
    for _ in range(2 * BLOCK):
        first.step()
    first.weights = "w0"
    for _ in range(2 * BLOCK):
        first.step()
    assert all(request.status is RequestStatus.RUNNING for request in carried)
    said = [list(request.all_token_ids) for request in carried]
    first.run()
    second = engines[1]
    for tokens in said:
        assert found(second, [*tokens, 9]) == WHOLE  # of before the first change; the oracle checks whose they are
    first = engines[0]
    for tokens in said:
        assert found(first, [*tokens, 9]) >= WHOLE  # what the second engine has stored meanwhile, too
    first.check_clean()
    second.check_clean()


def test_a_roll_back_while_a_request_waits_for_a_load(make_rig: MakeRig) -> None:
    engines = several(make_rig, 2, num_blocks=16)
    rig = engines[0]
    rig.serve(TOKENS)
    push_out(rig)
    (worker,) = rig.workers
    worker.hold_loads = True
    request = rig.add(TOKENS, max_tokens=2 * BLOCK)
    rig.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    for weights in ("w1", "w0"):
        rig.weights = weights
        rig.step()
    worker.hold_loads = False
    worker.work()
    rig.run()
    assert worker.poison_orders == [request.request_id]
    said = list(request.all_token_ids)
    other = engines[1]
    found(other, [*said, 9])
    rig = engines[0]
    found(rig, [*said, 9])
    rig.check_clean()
    other.check_clean()


def test_engines_with_equal_weights_share_whichever_way_they_got_them(make_rig: MakeRig) -> None:
    engines = several(make_rig, 2, num_blocks=12)
    first = engines[0]
    first.weights = "w1"
    found(first)
    second = engines[1]
    assert found(second) == 0  # it missed the push
    second.write_past("w1")
    second.executor.collective_rpc("never_heard_of")
    assert found(second) == WHOLE
    first = engines[0]
    first.weights = "w2"
    assert found(first) == 0
    first.weights = "w1"
    assert found(first) == WHOLE
    for rig in engines:
        rig.check_clean()


# ---------------------------------------------------------------------------------------------- H2: a change behind a step


def late_hit(rig: Any) -> list[int]:
    """Somebody writes past vLLM while a step is under way; what was asked for."""
    asked: list[int] = []
    rig.side.weights.link.propose = asked.append
    rig.add(prompt(5, LENGTH))
    output = rig.scheduler.schedule()
    rig.write_past("w1")
    rig.update(output)
    return asked


def test_a_change_behind_a_step_saves_nothing_of_it_and_asks_for_one_epoch(make_rig: MakeRig) -> None:
    store = SharedStore()
    rig = make_rig(store=store)
    rig.adopt(0)
    found(rig)
    old, before = rig.watch.value, len(store.objects)
    asked = late_hit(rig)
    assert asked == [1]
    rig.run()
    assert asked == [1]
    assert len(store.objects) == before
    assert rig.watch.value not in (None, old)
    assert found(rig, prompt(5, LENGTH)) == 0
    assert found(rig, prompt(5, LENGTH)) == WHOLE
    assert rig.watch.counters["late"] == 1
    assert not any(rig.foreign_tokens.values())


def test_an_ended_digest_stays_ended_until_the_next_epoch(make_rig: MakeRig) -> None:
    store = SharedStore()
    rig = make_rig(store=store)
    rig.adopt(0)
    found(rig)
    old = rig.watch.value
    late_hit(rig)
    rig.run()
    for _ in range(3):
        rig.weights = "w2"
        found(rig)
        rig.weights = "w0"
        before = len(store.objects)
        assert found(rig) == 0, "a digest that ended was used again"
        assert found(rig, prompt(5, LENGTH)) == 0
        assert rig.watch.value == old
        assert rig.connector.scheduler.gauges()["bypass"] == 1.0
        assert len(store.objects) == before
    rig.adopt(1)
    assert found(rig) == 0
    assert found(rig) == WHOLE
    assert not any(rig.stale_tokens.values())
    rig.check_clean()


def test_other_digests_of_the_epoch_go_on(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.adopt(0)
    late_hit(rig)
    rig.run()
    found(rig)
    assert found(rig) == WHOLE
    assert rig.pins.root.snapshot.shared


def test_a_lost_lease_does_not_bring_an_ended_digest_back(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.adopt(0)
    found(rig)
    late_hit(rig)
    rig.run()
    rig.weights = "w0"
    rig.lease_until = 0.0
    found(rig)
    rig.lease_until = float("inf")
    assert found(rig) == 0
    assert not rig.pins.root.snapshot.shared


def test_a_load_that_ends_with_the_step_of_a_change_leaves_nothing_open(make_rig: MakeRig) -> None:
    """Its success is recorded and cannot be taken back: waiting for it would keep the engine stepping for ever."""
    rig = make_rig(num_blocks=24)
    rig.adopt(0)
    rig.serve(TOKENS)
    for seed in range(100, 106):
        rig.serve(prompt(seed, LENGTH))
    (worker,) = rig.workers
    worker.hold_loads = True
    loading = rig.add(TOKENS)
    rig.step()
    assert loading.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    rig.add(prompt(5, LENGTH))
    output = rig.scheduler.schedule()
    rig.write_past("w1")
    worker.hold_loads = False
    rig.update(output)
    assert rig.watch.counters["late"] == 1
    rig.run()
    assert rig.leaks() == {}
    assert not any(rig.foreign_tokens.values())


def test_an_engine_without_tiers_sees_a_change_behind_a_step_too(make_rig: MakeRig) -> None:
    rig = make_rig(l1_bytes=None)
    rig.adopt(0)
    assert rig.books is None
    found(rig)
    asked = late_hit(rig)
    assert asked == [1]
    rig.run()
    rig.weights = "w0"
    assert found(rig, prompt(5, LENGTH)) == 0
    assert not any(rig.stale_tokens.values())


def test_a_change_behind_a_step_that_completes_no_block_is_seen_too(make_rig: MakeRig) -> None:
    """Its part of a block would be named with the rest of it, after the weights that were there before and after."""
    store = SharedStore()
    rig = make_rig(store=store)
    rig.adopt(0)
    request = rig.add(TOKENS, max_tokens=2 * BLOCK)
    for _ in range(3):
        rig.step()
    before = len(store.objects)
    for weights in ("w1", "w0"):
        output = rig.scheduler.schedule()
        assert output.num_scheduled_tokens == {request.request_id: 1}
        rig.write_past(weights)
        rig.update(output)
    rig.run()
    assert rig.watch.counters["late"] == 2
    assert len(store.objects) == before


def test_a_request_stranded_over_a_roll_back_is_named_anew_when_it_is_preempted(make_rig: MakeRig) -> None:
    """Its first name is right again, and those of blocks that it computed with other weights are not."""
    rig = make_rig()
    rig.adopt(0)
    request = rig.add(TOKENS, max_tokens=4 * BLOCK)
    for _ in range(3):
        rig.step()
    rig.weights = "w1"
    for _ in range(BLOCK):
        rig.step()
    rig.weights = "w0"
    for _ in range(BLOCK):
        rig.step()
    rig.scheduler._preempt_request(rig.scheduler.running.pop(), 0.0)
    rig.step()
    rig.step()
    rig.run()
    assert request.request_id in rig.finished
    rig.check_clean()


def test_a_preempted_request_finds_none_of_its_blocks_while_nobody_knows_the_weights(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.adopt(0)
    rig.executor.answers = lambda answer: alter(answer, weights=None, note="loading")
    rig.weights = "w1"
    request = rig.add(TOKENS, max_tokens=BLOCK)
    for _ in range(3):
        rig.step()
    rig.weights = "w2"
    rig.scheduler._preempt_request(rig.scheduler.running.pop(), 0.0)
    rig.run()
    assert request.request_id in rig.finished
    rig.check_clean()


def test_a_change_behind_a_step_without_a_hub_asks_nobody(make_rig: MakeRig) -> None:
    rig = make_rig(hub=False)
    found(rig)
    assert late_hit(rig) == []
    rig.run()
    assert found(rig, prompt(5, LENGTH)) == 0


# ---------------------------------------------------------------------------------------------- H3: ranks that differ


def test_no_shard_is_stored_before_every_rank_has_agreed(make_rig: MakeRig) -> None:
    store = SharedStore()
    rig = make_rig(store=store, num_ranks=2)
    rig.adopt(0)
    rig.workers[1].hold_saves = True
    request = rig.add(TOKENS, max_tokens=4)
    for _ in range(4):
        rig.step()
        assert store.objects == {}
    rig.workers[1].hold_saves = False
    rig.workers[1].work()
    rig.run()
    assert request.request_id in rig.finished
    assert len(store.objects) == 16
    assert found(rig) == WHOLE
    rig.check_clean()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_holds_other_weights_after_the_step_stores_nothing_anywhere(make_rig: MakeRig, rank: int) -> None:
    store = SharedStore()
    rig = make_rig(store=store, num_ranks=2)
    rig.adopt(0)
    asked: list[int] = []
    rig.side.weights.link.propose = asked.append
    rig.add(TOKENS, max_tokens=4)
    output = rig.scheduler.schedule()
    rig.write_past("w1", rank)
    rig.update(output)
    rig.run()
    assert store.objects == {}
    assert asked == [1]
    assert found(rig) == 0
    rig.run()
    assert len({key.split("/")[3] for key in store.objects}) == 1  # names of both ranks' weights, of one question
    assert not any(rig.foreign_tokens.values())


def test_two_engines_of_which_one_lost_a_rank_never_mix_shards(make_rig: MakeRig) -> None:
    """What went wrong without: one engine's rank 1 stores, an honest engine adds shard 0 under the name, a third reads both."""
    engines = several(make_rig, 3, num_ranks=2, num_blocks=12)
    skewed = engines[0]
    skewed.add(TOKENS, max_tokens=2)
    output = skewed.scheduler.schedule()
    skewed.write_past("w1", 0)
    skewed.update(output)
    skewed.run()
    honest = engines[1]
    assert found(honest) == 0
    third = engines[2]
    assert found(third) == WHOLE
    honest.check_clean()
    third.check_clean()


def test_a_push_that_missed_a_rank_has_a_name_of_its_own(make_rig: MakeRig) -> None:
    engines = several(make_rig, 2, num_ranks=2, num_blocks=12)
    half = engines[0]
    found(half)
    half.executor.on_call = lambda name: half.executor.write("w1", 0) if name == "update_weights" else None
    half.executor.collective_rpc("update_weights")
    half.write_past("w1", 0)
    assert found(half) == 0
    assert found(half) == WHOLE
    whole = engines[1]
    assert found(whole) == WHOLE  # of before
    whole.weights = "w1"
    assert found(whole) == 0
    half = engines[0]
    half.executor.on_call = lambda name: half.executor.write("w1") if name == "update_weights" else None
    half.executor.collective_rpc("update_weights")
    half.write_past("w1", 1)
    assert found(half) == WHOLE
    for rig in engines:
        rig.check_clean()


def test_ranks_that_swapped_their_weights_are_told_apart(make_rig: MakeRig) -> None:
    rig = make_rig(num_ranks=2)
    rig.adopt(0)
    rig.executor.ranks[:] = ["a", "b"]
    rig._weights = "a|b"
    rig.executor.collective_rpc("update_weights")
    found(rig)
    first = rig.watch.value
    rig.executor.ranks[:] = ["b", "a"]
    rig._weights = "b|a"
    rig.executor.collective_rpc("update_weights")
    assert found(rig) == 0
    assert rig.watch.value != first


# ---------------------------------------------------------------------------------------------- engines that cannot know


def alter(answer: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**answer, **changes}


SILENT: dict[str, Callable[[dict[str, Any]], Any]] = {
    "cannot": lambda answer: alter(answer, weights=None, note="the weights of x were packed away") if answer["rank"] else answer,
    "answers late": lambda answer: alter(answer, number=answer["number"] - 1) if answer["rank"] else answer,
    "lacks the plugin": lambda answer: None if answer["rank"] else answer,
    "never answers": lambda answer: (_ for _ in ()).throw(TimeoutError("RPC call to ask timed out")),
}


@pytest.mark.parametrize("case", list(SILENT))
def test_a_rank_that_cannot_say_makes_the_engine_share_nothing_and_say_so_once(
    make_rig: MakeRig, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    store = SharedStore()
    rig = make_rig(store=store, num_ranks=2)
    rig.adopt(0)
    found(rig)
    assert rig.connector.scheduler.gauges()["weights_known"] == 1.0
    before = len(store.objects)
    rig.executor.answers = SILENT[case]
    rig.weights = "w1"
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.WARNING, logger="vllm.epochkv.weights"):
        for _ in range(4):
            assert found(rig) == 0
            rig.watch._look_at = 0.0
    said = {record.getMessage() for record in caplog.records if "weights are unknown" in record.getMessage()}
    assert len(said) == 1
    assert rig.connector.scheduler.gauges()["weights_known"] == 0.0
    assert rig.connector.scheduler.gauges()["bypass"] == 1.0
    assert len(store.objects) == before
    rig.executor.answers = lambda answer: answer
    rig.watch._look_at = 0.0
    found(rig)
    assert found(rig) == WHOLE
    assert rig.connector.scheduler.gauges()["weights_known"] == 1.0
    rig.check_clean()


def test_requests_that_ran_while_nobody_knew_are_found_by_nobody(make_rig: MakeRig) -> None:
    store = SharedStore()
    rig = make_rig(store=store)
    rig.adopt(0)
    running = rig.add(TOKENS, max_tokens=4 * BLOCK)
    rig.step()
    rig.executor.answers = lambda answer: alter(answer, weights=None, note="loading")
    rig.weights = "w1"
    for _ in range(BLOCK):
        rig.step()
    rig.executor.answers = lambda answer: answer
    rig.watch._look_at = 0.0
    rig.weights = "w0"
    rig.run()
    said = list(running.all_token_ids)
    assert found(rig, [*said, 3]) == WHOLE
    rig.check_clean()


class RayDistributedExecutor(FakeExecutor):
    """By its name, vLLM's old Ray executor."""


def refuse_eplb(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    object.__setattr__(config.parallel_config, "enable_eplb", True)


def refuse_experts(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    object.__setattr__(config.parallel_config, "data_parallel_size", 2)
    monkeypatch.setattr(type(config.model_config), "is_moe", True)


def refuse_offload(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    config.offload_config.prefetch.offload_group_size = 4


REFUSED: dict[str, tuple[Callable[[Any, pytest.MonkeyPatch], None] | None, str]] = {
    "expert parallel over data parallel": (refuse_experts, "data_parallel_size 1"),
    "expert rebalancing": (refuse_eplb, "enable_eplb"),
    "prefetch offloading": (refuse_offload, "offload_group_size"),
    "old Ray executor": (None, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_engines_whose_weights_no_digest_describes_serve_without_tiers_and_say_why(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, case: str
) -> None:
    change, says = REFUSED[case]
    store = SharedStore()
    if change is None:
        monkeypatch.setattr("tests.support.scheduler.FakeExecutor", RayDistributedExecutor)

    class Refused(Rig):
        def _vllm_config(self, *args: Any) -> Any:
            config = super()._vllm_config(*args)
            if change is not None:
                change(config, monkeypatch)
            return config

    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.WARNING, logger="vllm.epochkv"):
        rig = make_rig(Refused, store=store)
    said = {record.getMessage() for record in caplog.records if "serves without caches" in record.getMessage()}
    assert len(said) == 1
    assert says in said.pop()
    rig.adopt(0)
    assert found(rig) == 0
    rig.weights = "w1"
    assert found(rig) == 0
    assert found(rig) == 0
    assert store.objects == {}
    assert store.asked == []
    assert rig.connector.scheduler.gauges()["weights_known"] == 0.0
    assert not {"digest_weights", "is_unchanged", "end_device_work"} & set(rig.executor.calls)  # workers are not asked beside running steps
    rig.check_clean()


# ---------------------------------------------------------------------------------------------- encoders


class EncoderCache:
    """As vLLM's `EncoderCacheManager`, as far as we look at it."""

    def __init__(self) -> None:
        self.cached: dict[str, set[str]] = {"picture": set()}

    def reset(self) -> None:
        self.cached.clear()


def with_encoder(rig: Any) -> EncoderCache:
    cache = EncoderCache()
    rig.scheduler.reset_encoder_cache = cache.reset
    rig.scheduler.encoder_cache_manager.cached = cache.cached
    rig.watch._has_encoder = True
    return cache


def test_outputs_of_an_encoder_go_with_the_weights_that_made_them(make_rig: MakeRig) -> None:
    rig = make_rig()
    rig.adopt(0)
    found(rig)
    cache = with_encoder(rig)
    rig.executor.collective_rpc("never_heard_of")
    found(rig)
    assert cache.cached  # the same weights
    rig.weights = "w1"
    found(rig)
    assert not cache.cached
    assert "reset_encoder_cache" in rig.executor.calls  # those of the ranks, too
    assert found(rig) == WHOLE
    rig.check_clean()


def test_while_a_request_refers_to_them_nothing_is_named(make_rig: MakeRig) -> None:
    store = SharedStore()
    rig = make_rig(store=store)
    rig.adopt(0)
    found(rig)
    cache = with_encoder(rig)
    cache.cached["picture"].add("a request")
    rig.weights = "w1"
    before = len(store.objects)
    assert found(rig) == 0
    assert found(rig) == 0
    assert len(store.objects) == before
    assert rig.connector.scheduler.gauges()["weights_known"] == 0.0
    assert "reset_encoder_cache" not in rig.executor.calls
    cache.cached["picture"].clear()
    found(rig)
    assert found(rig) == WHOLE
    assert not cache.cached
    rig.check_clean()


# ---------------------------------------------------------------------------------------------- our own errors


def broken(*args: Any, **kwargs: Any) -> Any:
    """An error of ours."""
    raise RuntimeError("broken")


PLACES: dict[str, Callable[[Any], tuple[Any, str]]] = {
    "watch.before_schedule": lambda rig: (rig.watch, "before_schedule"),
    "watch.calling": lambda rig: (rig.watch, "calling"),
    "watch._look": lambda rig: (rig.watch, "_look"),
    "watch._name": lambda rig: (rig.watch, "_name"),
    "watch._set": lambda rig: (rig.watch, "_set"),
    "weights.hold": lambda rig: (rig.side.weights, "hold"),
    "root.hold": lambda rig: (rig.pins.root, "hold"),
    "pins.strand": lambda rig: (rig.pins, "strand"),
    "blocks.num_named_blocks": lambda rig: (blocks, "num_named_blocks"),
    "blocks.holds_blocks": lambda rig: (blocks, "holds_blocks"),
    "state.apply": lambda rig: (rig.side.state, "apply"),
}


@pytest.mark.parametrize("place", list(PLACES))
def test_an_error_of_ours_during_a_change_never_reaches_vllm_and_leaves_nothing_named(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    store = SharedStore()
    rig = make_rig(store=store)
    rig.adopt(0)
    rig.serve(prompt(3, LENGTH))
    running = rig.add(TOKENS, max_tokens=2 * BLOCK)
    rig.step()
    before = len(store.objects)
    with monkeypatch.context() as patched:
        patched.setattr(*PLACES[place](rig), broken)
        rig.weights = "w1"
        for _ in range(4):
            rig.step()
    assert rig.connector._guard.errors
    rig.run()
    assert running.request_id in rig.finished
    for tokens in (prompt(3, LENGTH), TOKENS, list(running.all_token_ids)):
        assert found(rig, tokens) == 0
        assert found(rig, tokens) == 0
    for weights in ("w0", "w2"):
        rig.weights = weights
        assert found(rig, prompt(3, LENGTH)) == 0
    assert len(store.objects) == before
    assert rig.connector.scheduler.gauges()["broken"] == 1.0
    assert not any(rig.foreign_tokens.values())
    assert not any(rig.stale_tokens.values())


@pytest.mark.parametrize("place", ["late", "end", "propose", "suspect"])
def test_an_error_of_ours_behind_a_step_never_reaches_vllm_and_leaves_nothing_named(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    store = SharedStore()
    rig = make_rig(store=store)
    rig.adopt(0)
    rig.serve(prompt(3, LENGTH))
    before = len(store.objects)
    rig.add(prompt(5, LENGTH), max_tokens=3)
    output = rig.scheduler.schedule()
    rig.write_past("w1")
    target = {"late": rig.watch, "suspect": rig.watch, "end": rig.pins.root, "propose": rig.side.weights.link}[place]
    with monkeypatch.context() as patched:
        patched.setattr(target, place, broken)
        rig.update(output)
    assert rig.connector._guard.errors
    rig.run()
    rig.weights = "w0"
    for _ in range(2):
        assert found(rig, prompt(5, LENGTH)) == 0
    assert len(store.objects) == before
    assert rig.block_pool.get_num_free_blocks() == rig.free_at_start
