"""The simulator of names over many schedules, and proof that it notices a missing rule.

EPOCHKV_SEEDS=500 runs more schedules, EPOCHKV_SEED=7 one of them.
"""

import os
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from epochkv_connector.naming import root as roots
from epochkv_connector.weights import executor as joining
from epochkv_connector.weights import watch as watching
from epochkv_connector.weights.watch import fold
from tests.scheduler.names_simulator import Names, reached
from tests.scheduler.rigs import MakeRig
from tests.support.scheduler import RequestStatus
from tests.support.scheduler_worker import FakeWorker

MUTANT_SCHEDULES = 1000
TELLING = (11, 15, 0)
"""Schedules that notice most mutants; they are tried first."""
DRAWN = int(os.environ.get("EPOCHKV_SEED", random.SystemRandom().randrange(10**6)))
SEEDS = [*map(str, range(int(os.environ.get("EPOCHKV_SEEDS", "24")))), "drawn"]


@pytest.mark.parametrize(
    ("layout", "seed"),
    [
        *(pytest.param(("full",), seed, id=seed) for seed in SEEDS),
        *(pytest.param(("full", "state"), seed, id=f"full+state-{seed}") for seed in SEEDS[::3]),
    ],
)
def test_names_in_random_schedules(make_rig: MakeRig, seed: str) -> None:
    number = DRAWN if seed == "drawn" else int(seed)
    print(f"EPOCHKV_SEED={number}")
    Names(make_rig, random.Random(f"names{number}")).run()
    reached["schedules"] += 1


def test_the_schedules_reached_what_they_are_for() -> None:
    """Runs after them: a schedule without loads, roll-backs or late changes proves nothing."""
    if reached["schedules"] < len(SEEDS) + len(SEEDS[::3]):
        pytest.skip("this process has not run all of the random schedules")
    for name in ("loads_done", "blocks_stored", "watch_late", "watch_unseen", "watch_unknown", "watch_changes", "invalidated", "restart"):
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


def no_detach(patch: pytest.MonkeyPatch, rig: Any) -> None:
    rig.pins.detach = lambda request, num_named: None


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
    naming: Any = roots
    root, space = naming.shared_root, naming.namespace
    if root.__name__ == "shared_root":
        patch.setattr(roots, "shared_root", lambda *known: root(*known[:4], same))
        patch.setattr(roots, "namespace", lambda *known: space(*known[:3], same))


def root_without_weights(patch: pytest.MonkeyPatch, rig: Any) -> None:
    naming: Any = roots
    same, root = b"\0" * 32, naming.shared_root
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
    no_detach,
    detach_only_running_requests,
    detach_whole_requests_late,
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


@pytest.mark.unclean
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_rule_that_is_taken_away_is_noticed(make_rig: MakeRig, mutant: Callable[[pytest.MonkeyPatch, Any], None]) -> None:
    for seed in (*TELLING, *range(MUTANT_SCHEDULES)):
        with pytest.MonkeyPatch.context() as patch:
            names = None
            try:
                names = Names(make_rig, random.Random(f"mutant{seed}"), lambda rig, patch=patch: mutant(patch, rig))
                names.run()
            except AssertionError as noticed:
                print(f"{mutant.__name__}: schedule {seed}: {str(noticed).splitlines()[0][:150]}")
                return
    raise AssertionError(f"{mutant.__name__}: nothing noticed in {MUTANT_SCHEDULES} schedules")
