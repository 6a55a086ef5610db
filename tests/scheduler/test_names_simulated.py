"""A simulator of names: engines with real schedulers on one store, weights that are pushed in any order, through vLLM and past it.

The oracle knows which weights computed every token's KV, and from which tokens. After every step and at the end:

- W1: nobody begins with KV of other weights than his own; no object of the store was computed with others than its name says;
- W2: after a change that passes through vLLM, what is named next is named by the new weights, or by none;
- W3: engines that hold the same bytes share again by themselves, in the epoch that was asked for;
- W4: an engine that does not know its weights shares nothing.

A write past vLLM is seen behind the step that follows it, so what that one step was scheduled with is not held against it. Nor are
the blocks that a request took before a change: it goes on with them, and nobody finds what it makes of them.

Each rule is taken away, and that is noticed. EPOCHKV_SEEDS=500 runs more schedules, EPOCHKV_SEED=7 one of them.
"""

from __future__ import annotations

import hashlib
import inspect
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest

from epochkv_connector.naming import root as roots
from epochkv_connector.weights import executor as joining
from epochkv_connector.weights import watch as watching
from epochkv_connector.weights.watch import fold
from tests.scheduler.rigs import MakeRig, abort_one, hold_some, preempt_last, release, work_some
from tests.support.scheduler import BLOCK, OwnRoot, RequestStatus, Rig, SharedStore, prompt
from tests.support.scheduler_oracle import Oracle

NUM_ACTIONS = 250
BLOCKS = 6
reached: Counter[str] = Counter()
"""What the schedules so far contained."""


def digest_of(weights: str, num_ranks: int) -> bytes:
    """What an engine with these weights (of all its ranks, or of each) should call them."""
    held = weights.split("|") if "|" in weights else [weights] * num_ranks
    return fold(hashlib.sha256(one.encode()).digest() for one in held)


class NamesOracle(Oracle):
    """Compares with what an engine may have taken its KV for.

    Attributes:
        taken: what the engine called its weights when a request took a hit whose rest is loaded: from then on it is carried, and what
            it finds must be of these.
    """

    rig: Engine

    def __init__(self, rig: Engine) -> None:
        super().__init__(rig)
        self.taken: dict[str, bytes] = {}
        self._texts: dict[bytes, str] = {}
        self._expected = ""

    def admitted_label(self, request: Any) -> str:
        return self._expected

    def check(self, request: Any, start: int, admitted: bool) -> None:
        was = self.stale_tokens.get(request.request_id, 0)
        recorded = self.recorded_weights.pop(request.request_id, self.rig.weights)
        taken = self._texts.get(self.taken.pop(request.request_id, b""), recorded)
        for label in (taken, recorded, self.rig.weights):
            self._expected = label
            self.stale_tokens[request.request_id] = was
            super().check(request, start, admitted)
            if self.stale_tokens[request.request_id] == was:
                return
        if self.rig.is_misled():
            self.stale_tokens[request.request_id] = was

    def note(self) -> None:
        rig = self.rig
        self._texts[rig.truth] = rig.weights
        for request in rig.scheduler.requests.values():
            if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS and rig.watch.value is not None:
                self.taken.setdefault(request.request_id, rig.watch.value)
            elif request.status is not RequestStatus.RUNNING:
                self.taken.pop(request.request_id, None)


class Engine(Rig):
    """A rig whose weights may be written without a word to vLLM.

    Attributes:
        past: somebody has, and nobody has looked since.
    """

    past = False

    @property
    def truth(self) -> bytes:
        return fold(hashlib.sha256(held.encode()).digest() for held in self.executor.ranks)

    def is_misled(self) -> bool:
        """Its names are of other weights than its own, and it cannot know."""
        self.past = self.past and self.watch.value not in (None, self.truth)
        return self.past


