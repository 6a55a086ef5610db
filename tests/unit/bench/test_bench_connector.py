"""Hit rates that the benchmark of the connector simulates."""

from bench.connector import simulation, trace


def test_simulated_engines_find_what_a_hand_counted_trace_shares() -> None:
    # Turns alternate between two engines. Counted by hand: engine 0 sees requests 0, 2, 4, engine 1 sees 1, 3.
    prompts = ((0, 1, 2), (0, 1, 2, 3), (0, 1, 5), (0, 1, 2, 3, 4), (0, 6))
    chats = trace.Trace([trace.Request(blocks, 1) for blocks in prompts], "by hand", False)
    assert simulation.hit_rate(chats, 2, 100, shared=False) == (0 + 0 + 2 + 4 + 1) / 17
    assert simulation.hit_rate(chats, 2, 100, shared=True) == (0 + 3 + 2 + 4 + 1) / 17
    assert simulation.hit_rate(chats, 1, 100, shared=False) == (0 + 3 + 2 + 4 + 1) / 17
