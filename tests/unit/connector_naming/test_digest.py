"""One digest of tensors: nothing that changes what a model computes may leave it as it was. On the host's way and on the device's,
which is run on the host's tensors here."""

import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

from epochkv_connector.weights import digest as naming
from epochkv_connector.weights.digest import MIN_PER_TENSOR, RUN, OnDevice, OnHost, Sample, digest

Way = str
SIDE = 96


def many(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Varied content of any type."""
    made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 8
    if dtype.is_floating_point:
        return made.to(dtype)
    return (made * 7).to(torch.int32).to(dtype) if dtype is not torch.bool else made > 0


@pytest.fixture(params=["host", "device"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    """Slabs are small, so that small tensors go through every level."""
    if request.param == "device":
        monkeypatch.setattr(naming, "_Host", lambda: naming._Device(torch.device("cpu")))
    monkeypatch.setattr(naming, "SLAB_BYTES", 1 << 20)
    monkeypatch.setattr(naming, "HOST_SLAB_BYTES", 1 << 18)
    monkeypatch.setattr(naming, "SMALL_BYTES", 16 << 10)
    monkeypatch.setattr(naming, "LAST_BYTES", 4 << 10)
    return str(request.param)


def value(*tensors: torch.Tensor, extra: Any = ()) -> bytes:
    return digest([(f"t{index}", tensor) for index, tensor in enumerate(tensors)], extra)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def bit(place: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """One bit of the byte at this part of the tensor."""

    def flipped(tensor: torch.Tensor) -> torch.Tensor:
        out = tensor.clone()
        data = as_bytes(out)
        data[min(int(place * data.numel()), data.numel() - 1)] ^= 1
        return out

    return flipped


def rows(*order: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rows that changed places."""

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        out = as_bytes(tensor.clone()).view(tensor.shape[0], -1)
        out[list(order)] = out[list(order[1:] + order[:1])]
        return out.view(-1).view(tensor.dtype).view(tensor.shape)

    return moved


def columns(tensor: torch.Tensor) -> torch.Tensor:
    out = as_bytes(tensor.clone()).view(*tensor.shape, tensor.element_size())
    out[:, [3, 11]] = out[:, [11, 3]]
    return out.view(-1).view(tensor.dtype).view(tensor.shape)


def shifted(num: int) -> Callable[[torch.Tensor], torch.Tensor]:
    def roll(tensor: torch.Tensor) -> torch.Tensor:
        return as_bytes(tensor).roll(num * tensor.element_size()).view(tensor.dtype).view(tensor.shape)

    return roll


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    data = as_bytes(tensor).view(*tensor.shape, tensor.element_size())
    return data.transpose(0, 1).contiguous().view(-1).view(tensor.dtype).view(tensor.shape)


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "two rows": rows(1, 2),
    "far rows": rows(0, SIDE - 1),
    "three rows": rows(5, 9, 40),
    "two columns": columns,
    "transposed": transposed,
    "reversed": lambda tensor: as_bytes(tensor).flip(0).view(tensor.dtype).view(tensor.shape),
    "shifted by one": shifted(1),
    "shifted by a row": shifted(SIDE),
    "negated": lambda tensor: as_bytes(tensor).bitwise_xor(0x80).view(tensor.dtype).view(tensor.shape),
    "first bit": bit(0),
    "middle bit": bit(0.5),
    "last bit": bit(1),
    "zeros": torch.zeros_like,
}
TYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_structured_change_of_one_tensor_shows(way: Way, dtype: torch.dtype) -> None:
    tensor = many(1, SIDE, SIDE, dtype=dtype)
    around = (many(2, 5, 7), many(3, 300, 40))
    seen = {"as it was": value(around[0], tensor, around[1])}
    for name, change in CHANGES.items():
        changed = change(tensor)
        assert not torch.equal(as_bytes(changed), as_bytes(tensor)), name
        seen[name] = value(around[0], changed, around[1])
    assert len(set(seen.values())) == len(seen)
    assert value(around[0], tensor.clone(), around[1]) == seen["as it was"]
    assert {len(one) for one in seen.values()} == {32}


@pytest.mark.parametrize("shape", [(SIDE, SIDE), (3000, 700), (1, 2_100_001)])
def test_every_place_counts_on_every_level(way: Way, shape: tuple[int, int]) -> None:
    """8 MB are 8 slabs, and on a device three levels."""
    tensor = many(4, *shape)
    seen = {value(tensor)}
    for place in (0, 0.111, 0.25, 0.49999, 0.5, 0.75, 0.999, 1):
        seen.add(value(bit(place)(tensor)))
    assert len(seen) == 9


def test_equal_changes_at_two_places_do_not_cancel(way: Way) -> None:
    """What sums and XOR miss: a pair of changes whose sum is nothing."""
    tensor = many(5, 400, 4096, dtype=torch.int8)
    data = as_bytes(tensor)
    seen = {value(tensor)}
    for first, second in ((0, 4096), (0, 16384), (5, 5 + 16384 * 64), (0, 1 << 20)):
        pair = tensor.clone()
        as_bytes(pair)[[first, second]] = data[[second, first]]
        if data[first] == data[second]:
            as_bytes(pair)[first] ^= 1
            as_bytes(pair)[second] ^= 1
        seen.add(value(pair))
    assert len(seen) == 5


