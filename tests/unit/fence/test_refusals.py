"""Lines of the log that somebody else causes are few, whatever is tried."""

from epochkv_fence.common import Seldom


def test_one_line_in_a_minute_for_a_topic_and_few_in_all() -> None:
    seldom = Seldom(60.0, most=2)
    assert seldom("10.0.0.7", 100.0) == ""
    assert [seldom("10.0.0.7", 100.0 + step) for step in range(1, 60)] == [None] * 59
    assert seldom("10.0.0.8", 101.0) == " (59 more were not logged)"
    assert seldom("10.0.0.9", 102.0) is None
    assert seldom("10.0.0.7", 160.0) == " (1 more were not logged)"
