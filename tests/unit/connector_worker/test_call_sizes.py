"""How much one store call carries: all of a request in order, small after anything but a fast success."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epochkv_connector.store.queues import CallSize, Transfer, first_chunk


def transfers(sizes: list[int]) -> list[Transfer]:
    return [Transfer(str(index), 0, memoryview(bytearray(size))) for index, size in enumerate(sizes)]


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 8), st.integers(1, 100))
def test_chunks_cover_a_request_in_order_within_both_limits(sizes: list[int], max_keys: int, max_bytes: int) -> None:
    left, seen = transfers(sizes), []
    while left:
        chunk = first_chunk(left, max_keys, max_bytes)
        assert 1 <= len(chunk) <= max_keys
        assert len(chunk) == 1 or sum(len(transfer.view) for transfer in chunk) <= max_bytes
        more = left[: len(chunk) + 1]
        fits = sum(len(transfer.view) for transfer in more) <= max_bytes
        assert len(chunk) in (max_keys, len(left)) or not fits, "as many as may go together"
        seen += [transfer.key for transfer in chunk]
        left = left[len(chunk) :]
    assert seen == [str(index) for index in range(len(sizes))]
    assert not first_chunk([], max_keys, max_bytes)


def test_fast_full_calls_double_up_to_the_limit() -> None:
    size = CallSize(4, 16, 0.25)
    carried = []
    for _ in range(4):
        carried.append(size.num_keys)
        size.saw(size.num_keys, 0.1, succeeded=True)
    assert carried == [4, 8, 16, 16]


@pytest.mark.parametrize(("seconds", "succeeded"), [(0.3, True), (0.1, False)])
def test_a_slow_call_or_a_failed_one_begins_anew(seconds: float, succeeded: bool) -> None:
    size = CallSize(4, 16, 0.25)
    for _ in range(3):
        size.saw(size.num_keys, 0.1, succeeded=True)
    size.saw(1, seconds, succeeded=succeeded)
    assert size.num_keys == 4


def test_a_call_that_was_not_full_proves_nothing() -> None:
    size = CallSize(4, 16, 0.25)
    size.saw(3, 0.1, succeeded=True)
    assert size.num_keys == 4


def test_a_limit_below_the_first_size_holds() -> None:
    size = CallSize(4, 2, 0.25)
    size.saw(2, 0.1, succeeded=True)
    assert size.num_keys == 2
