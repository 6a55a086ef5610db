"""Adapters with the real Scheduler and vLLM's own cache of adapters: names by the tensors that ranks hold, however they got there.

The oracle labels KV with the text that an adapter's tensors were made of, so KV of another version shows whoever made the mistake.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from vllm.exceptions import LoRAAdapterNotFoundError
from vllm.lora.request import LoRARequest

from tests.scheduler.rigs import LENGTH, TOKENS, FailsOnce, MakeRig
from tests.support.ahead import AheadRig
from tests.support.scheduler import BLOCK, RequestStatus, SharedStore, prompt
from tests.support.scheduler_worker import RankAdapters

ALL = 8 * BLOCK
PATH = "/adapters/a"


def adapter(number: int = 1, path: str = PATH, *, name: str = "tuned", load_inplace: bool = False) -> LoRARequest:
    return LoRARequest(name, number, path, load_inplace=load_inplace)


def add(rig: Any, used: LoRARequest, tokens: list[int], max_tokens: int = 1) -> Any:
    request = rig.request(tokens, max_tokens=max_tokens)
    request.lora_request = used
    request.block_hashes = []
    request.block_hashes = rig.hasher(request)
    rig.scheduler.add_request(request)
    return request


def run_a_little(rig: Any, used: LoRARequest, tokens: list[int], max_tokens: int = 1) -> Any:
    """A request that is in the middle of its work: a few steps, in which its prompt is computed, or is being loaded."""
    request = add(rig, used, tokens, max_tokens)
    rig.steps(3)
    return request


def serve(rig: Any, used: LoRARequest, tokens: list[int]) -> int:
    """Run it alone; returns how many tokens were found in a cache, none of them with the KV of other tensors."""
    request = add(rig, used, tokens)
    rig.run()
    assert request.request_id in rig.finished
    assert rig.stale_tokens[request.request_id] == 0
    return int(rig.cached[request.request_id])


def load(rig: Any, used: LoRARequest, text: str | None = None) -> None:
    """As `/v1/load_lora_adapter`; `text`: a trainer has written it to the path before."""
    if text is not None:
        rig.executor.disk[used.lora_path] = text
    assert rig.core.add_lora(used)


class FromMemory:
    """A call that trainers make on the workers, with tensors that have no file."""

    def __init__(self, number: int, text: str) -> None:
        self.__name__ = "update_weights_from_ipc"
        self._number, self._text = number, text

    def on_adapters(self, rank: RankAdapters) -> bool:
        """The worker replaces the adapter without any call that says so."""
        rank.remove_adapter(self._number)
        return bool(rank._adapter_manager.add_adapter(rank.make(self._number, self._text)))


class WriteInPlace(FromMemory):
    """The same, into the tensors that are there."""

    def on_adapters(self, rank: RankAdapters) -> bool:
        """No object changes."""
        layer = rank._adapter_manager.list_adapters()[self._number].loras["m"]
        made = RankAdapters.make(1, self._text).loras["m"]
        layer.lora_a.copy_(made.lora_a)
        layer.lora_b.copy_(made.lora_b)
        return True


@pytest.fixture
def make(make_rig: MakeRig, store: SharedStore) -> MakeRig:
    """Engines of one pool that hold the same model. One after the other: a process has one root of vLLM's."""

    return partial(make_rig, store=store, num_blocks=64, epoch=0)


# ---------------------------------------------------------------------------------------------- names
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_equal_tensors_are_one_name_whatever_they_are_called(make: MakeRig, num_ranks: int) -> None:
    """Written while engines run; another name, id and path in each, and again in the first."""
    first = make(num_ranks=num_ranks)
    load(first, adapter(1), "one")
    assert serve(first, adapter(1), TOKENS) == 0
    load(first, adapter(5, "/elsewhere/copy", name="copy"), "one")
    assert serve(first, adapter(5, "/elsewhere/copy", name="copy"), TOKENS) == ALL
    second = make(num_ranks=num_ranks)
    load(second, adapter(3, "/mnt/b", name="other"), "one")
    assert serve(second, adapter(3, "/mnt/b", name="other"), TOKENS) == ALL


def test_a_request_that_comes_first_has_its_adapter_loaded_and_is_named_by_it(make: MakeRig) -> None:
    """As the offline API: nobody told the engine to load it."""
    for cached in (0, ALL):
        rig = make()
        rig.executor.disk[PATH] = "one"
        assert serve(rig, adapter(), TOKENS) == cached
        assert serve(rig, adapter(), TOKENS) == ALL
        assert rig.executor.adapters[0].loads == [PATH], "once, as without us"