class Names:
    """One random schedule."""

    def __init__(self, make_rig: MakeRig, source: random.Random, mutate: Callable[[Any], None] = lambda rig: None) -> None:
        self.source = source
        self.store = SharedStore()
        self.target = 0
        self.now = 1000.0
        self.num_ranks = source.choice([1, 2, 2])
        self._make = make_rig
        self._mutate = mutate
        sizes = {"num_blocks": source.choice([24, 40]), "l1_bytes": source.choice([None, 1 << 20])}
        self._options = {"num_ranks": self.num_ranks, **sizes, "max_batched_tokens": source.choice([64, 8192])}
        self._happened: Counter[str] = Counter()
        self._put_before: set[str] = set()
        self.known = ["w0"]
        self.said: list[list[int]] = []
        self.engines = [self.new() for _ in range(source.choice([2, 2, 3]))]

    def new(self) -> Any:
        rig = self._make(Engine, store=self.store, oracle=NamesOracle, **self._options)
        rig.pins.root._global = OwnRoot(rig.pins.root.snapshot.root)
        rig.side.weights.link.propose = self._proposed
        rig.watch._clock = lambda: self.now
        rig.watch._scheduled_at = rig.watch._suspected_at = self.now
        rig.watch._digest_at = 0.0
        rig.adopt(self.target)
        self._mutate(rig)
        return rig

    def _proposed(self, epoch: int) -> None:
        self.target = max(self.target, epoch)

    # ------------------------------------------------------------------ what happens
    def act(self) -> None:
        names = list(ACTIONS)
        (name,) = self.source.choices(names, [ACTIONS[name].weight for name in names])
        rig = self.source.choice(self.engines)
        self._happened[name] += 1
        ACTIONS[name].do(self, rig)
        self.check()

    def next_weights(self) -> str:
        """New ones, or a return to earlier ones."""
        if self.source.random() < 0.3 or len(self.known) < 2:
            self.known.append(f"w{len(self.known)}")
            return self.known[-1]
        return self.source.choice(self.known[-3:])

    def step(self, rig: Any, between: Callable[[], None] = lambda: None) -> None:
        """One step of one engine; `between` happens while it is under way."""
        self.now += 0.01
        if self.now - rig.watch._scheduled_at > watching.IDLE_SECONDS:
            rig.past = False  # after a pause it compares first, so nothing excuses it
        output = rig.scheduler.schedule()
        self._check_named(rig)
        rig.oracle.note()
        between()
        rig.update(output)
        work_some(rig, self.source)

    def drop(self, rig: Any) -> None:
        release(rig)
        self.now += 100.0
        rig.run(3000)
        self._verify(rig)

    # ------------------------------------------------------------------ what must hold
    def _check_named(self, rig: Any) -> None:
        if rig.is_misled():
            return
        value = rig.watch.value
        assert value in (None, rig.truth), "W2: named after other weights than it holds"
        shown = rig.pins.root.refresh()
        assert not shown.shared or value == shown.weights, "W4: a shared root without weights"

    def check(self) -> None:
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
        reached.update({name: int(value) for name, value in rig.tiers.stats().items() if name in ("loads_done", "blocks_stored")})
        reached["invalidated"] += rig.side.counters["invalidated_loads"]

    def finish(self) -> None:
        """Everything ends; then all get the same weights, each in its way, and the epoch that was asked for, and share."""
        for rig in self.engines:
            self.drop(rig)
            self.check()
        weights = self.source.choice(self.known)
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
        for _ in range(NUM_ACTIONS):
            self.act()
        self.finish()


# ---------------------------------------------------------------------------------------------- what happens to one engine
class Action(NamedTuple):
    """How often it happens beside the others, and what it does."""

    weight: float
    do: Callable[[Names, Any], object]


