"""Since when an epoch can have been asked for: never later than it was."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epochkv_operator.hub.sightings import Sightings


def test_the_last_read_that_showed_less_is_the_proof() -> None:
    seen = Sightings()
    assert seen.since("a", 1) is None
    seen.shown("a", 0, 10.0)
    seen.shown("a", 0, 20.0)
    assert seen.since("a", 1) == 20.0
    assert seen.since("b", 1) is None
    seen.shown("a", 1, 30.0)  # asked for between 20 and this read's end
    seen.shown("a", 1, 40.0)
    assert seen.since("a", 1) == 20.0
    assert seen.since("a", 7) == 40.0
    assert seen.since("a", 0) is None
    assert seen.at("a") == 40.0
    seen.forget("a")
    assert (seen.since("a", 2), seen.at("a")) == (None, None)


def test_what_the_first_read_shows_may_be_as_old_as_it_likes() -> None:
    seen = Sightings()
    seen.shown("a", 5, 10.0)
    seen.shown("a", 5, 20.0)
    assert seen.since("a", 5) is None
    assert seen.since("a", 6) == 20.0


@given(
    asks=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), max_size=8),
    reads=st.lists(st.tuples(st.integers(0, 60), st.integers(0, 10)), max_size=12),
)
def test_never_later_than_the_ask(asks: list[tuple[int, int]], reads: list[tuple[int, int]]) -> None:
    """Reads take effect at any moment between their begin and their end, and are told in the order of their ends."""
    asked: dict[int, int] = {}
    epoch = 0
    for moment, step in sorted(asks):
        epoch += step
        asked[epoch] = moment

    def spec_at(moment: int) -> int:
        return max((epoch for epoch, at in asked.items() if at <= moment), default=0)

    seen = Sightings()
    for begin, duration in sorted(reads, key=lambda read: read[0] + read[1]):
        seen.shown("a", spec_at(begin + duration // 2), float(begin))
    for epoch, moment in asked.items():
        since = seen.since("a", epoch)
        assert since is None or since <= moment
