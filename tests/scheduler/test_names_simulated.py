"""A simulator of names: engines with real schedulers on one store, weights that are pushed in any order, through vLLM and past it.

The oracle knows which weights computed every token's KV, and from which tokens. After every step and at the end:

- W1: nobody begins with KV of other weights than his own; no object of the store was computed with others than its name says;
- W2: after a change that passes through vLLM, what is named next is named by the new weights, or by none;
- W3: engines that hold the same bytes share again by themselves, in the epoch that was asked for;
- W4: an engine that does not know its weights shares nothing.

A write past vLLM is seen behind the step that follows it, so what that one step was scheduled with is not held against it. Nor are
the blocks that a request took before a change: it goes on with them, and nobody finds what it makes of them.
EPOCHKV_SEEDS=500 runs more schedules, EPOCHKV_SEED=7 one of them.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from epochkv_connector.naming import root as roots
from epochkv_connector.weights import executor as joining
from epochkv_connector.weights import watch as watching
from epochkv_connector.weights.watch import fold
from tests.support.scheduler import BLOCK, RequestStatus, Rig, SharedStore, prompt
from tests.support.scheduler_names import OwnRoot
from tests.support.scheduler_worker import FakeWorker

MakeRig = Callable[..., Any]
NUM_ACTIONS = 250
MUTANT_SCHEDULES = 1000
SEEDS = [*range(int(os.environ.get("EPOCHKV_SEEDS", "40"))), int(os.environ.get("EPOCHKV_SEED", random.SystemRandom().randrange(10**6)))]
BLOCKS = 6
reached: Counter[str] = Counter()


def digest_of(weights: str, num_ranks: int) -> bytes:
    """What an engine with these weights (of all its ranks, or of each) should call them."""
    held = weights.split("|") if "|" in weights else [weights] * num_ranks
    return fold(hashlib.sha256(one.encode()).digest() for one in held)


class Engine(Rig):
    """A rig whose weights may be written without a word to vLLM.

    Attributes:
        past: somebody has, and nobody has looked since.
        taken: what the engine called its weights when a request took a hit whose rest is loaded: from then on it is carried, and what
            it finds must be of these.
    """

    past = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.taken: dict[str, bytes] = {}
        self._texts: dict[bytes, str] = {}
        self._expected = ""

    @property
    def truth(self) -> bytes:
        """What its ranks hold."""
        return fold(hashlib.sha256(held.encode()).digest() for held in self.executor.ranks)

    def is_misled(self) -> bool:
        """Its names are of other weights than its own, and it cannot know."""
        self.past = self.past and self.watch.value not in (None, self.truth)
        return self.past

    def admitted_label(self, request: Any) -> str:
        """See `_check`."""
        return self._expected

    def _check(self, request: Any, start: int, admitted: bool) -> None:
        was = self.stale_tokens.get(request.request_id, 0)
        recorded = self.recorded_weights.pop(request.request_id, self.weights)
        taken = self._texts.get(self.taken.pop(request.request_id, b""), recorded)
        for label in (taken, recorded, self.weights):
            self._expected = label
            self.stale_tokens[request.request_id] = was
            super()._check(request, start, admitted)
            if self.stale_tokens[request.request_id] == was:
                return
        if self.is_misled():
            self.stale_tokens[request.request_id] = was

    def note(self) -> None:
        """After a schedule."""
        self._texts[self.truth] = self.weights
        for request in self.scheduler.requests.values():
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS and self.watch.value is not None:
                self.taken.setdefault(request.request_id, self.watch.value)
            elif request.status is not RequestStatus.RUNNING:
                self.taken.pop(request.request_id, None)


class Names:
    """One random schedule."""

    def __init__(self, make_rig: MakeRig, source: random.Random, mutate: Callable[[Any], None] = lambda rig: None) -> None:
        self.source = source
        self.store = SharedStore()
        self.epoch = self.target = 0
        self.now = 1000.0
        self.num_ranks = source.choice([1, 2, 2])
        self._make = make_rig
        self._mutate = mutate
        self._options = {
            "num_ranks": self.num_ranks,
            "num_blocks": source.choice([24, 40]),
            "l1_bytes": source.choice([None, 1 << 20]),
            "max_batched_tokens": source.choice([64, 8192]),
        }
        self._happened: Counter[str] = Counter()
        self._put_before: set[str] = set()
        self._known = ["w0"]
        self._said: list[list[int]] = []
        self.engines = [self._new() for _ in range(source.choice([2, 2, 3]))]

    def _new(self) -> Any:
        rig = self._make(Engine, store=self.store, **self._options)
        rig.pins.root._global = OwnRoot(rig.pins.root.snapshot.root)
        rig.side.weights.link.propose = self._proposed
        rig.watch._clock = lambda: self.now
        rig.watch._scheduled_at = rig.watch._suspected_at = self.now
        rig.watch._look_at = 0.0
        rig.adopt(self.target)
        self._mutate(rig)
        return rig

    def _proposed(self, epoch: int) -> None:
        self.target = max(self.target, epoch)

    # ------------------------------------------------------------------ what happens

    def act(self) -> None:
        """One thing happens to one engine."""
        weights = {
            **{"step": 100, "add": 25, "push": 4, "return": 3, "part": 3, "past": 2, "late": 2, "fail": 2, "transfer": 2, "load": 1},
            **{"probe": 2, "idle": 3, "adopt": 3, "reset": 1, "lease": 1, "abort": 2, "preempt": 3, "hold": 4, "silent": 1, "sleep": 1},
            "restart": 0.3,
        }
        (name,) = self.source.choices(list(weights), list(weights.values()))
        index = self.source.randrange(len(self.engines))
        self._happened[name] += 1
        getattr(self, f"_{name}")(self.engines[index], index)
        self.check()

    def _next_weights(self) -> str:
        """New ones, or a return to earlier ones."""
        if self.source.random() < 0.3 or len(self._known) < 2:
            self._known.append(f"w{len(self._known)}")
            return self._known[-1]
        return self.source.choice(self._known[-3:])

    def _step(self, rig: Any, index: int, between: Callable[[], None] = lambda: None) -> None:
        self.now += 0.01
        if self.now - rig.watch._scheduled_at > watching.IDLE_SECONDS:
            rig.past = False  # after a pause it compares first, so nothing excuses it
        output = rig.scheduler.schedule()
        self._check_named(rig)
        rig.note()
        between()
        rig.update(output)
        for worker in rig.workers:
            if self.source.random() < 0.5:
                worker.work()

    def _add(self, rig: Any, index: int) -> None:
        if len(rig.scheduler.requests) >= 6:
            return
        living = [request for engine in self.engines for request in engine.scheduler.requests.values()]
        self._said = [*self._said[-8:], *(list(request.all_token_ids) for request in living)]
        if self._said and self.source.random() < 0.5:  # a conversation goes on
            rig.add([*self.source.choice(self._said), 7], max_tokens=self.source.choice([1, BLOCK]))
        else:
            family = prompt(self.source.randrange(2), BLOCKS * BLOCK)
            kept = self.source.choice([BLOCK - 3, 2 * BLOCK, 4 * BLOCK + 5, BLOCKS * BLOCK])
            rig.add([*family[:kept], 5 + self.source.randrange(2)], max_tokens=self.source.choice([1, BLOCK, 3 * BLOCK]))

    def _push(self, rig: Any, index: int) -> None:
        rig.past = False
        rig.weights = self._next_weights()

    def _return(self, rig: Any, index: int) -> None:
        """Other weights for a few steps, while loads wait, and those of before again."""
        was = rig.weights
        if "|" in was:
            return
        for worker in rig.workers:
            worker.hold_loads = True
        self._add(rig, index)
        self._step(rig, index)
        self._push(rig, index)
        for _ in range(self.source.randrange(1, BLOCK)):
            self._step(rig, index)
        rig.past = False
        rig.weights = was
        for worker in rig.workers:
            worker.hold_loads = False
        self._add(rig, index)

    def _part(self, rig: Any, index: int) -> None:
        """A push that reaches one rank."""
        rig.past = False
        weights, rank = self._next_weights(), self.source.randrange(self.num_ranks)
        rig.executor.on_call = lambda name: rig.write_past(weights, rank) if name == "update_weights" else None
        rig.executor.collective_rpc("update_weights")
        rig.executor.on_call = lambda name: None

    def _past(self, rig: Any, index: int) -> None:
        rig.past = True
        rig.write_past(self._next_weights(), self.source.choice([None, *range(self.num_ranks)]))

    def _late(self, rig: Any, index: int) -> None:
        """A write while a step is under way, and perhaps the old weights again."""
        self._add(rig, index)
        was = rig.weights
        self._step(rig, index, lambda: self._past(rig, index))
        if self.source.random() < 0.5 and "|" not in was:
            rig.past = False
            rig.weights = was
            self._step(rig, index)
            self._add(rig, index)

    def _fail(self, rig: Any, index: int) -> None:
        rig.past = False
        rig.executor.fails = {"update_weights"}
        with pytest.raises(RuntimeError, match="has failed"):
            rig.executor.collective_rpc("update_weights", kwargs={"weights": self._next_weights()})
        rig.executor.fails = set()
        rig._weights = rig.executor.engine_weights

    def _transfer(self, rig: Any, index: int) -> None:
        rig.past = False
        rig.executor.collective_rpc("start_weight_update")
        for _ in range(self.source.randrange(3)):
            rig.weights = self._next_weights()
            self._step(rig, index)
        rig.executor.collective_rpc("finish_weight_update")

    def _load(self, rig: Any, index: int) -> None:
        """`load_weights` of the model in this very process."""
        held = rig.watch._ranks._held
        held.writes += 1
        rig.write_past(self._next_weights())
        held.writes += 1
        rig.past = False

    def _probe(self, rig: Any, index: int) -> None:
        rig.executor.collective_rpc(self.source.choice(["liveness_probe", "check_health", "execute_dummy_batch"]))

    def _idle(self, rig: Any, index: int) -> None:
        self.now += 1.0

    def _adopt(self, rig: Any, index: int) -> None:
        if self.source.random() < 0.2:
            self.target += 1
        rig.adopt(self.target)

    def _reset(self, rig: Any, index: int) -> None:
        rig.scheduler.reset_prefix_cache(reset_connector=True)

    def _lease(self, rig: Any, index: int) -> None:
        rig.lease_until = 0.0
        for _ in range(self.source.randrange(4)):
            self._step(rig, index)
        if self.source.random() < 0.5:
            self._push(rig, index)
        rig.lease_until = float("inf")

    def _abort(self, rig: Any, index: int) -> None:
        living = sorted(rig.scheduler.requests)
        if living:
            rig.scheduler.finish_requests(self.source.choice(living), RequestStatus.FINISHED_ABORTED)

    def _preempt(self, rig: Any, index: int) -> None:
        if rig.scheduler.running:
            rig.scheduler._preempt_request(rig.scheduler.running.pop(), 0.0)

    def _hold(self, rig: Any, index: int) -> None:
        for worker in rig.workers:
            worker.hold_loads = self.source.random() < 0.5
            worker.hold_saves = self.source.random() < 0.3

    def _silent(self, rig: Any, index: int) -> None:
        """A rank cannot say what it holds, for a while."""
        silent = self.source.randrange(self.num_ranks)
        rig.executor.answers = lambda answer: {**answer, "weights": None, "note": "no"} if answer["rank"] == silent else answer
        self._push(rig, index)
        for _ in range(self.source.randrange(5)):
            self._step(rig, index)
            assert not rig.pins.root.snapshot.shared, "W4: an engine that does not know its weights shares"
        rig.executor.answers = lambda answer: answer

    def _sleep(self, rig: Any, index: int) -> None:
        rig.past = False
        rig.executor.collective_rpc("sleep")
        rig.executor.is_sleeping = True
        self.now += 1.0
        rig.executor.is_sleeping = False
        rig.executor.collective_rpc("wake_up")
        if self.source.random() < 0.5:
            self._push(rig, index)

    def _restart(self, rig: Any, index: int) -> None:
        """The engine ends with all it had but its objects in the store, and comes back with the weights of its files."""
        self._drop(rig)
        rig.close()
        self.engines[index] = self._new()

    def _drop(self, rig: Any) -> None:
        for worker in rig.workers:
            worker.hold_loads = worker.hold_saves = False
            worker.work()
        self.now += 100.0
        rig.run(3000)
        self._verify(rig)

    # ------------------------------------------------------------------ what must hold

    def _check_named(self, rig: Any) -> None:
        """What a step is scheduled with."""
        if rig.is_misled():
            return
        value = rig.watch.value
        assert value in (None, rig.truth), "W2: named after other weights than it holds"
        shown = rig.pins.root.refresh()
        assert not shown.shared or value == shown.weights, "W4: a shared root without weights"

    def check(self) -> None:
        """After each action."""
        for rig in self.engines:
            assert not any(rig.foreign_tokens.values()), f"KV of other tokens: {rig.foreign_tokens}"
            assert not any(rig.stale_tokens.values()), f"W1: KV of other weights: {rig.stale_tokens}"
        for key in self.store.objects.keys() - self._put_before:
            labels = {cell[0] for cell in self.store.objects[key] if cell is not None}
            named = [f"/w{digest_of(label, self.num_ranks).hex()[:16]}/" for label in labels]
            assert all(name in key for name in named), f"W1: {key} was computed with {labels}"
        self._put_before = set(self.store.objects)

    def _verify(self, rig: Any) -> None:
        assert rig.leaks() == {}
        assert rig.block_pool.get_num_free_blocks() == rig.free_at_start
        assert not rig.connector._guard.errors, dict(rig.connector._guard.errors)
        reached.update({f"watch_{name}": count for name, count in rig.watch.counters.items()})
        reached.update({name: int(value) for name, value in rig.books.stats().items() if name in ("loads_done", "blocks_stored")})
        reached["poisoned"] += rig.side.counters["poisoned_loads"]

    def finish(self) -> None:
        """Everything ends; then all get the same weights, each in its way, and the epoch that was asked for, and share."""
        for rig in self.engines:
            self._drop(rig)
            self.check()
        weights = self.source.choice(self._known)
        for rig in self.engines:
            rig.past = False
            rig.weights = weights
            rig.adopt(self.target)
        self.now += 10.0
        tokens = prompt(900, BLOCKS * BLOCK + 1)
        first, *others = self.engines
        first.serve(tokens)
        for rig in others:
            assert rig.cached[rig.serve(tokens)] == BLOCKS * BLOCK, "W3: engines with the same weights do not share"
        self.check()
        reached.update(self._happened)

    def run(self) -> None:
        """All of it."""
        for _ in range(NUM_ACTIONS):
            self.act()
        self.finish()


@pytest.mark.parametrize("seed", SEEDS)
def test_names_in_random_schedules(make_rig: MakeRig, seed: int) -> None:
    Names(make_rig, random.Random(f"names{seed}")).run()


def test_the_schedules_reached_what_they_are_for() -> None:
    """Runs after them: a schedule without loads, roll-backs or late changes proves nothing."""
    if not reached:
        pytest.skip("the random schedules were not run")
    for name in ("loads_done", "blocks_stored", "watch_late", "watch_unseen", "watch_unknown", "watch_changes", "poisoned", "restart"):
        assert reached[name] > 0, (name, reached)


# ---------------------------------------------------------------------------------------------- rules taken away


def skip_a_rank(patch: pytest.MonkeyPatch, rig: Any) -> None:
    patch.setattr(watching, "fold", lambda values: fold([next(iter(values))]))


def digest_after_the_step(patch: pytest.MonkeyPatch, rig: Any) -> None:
    schedule = rig.scheduler.schedule.__wrapped__

    def scheduling() -> Any:
        output = schedule()
        rig.watch.before_schedule()
        return output

    rig.scheduler.schedule = scheduling


def hook_after_delegating(patch: pytest.MonkeyPatch, rig: Any) -> None:
    call = rig.executor.collective_rpc.__wrapped__

    def collective_rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
        answer = call(method, *args, **kwargs)
        if not watching.is_harmless(method):
            rig.watch.calling(method)
        return answer

    rig.executor.collective_rpc = collective_rpc


def no_strand(patch: pytest.MonkeyPatch, rig: Any) -> None:
    rig.pins.strand = lambda request, num_named: None


def strand_only_running_requests(patch: pytest.MonkeyPatch, rig: Any) -> None:
    strand = rig.pins.strand
    rig.pins.strand = lambda request, num: strand(request, num) if request.status is RequestStatus.RUNNING else None


def strand_whole_requests_late(patch: pytest.MonkeyPatch, rig: Any) -> None:
    """One block too many keeps the name that its tokens give it."""
    strand = rig.pins.strand
    rig.pins.strand = lambda request, num: strand(request, num + 1)


def a_generation_that_returns(patch: pytest.MonkeyPatch, rig: Any) -> None:
    """With requests that keep what their pins allow: what a stranded one computes is offered again when the weights return."""
    known: dict[tuple[int, bytes | None], int] = {}
    swap, strand = rig.pins.root._swap, rig.pins.strand

    def swapping(state: Any) -> None:
        swap(state)
        shown = rig.pins.root.snapshot
        if shown.shared:
            rig.pins.root.snapshot = replace(shown, generation=known.setdefault((shown.epoch, shown.weights), shown.generation))

    def stranding(request: Any, num_named: int) -> None:
        """Its names, without the mark at its pin."""
        saveable = rig.pins.pin_of(request).saveable
        strand(request, len(request.block_hashes))
        request._block_hasher = request._block_hasher.inner
        rig.pins.pin_of(request).saveable = saveable

    rig.pins.root._swap, rig.pins.strand = swapping, stranding


def an_ended_digest_used_again(patch: pytest.MonkeyPatch, rig: Any) -> None:
    rig.pins.root.end = lambda weights: True


def a_late_hit_that_proposes_nothing(patch: pytest.MonkeyPatch, rig: Any) -> None:
    rig.side.weights.ask_for_next_epoch = lambda: None


def puts_before_all_ranks_agree(patch: pytest.MonkeyPatch, rig: Any) -> None:
    def save(self: FakeWorker, job: Any) -> None:
        original(self, job)
        early = self.copied.get(job.job_id)
        if early is not None:
            kept = list(self.acks)
            self._put(early)
            self.acks = kept

    original = FakeWorker._save
    if original.__name__ == "_save":
        patch.setattr(FakeWorker, "_save", save)


def sample_never_compared(patch: pytest.MonkeyPatch, rig: Any) -> None:
    rig.executor.looked = lambda metadata: None
    rig.watch._as_asked = lambda: True


def idle_engines_never_compare(patch: pytest.MonkeyPatch, rig: Any) -> None:
    rig.watch._as_asked = lambda: True


def harmless_list_too_long(patch: pytest.MonkeyPatch, rig: Any) -> None:
    patch.setattr(watching, "HARMLESS", watching.HARMLESS | {"update_weights"})


def names_without_weights(patch: pytest.MonkeyPatch, rig: Any) -> None:
    same = b"\0" * 32
    root, space = roots.shared_root, roots.namespace
    if root.__name__ == "shared_root":
        patch.setattr(roots, "shared_root", lambda *known: root(*known[:4], same))
        patch.setattr(roots, "namespace", lambda *known: space(*known[:3], same))


def root_without_weights(patch: pytest.MonkeyPatch, rig: Any) -> None:
    same, root = b"\0" * 32, roots.shared_root
    if root.__name__ == "shared_root":
        patch.setattr(roots, "shared_root", lambda *known: root(*known[:4], same))


def load_weights_unnoticed(patch: pytest.MonkeyPatch, rig: Any) -> None:
    patch.setattr(joining.EngineRanks, "num_writes", property(lambda self: 0))


def failed_calls_unnoticed(patch: pytest.MonkeyPatch, rig: Any) -> None:
    called, calling = rig.watch.called, rig.watch.calling
    rig.watch.called = lambda idle, failed: None if failed else called(idle=idle, failed=failed)
    rig.watch.calling = lambda method: None if rig.executor.fails else calling(method)


def unknown_weights_keep_their_name(patch: pytest.MonkeyPatch, rig: Any) -> None:
    hold = rig.side.weights.hold
    rig.side.weights.hold = lambda weights: None if weights is None else hold(weights)


MUTANTS = [
    skip_a_rank,
    digest_after_the_step,
    hook_after_delegating,
    no_strand,
    strand_only_running_requests,
    strand_whole_requests_late,
    a_generation_that_returns,
    an_ended_digest_used_again,
    a_late_hit_that_proposes_nothing,
    puts_before_all_ranks_agree,
    sample_never_compared,
    idle_engines_never_compare,
    harmless_list_too_long,
    names_without_weights,
    root_without_weights,
    load_weights_unnoticed,
    failed_calls_unnoticed,
    unknown_weights_keep_their_name,
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_rule_that_is_taken_away_is_noticed(make_rig: MakeRig, mutant: Callable[[pytest.MonkeyPatch, Any], None]) -> None:
    for seed in range(MUTANT_SCHEDULES):
        with pytest.MonkeyPatch.context() as patch:
            names = None
            try:
                names = Names(make_rig, random.Random(f"mutant{seed}"), lambda rig, patch=patch: mutant(patch, rig))
                names.run()
            except AssertionError as noticed:
                print(f"{mutant.__name__}: schedule {seed}: {str(noticed).splitlines()[0][:150]}")
                return
    raise AssertionError(f"{mutant.__name__}: nothing noticed in {MUTANT_SCHEDULES} schedules")
