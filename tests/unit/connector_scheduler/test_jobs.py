"""The table: ranks counted across steps, intersection and hull, nothing released that a rank may touch."""

from epochkv_connector.tiers.state import Jobs, Loaded, Outcome, Released
from epochkv_connector.wire import BlockMove, JobAck, LoadJob, Phase, SaveJob, Tier

BLOCKS = 6


def save_job(namespace: str | None = "ns") -> SaveJob:
    moves = tuple(BlockMove(0, block, 10 + block, 20 + block, bytes([block])) for block in range(BLOCKS))
    return SaveJob(1, "r", namespace, 0, BLOCKS, moves, 10.0)


def load_job() -> LoadJob:
    moves = tuple(
        BlockMove(0, block, 10 + block, 20 + block, bytes([block]), Tier.HOST if block < 2 else Tier.STORE) for block in range(BLOCKS)
    )
    return LoadJob(2, "r", "ns", moves, 10.0)


def opened(ranks: int, *, namespace: str | None = "ns") -> Jobs:
    table = Jobs(ranks)
    table.open_save(save_job(namespace), [10 + block for block in range(BLOCKS)], [1], 0.0)
    table.open_load(load_job(), 0.0, reads=True)
    return table


def feed(table: Jobs, acks: list[JobAck]) -> list[Outcome]:
    return [outcome for ack in acks for outcome in table.acknowledge(ack)]


def test_a_read_is_open_until_every_rank_has_reported_it_and_let_go() -> None:
    table = opened(2)
    assert table.num_reads == 1
    feed(table, [JobAck(2, 0, Phase.LOADED, 0, BLOCKS)])
    assert table.num_reads == 1
    feed(table, [JobAck(2, 1, Phase.LOADED, 0, 0, failed=True, busy_slots=(24,))])
    assert table.num_reads == 1
    feed(table, [JobAck(2, 1, Phase.RELEASED, 0, 0)])
    assert table.num_reads == 0


def test_a_failed_load_that_used_slots_in_turns_is_doubted_as_a_whole() -> None:
    table = Jobs(1)
    moves = tuple(BlockMove(0, block, 10 + block, 20 + block % 2, bytes([block]), Tier.STORE) for block in range(BLOCKS))
    table.open_load(LoadJob(2, "r", "ns", moves, 10.0), 0.0, reads=True)
    loaded, released = feed(table, [JobAck(2, 0, Phase.LOADED, 0, 0, failed=True, filled_slots=(20, 21))])
    assert isinstance(loaded, Loaded)
    assert (loaded.filled, loaded.doubted) == ((), moves)
    assert released == Released((21, 20)), "each slot once"
    assert len(table) == 0


def test_a_rank_counts_once() -> None:
    table = opened(2)
    ack = JobAck(1, 0, Phase.COPIED, 0, BLOCKS)
    assert feed(table, [ack, ack, ack]) == []
    assert table.ignored_acks == 2
    assert feed(table, [JobAck(99, 0, Phase.COPIED, 0, 1), JobAck(1, 0, Phase.LOADED, 0, 1)]) == []
    assert table.ignored_acks == 4


def test_a_failed_load_blames_what_was_not_fetched_or_else_everything() -> None:
    table = opened(1)
    (loaded, _) = feed(table, [JobAck(2, 0, Phase.LOADED, 0, 0, True, (22, 23))])
    assert isinstance(loaded, Loaded)
    assert {move.block for move in loaded.doubted} == {4, 5}
    table = opened(1)
    (loaded, _) = feed(table, [JobAck(2, 0, Phase.LOADED, 0, 0, True, (22, 23, 24, 25))])
    assert isinstance(loaded, Loaded)
    assert {move.block for move in loaded.doubted} == set(range(BLOCKS))


def test_busy_slots_wait_for_every_rank_that_named_them() -> None:
    table = opened(2)
    busy = [JobAck(2, rank, Phase.LOADED, 0, 0, True, (), (24, 25)) for rank in (0, 1)]
    loaded, released = feed(table, busy)
    assert isinstance(loaded, Loaded)
    assert isinstance(released, Released)
    assert released.slots == (23, 22, 21, 20)
    assert not table.is_loading("r"), "the request need not wait for the slots"
    assert table.num_busy_slots == 2
    assert feed(table, [JobAck(2, 0, Phase.RELEASED, 0, 0)]) == []
    (released,) = feed(table, [JobAck(2, 1, Phase.RELEASED, 0, 0)])
    assert released == Released((25, 24))
    assert table.num_busy_slots == 0


def test_overdue_jobs_are_counted_and_kept() -> None:
    table = opened(1)
    assert table.num_overdue(20.0) == 0
    assert table.num_overdue(20.1) == 2
    assert len(table) == 2
