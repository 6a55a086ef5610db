"""Every layout that can be cut into blocks is copied byte for byte, every other one is refused by name; and how many slots a rank has."""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from epochkv_connector.worker.layout import HEADER_BYTES, GroupSpec, LayoutError, block_layout, layout_digest, object_bytes, slot_stride
from epochkv_connector.worker.role import slot_count
from epochkv_connector.worker.staging import HostRegion, Staging, StagingStream
from epochkv_fence.connection import ConfigurationError
from tests.cuda.rig import copied
from tests.unit.connector_scheduler.rig import config

DTYPES = [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e4m3fn]


def payload(region: HostRegion, slot: int, num_bytes: int) -> torch.Tensor:
    start = region.slot_address(slot) - region.address + HEADER_BYTES
    return region.tensor[start : start + num_bytes]


@dataclass
class Cache:
    """KV tensors of one engine and, independently of their strides, the bytes of each block by plain indexing."""

    caches: dict[str, torch.Tensor]
    groups: list[list[str]]
    num_blocks: int
    block_dim: int
    physical: list[int]  # logical dimensions behind the block dimension, in memory order

    def block_bytes(self, group: int, block: int) -> bytes:
        """Layer by layer, in memory order."""
        parts = []
        for name in self.groups[group]:
            inner = self.caches[name].select(self.block_dim, block)
            parts.append(inner.permute(self.physical).contiguous().view(torch.uint8).numpy().tobytes())
        return b"".join(parts)

    def everything(self) -> dict[str, bytes]:
        return {name: t.contiguous().view(torch.uint8).numpy().tobytes() for name, t in self.caches.items()}


def random_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    count = int(np.prod(shape)) * torch.empty(0, dtype=dtype).element_size()
    raw = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8))
    return raw.view(dtype).view(shape)


@st.composite
def engines(draw: st.DrawFn) -> Cache:
    """CPU (blocks first), K/V-first, transposed heads, all layers in one storage or not, groups that share storage."""
    blocks = draw(st.integers(3, 7))
    heads, tokens, size = draw(st.integers(1, 3)), draw(st.integers(1, 4)), draw(st.sampled_from([1, 4, 8]))
    layers, num_groups = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    dtype = draw(st.sampled_from(DTYPES))
    kind = draw(st.sampled_from(["blocks_first", "kv_first", "blocks_first_transposed"]))
    one_storage = draw(st.booleans())
    shape = {
        "blocks_first": (blocks, heads, tokens, 2 * size),
        "kv_first": (2, blocks, tokens, heads, size),
        "blocks_first_transposed": (blocks, tokens, heads, 2 * size),
    }[kind]
    seed = draw(st.integers(0, 2**16))
    if one_storage:
        whole = random_tensor((layers, *shape), dtype, seed)
        tensors = [whole[i] for i in range(layers)]
    else:
        tensors = [random_tensor(shape, dtype, seed + i) for i in range(layers)]
    physical = list(range(len(shape) - 1))
    if kind == "blocks_first_transposed":
        tensors = [t.transpose(1, 2) for t in tensors]  # logically heads before tokens, in memory tokens before heads
        physical = [1, 0, 2]
    # Groups share storage: layer i of every group is the same tensor, as vLLM's hybrid cache manager does it.
    groups = [[f"g{g}.l{i}" for i in range(layers)] for g in range(num_groups)]
    caches = {name: tensors[i] for group in groups for i, name in enumerate(group)}
    return Cache(caches, groups, blocks, 1 if kind == "kv_first" else 0, physical)


def staging(cache: Cache, slots: int) -> Staging:
    return Staging(cache.caches, dict(enumerate(GroupSpec(names, 16) for names in cache.groups)), slots, cache.num_blocks)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(engines(), st.data())
def test_gather_then_scatter_is_plain_indexing(cache: Cache, data: st.DataObject) -> None:
    slots = 2 * cache.num_blocks
    stage = staging(cache, slots)
    stream = StagingStream(stage)
    group = data.draw(st.integers(0, len(cache.groups) - 1))
    sources = data.draw(st.lists(st.integers(0, cache.num_blocks - 1), min_size=1, max_size=cache.num_blocks, unique=True))
    targets = data.draw(st.permutations(range(cache.num_blocks)))[: len(sources)]
    places = data.draw(st.permutations(range(slots)))[: len(sources)]
    expected = [cache.block_bytes(group, block) for block in sources]
    before = [cache.block_bytes(group, block) for block in range(cache.num_blocks)]
    size = stage.groups[group].payload_bytes
    assert size == len(expected[0])

    stream.gather([copied(group, block, slot) for block, slot in zip(sources, places, strict=True)])
    assert [payload(stage.region, slot, size).numpy().tobytes() for slot in places] == expected
    assert [cache.block_bytes(group, block) for block in range(cache.num_blocks)] == before, "gather only reads"

    stream.scatter([copied(group, block, slot) for block, slot in zip(targets, places, strict=True)])
    wanted = list(before)
    for block, value in zip(targets, expected, strict=True):
        wanted[block] = value
    assert [cache.block_bytes(group, block) for block in range(cache.num_blocks)] == wanted


