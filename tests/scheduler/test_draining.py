"""What an engine says of its reads from the store: a hub empties a store on the strength of it, under nobody's hands."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from epochkv_connector import admin
from epochkv_connector.records import JobAck, Phase
from epochkv_connector.scheduling import DRAIN_SECONDS
from tests.helpers_scheduler import BLOCK, Mode, SharedStore, prompt
from tests.helpers_store import wait_until
from tests.scheduler.test_loads import LENGTH, begin_load, filled

MakeRig = Callable[..., Any]


def reading(make_rig: MakeRig, **kwargs: Any) -> tuple[Any, SharedStore, Any]:
    """An engine of two ranks without L1 that waits for a load from the store, and that load's request."""
    store = SharedStore()
    rig, tokens = filled(make_rig, store=store, **{"l1_bytes": None, "num_ranks": 2, **kwargs})
    assert rig.side.loading() == 0
    return rig, store, begin_load(rig, tokens)


@pytest.fixture
def pokes(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """What `loading()` was whenever the hub would have been told at once."""
    told: list[int | None] = []
    monkeypatch.setattr("epochkv_connector.link.HubLink.poke", lambda self: told.append(0))
    return told


def test_a_read_is_open_until_its_last_rank_has_reported(make_rig: MakeRig, pokes: list[int | None]) -> None:
    rig, _, _ = reading(make_rig)
    assert rig.side.loading() == 1
    rig.adopt(1, weights="w1", mode=Mode.BYPASS)
    rig.step()
    assert (rig.side.loading(), pokes) == (1, [])
    rig.workers[0].hold_loads = False
    rig.step()
    assert (rig.side.loading(), pokes) == (1, []), "a rank in another process still reads"
    rig.workers[1].hold_loads = False
    rig.step()
    assert (rig.side.loading(), pokes) == (0, [0])
    rig.run()
    assert pokes == [0]
    rig.check_clean()


def test_in_use_the_hub_is_not_told_of_every_load(make_rig: MakeRig, pokes: list[int | None]) -> None:
    rig, _, _ = reading(make_rig)
    for worker in rig.workers:
        worker.hold_loads = False
    rig.run()
    assert (rig.side.loading(), pokes) == (0, [])
    rig.check_clean()


def test_a_read_given_up_is_open_until_the_store_lets_go(make_rig: MakeRig, pokes: list[int | None]) -> None:
    """A hung store: the load is failed at its deadline, and its bytes may still come."""
    rig, _, request = reading(make_rig, num_ranks=1)
    (job,) = rig.workers[0].loads
    rig.workers[0].loads.clear()
    slots = tuple(move.slot for move in job.moves)
    rig.workers[0].finished.add(request.request_id)
    rig.workers[0].failed.add(request.request_id)
    rig.workers[0].acks.append(JobAck(job.job_id, 0, Phase.LOADED, 0, 0, failed=True, failed_slots=slots, busy_slots=slots))
    while request.request_id not in rig.finished:
        rig.step()
    assert rig.side.loading() == 1
    assert not rig.connector.has_pending_push_work(), "in use nobody waits for it, and a pause would"
    now = 1000.0
    rig.fence._clock = lambda: now
    rig.adopt(1, mode=Mode.BYPASS)
    assert rig.connector.has_pending_push_work(), "the engine is idle and would never collect the end of the read"
    now += DRAIN_SECONDS
    assert not rig.connector.has_pending_push_work()
    now -= DRAIN_SECONDS
    rig.step()
    assert (rig.side.loading(), pokes) == (1, [])
    rig.workers[0].acks.append(JobAck(job.job_id, 0, Phase.RELEASED, 0, 0))
    rig.step()
    assert (rig.side.loading(), pokes) == (0, [0])
    assert not rig.connector.has_pending_push_work()
    rig.check_clean()


def test_a_read_accepted_just_before_bypass_counts_before_any_rank_knows_of_it(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """The acknowledgement of the bypass waits for the step (`busy`), and then says that something is read."""
    rig, tokens = filled(make_rig, store=SharedStore(), l1_bytes=None)
    seen: list[tuple[bool, int | None]] = []
    build = rig.connector.build_connector_meta

    def adopt_first(output: Any) -> Any:
        rig.adopt(1, weights="w1", mode=Mode.BYPASS)
        seen.append((rig.fence.busy(), rig.side.loading()))
        metadata = build(output)
        seen.append((rig.fence.busy(), rig.side.loading()))
        return metadata

    monkeypatch.setattr(rig.connector, "build_connector_meta", adopt_first)
    rig.add(tokens)
    rig.step()
    assert seen == [(True, 1), (False, 1)]
    assert rig.side.loading() == 0, "the worker has run it by now"
    monkeypatch.undo()
    rig.run()
    rig.check_clean()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("weights_source", ["Pushed", "Model"])
def test_in_bypass_no_rank_is_told_to_load_or_save(make_rig: MakeRig, num_ranks: int, weights_source: str) -> None:
    store = SharedStore()
    rig, tokens = filled(make_rig, store=store, num_ranks=num_ranks, weights_source=weights_source)
    rig.adopt(0, mode=Mode.BYPASS)
    before = (list(store.fetched), set(store.objects), list(store.asked))
    orders: list[int] = []
    for worker in rig.workers:
        take = worker.start_step

        def note(metadata: Any, take: Callable[[Any], None] = take) -> None:
            orders.append(len(metadata.loads) + len(metadata.saves))
            take(metadata)

        worker.start_step = note
    for wanted in (tokens, prompt(50, LENGTH), tokens, prompt(51, BLOCK - 3)):
        rig.serve(wanted, max_tokens=2 * BLOCK)
        assert rig.side.loading() == 0
    assert len(orders) > num_ranks
    assert not any(orders)
    assert (list(store.fetched), set(store.objects), list(store.asked)) == before
    rig.adopt(0)
    assert rig.cached[rig.serve(tokens)] == 8 * BLOCK, "the same prompt is loaded when the epoch is in use again"
    rig.check_clean()


def test_l1_is_no_store(make_rig: MakeRig) -> None:
    rig, tokens = filled(make_rig)
    begin_load(rig, tokens)
    assert rig.side.loading() == 0


def test_no_number_is_made_up_when_the_bookkeeping_fails(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    rig, _, _ = reading(make_rig, num_ranks=1)

    def broken(*_: Any) -> Any:
        raise RuntimeError("injected")

    monkeypatch.setattr(rig.half, "on_acks", broken)
    rig.workers[0].hold_loads = False
    rig.step()
    assert rig.side.loading() is None


def test_an_idle_engine_in_this_process_needs_no_step_to_know(make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """In process nothing steps after the last request: the worker is asked instead. Not where other ranks exist."""
    rig, _, _ = reading(make_rig, num_ranks=1)
    (job,) = rig.workers[0].loads

    class Local:
        def reads_over(self) -> set[int]:
            return {job.job_id}

    monkeypatch.setattr(rig.side, "_local_worker", Local)
    assert rig.side.loading() == 0
    monkeypatch.setattr(rig.half._ledger, "num_ranks", 2)
    assert rig.side.loading() == 1


@pytest.fixture
def short_folder() -> Iterator[str]:
    """For sockets: pytest's own folders have long names."""
    with tempfile.TemporaryDirectory(prefix="epochkv-", ignore_cleanup_errors=True) as folder:
        yield folder


def test_ranks_in_other_processes_are_asked_while_the_engine_is_idle(
    short_folder: str, make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle engine stops stepping after a while, and a hung store may let go of a read only then."""
    monkeypatch.setenv(admin.FOLDER_ENV, short_folder)
    rig, _, _ = reading(make_rig)
    (job,) = rig.workers[0].loads
    over: list[list[int]] = [[], []]
    folder = admin.engine_folder(str(rig.vllm_config.kv_transfer_config.engine_id))
    servers = [
        admin.AdminServer(admin.rank_socket(folder, rank), {"STATUS": lambda argument, seconds, rank=rank: {"reads_over": over[rank]}})
        for rank in range(2)
    ]
    for server in servers:
        server.start()
    hub_is_told = rig.connector._loading  # what the heartbeats carry
    over[0] = [job.job_id]
    assert [hub_is_told() for _ in range(3)] == [1, 1, 1]
    rig.adopt(1, weights="w1", mode=Mode.BYPASS)
    hub_is_told()
    wait_until(lambda: rig.connector._tiers.watch.reads_over()[0] == {job.job_id}, 10, "rank 0 was asked")
    assert hub_is_told() == 1, "rank 1 still reads"
    over[1] = [job.job_id]
    wait_until(lambda: hub_is_told() == 0, 10, "both ranks have said that it is over, and no step was made")
    assert rig.side.loading() == 1, "the books wait for the ranks' reports"
    for server in servers:
        assert server.stop()
    for worker in rig.workers:
        worker.hold_loads = False
    rig.run()
    assert (hub_is_told(), rig.side.loading()) == (0, 0)
    rig.check_clean()
