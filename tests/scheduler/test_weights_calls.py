"""Every call on workers that may write to weights ends the names that they had, before it is delegated; harmless ones cost nothing."""

import inspect
from importlib import import_module
from typing import Any

import pytest

from epochkv_connector.weights.adapters import ADAPTER_CALLS
from epochkv_connector.weights.watch import HARMLESS
from tests.scheduler.rigs import LENGTH, WHOLE, MakeRig, found, names, push_out
from tests.support.scheduler import BLOCK, SharedStore, prompt


def touch(worker: Any) -> None:
    """Any function, as `apply_model` sends one."""


@pytest.mark.parametrize("method", ["update_weights", "start_weight_update", "skyrl_start_weight_update", "sleep", touch])
def test_every_call_that_writes_ends_the_names_before_it_is_delegated(make_rig: MakeRig, method: Any, store: SharedStore) -> None:
    rig = make_rig(store=store, epoch=0)
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


def test_a_probe_between_requests_keeps_the_names_and_what_they_find(rig: Any) -> None:
    """prime-rl asks for `liveness_probe` now and then, also while requests run."""
    assert found(rig) == 0
    root = rig.pins.root.snapshot.root
    running = rig.add(prompt(2, LENGTH), max_tokens=4 * BLOCK)
    for _ in range(3):
        rig.steps(BLOCK)
        rig.executor.collective_rpc("liveness_probe")
        assert found(rig) == WHOLE
    rig.run()
    assert running.request_id in rig.finished
    assert rig.pins.root.snapshot.root == root
    assert found(rig, [*running.all_token_ids, 7]) > WHOLE  # also what it computed across the probes


def test_an_unknown_call_costs_a_digest_and_no_sharing(make_rig: MakeRig) -> None:
    rig = make_rig(num_blocks=12, epoch=0)
    found(rig)
    push_out(rig)
    looks, root = rig.watch.counters["digests"], rig.pins.root.snapshot.root
    for _ in range(3):
        rig.executor.collective_rpc("never_heard_of")
    assert found(rig) == WHOLE
    assert rig.watch.counters["digests"] == looks + 1
    assert rig.pins.root.snapshot.root is root


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


def test_vllms_source_shows_that_harmless_names_leave_weights_alone() -> None:
    for owner, function, line in HARMLESS_BECAUSE.values():
        module, _, kind = owner.rpartition(".")
        owner_type = getattr(import_module(module), kind)
        held = [found for name in (function, f"_{function}") if (found := getattr(owner_type, name, None)) is not None]
        if held:  # some versions have it in two halves, or not at all
            source = "".join(inspect.getsource(inspect.unwrap(found)) for found in held)
            assert line in source, function
            assert not [writer for writer in WRITERS if writer in source], function


def test_harmless_names_cost_nothing(rig: Any) -> None:
    found(rig)
    rig.executor.calls.clear()
    harmless = sorted(HARMLESS - ADAPTER_CALLS)
    for method in harmless:
        rig.executor.collective_rpc(method)
        assert found(rig) == WHOLE
    assert rig.executor.calls == harmless