def _add(names: Names, rig: Any) -> None:
    if len(rig.scheduler.requests) >= 6:
        return
    living = [request for engine in names.engines for request in engine.scheduler.requests.values()]
    names.said = [*names.said[-8:], *(list(request.all_token_ids) for request in living)]
    if names.said and names.source.random() < 0.5:  # a conversation goes on
        rig.add([*names.source.choice(names.said), 7], max_tokens=names.source.choice([1, BLOCK]))
    else:
        family = prompt(names.source.randrange(2), BLOCKS * BLOCK)
        kept = names.source.choice([BLOCK - 3, 2 * BLOCK, 4 * BLOCK + 5, BLOCKS * BLOCK])
        rig.add([*family[:kept], 5 + names.source.randrange(2)], max_tokens=names.source.choice([1, BLOCK, 3 * BLOCK]))


def _push(names: Names, rig: Any) -> None:
    rig.past = False
    rig.weights = names.next_weights()


def _return(names: Names, rig: Any) -> None:
    """Other weights for a few steps, while loads wait, and those of before again."""
    was = rig.weights
    if "|" in was:
        return
    for worker in rig.workers:
        worker.hold_loads = True
    _add(names, rig)
    names.step(rig)
    _push(names, rig)
    for _ in range(names.source.randrange(1, BLOCK)):
        names.step(rig)
    rig.past = False
    rig.weights = was
    for worker in rig.workers:
        worker.hold_loads = False
    _add(names, rig)


def _part(names: Names, rig: Any) -> None:
    rig.past = False
    weights, rank = names.next_weights(), names.source.randrange(names.num_ranks)
    rig.executor.on_call = lambda name: rig.write_past(weights, rank) if name == "update_weights" else None
    rig.executor.collective_rpc("update_weights")
    rig.executor.on_call = lambda name: None


def _past(names: Names, rig: Any) -> None:
    rig.past = True
    rig.write_past(names.next_weights(), names.source.choice([None, *range(names.num_ranks)]))


def _late(names: Names, rig: Any) -> None:
    """A write while a step is under way, and perhaps the old weights again."""
    _add(names, rig)
    was = rig.weights
    names.step(rig, lambda: _past(names, rig))
    if names.source.random() < 0.5 and "|" not in was:
        rig.past = False
        rig.weights = was
        names.step(rig)
        _add(names, rig)


def _fail(names: Names, rig: Any) -> None:
    rig.past = False
    rig.executor.fails = {"update_weights"}
    with pytest.raises(RuntimeError, match="has failed"):
        rig.executor.collective_rpc("update_weights", kwargs={"weights": names.next_weights()})
    rig.executor.fails = set()
    rig._weights = rig.executor.engine_weights


def _transfer(names: Names, rig: Any) -> None:
    rig.past = False
    rig.executor.collective_rpc("start_weight_update")
    for _ in range(names.source.randrange(3)):
        rig.weights = names.next_weights()
        names.step(rig)
    rig.executor.collective_rpc("finish_weight_update")


def _load(names: Names, rig: Any) -> None:
    """`load_weights` of the model in this very process."""
    held = rig.watch._ranks._held
    held.writes += 1
    rig.write_past(names.next_weights())
    held.writes += 1
    rig.past = False


def _probe(names: Names, rig: Any) -> None:
    rig.executor.collective_rpc(names.source.choice(["liveness_probe", "check_health", "execute_dummy_batch"]))


def _idle(names: Names, rig: Any) -> None:
    names.now += 1.0


def _adopt(names: Names, rig: Any) -> None:
    if names.source.random() < 0.2:
        names.target += 1
    rig.adopt(names.target)


def _lease(names: Names, rig: Any) -> None:
    rig.lease_until = 0.0
    for _ in range(names.source.randrange(4)):
        names.step(rig)
    if names.source.random() < 0.5:
        _push(names, rig)
    rig.lease_until = float("inf")


def _silent(names: Names, rig: Any) -> None:
    """A rank cannot say what it holds, for a while."""
    silent = names.source.randrange(names.num_ranks)
    rig.executor.answers = lambda answer: {**answer, "weights": None, "note": "no"} if answer["rank"] == silent else answer
    _push(names, rig)
    for _ in range(names.source.randrange(5)):
        names.step(rig)
        assert not rig.pins.root.snapshot.shared, "W4: an engine that does not know its weights shares"
    rig.executor.answers = lambda answer: answer