# ---------------------------------------------------------------------------------------------- replaced
def in_place_over_http(rig: Any, text: str) -> LoRARequest:
    used = adapter(load_inplace=True)
    load(rig, used, text)
    return used


def unloaded_and_loaded(rig: Any, text: str) -> LoRARequest:
    rig.executor.collective_rpc("remove_lora", args=(1,))
    load(rig, adapter(), text)
    return adapter()


def sent_in_memory(rig: Any, text: str) -> LoRARequest:
    rig.executor.collective_rpc(FromMemory(1, text))
    return adapter()


def written_in_place(rig: Any, text: str) -> LoRARequest:
    rig.executor.collective_rpc(WriteInPlace(1, text))
    return adapter()


REPLACE = pytest.mark.parametrize("replace", [in_place_over_http, unloaded_and_loaded, sent_in_memory, written_in_place])


@REPLACE
def test_a_new_version_is_named_by_its_tensors_and_the_old_one_is_found_again(
    make: MakeRig, replace: Callable[[Any, str], LoRARequest]
) -> None:
    other = make()
    load(other, adapter(), "two")
    assert serve(other, adapter(), TOKENS) == 0
    rig = make()
    load(rig, adapter(), "one")
    assert serve(rig, adapter(), TOKENS) == 0
    used = replace(rig, "two")
    assert serve(rig, used, TOKENS) == ALL, "from the engine that has it, too"
    used = replace(rig, "one")
    assert serve(rig, used, TOKENS) == ALL


@REPLACE
def test_requests_that_run_over_a_change_name_nothing_more(
    make: MakeRig, store: SharedStore, replace: Callable[[Any, str], LoRARequest]
) -> None:
    """And those that wait find nothing of the version before. Then that comes back: it finds nothing that was computed without it."""
    rig = make()
    load(rig, adapter(), "one")
    running = run_a_little(rig, adapter(), prompt(1, LENGTH), 4 * BLOCK)
    assert len(store.objects) == 8
    waiting = add(rig, adapter(), prompt(1, LENGTH))
    replace(rig, "two")
    rig.run()
    assert {running.request_id, waiting.request_id} <= rig.finished
    assert rig.cached[waiting.request_id] == rig.stale_tokens[waiting.request_id] == 0
    assert len(store.objects) == 16
    used = replace(rig, "one")
    assert serve(rig, used, [*running.all_token_ids, 5]) == ALL, "what was computed before is good, and no more"
    elsewhere = make()
    load(elsewhere, adapter(), "one")
    assert serve(elsewhere, adapter(), [*running.all_token_ids, 5]) == ALL + 4 * BLOCK, "computed anew by the first"


@REPLACE
def test_what_is_being_loaded_for_the_version_before_fails(make: MakeRig, replace: Callable[[Any, str], LoRARequest]) -> None:
    first = make()
    load(first, adapter(), "one")
    assert serve(first, adapter(), TOKENS) == 0
    rig = make()
    load(rig, adapter(), "one")
    rig.workers[0].hold_loads = True
    loading = run_a_little(rig, adapter(), TOKENS)
    assert rig.tiers.loads.is_open(loading.request_id)
    replace(rig, "two")
    rig.workers[0].hold_loads = False
    rig.run()
    assert loading.request_id in rig.finished
    assert rig.stale_tokens[loading.request_id] == 0


def test_a_load_that_fails_leaves_what_was_there(make: MakeRig) -> None:
    rig = make()
    load(rig, adapter(), "one")
    assert serve(rig, adapter(), TOKENS) == 0
    with pytest.raises(LoRAAdapterNotFoundError, match="nowhere"):
        rig.core.add_lora(adapter(path="/nowhere", load_inplace=True))
    assert serve(rig, adapter(), TOKENS) == ALL


def test_requests_that_load_in_place_are_named_by_what_they_load(make: MakeRig) -> None:
    """vLLM reads it again with every step of such a request. Nobody told the engine of the new version but the request."""
    rig = make()
    used = adapter(load_inplace=True)
    load(rig, used, "one")
    assert serve(rig, used, TOKENS) == 0
    assert serve(rig, used, TOKENS) == ALL
    rig.executor.disk[PATH] = "two"
    assert serve(rig, used, TOKENS) == 0
    assert serve(rig, used, TOKENS) == ALL
    rig.executor.disk[PATH] = "one"
    assert serve(rig, used, TOKENS) == ALL
    assert rig.side.weights.adapters.counters["late"] == 0


