"""Adapters with the real Scheduler: names by what their files hold, and the end of names when vLLM puts other weights in place."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.lora.request import LoRARequest

from epochkv_connector import adapters
from tests.helpers_scheduler import BLOCK, SharedStore, prompt

MakeRig = Callable[..., Any]
LENGTH = 8 * BLOCK + 3


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that stands still for half a second would make an adapter this engine's own."""
    monkeypatch.setattr(adapters, "WAIT_SECONDS", 30.0)


def write_adapter(folder: Path, weights: bytes) -> str:
    """The files of an adapter, older than any engine that is made from now on; returns its path."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text('{"r": 8}')
    (folder / "adapter_model.safetensors").write_bytes(weights)
    time.sleep(0.05)
    return str(folder)


def adapter(number: int, path: str, *, load_inplace: bool = False) -> LoRARequest:
    return LoRARequest("adapter", number, path, load_inplace=load_inplace)


def add(rig: Any, used: LoRARequest, tokens: list[int], max_tokens: int = 1) -> Any:
    """A request that uses an adapter, in vLLM's queue."""
    request = rig.request(tokens, max_tokens=max_tokens)
    request.lora_request = used
    request.block_hashes = []
    request.block_hashes = rig.hasher(request)
    rig.scheduler.add_request(request)
    return request


def run_a_little(rig: Any, used: LoRARequest, tokens: list[int], max_tokens: int = 1) -> Any:
    """A request that is in the middle of its work: a few steps, in which its prompt is computed, or is being loaded."""
    request = add(rig, used, tokens, max_tokens)
    for _ in range(3):
        rig.step()
    return request


def serve(rig: Any, used: LoRARequest, tokens: list[int]) -> int:
    """Run it alone; returns how many tokens were found in a cache, none of them with the KV of other weights."""
    request = add(rig, used, tokens)
    rig.run()
    assert request.request_id in rig.finished
    assert rig.stale_tokens[request.request_id] == 0
    return int(rig.cached[request.request_id])


def replace(rig: Any, used: LoRARequest, weights: str) -> None:
    """vLLM is told to load `used`, which comes into effect at once."""
    rig.fence.adapter_loading(used)
    rig.weights = weights


# ---------------------------------------------------------------------------------------------- names


@pytest.mark.parametrize("weights_source", ["Pushed", "Model"])
def test_an_adapter_is_shared_by_what_its_files_hold(make_rig: MakeRig, tmp_path: Path, weights_source: str) -> None:
    store = SharedStore()
    tokens = prompt(1, LENGTH)

    def ask(path: str, weights: str) -> int:
        rig = make_rig(store=store, weights=weights, weights_source=weights_source)
        rig.adopt(0)
        found = serve(rig, adapter(1, path), tokens)
        rig.check_clean()
        return found

    path = write_adapter(tmp_path / "a", b"one")
    assert ask(path, "with one") == 0
    assert ask(path, "with one") == 8 * BLOCK
    write_adapter(tmp_path / "a", b"two")
    assert ask(path, "with two") == 0
    assert ask("nowhere/at-all", "with three") == 0
    assert ask("nowhere/at-all", "with four") == 0


def test_nothing_is_saved_of_an_adapter_whose_files_change_after_the_pin(make_rig: MakeRig, tmp_path: Path) -> None:
    """vLLM may read them (again) at any time between."""
    store = SharedStore()
    path = write_adapter(tmp_path / "a", b"one")
    rig = make_rig(store=store, weights_source="Model")
    rig.adopt(0)
    request = add(rig, adapter(1, path), prompt(1, LENGTH))
    write_adapter(tmp_path / "a", b"two")
    rig.run()
    assert request.request_id in rig.finished
    assert not store.objects
    assert rig.half.stats()["saves_emitted"] == 0
    rig.check_clean()


