"""A few elements of every tensor: whole pushes show, one element shows as often as it is said, and nothing shows without a change."""

import math
import random
from collections.abc import Sequence

import pytest
import torch

from epochkv_connector.weights.digest import MIN_PER_TENSOR, RUN, OnDevice, OnHost, Sample

Tensors = Sequence[tuple[str, torch.Tensor]]


def model(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> list[tuple[str, torch.Tensor]]:
    """2.6 million elements: matrices of several sizes, norms and a scalar."""
    source = torch.Generator().manual_seed(seed)
    shapes = [(1000, 512), (2048, 1024), (64,), (1,), (17, 3), ()]
    return [(f"t{index}", torch.randn(shape, generator=source).to(dtype)) for index, shape in enumerate(shapes)]


def test_nothing_shows_without_a_change_and_each_tensor_has_a_part_in_it() -> None:
    tensors = model()
    sample = Sample(tensors)
    assert sample.holds()
    assert 11_400 < sample.num_elements < 23_000, "a push of one element in a thousand goes unseen with a chance of e^-11"
    for _, tensor in tensors:
        before = tensor.clone()
        tensor.add_(1)
        assert not sample.holds(), tensor.shape
        tensor.copy_(before)
        assert sample.holds()


def test_small_tensors_are_compared_whole() -> None:
    small = torch.zeros(MIN_PER_TENSOR)
    sample = Sample([("small", small), ("large", torch.zeros(1_000_000))])
    for place in range(MIN_PER_TENSOR):
        small[place] = 1
        assert not sample.holds()
        small[place] = 0


@pytest.mark.parametrize("shape", [(700, 300), (210_000,), (7, 300, 100)])
def test_one_element_shows_as_often_as_its_share_of_the_sample(shape: tuple[int, ...]) -> None:
    tensor = torch.zeros(shape)
    flat, wanted, draws = tensor.view(-1), 20_000, 600
    step = (flat.numel() // RUN // (wanted // RUN)) | 1
    for place in (0, 1, flat.numel() // 2, flat.numel() - 1):
        seen = 0
        for draw in range(draws):
            sample = Sample([("t", tensor)], wanted, random.Random(draw))
            flat[place] = 1
            seen += not sample.holds()
            flat[place] = 0
        expected = draws / step
        assert abs(seen - expected) < 5 * math.sqrt(expected), (place, seen, expected)


def test_elements_that_make_no_run_are_all_compared() -> None:
    tensor = torch.zeros(100_003)
    sample = Sample([("t", tensor)], 100)
    for place in (100_000, 100_001, 100_002):
        tensor[place] = 1
        assert not sample.holds()
        tensor[place] = 0
    assert sample.holds()


def test_a_column_is_not_missed_for_ever() -> None:
    """Distances are odd, so that with the sizes of models, which are even, they meet every column."""
    tensor = torch.zeros(512, 1024)
    sample = Sample([("t", tensor)], 2048, random.Random(3))
    for column in range(1024):
        tensor[:, column] = 1
        assert not sample.holds(), column
        tensor[:, column] = 0


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16, torch.float8_e4m3fn, torch.int8, torch.uint8, torch.int64, torch.bool, torch.complex64], ids=str
)
def test_any_type_is_compared_by_its_bits(dtype: torch.dtype) -> None:
    tensor = torch.zeros(40, 40).to(dtype)
    sample = Sample([("t", tensor)])
    assert sample.holds()
    tensor.view(torch.uint8)[-1, -1] ^= 1
    assert not sample.holds()


def test_what_is_not_a_number_is_equal_to_itself_and_minus_zero_is_not_zero() -> None:
    tensor = torch.full((40,), float("nan"))
    sample = Sample([("t", tensor), ("zero", zero := torch.zeros(40))])
    assert sample.holds()
    zero[7] = -0.0
    assert not sample.holds()


def test_tensors_with_gaps_transposed_empty_and_on_meta() -> None:
    sliced = torch.zeros(300, 100)[:, 5:95]
    turned = torch.zeros(300, 100).t()
    sample = Sample([("sliced", sliced), ("turned", turned), ("empty", torch.empty(0)), ("meta", torch.empty(4, device="meta"))])
    assert sample.holds()
    sliced += 1
    assert not sample.holds()
    sliced -= 1
    assert sample.holds()
    turned += 1
    assert not sample.holds()


def test_a_comparison_is_of_the_moment_it_was_made() -> None:
    tensor = torch.zeros(100)
    sample = Sample([("t", tensor)])
    before = sample.compare()
    tensor += 1
    assert before()
    assert not sample.compare()()


def test_another_draw_is_of_other_elements() -> None:
    tensor = torch.arange(1_000_000)
    found = {bytes(Sample([("t", tensor)], 100)._groups[0].then) for _ in range(5)}
    assert len(found) == 5


@pytest.mark.parametrize("kind", [OnHost, OnDevice])
def test_both_ways_of_comparing_see_one_bit(kind: type[OnHost | OnDevice]) -> None:
    """A GPU has one, a CPU the other; host memory will do for both."""
    tensor = torch.zeros(64, 16, dtype=torch.int16)
    views = kind([tensor[1::3], tensor[5:7]])
    assert not bool(views.differs())
    tensor[2, 3] = 1
    assert not bool(views.differs()), "that row is in neither view"
    for place in ((4, 0), (6, 15)):
        tensor[place] = 1
        assert bool(views.differs()), place
        tensor[place] = 0
        assert not bool(views.differs())
