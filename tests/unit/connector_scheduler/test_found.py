"""Columns say what one question after the other says, over both tiers, with and without a tracker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from epochkv_connector.tiers import hits as prompt_blocks
from epochkv_connector.tiers.hits import ABSENT, PromptBlocks
from epochkv_connector.tiers.layout import one_by_one
from epochkv_connector.tiers.state import HostIndex, RecentBlocks

HASHES = [b"hash %d" % number for number in range(41)]
SCALES = (1, 2, 4)


@st.composite
def prompts(draw: st.DrawFn) -> tuple[PromptBlocks, dict[tuple[int, bytes], int]]:
    """A prompt of which a random part is in L1, in L2, in both, or in L1 and not confirmed by every rank."""
    index = HostIndex(200, len(SCALES))
    tracker = RecentBlocks(1000) if draw(st.booleans()) else None
    gone = draw(st.sets(st.integers(0, 40), max_size=4))
    held: dict[tuple[int, bytes], int] = {}
    remote: set[tuple[int, bytes]] = set()
    for group, scale in enumerate(SCALES):
        for block in range(len(HASHES) // scale):
            name = HASHES[(block + 1) * scale - 1]
            if block in gone:
                continue
            if tracker is not None or draw(st.booleans()):
                (slot,) = index.allocate(1)
                index.insert(slot, group, name)
                if tracker is None or draw(st.integers(0, 9)):
                    held[group, name] = slot
            else:
                remote.add((group, name))
    if tracker is not None:
        tracker.add(held)
    return PromptBlocks(index, tracker, HASHES, SCALES, frozenset(remote)), held


@given(prompts(), st.integers(0, 2), st.integers(0, 45), st.integers(0, 45), st.integers(1, 9), st.data())
def test_columns_say_what_single_questions_say(
    prompt: tuple[PromptBlocks, dict[tuple[int, bytes], int]], group: int, first: int, end: int, stretch: int, data: st.DataObject
) -> None:
    found, held = prompt
    before = prompt_blocks.FIRST_STRETCH
    prompt_blocks.FIRST_STRETCH = stretch  # type: ignore[misc]  # several stretches in a short prompt
    try:
        absent = found.first_absent(group, first, end)
    finally:
        prompt_blocks.FIRST_STRETCH = before  # type: ignore[misc]
    assert absent == one_by_one(found.present)(group, first, end)
    if absent > first:  # what was walked is remembered, and what is asked beside it is looked up
        start = data.draw(st.integers(0, absent - 1))
        blocks = range(start, data.draw(st.integers(start + 1, absent)))
        span = found.locate(group, blocks)
        names = [HASHES[(block + 1) * SCALES[group] - 1] for block in blocks]
        assert (span.group, span.first, span.names) == (group, start, names)
        assert span.slots == [held.get((group, name), ABSENT) for name in names]
        assert span.num_absent == span.slots.count(ABSENT)
        assert span.held() == [slot for slot in span.slots if slot != ABSENT]