def test_files_that_vllm_reads_again_are_found_under_no_name_of_before(make_rig: MakeRig, tmp_path: Path) -> None:
    """They are overwritten, and vLLM goes on with what it has read until it needs the room for another adapter."""
    rig = make_rig(num_blocks=64, weights="one")
    rig.adopt(0)
    used, tokens = adapter(1, write_adapter(tmp_path / "a", b"one")), prompt(1, LENGTH)
    assert serve(rig, used, tokens) == 0
    write_adapter(tmp_path / "a", b"two")
    assert serve(rig, used, tokens) == 0
    rig.weights = "two"
    assert serve(rig, used, tokens) == 0
    rig.check_clean()


def test_files_that_change_while_a_request_waits_end_the_names_they_had(make_rig: MakeRig, tmp_path: Path) -> None:
    """vLLM reads them when the request is scheduled, as it needed the room for another adapter meanwhile; and the version from
    before lies elsewhere, too."""
    store = SharedStore()
    path, copy, tokens = write_adapter(tmp_path / "a", b"one"), write_adapter(tmp_path / "copy", b"one"), prompt(1, LENGTH)
    rig = make_rig(num_blocks=64, store=store, weights="one")
    rig.adopt(0)
    assert serve(rig, adapter(1, path), tokens) == 0
    assert len(store.objects) == 8
    waiting = add(rig, adapter(1, path), [*tokens, *prompt(2, LENGTH)], 2 * BLOCK)
    write_adapter(tmp_path / "a", b"two")
    rig.weights = "two"
    rig.run()
    assert rig.cached[waiting.request_id] == 0
    assert len(store.objects) == 8
    replace(rig, adapter(2, copy), "one")
    assert serve(rig, adapter(2, copy), [*waiting.all_token_ids, 5]) == 0
    rig.check_clean()


# ---------------------------------------------------------------------------------------------- loaded in place


def test_requests_that_load_in_place_find_nothing_and_are_not_found(make_rig: MakeRig, tmp_path: Path) -> None:
    """vLLM loads it again when such a request is scheduled: nobody can say what was computed before, and what after."""
    rig = make_rig(num_blocks=64)
    rig.adopt(0)
    path, tokens = write_adapter(tmp_path / "a", b"one"), prompt(1, LENGTH)
    assert serve(rig, adapter(1, path), tokens) == 0
    assert serve(rig, adapter(1, path), tokens) == 8 * BLOCK
    for load_inplace in (True, True, False, False):
        assert serve(rig, adapter(1, path, load_inplace=load_inplace), tokens) == 0
    assert serve(rig, adapter(2, path), tokens) == 0, "unloaded, and loaded again: vLLM gives it another id"
    assert serve(rig, adapter(2, path), tokens) == 8 * BLOCK
    rig.check_clean()


def test_requests_that_load_in_place_at_the_same_time_all_end(make_rig: MakeRig) -> None:
    """Each of them ends what was pinned before: that must not go back and forth."""
    rig = make_rig(num_blocks=24)
    rig.adopt(0)
    asked = [add(rig, adapter(1, "/adapters/a", load_inplace=seed % 2 == 0), prompt(seed, LENGTH), 2 * BLOCK) for seed in range(6)]
    rig.run()
    assert {request.request_id for request in asked} <= rig.finished
    rig.check_clean()


def test_versions_of_an_adapter_loaded_in_place_are_never_shared(make_rig: MakeRig, tmp_path: Path) -> None:
    """Two engines that loaded it in place may have two versions, and an engine that starts anew counts from 0."""
    store = SharedStore()
    tokens = prompt(1, LENGTH)
    path = write_adapter(tmp_path / "a", b"one")
    first = make_rig(num_blocks=24, store=store)
    first.adopt(0)
    # A request runs and another waits while the adapter is loaded in place: neither may save what it computes from now on.
    running = run_a_little(first, adapter(1, path), tokens, 2 * BLOCK)
    saved = len(store.objects)
    assert saved == 8
    add(first, adapter(1, path, load_inplace=True), tokens, 2 * BLOCK)
    first.run()
    assert len(store.objects) == saved
    assert running.request_id in first.finished
    first.check_clean()
    second = make_rig(store=store, weights="w1")  # its version of the adapter
    second.adopt(0)
    assert serve(second, adapter(1, path, load_inplace=True), tokens) == 0
    assert len(store.objects) == saved
    second.check_clean()