def test_content_that_moves_to_another_tensor_shows(way: Way) -> None:
    first, second = many(6, 200, 64), many(7, 200, 64)
    assert value(first, second) != value(second, first)


def test_a_border_between_tensors_that_moves_shows(way: Way) -> None:
    whole = many(8, 5000)
    assert value(whole[:2000], whole[2000:]) != value(whole[:2001], whole[2001:]) != value(whole)


def test_names_types_shapes_and_what_else_is_told_count(way: Way) -> None:
    tensor = many(9, 48, 48)
    named = [("a", tensor), ("b", tensor), ("a", tensor.view(24, 96)), ("a", tensor.view(torch.int32))]
    values = [
        *(digest([one]) for one in named),
        *(digest([("a", tensor), ("empty", torch.empty(shape))]) for shape in ((0,), (0, 3))),
        *(digest([("a", tensor)], ["more"]), digest([])),
    ]
    assert len(set(values)) == len(values)


# ---------------------------------------------------------------------------------------------- where tensors lie
def test_a_slice_has_the_digest_of_its_copy_and_shows_only_its_own_elements(way: Way) -> None:
    whole = many(11, 640, 700)
    part = whole[7:600:3, 5:690]
    assert not part.is_contiguous()
    before = value(part)
    assert before == value(part.contiguous())
    whole[8, 5] += 1  # a row that is left out
    assert value(part) == before
    whole[10, 689] += 1
    assert value(part) != before


def odd_strides(*shape: int) -> torch.Tensor:
    """Those of dimensions of one element say nothing."""
    tensor = many(17, *shape)
    return tensor.as_strided(shape, [977 if size == 1 else stride for size, stride in zip(shape, tensor.stride(), strict=True)])


VIEWS: dict[str, Callable[[], torch.Tensor]] = {
    "a slice of one dimension": lambda: many(12, 90_000)[::3],
    "a slice of three dimensions": lambda: many(13, 40, 50, 60)[:, ::2, 1:31],
    **{f"from byte {begin}": lambda begin=begin: many(18, 700_003, dtype=torch.uint8)[begin:] for begin in (1, 3, 7, 13)},
    **{str(shape): lambda shape=shape: odd_strides(*shape) for shape in ((1, 40), (40, 1), (1, 1), (7, 1, 9), (1, 5, 1, 5))},
}


@pytest.mark.parametrize("name", VIEWS)
def test_a_view_has_the_digest_of_its_copy(way: Way, name: str) -> None:
    view = VIEWS[name]()
    assert value(view) == value(view.clone(memory_format=torch.contiguous_format))


def test_equal_content_in_another_storage_order_is_never_taken_for_other_content(way: Way) -> None:
    tensor = many(16, SIDE, SIDE)
    other_order = tensor.t().contiguous().t()
    assert torch.equal(tensor, other_order)
    assert value(other_order) == value(tensor.t().contiguous().t())  # and the same way gives the same digest
    assert len({value(tensor), value(other_order), value(other_order.t()), value(tensor.t())}) == 4


def test_an_expanded_tensor(way: Way) -> None:
    row = many(19, 1, 300)
    before = value(row.expand(200, 300))
    row[0, 299] += 1
    assert value(row.expand(200, 300)) != before


# ---------------------------------------------------------------------------------------------- ties, wrappers, refusals
def test_a_tied_tensor_is_read_once_and_untying_it_shows(way: Way) -> None:
    tensor = many(20, 300, 40)
    tied = digest([("embed", tensor), ("head", tensor)])
    apart = digest([("embed", tensor), ("head", tensor.clone())])
    assert tied != apart
    tensor[0, 0] += 1
    assert digest([("embed", tensor), ("head", tensor)]) != tied


class Partitioned(torch.nn.Parameter):
    """As vLLM's GGUF parameters: the bytes are elsewhere."""

    partitions: dict[int, torch.Tensor]


def test_partitions_of_a_parameter_are_what_it_holds(way: Way) -> None:
    holder = Partitioned(torch.empty(0), requires_grad=False)
    holder.partitions = {0: many(22, 40, 40), 1: many(23, 10, 10)}
    before = value(holder)
    holder.partitions[1][3, 3] += 1
    assert value(holder) != before


def test_the_two_ways_are_two_digests_of_one_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """The matrix is fixed: engines of two processes have one digest for one set of weights."""
    monkeypatch.setattr(naming, "_Host", lambda: naming._Device(torch.device("cpu")))
    expected = value(many(28, 100, 100))
    naming._matrix.cache_clear()
    assert value(many(28, 100, 100)) == expected


# ---------------------------------------------------------------------------------------------- a few elements of every tensor
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
