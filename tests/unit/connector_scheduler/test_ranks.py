"""Acknowledgements of several ranks, in any grouping, order and skew over steps.

A save counts if every rank managed it, whichever way vLLM merges the ranks of a step, and nothing is seen before the last rank has
spoken, nor released that a rank may touch.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epochkv_connector.tiers.manager import SETTLE_SECONDS
from epochkv_connector.tiers.state import Copied, Jobs, Loaded, Outcome, RecentBlocks, Released, Stored
from epochkv_connector.wire import BlockMove, JobAck, LoadJob, Phase, SaveJob, Tier, WorkerReport
from tests.unit.connector_scheduler.rig import PROMPT, SNAP, World, chain, config

BLOCKS = 8
SAVE, LOAD = 1, 2

managed = st.sampled_from([True, True, True, False])


def table_of(num_ranks: int, num_host: int = 0) -> Jobs:
    """A save to both tiers and a load of blocks 0..7, slots 20..27, of which the first are in L1."""
    table = Jobs(num_ranks)
    tiers = [Tier.HOST] * num_host + [Tier.STORE] * (BLOCKS - num_host)
    moves = tuple(BlockMove(0, block, 10 + block, 20 + block, bytes([block]), tier) for block, tier in enumerate(tiers))
    table.open_save(SaveJob(SAVE, "s", "ns", moves, 10.0), [10 + block for block in range(BLOCKS)], 0.0)
    table.open_load(LoadJob(LOAD, "l", "ns", moves, 10.0), 0.0)
    return table


def acks_of(rank: int, copied: bool, stored: bool, missing: frozenset[int]) -> list[JobAck]:
    """All that one rank says, in its order."""
    filled = tuple(20 + block for block in range(BLOCKS) if block not in missing)
    return [
        JobAck(SAVE, rank, Phase.COPIED, failed=not copied),
        JobAck(LOAD, rank, Phase.LOADED, bool(missing), filled),
        JobAck(SAVE, rank, Phase.STORED, failed=not stored),
    ]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[list[JobAck]], list[WorkerReport], list[int]]:
    """(what each rank says, one merged report per step, the step in which the last rank says each of its three things)."""
    said = [
        acks_of(rank, draw(managed), draw(managed), draw(st.frozensets(st.integers(0, BLOCKS - 1), max_size=3)))
        for rank in range(draw(st.integers(1, 4)))
    ]
    when = [sorted(draw(st.lists(st.integers(0, 4), min_size=3, max_size=3))) for _ in said]
    merged = []
    for step in range(5):
        reports = [
            WorkerReport([ack for ack, at in zip(acks, times, strict=True) if at == step]) for acks, times in zip(said, when, strict=True)
        ]
        reports = draw(st.permutations(reports))
        while len(reports) > 1:  # in any grouping
            at = draw(st.integers(0, len(reports) - 2))
            reports[at : at + 2] = [reports[at].aggregate(reports[at + 1])]
        merged.append(reports[0])
    return said, merged, [max(times[number] for times in when) for number in range(3)]


def essence(outcome: Outcome) -> tuple[object, ...]:
    """What of an outcome the bookkeeping acts upon."""
    if isinstance(outcome, Copied):
        return "copied", {move.block for move in outcome.saved}
    if isinstance(outcome, Stored):
        return "stored", {move.block for move in outcome.stored}
    assert isinstance(outcome, Loaded)
    return "loaded", outcome.failed, {m.block for m in outcome.filled}, {m.block for m in outcome.doubted}


@given(steps())
@settings(max_examples=300, deadline=None)
def test_any_grouping_order_and_skew_of_ranks_gives_what_all_managed_after_the_last(
    case: tuple[list[list[JobAck]], list[WorkerReport], list[int]],
) -> None:
    said, merged, last = case
    table = table_of(len(said))
    seen: dict[str, tuple[int, tuple[object, ...]]] = {}
    for step, report in enumerate(merged):
        assert report, "vLLM's aggregator skips what is falsy"
        for ack in report.acks:
            for outcome in table.acknowledge(ack):
                if isinstance(outcome, Copied | Stored | Loaded):
                    what = essence(outcome)
                    assert what[0] not in seen
                    seen[str(what[0])] = step, what
    everything = set(range(BLOCKS))
    expected: dict[str, tuple[int, tuple[object, ...]]] = {}
    for name, number in (("copied", 0), ("stored", 2)):
        failed = any(acks[number].failed for acks in said)
        expected[name] = (last[number], (name, set() if failed else everything))
    missing = {block for acks in said for block in everything if 20 + block not in acks[1].filled_slots}
    expected["loaded"] = (last[1], ("loaded", bool(missing), everything - missing, missing))
    assert seen == expected
    assert len(table) == 0
    assert table.ignored_acks == 0


@given(managed=st.lists(managed, min_size=1, max_size=4), data=st.data())
@settings(max_examples=60, deadline=None)
def test_a_save_is_found_after_the_last_rank_if_all_ranks_managed_it(managed: list[bool], data: st.DataObject) -> None:
    world = World(config(l1_slots=50, ranks=len(managed)), ranks=len(managed))
    blocks: list[list[int]] = [[]]
    world.compute(blocks, chain(SNAP.root, PROMPT), 0, 4 * BLOCKS)
    world.tiers.adopt(SNAP)
    world.collect("a", blocks, 4 * BLOCKS)
    (job,) = world.step().saves

    def found() -> int | None:
        world.tiers.finish("asks")
        return world.answer("asks")

    for rank in data.draw(st.permutations(range(len(managed)))):
        assert found() == 0, "a rank has not spoken"
        world.tiers.on_acks([JobAck(job.job_id, rank, Phase.COPIED, failed=not managed[rank])])
        world.step()
    assert found() == (4 * BLOCKS if all(managed) else 0)
    world.tiers.finish("asks")
    world.tiers.finish("a")
    world.assert_idle()


@pytest.mark.parametrize("failed", [False, True])
def test_ranks_that_settle_alone_agree_once_all_have(failed: bool) -> None:
    world = World(config(l1_slots=50, l2=True, ranks=2), ranks=2)
    world.tiers.state.settles = True
    blocks: list[list[int]] = [[]]
    world.compute(blocks, chain(SNAP.root, PROMPT), 0, 4 * BLOCKS)
    world.tiers.adopt(SNAP)
    world.collect("a", blocks, 4 * BLOCKS)
    (job,) = world.tiers.end_step().saves
    acks = [JobAck(job.job_id, rank, phase, failed and bool(rank) and phase > 0) for phase in job.phases[:2] for rank in range(2)]
    for ack in acks[:3]:
        world.tiers.on_acks([ack])
        step = world.tiers.end_step()
        assert step.agreed == step.refused == ()
    assert world.tiers.saves.is_pending(), "an engine that idles steps on, or nobody would hear of the last rank"
    world.now += SETTLE_SECONDS
    assert not world.tiers.saves.is_pending(), "not for ever"
    world.tiers.on_acks(acks[3:])
    step = world.tiers.end_step()
    assert (step.agreed, step.refused) == (((), (job.job_id,)) if failed else ((job.job_id,), ()))


def test_recent_blocks_forget_the_tail_of_the_oldest_chain_first() -> None:
    recent = RecentBlocks(3)
    recent.add([(0, b"a"), (0, b"b")])
    recent.add([(1, b"c"), (1, b"d")])
    assert [key in recent for key in [(0, b"a"), (0, b"b"), (1, b"c"), (1, b"d")]] == [True, False, True, True]
    recent.add([(0, b"a")])
    recent.discard([(1, b"d"), (2, b"never there")])
    recent.add([(1, b"e"), (1, b"f")])
    assert [key in recent for key in [(0, b"a"), (1, b"c"), (1, b"e"), (1, b"f")]] == [True, False, True, True]
    assert len(recent) == 3


# -- what becomes of slots ---------------------------------------------------------------------------------------------
def feed(table: Jobs, acks: list[JobAck]) -> list[Outcome]:
    return [outcome for ack in acks for outcome in table.acknowledge(ack)]


def test_a_failed_load_that_used_slots_in_turns_is_doubted_as_a_whole() -> None:
    table = Jobs(1)
    moves = tuple(BlockMove(0, block, 10 + block, 20 + block % 2, bytes([block]), Tier.STORE) for block in range(BLOCKS))
    table.open_load(LoadJob(2, "r", "ns", moves, 10.0), 0.0)
    loaded, released = feed(table, [JobAck(2, 0, Phase.LOADED, failed=True, filled_slots=(20, 21))])
    assert isinstance(loaded, Loaded)
    assert (loaded.filled, loaded.doubted) == ((), moves)
    assert released == Released((21, 20)), "each slot once"
    assert len(table) == 0


def test_a_rank_counts_once() -> None:
    table = table_of(2)
    ack = JobAck(1, 0, Phase.COPIED)
    assert feed(table, [ack, ack, ack]) == []
    assert table.ignored_acks == 2
    assert feed(table, [JobAck(99, 0, Phase.COPIED), JobAck(1, 0, Phase.LOADED)]) == []
    assert table.ignored_acks == 4


def test_a_failed_load_blames_what_was_not_fetched_or_else_everything() -> None:
    for filled, doubted in (((22, 23, 24, 25), {6, 7}), (tuple(range(22, 28)), set(range(BLOCKS)))):
        (loaded, _) = feed(table_of(1, num_host=2), [JobAck(LOAD, 0, Phase.LOADED, True, filled)])
        assert isinstance(loaded, Loaded)
        assert {move.block for move in loaded.doubted} == doubted


def test_busy_slots_wait_for_every_rank_that_named_them() -> None:
    table = table_of(2)
    busy = [JobAck(2, rank, Phase.LOADED, True, (20, 22, 24), (24, 25)) for rank in (0, 1)]
    loaded, released = feed(table, busy)
    assert isinstance(loaded, Loaded)
    assert [move.slot for move in loaded.filled] == [20, 22, 24], "the other calls of one fetch write to other slots"
    assert isinstance(released, Released)
    assert released.slots == (27, 26, 23, 22, 21, 20)
    assert not table.is_loading("l"), "the request need not wait for the slots"
    assert table.num_busy_slots == 2
    assert feed(table, [JobAck(2, 0, Phase.RELEASED)]) == []
    (released,) = feed(table, [JobAck(2, 1, Phase.RELEASED)])
    assert released == Released((25, 24))
    assert table.num_busy_slots == 0


def test_overdue_jobs_are_counted_and_kept() -> None:
    table = table_of(1)
    assert table.num_overdue(20.0) == 0
    assert table.num_overdue(20.1) == 2
    assert len(table) == 2