REPLACEMENTS = pytest.mark.parametrize("load_inplace", [True, False], ids=["in place", "id used again"])
"""As `/v1/load_lora_adapter` does it, and as callers of the engine may who give ids themselves."""


@REPLACEMENTS
def test_requests_from_before_a_load_in_place_save_nothing_under_its_old_version(
    make_rig: MakeRig, tmp_path: Path, load_inplace: bool
) -> None:
    """No request that is known then says a word of it. One runs, another waits."""
    store = SharedStore()
    path, other = write_adapter(tmp_path / "a", b"one"), write_adapter(tmp_path / "b", b"two")
    rig = make_rig(num_blocks=24, store=store)
    rig.adopt(0)
    running = run_a_little(rig, adapter(1, path), prompt(1, LENGTH), 2 * BLOCK)
    waiting = add(rig, adapter(1, path), prompt(2, LENGTH), 2 * BLOCK)
    saved = len(store.objects)
    assert saved == 8
    replace(rig, adapter(1, other, load_inplace=load_inplace), "two")
    rig.run()
    assert {running.request_id, waiting.request_id} <= rig.finished
    assert len(store.objects) == saved
    assert rig.cached[waiting.request_id] == 0
    assert serve(rig, adapter(2, other), prompt(3, LENGTH)) == 0
    assert len(store.objects) > saved, "an adapter that nothing was mixed with is shared"
    rig.check_clean()


@REPLACEMENTS
def test_a_version_that_comes_back_does_not_find_what_its_requests_computed_without_it(
    make_rig: MakeRig, tmp_path: Path, load_inplace: bool
) -> None:
    """A request goes on under the old names with the new weights; then the old version is loaded once more."""
    store = SharedStore()
    path, other = write_adapter(tmp_path / "a", b"one"), write_adapter(tmp_path / "b", b"two")
    rig = make_rig(num_blocks=64, store=store, weights="one")
    rig.adopt(0)
    running = run_a_little(rig, adapter(1, path), prompt(1, LENGTH), 6 * BLOCK)
    replace(rig, adapter(1, other, load_inplace=load_inplace), "two")
    rig.run()
    replace(rig, adapter(2, path), "one")
    assert serve(rig, adapter(2, path), [*running.all_token_ids, 5]) == 0
    rig.check_clean()
    elsewhere = make_rig(num_blocks=64, store=store, weights="one")
    elsewhere.adopt(0)
    assert serve(elsewhere, adapter(1, path), [*running.all_token_ids, 5]) == 8 * BLOCK, "what was computed before is good"


@REPLACEMENTS
def test_a_request_that_waits_finds_nothing_of_the_version_before(make_rig: MakeRig, tmp_path: Path, load_inplace: bool) -> None:
    """Also where the adapter is younger than the engine, and so this engine's own."""
    rig = make_rig(num_blocks=64, weights="one")
    rig.adopt(0)
    path, tokens = write_adapter(tmp_path / "a", b"one"), prompt(1, LENGTH)
    assert serve(rig, adapter(1, path), tokens) == 0
    waiting = add(rig, adapter(1, path), tokens)
    replace(rig, adapter(1, str(tmp_path / "b"), load_inplace=load_inplace), "two")
    rig.run()
    assert rig.cached[waiting.request_id] == 0
    assert serve(rig, adapter(1, path), tokens) == 0, "another that was sent before"
    rig.check_clean()


