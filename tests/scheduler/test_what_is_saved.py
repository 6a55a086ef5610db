"""Which part of a request the tiers get, on vLLM's real scheduler: what `save` says, and which blocks of running requests, with async
scheduling, with drafts, and when nothing is looked at that has no new block.
"""

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from epochkv_connector.engine import blocks
from tests.scheduler.rigs import SLOT_BYTES, MakeRig, hold_some, on_layouts, release
from tests.scheduler.test_random_schedules import Chaos
from tests.support.ahead import AheadRig, AsyncRig
from tests.support.scheduler import BLOCK, RequestStatus, Rig, SharedStore, prompt
from tests.support.scheduler_config import STATE

PROMPT, ANSWER = 4 * BLOCK, 3 * BLOCK + 1


def saved_tokens(rig: Any, tokens: list[int]) -> int:
    """How long a prefix of these the tiers would give to somebody."""
    rig.scheduler.reset_prefix_cache()
    return int(rig.cached[rig.serve([*tokens, 5])])


def saved(rig: Any, params: Any = None) -> int:
    """Tokens of a request of 4 blocks and its answer of 3 that the tiers would give to somebody."""
    request = rig.serve(prompt(1, PROMPT), max_tokens=ANSWER, params=params)
    return saved_tokens(rig, prompt(1, PROMPT) + rig.outputs[request])


@pytest.mark.parametrize(
    ("save", "expected"),
    [
        *(("All", 7), ("Prompts", 4)),
        *(({"max_tokens": tokens}, blocks) for tokens, blocks in ((2 * BLOCK + 3, 2), (5 * BLOCK, 5), (BLOCK - 1, 0), (0, 0))),
    ],
)
def test_the_tiers_get_what_the_configuration_says(make_rig: MakeRig, store: SharedStore, save: Any, expected: int) -> None:
    rig = make_rig(store=store, epoch=0, extra={"save": save})
    assert saved(rig) == expected * BLOCK


@pytest.mark.parametrize("asked", ["Prompts", {"max_tokens": 4 * BLOCK}, 4 * BLOCK])
@on_layouts(("full",), ("full", STATE), ("48", "full"))
def test_a_request_may_say_otherwise(make_rig: MakeRig, asked: Any) -> None:
    assert saved(make_rig(epoch=0), {"epochkv": {"save": asked}}) == 4 * BLOCK
    assert saved(make_rig(epoch=0, extra={"save": "Prompts"}), {"epochkv": {"save": "All"}}) == 7 * BLOCK


@pytest.mark.parametrize("asked", ["prompts", {"max_tokens": -1}, {"max_tokens": "2"}, {}, None, -1, True])
def test_what_nobody_understands_changes_nothing(make_rig: MakeRig, asked: Any) -> None:
    assert saved(make_rig(epoch=0), {"epochkv": {"save": asked}}) == 7 * BLOCK


def test_who_waits_is_not_looked_at_in_each_step_after_new_names(make_rig: MakeRig) -> None:
    """Thousands wait where a trainer pushes weights."""
    rig = make_rig(epoch=0, max_num_seqs=1)
    for seed in range(4):
        rig.add(prompt(seed, PROMPT), max_tokens=2 * BLOCK)
    rig.step()
    rig.adopt(1, weights="w1")
    rig.steps(2)
    assert len(rig.scheduler.waiting) == 3
    assert len(rig.side.steps.candidates.boundaries) == 1
    rig.run()
    assert rig.tiers.stats()["blocks_saved"] == 4 + 3 * 5, "of the first, what it had computed; of the others, answers too"


# ------------------------------------------------------------------------------------------ of running requests, also ahead of the model
PRIVATE = {"hub": False}