def _sleep(names: Names, rig: Any) -> None:
    rig.past = False
    rig.executor.collective_rpc("sleep")
    rig.executor.is_sleeping = True
    names.now += 1.0
    rig.executor.is_sleeping = False
    rig.executor.collective_rpc("wake_up")
    if names.source.random() < 0.5:
        _push(names, rig)


def _restart(names: Names, rig: Any) -> None:
    """The engine ends with all it had but its objects in the store, and comes back with the weights of its files."""
    names.drop(rig)
    rig.close()
    names.engines[names.engines.index(rig)] = names.new()


ACTIONS = {
    "step": Action(100, Names.step),
    "add": Action(25, _add),
    "push": Action(4, _push),
    "return": Action(3, _return),
    "part": Action(3, _part),
    "past": Action(2, _past),
    "late": Action(2, _late),
    "fail": Action(2, _fail),
    "transfer": Action(2, _transfer),
    "load": Action(1, _load),
    "probe": Action(2, _probe),
    "idle": Action(3, _idle),
    "adopt": Action(3, _adopt),
    "reset": Action(1, lambda names, rig: rig.scheduler.reset_prefix_cache(reset_connector=True)),
    "lease": Action(1, _lease),
    "abort": Action(2, lambda names, rig: abort_one(rig, names.source)),
    "preempt": Action(3, lambda names, rig: preempt_last(rig)),
    "hold": Action(4, lambda names, rig: hold_some(rig, names.source)),
    "silent": Action(1, _silent),
    "sleep": Action(1, _sleep),
    "restart": Action(0.3, _restart),
}


# ---------------------------------------------------------------------------------------------- the schedules
MUTANT_SCHEDULES = 1000
TELLING = (11, 15, 0)
"""Schedules that notice most mutants; they are tried first."""
DRAWN = int(os.environ.get("EPOCHKV_SEED", random.SystemRandom().randrange(10**6)))
SEEDS = [*map(str, range(int(os.environ.get("EPOCHKV_SEEDS", "24")))), "drawn"]


STATES = [pytest.param(("full", "state"), seed, id=f"full+state-{seed}") for seed in SEEDS[::3]]


@pytest.mark.parametrize(("layout", "seed"), [*(pytest.param(("full",), seed, id=seed) for seed in SEEDS), *STATES])
def test_names_in_random_schedules(make_rig: MakeRig, seed: str) -> None:
    number = DRAWN if seed == "drawn" else int(seed)
    print(f"EPOCHKV_SEED={number}")
    Names(make_rig, random.Random(f"names{number}")).run()
    reached["schedules"] += 1


def test_the_schedules_reached_what_they_are_for() -> None:
    """Runs after them: a schedule without loads, roll-backs or late changes proves nothing."""
    if reached["schedules"] < len(SEEDS) + len(STATES):
        pytest.skip("this process has not run all of the random schedules")
    for name in ("loads_done", "blocks_stored", "watch_late", "watch_unseen", "watch_unknown", "watch_changes", "invalidated", "restart"):
        assert reached[name] > 0, (name, reached)


# ---------------------------------------------------------------------------------------------- rules taken away
def digest_after_the_step(patch: pytest.MonkeyPatch, rig: Any) -> None:
    schedule = inspect.unwrap(rig.scheduler.schedule)

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


def detach_only_running_requests(patch: pytest.MonkeyPatch, rig: Any) -> None:
    detach = rig.pins.detach
    rig.pins.detach = lambda request, num: detach(request, num) if request.status is RequestStatus.RUNNING else None


def detach_whole_requests_late(patch: pytest.MonkeyPatch, rig: Any) -> None:
    """One block too many keeps the name that its tokens give it."""
    detach = rig.pins.detach
    rig.pins.detach = lambda request, num: detach(request, num + 1)