@REPLACEMENTS
def test_a_request_of_the_id_before_finds_nothing_that_another_id_has_mixed(make_rig: MakeRig, tmp_path: Path, load_inplace: bool) -> None:
    """It waits, and has its names, while its adapter is unloaded and loaded again, which gives it another id; that id's weights are
    replaced in the middle of the same prompt."""
    store = SharedStore()
    path, other, tokens = write_adapter(tmp_path / "a", b"one"), write_adapter(tmp_path / "b", b"two"), prompt(1, LENGTH)
    rig = make_rig(num_blocks=64, store=store, weights="one", max_num_seqs=1, max_batched_tokens=4 * BLOCK)
    rig.adopt(0)
    running, waiting = add(rig, adapter(2, path), tokens), add(rig, adapter(1, path), tokens)
    rig.step()
    assert rig.fence.pin_of(waiting).root == rig.fence.pin_of(running).root
    replace(rig, adapter(2, other, load_inplace=load_inplace), "two")
    saved = len(store.objects)
    while running.request_id not in rig.finished:
        rig.step()
    assert len(store.objects) == saved
    rig.weights = "one"  # of the id that waits
    rig.run()
    assert rig.cached[waiting.request_id] == 0
    assert len(store.objects) == saved
    rig.check_clean()


def test_what_a_request_says_in_bypass_counts_when_the_lease_is_back(make_rig: MakeRig, tmp_path: Path) -> None:
    store = SharedStore()
    path = write_adapter(tmp_path / "a", b"one")
    rig = make_rig(num_blocks=64, store=store, weights="one")
    rig.adopt(0)
    lease, rig.lease_until = rig.lease_until, 0.0
    assert serve(rig, adapter(1, path, load_inplace=True), prompt(1, LENGTH)) == 0
    rig.lease_until = lease
    assert serve(rig, adapter(1, path), prompt(2, LENGTH)) == 0
    assert not store.objects
    rig.check_clean()


def test_a_request_that_loaded_in_place_leaves_its_own_kv_when_it_is_loaded_again(make_rig: MakeRig) -> None:
    """It was preempted, and would come back to what it had computed with the weights before."""
    rig = make_rig(num_blocks=14, weights="one")
    rig.adopt(0)
    rig.fence.adapter_loading(adapter(1, "/adapters/a", load_inplace=True))
    pins = []
    request = add(rig, adapter(1, "/adapters/a", load_inplace=True), prompt(1, LENGTH), 2)
    for _ in range(2):
        pins.append(rig.fence.pin_of(request))
        assert pins[-1].alone
        assert rig.fence.is_current(pins[-1])
        rig.fence.adapter_loading(adapter(1, "/adapters/a", load_inplace=True))
        assert not rig.fence.is_current(pins[-1])
        rig.fence.repin(request, must=True)
    assert len({pin.root for pin in pins}) == 2
    rig.run()
    assert request.request_id in rig.finished
    rig.check_clean()


@REPLACEMENTS
def test_what_is_being_loaded_for_the_version_before_fails(make_rig: MakeRig, tmp_path: Path, load_inplace: bool) -> None:
    store = SharedStore()
    path, tokens = write_adapter(tmp_path / "a", b"one"), prompt(1, LENGTH)
    first = make_rig(num_blocks=64, store=store, weights="one")
    first.adopt(0)
    assert serve(first, adapter(1, path), tokens) == 0
    rig = make_rig(num_blocks=64, store=store, weights="one")
    rig.adopt(0)
    rig.workers[0].hold_loads = True
    loading = run_a_little(rig, adapter(1, path), tokens)
    assert rig.half.open_loads() == {loading.request_id}
    replace(rig, adapter(1, str(tmp_path / "b"), load_inplace=load_inplace), "two")
    rig.workers[0].hold_loads = False
    rig.run()
    assert loading.request_id in rig.finished
    assert rig.stale_tokens[loading.request_id] == 0
    rig.check_clean()


def test_an_error_of_ours_does_not_keep_vllm_from_loading(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    from epochkv_connector import compat
    from epochkv_connector.fencing import Fence

    actions: list[Callable[[Any], None]] = []
    monkeypatch.setattr(compat, "around_adapter_load", lambda before, after: actions.append(before))

    def broken(fence: Fence, used: LoRARequest) -> None:
        raise MemoryError(f"no thread for {used.lora_name}")

    monkeypatch.setattr(Fence, "adapter_loading", broken)
    rig = make_rig()
    (action,) = actions
    action(adapter(1, "/adapters/a"))
    assert rig.connector._guard.errors == {"adapter_loading": 1}