@settings(max_examples=40, deadline=None)
@given(engines(), st.integers(8, 11))
def test_the_digest_of_a_layout_does_not_depend_on_where_its_layers_lie_or_how_many_blocks_there_are(cache: Cache, blocks: int) -> None:
    groups = [GroupSpec(names, 16) for names in cache.groups]
    own = layout_digest(cache.caches, groups, cache.num_blocks)
    assert len(own) == 16
    tensors = {id(tensor): tensor for tensor in cache.caches.values()}
    others = {}
    for key, tensor in tensors.items():
        order = sorted(range(tensor.dim()), key=lambda place, tensor=tensor: -tensor.stride(place))  # type: ignore[misc]
        shape = [blocks if place == cache.block_dim else size for place, size in enumerate(tensor.shape)]
        more = torch.zeros([shape[place] for place in order], dtype=tensor.dtype)
        others[key] = more.permute([order.index(place) for place in range(tensor.dim())])
    elsewhere = {name: others[id(tensor)] for name, tensor in cache.caches.items()}
    assert layout_digest(elsewhere, groups, blocks) == own


def test_the_digest_of_a_layout_tells_everything_that_changes_what_a_byte_is() -> None:
    def digest(caches: dict[str, Any], block_size: int = 16, blocks: int = 5, about: object = None) -> bytes:
        return layout_digest(caches, [GroupSpec(list(caches), block_size)], blocks, {"layers": about})

    a, b = torch.zeros(5, 2, 16, 8), torch.zeros(5, 2, 16, 8)
    base = digest({"a": a, "b": b})
    padded = torch.zeros(5, 4, 16, 8)[:, :2]
    assert digest({"a": a.clone(), "b": padded}) == base
    others = [
        *(digest({"b": b, "a": a}), digest({"a": a, "c": b}), digest({"a": a})),
        digest({"a": a, "b": a}),  # shared: its bytes are there once
        digest({"a": a.half(), "b": b.half()}),
        digest({"a": a, "b": b.view(torch.int32)}),
        digest({"a": a, "b": torch.zeros(5, 2, 8, 16)}),
        digest({"a": a, "b": torch.zeros(5, 16, 2, 8).transpose(1, 2)}),  # equal shape, other order in memory
        digest({"a": a, "b": torch.zeros(2, 5, 16, 8)}),  # keys first
        digest({"a": a, "b": [b[:, :1], b[:, 1:]]}),
        digest({"a": torch.zeros(10, 2, 8, 8), "b": torch.zeros(10, 2, 8, 8)}),  # two kernel blocks for each
        *(digest({"a": a, "b": b}, block_size=32), digest({"a": a, "b": b}, about={"a": "FlashInfer"})),
    ]
    assert len({base, *others}) == 1 + len(others)
    with pytest.raises(LayoutError, match="layer 'c' of a KV cache group was not registered"):
        layout_digest({"a": a}, [GroupSpec(["c"])], 5)


@pytest.mark.parametrize("why", ["distances", "strides"])
def test_layers_in_no_order_are_copied_both_ways(why: str) -> None:
    """At distances that grow, or with blocks at different distances in each layer."""
    memory = torch.from_numpy(np.random.default_rng(1).integers(0, 256, 1 << 16, dtype=np.uint8))
    names = [f"l{number}" for number in range(12)]
    caches, start = {}, 0
    for number, name in enumerate(names):
        stride = 48 + (16 * number if why == "strides" else 0)
        caches[name] = memory.as_strided((5, 48), (stride, 1), start)
        start += 2048 if why == "strides" else 5 * stride + 16 * number * number
    stage = Staging(caches, {0: GroupSpec(names)}, 6, 5)
    stream = StagingStream(stage)
    blocks = [[caches[name][block].clone() for name in names] for block in range(5)]
    untouched = memory.clone()
    stream.gather([copied(0, block, 5 - block) for block in range(5)])
    for block in range(5):
        assert torch.equal(payload(stage.region, 5 - block, 12 * 48), torch.cat(blocks[block]))
    stream.scatter([copied(0, block, block + 1) for block in range(5)])  # block 4 - b comes to b
    for block in range(5):
        assert torch.equal(torch.cat([caches[name][block] for name in names]), torch.cat(blocks[4 - block]))
    for name in names:
        caches[name].copy_(torch.stack([row[names.index(name)] for row in blocks]))
    assert torch.equal(memory, untouched), "nothing between the layers was written"


