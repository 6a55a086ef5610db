"""The hub's log names who is refused and what to do, in few lines whatever is tried."""

from __future__ import annotations

from epochkv_fence.net.gate import MAX_ADDRESSES, MAX_LINES, SAY_SECONDS, RefusalLog


def test_one_line_a_minute_for_an_address_with_what_came_between() -> None:
    refusals = RefusalLog()
    first = refusals.key("10.0.0.7", 100.0)
    assert first is not None
    assert first.startswith("a client at 10.0.0.7 is refused: its key is of no pool of this hub, or was retired. Give it")
    assert first.endswith("the Secret <pool>-fence")
    assert [refusals.key("10.0.0.7", 100.0 + step) for step in range(1, 60)] == [None] * 59
    other = refusals.key("10.0.0.8", 101.0)
    assert other is not None
    assert "10.0.0.8" in other
    again = refusals.key("10.0.0.7", 160.0)
    assert again is not None
    assert again.endswith("(59 more times since this was said last)")
    assert refusals.key("10.0.0.7", 161.0) is None


def test_many_addresses_are_few_lines_and_little_memory() -> None:
    refusals = RefusalLog()
    lines = [refusals.key(f"10.{number // 65536}.{number // 256 % 256}.{number % 256}", 5.0) for number in range(3 * MAX_ADDRESSES)]
    assert sum(line is not None for line in lines) == MAX_LINES
    assert len(refusals._addresses) == MAX_ADDRESSES
    later = refusals.key("192.0.2.1", 5.0 + SAY_SECONDS)
    assert later is not None
    assert later.endswith(f"({2 * MAX_ADDRESSES + 1 - MAX_LINES} more from other addresses)")


def test_handshakes_that_fail_are_told_apart() -> None:
    refusals = RefusalLog()
    line = refusals.handshake(0.0)
    assert line is not None
    assert "hub.pub of another hub" in line
    assert refusals.handshake(1.0) is None
    assert refusals.key("", 1.0) is not None