@pytest.mark.parametrize("kind", [Rig, AheadRig, AsyncRig], ids=["Rig", "AheadRig", "AsyncRig"])
@pytest.mark.parametrize("more", [-1, 0, 1, 2])
def test_every_full_block_of_an_answer_is_saved(make_rig: MakeRig, kind: Callable[..., Rig], more: int) -> None:
    # The last token of an answer is sampled and not computed: KV ends one token before it.
    rig = make_rig(kind, **PRIVATE)
    first = rig.serve(prompt(1, BLOCK + 3), max_tokens=2 * BLOCK - 2 + more)
    text = prompt(1, BLOCK + 3) + rig.outputs[first]
    assert len(text) == 3 * BLOCK + 1 + more
    assert saved_tokens(rig, text) == (len(text) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("kind", [Rig, AsyncRig], ids=["Rig", "AsyncRig"])
def test_the_last_block_is_not_saved_for_a_request_whose_load_never_ended(make_rig: MakeRig, kind: Callable[..., Rig]) -> None:
    rig = make_rig(kind, **PRIVATE)
    rig.serve(prompt(1, 4 * BLOCK))
    rig.scheduler.reset_prefix_cache()
    rig.workers[0].hold_loads = True
    loading = rig.add(prompt(1, 4 * BLOCK))
    rig.step()
    assert loading.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert loading.num_computed_tokens > 0, "vLLM counts as computed what is promised"
    saves = rig.tiers.stats()["saves_emitted"]
    rig.scheduler.finish_requests(loading.request_id, RequestStatus.FINISHED_ABORTED)
    release(rig)
    rig.run()
    assert rig.tiers.stats()["saves_emitted"] == saves


def test_a_last_block_whose_save_was_not_sent_is_given_up_when_caches_are_reset(make_rig: MakeRig) -> None:
    rig = make_rig(AsyncRig, **PRIVATE)
    request = rig.add(prompt(1, BLOCK + 3), max_tokens=BLOCK - 2)
    while request.request_id not in rig.finished:
        rig.step()
    assert rig.leaks().get("tiers.unsent_saves") == 1
    assert rig.scheduler.reset_prefix_cache(), "the block is held by nobody that vLLM has to wait for"
    rig.run()
    rig.check_clean()
    assert saved_tokens(rig, prompt(1, BLOCK + 3) + rig.outputs[request.request_id]) == BLOCK


def watch(rig: Any) -> list[int]:
    """Compare each step's choice with a look at every scheduled request; returns where new blocks are counted."""
    offers, chosen, counts = rig.side.steps.candidates, rig.side.steps.candidates.of_step, [0, 0]

    def num_offered(request_id: str) -> int:
        return rig.side.requests.get(request_id).num_offered

    def naive(output: Any) -> dict[str, int]:
        found = {}
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            request, drafts = rig.scheduler.requests[request_id], output.scheduled_spec_decode_tokens.get(request_id, ())
            confirmed = blocks.num_confirmed_tokens(request, num_scheduled, len(drafts))
            complete = min(confirmed // BLOCK, len(request.block_hashes))
            if complete > num_offered(request_id) and rig.pins.may_save(rig.pins.pin_of(request)):
                found[request_id] = complete
        return found

    def views(saves: Any, output: Any, snapshot: Any) -> Iterable[Any]:
        expected, before = naive(output), {name: num_offered(name) for name in output.num_scheduled_tokens}
        made = list(chosen(saves, output, snapshot))
        complete = {view.request_id: min(view.num_confirmed_tokens // BLOCK, len(view.block_hashes)) for view in made}
        assert {name: n for name, n in complete.items() if n > before[name]} == expected
        counts[0] += len(expected)
        counts[1] += len(complete.keys() - expected.keys())
        return made

    offers.of_step = views
    return counts


class Schedule(Chaos):
    """Requests come, go, are preempted and hit caches, in random order."""

    def _add(self) -> None:
        if len(self.rig.scheduler.requests) < 12:
            kept = self.source.choice([0, 0, BLOCK, 5 * BLOCK])
            tokens = prompt(self.source.randrange(3), kept) + prompt(self.source.randrange(10**6), self.source.randrange(1, 4 * BLOCK))
            self.rig.add(tokens, max_tokens=self.source.choice([1, BLOCK, 4 * BLOCK + self.source.randrange(BLOCK)]))

    def _reset(self) -> None:
        waits = {RequestStatus.WAITING_FOR_REMOTE_KVS}
        if not waits & {request.status for request in self.rig.scheduler.requests.values()}:
            self.rig.preempt_all()
            self._adopt()

    def _lease(self) -> None:
        """What may not be saved without a lease may be saved with it: the same names hold again."""
        self.rig.lease_until = 0.0
        for _ in range(self.source.randrange(2 * BLOCK)):
            self._step()
        self.rig.lease_until = float("inf")

    def _hold(self) -> None:
        hold_some(self.rig, self.source, loads=0.3)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("num_drafts", [0, 1, 4])
@pytest.mark.parametrize("kind", ["AheadRig", "AsyncRig"])
def test_no_new_block_is_missed_and_none_is_late(make_rig: MakeRig, kind: str, num_drafts: int, seed: int) -> None:
    source, made = random.Random(f"{kind} {num_drafts} {seed}"), {"AheadRig": AheadRig, "AsyncRig": AsyncRig}[kind]
    sizes = {"num_blocks": source.choice([40, 60, 200]), "l1_bytes": source.choice([6, 400]) * SLOT_BYTES}
    rig = make_rig(made, num_drafts=num_drafts, seed=seed, **sizes, max_batched_tokens=source.choice([24, 64, 8192]))
    schedule = Schedule(rig, None, source, {"step": 120, "add": 25, "abort": 4, "adopt": 2, "reset": 1, "lease": 2, "hold": 6})
    counts = watch(rig)
    for _ in range(500):
        schedule.act()
        assert not any(rig.foreign_tokens.values()), f"KV of other tokens: {rig.foreign_tokens}"
    release(rig)
    rig.run(3000)
    assert counts[0] > 50