def test_a_layer_may_have_several_tensors() -> None:
    conv, ssm = torch.arange(12.0).view(4, 3), torch.arange(20.0).view(4, 5) + 100
    stage = Staging({"mamba": [conv, ssm]}, {0: GroupSpec(["mamba"])}, 1, 4)
    StagingStream(stage).gather([copied(0, 2, 0)])
    assert payload(stage.region, 0, 32).view(torch.float32).tolist() == [6, 7, 8, 110, 111, 112, 113, 114]


def test_smaller_kernel_blocks_are_grouped_into_pool_blocks() -> None:
    kernel = torch.arange(12 * 2.0).view(12, 2)  # 4 pool blocks of 3 kernel blocks
    stage = Staging({"a": kernel}, {0: GroupSpec(["a"])}, 1, 4)
    StagingStream(stage).gather([copied(0, 1, 0)])
    assert payload(stage.region, 0, 24).view(torch.float32).tolist() == [6, 7, 8, 9, 10, 11]


@pytest.mark.parametrize(
    ("shape", "num_blocks", "message"),
    [
        ((2, 2, 4), 2, r"dimensions \[0, 1\] of shape \(2, 2, 4\) could both count blocks"),
        ((2, 4, 4), 2, None),  # 2 blocks, block dimension 0: dimension 1 does not count 2
        ((5, 6, 4), 7, "no dimension of shape"),
        ((3, 7, 4), 7, "no dimension of shape"),  # dimension 1 counts blocks only behind a leading 2
        ((2, 6), 3, None),  # K/V first, two kernel blocks per block
        ((), 1, "no dimension of shape"),
    ],
)
def test_ambiguous_and_impossible_shapes_are_refused(shape: tuple[int, ...], num_blocks: int, message: str | None) -> None:
    tensor = torch.zeros(shape)
    if message is None:
        assert math.prod(block_layout("layer", tensor, num_blocks).shape) * num_blocks == tensor.numel() * 4
    else:
        with pytest.raises(LayoutError, match=message):
            block_layout("layer", tensor, num_blocks)


def test_overlapping_elements_are_refused() -> None:
    with pytest.raises(LayoutError, match="overlapping"):
        block_layout("layer", torch.zeros(4, 1).expand(4, 6), 4)
    with pytest.raises(LayoutError, match="overlapping"):
        block_layout("layer", torch.zeros(64).as_strided((4, 3, 4), (16, 2, 1)), 4)


def test_a_group_whose_layers_are_on_other_pipeline_stages_is_an_empty_block() -> None:
    blocks = torch.arange(16, dtype=torch.float32).view(4, 4)
    stage = Staging({"a": blocks}, {0: GroupSpec([]), 1: GroupSpec(["a"])}, 2, 4)
    stream = StagingStream(stage)
    stream.gather([copied(0, 3, 0), copied(1, 2, 1)])
    assert len(stage.object_view(0, 0)) == object_bytes(0)
    assert payload(stage.region, 1, 16).view(torch.float32).tolist() == blocks[2].tolist()
    stream.scatter([copied(0, 0, 0), copied(1, 0, 1)])
    assert blocks[0].tolist() == blocks[2].tolist()
    assert layout_digest({"a": blocks}, [GroupSpec([]), GroupSpec(["a"])], 4) != layout_digest({"a": blocks}, [GroupSpec(["a"])], 4)


def test_ids_out_of_range_touch_nothing() -> None:
    stage = Staging({"a": torch.zeros(4, 4)}, {0: GroupSpec(["a"])}, 2, 4)
    stream = StagingStream(stage)
    for pair in (copied(0, 4, 0), copied(0, -1, 0), copied(0, 0, 2), copied(0, 0, -1), copied(1, 0, 0)):
        with pytest.raises(IndexError):
            stream.gather([pair])
    assert bytes(stage.region.bytes) == bytes(stage.region.num_bytes)


# -- slots --------------------------------------------------------------------------------------------------------------------
@given(st.lists(st.integers(1, 1 << 22), min_size=1, max_size=4))
@example([4096 - 128])
def test_slots_hold_the_largest_object_aligned(payloads: list[int]) -> None:
    stride = slot_stride(payloads)
    assert stride % 256 == 0
    assert max(payloads) + 256 <= stride < max(payloads) + 256 + 256


def test_capacity_is_split_over_ranks() -> None:
    assert slot_count(config(l1_slots=10, ranks=4), 512, 4) == 10
    assert slot_count(config(l1_slots=10), 512, 4) == 2
    assert slot_count(config(l1_slots=10), 640, 4) == 2
    assert slot_count(config(l1_slots=10), 641, 4) == 1
    assert slot_count(config(staging_slots=7), 100, 4) == 7


def test_an_l1_smaller_than_a_block_says_what_to_give() -> None:
    with pytest.raises(ConfigurationError, match=r"local.capacity_bytes is 3072.*at least 3076"):
        slot_count(config(l1_slots=6), 769, 4)