def a_generation_that_returns(patch: pytest.MonkeyPatch, rig: Any) -> None:
    """With requests that keep what their pins allow: what a detached one computes is offered again when the weights return."""
    known: dict[tuple[int, bytes | None], int] = {}
    swap, detach = rig.pins.root._swap, rig.pins.detach

    def swapping(state: Any) -> None:
        swap(state)
        shown = rig.pins.root.snapshot
        if shown.shared:
            rig.pins.root.snapshot = replace(shown, generation=known.setdefault((shown.epoch, shown.weights), shown.generation))

    def detaching(request: Any, num_named: int) -> None:
        """Its names, without the mark at its pin."""
        saveable = rig.pins.pin_of(request).saveable
        detach(request, len(request.block_hashes))
        request._block_hasher = request._block_hasher.inner
        rig.pins.pin_of(request).saveable = saveable

    rig.pins.root._swap, rig.pins.detach = swapping, detaching


def sample_never_compared(patch: pytest.MonkeyPatch, rig: Any) -> None:
    rig.executor.looked = lambda metadata: None
    rig.watch._as_asked = lambda: True


def root_without_weights(patch: pytest.MonkeyPatch, rig: Any) -> None:
    naming: Any = roots
    same, root = b"\0" * 32, naming.shared_root
    if root.__name__ == "shared_root":
        patch.setattr(roots, "shared_root", lambda *known: root(*known[:4], same))


def failed_calls_unnoticed(patch: pytest.MonkeyPatch, rig: Any) -> None:
    called, calling = rig.watch.called, rig.watch.calling
    rig.watch.called = lambda idle, failed: None if failed else called(idle=idle, failed=failed)
    rig.watch.calling = lambda method: None if rig.executor.fails else calling(method)


def unknown_weights_keep_their_name(patch: pytest.MonkeyPatch, rig: Any) -> None:
    hold = rig.side.weights.hold
    rig.side.weights.hold = lambda weights: None if weights is None else hold(weights)


Mutant = Callable[[pytest.MonkeyPatch, Any], None]
MUTANTS: dict[str, Mutant] = {
    "skip_a_rank": lambda patch, rig: patch.setattr(watching, "fold", lambda values: fold([next(iter(values))])),
    "no_detach": lambda patch, rig: patch.setattr(rig.pins, "detach", lambda request, num_named: None),
    "an_ended_digest_used_again": lambda patch, rig: patch.setattr(rig.pins.root, "end", lambda weights: None),
    "a_late_hit_that_proposes_nothing": lambda patch, rig: patch.setattr(rig.side.weights, "ask_for_next_epoch", lambda: None),
    "idle_engines_never_compare": lambda patch, rig: patch.setattr(rig.watch, "_as_asked", lambda: True),
    "harmless_list_too_long": lambda patch, rig: patch.setattr(watching, "HARMLESS", watching.HARMLESS | {"update_weights"}),
    "load_weights_unnoticed": lambda patch, rig: patch.setattr(joining.EngineRanks, "num_writes", property(lambda self: 0)),
} | {
    mutant.__name__: mutant
    for mutant in (
        *(digest_after_the_step, hook_after_delegating, detach_only_running_requests, detach_whole_requests_late),
        *(a_generation_that_returns, sample_never_compared, root_without_weights),
        *(failed_calls_unnoticed, unknown_weights_keep_their_name),
    )
}


@pytest.mark.unclean
@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_rule_that_is_taken_away_is_noticed(make_rig: MakeRig, mutant: str) -> None:
    for seed in (*TELLING, *range(MUTANT_SCHEDULES)):
        with pytest.MonkeyPatch.context() as patch:
            names = None
            try:
                names = Names(make_rig, random.Random(f"mutant{seed}"), lambda rig, patch=patch: MUTANTS[mutant](patch, rig))
                names.run()
            except AssertionError as noticed:
                print(f"{mutant}: schedule {seed}: {str(noticed).splitlines()[0][:150]}")
                return
    raise AssertionError(f"{mutant}: nothing noticed in {MUTANT_SCHEDULES} schedules")