def test_what_is_asked_about_again_fails_no_save_of_others_and_costs_no_question_a_step(make: MakeRig) -> None:
    rig = make(AheadRig, async_scheduling=True)
    load(rig, adapter(), "one")
    last = add(rig, adapter(), prompt(1, BLOCK + 3), max_tokens=BLOCK - 2)  # its last block is saved with the step after its end
    while last.request_id not in rig.finished:
        rig.step()
    aborted = add(rig, adapter(load_inplace=True), prompt(2, BLOCK))
    rig.scheduler.finish_requests(aborted.request_id, RequestStatus.FINISHED_ABORTED)
    rig.add(prompt(3, 3 * BLOCK), max_tokens=9)
    rig.run()
    assert (rig.tiers.stats()["blocks_saved"], rig.executor.calls.count("digest_adapters")) == (1 + 3, 2)


# ---------------------------------------------------------------------------------------------- read again by itself
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_files_that_were_overwritten_and_read_again_are_saved_under_no_name(make: MakeRig, store: SharedStore, num_ranks: int) -> None:
    """The request waited meanwhile, so it has the name of before: its ranks see that, save nothing, and the name ends here."""
    rig = make(num_adapters=1, num_ranks=num_ranks)
    one, two, again = adapter(1), adapter(2, "/b", name="b"), adapter(3, "/copy", name="c")
    load(rig, one, "one")
    running = add(rig, one, prompt(1, LENGTH), 2 * BLOCK)
    rig.side.weights.adapters.before_schedule()  # of a step that had no room for it
    load(rig, two, "two")
    rig.executor.disk[PATH] = "other"
    rig.steps(3)
    assert not store.objects
    assert rig.side.weights.adapters.counters["late"] >= 1
    rig.run()
    assert running.request_id in rig.finished
    assert not store.objects
    load(rig, again, "one")
    assert serve(rig, again, [*prompt(1, LENGTH), 5]) == 0
    assert not store.objects, "ended until the next epoch"
    assert serve(rig, one, prompt(2, LENGTH)) == 0, "by the name of what it is"
    assert len(store.objects) == 8 * num_ranks
    rig.adopt(1)
    assert serve(rig, again, prompt(3, LENGTH)) == 0
    assert len(store.objects) == 16 * num_ranks
    assert serve(rig, again, prompt(3, LENGTH)) == ALL
    elsewhere = make(num_ranks=num_ranks)
    load(elsewhere, adapter(9, "/x"), "other")
    assert serve(elsewhere, adapter(9, "/x"), prompt(2, LENGTH)) == ALL


def test_files_of_an_adapter_that_vllm_has_dropped_are_read_before_its_next_request_is_named(make: MakeRig) -> None:
    """What vLLM keeps is not read again."""
    rig = make(num_adapters=1)
    one, two = adapter(1), adapter(2, "/b", name="b")
    load(rig, one, "one")
    assert [serve(rig, one, TOKENS) for _ in range(2)] == [0, ALL]
    load(rig, two, "two")
    rig.executor.disk[PATH] = "other"
    assert [serve(rig, one, TOKENS) for _ in range(2)] == [0, ALL]
    assert rig.executor.adapters[0].loads == [PATH, "/b", PATH]
    adapters = rig.side.weights.adapters
    adapters.num_kept, asked = 2, adapters.counters["asked"]
    assert serve(rig, one, TOKENS) == ALL
    assert (adapters.counters["asked"], adapters.counters["late"]) == (asked, 0), "where both have room, nobody asks again"


# ---------------------------------------------------------------------------------------------- unknown
def test_ranks_that_hold_different_tensors_share_nothing_with_ranks_that_hold_the_same_ones(make: MakeRig) -> None:
    """One of them missed a push."""
    whole = make(num_ranks=2)
    load(whole, adapter(), "one")
    assert serve(whole, adapter(), TOKENS) == 0
    half = make(num_ranks=2)
    half.executor.adapters[1].disk = {PATH: "old"}
    load(half, adapter(), "one")
    request = add(half, adapter(), TOKENS)
    half.run()
    assert half.cached[request.request_id] == 0


@pytest.mark.unclean
def test_an_error_of_ours_does_not_keep_vllm_from_loading(make: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = make()
    broken = FailsOnce(rig.side.weights.adapters, "ask", monkeypatch)
    load(rig, adapter(), "one")
    assert broken.raised
    assert rig.executor.adapters[0].loads == [PATH]
    assert rig.connector._guard.errors == {"weights": 1}
    assert rig.serve(prompt(1, LENGTH)) in rig.finished
