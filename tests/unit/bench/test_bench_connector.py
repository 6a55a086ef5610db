"""Hit rates that the benchmark of the connector simulates."""

from bench.connector import beside, simulation, trace


def test_simulated_engines_find_what_a_hand_counted_trace_shares() -> None:
    # Turns alternate between two engines. Counted by hand: engine 0 sees requests 0, 2, 4, engine 1 sees 1, 3.
    prompts = ((0, 1, 2), (0, 1, 2, 3), (0, 1, 5), (0, 1, 2, 3, 4), (0, 6))
    chats = trace.Trace([trace.Request(blocks, 1) for blocks in prompts], "by hand", False)
    assert simulation.hit_rate(chats, 2, 100, shared=False) == (0 + 0 + 2 + 4 + 1) / 17
    assert simulation.hit_rate(chats, 2, 100, shared=True) == (0 + 3 + 2 + 4 + 1) / 17
    assert simulation.hit_rate(chats, 1, 100, shared=False) == (0 + 3 + 2 + 4 + 1) / 17


def test_steps_beside_a_transfer_are_told_from_those_alone() -> None:
    # 100 ms each, but 300 while the requests that were answered at 1.32 and 4.02 computed, and 200 beside transfers.
    ends = [0.0, *(0.2 * number + 0.4 for number in range(4)), 1.3, *(0.1 * number + 1.4 for number in range(24))]
    ends += [4.0, 4.2, 4.4, *(0.1 * number + 4.5 for number in range(14))]
    found = beside.windows(ends, {"load": (0.35, 1.32), "save": (3.65, 4.02)}, 0.4)
    assert {kind: {round(step) for step in steps} for kind, steps in found.items()} == {"alone": {100}, "load": {200}, "save": {200}}
    assert len(found["save"]) == 2
    assert len(found["load"]) == 3
