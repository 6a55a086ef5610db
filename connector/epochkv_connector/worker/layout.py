"""Where the bytes of a block lie: in vLLM's KV tensors, and in a slot of the host region.

vLLM hands over one tensor (or a list of tensors) per layer. Block dimension, dimension order, dtype, padding and
sharing of storage differ between backends, so nothing is assumed: the block dimension is found from `num_blocks`, the
rest is read from shapes and strides, and what stays ambiguous is refused by name. Bytes are taken in *physical* order
(largest stride first), so a copy moves long contiguous runs whatever the logical order is; two engines share bytes
only if their fingerprints and the digests of their ranks' layouts (`layout_digest`) are equal.

A slot is `[128 B header][payload][128 B trailer]`: the very bytes that go to the store as one object (`store.client`). All slots of
a region have the same stride. Depends on torch only.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

HEADER_BYTES = 128
TRAILER_BYTES = 128
SLOT_ALIGNMENT_BYTES = 256


def object_bytes(payload_bytes: int) -> int:
    """Size of a block in the store: header, payload, trailer."""
    return HEADER_BYTES + payload_bytes + TRAILER_BYTES


def slot_stride(payload_bytes: Sequence[int]) -> int:
    """Bytes from one slot to the next for groups with these payload sizes (the largest decides), aligned to 256."""
    if not payload_bytes or max(payload_bytes) <= 0:
        raise ValueError(f"payload_bytes is {list(payload_bytes)}; one KV cache group at least must have layers here")
    needed = object_bytes(max(payload_bytes))
    return -(-needed // SLOT_ALIGNMENT_BYTES) * SLOT_ALIGNMENT_BYTES


KVCache: TypeAlias = Tensor | Sequence[Tensor]

LAYOUT_DIGEST_BYTES = 16


class LayoutError(ValueError):
    """A registered KV tensor cannot be cut into blocks; the message names the layer, its shape and the remedy."""


@dataclass(frozen=True, slots=True)
class GroupSpec:
    """One KV cache group, as `kv_cache_config.kv_cache_groups[i]` describes it."""

    layer_names: Sequence[str]  # in vLLM's order; layers that share one tensor are stored once
    block_size: int = 0  # tokens per block


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Where the bytes of one tensor's blocks lie: block b has `shape` at `offset + b * block_stride`, all in bytes.

    `shape[-1]` is a contiguous run of bytes; the dimensions before it have `strides`.
    """

    offset: int
    block_stride: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GroupView:
    """One KV cache group: `parts[i][block]` are bytes of that block, `payload_bytes` in all parts together.

    Every part is a uint8 view of shape `(num_blocks, *inner, run_bytes)` over the registered storage, of one tensor each. There is none
    where the layers of the group are on other pipeline stages.
    """

    num_blocks: int
    parts: tuple[Tensor, ...]
    payload_bytes: int


def group_view(caches: Mapping[str, KVCache], spec: GroupSpec, num_blocks: int) -> GroupView:
    """The view of one group over KV tensors of `num_blocks` blocks, by layer, as `register_kv_caches` receives them.

    Raises:
        LayoutError: a layer is missing, or its layout is ambiguous or unsupported.
    """
    tensors = _tensors_of(caches, spec)  # none where the layers are on other pipeline stages
    layouts: list[tuple[Tensor, BlockLayout]] = []
    for name, tensor in tensors:
        first, other = tensors[0]
        if tensor.device != other.device:
            raise LayoutError(f"{name} is on {tensor.device}, {first} on {other.device}; one group lies on one device")
        layouts.append((tensor, block_layout(name, tensor, num_blocks)))
    parts = [_bytes_view(t, lay.offset, (num_blocks, *lay.shape), (lay.block_stride, *lay.strides)) for t, lay in layouts]
    return GroupView(num_blocks=num_blocks, parts=tuple(parts), payload_bytes=sum(math.prod(layout.shape) for _, layout in layouts))


def layout_digest(
    caches: Mapping[str, KVCache], groups: Sequence[GroupSpec], num_blocks: int, about: Mapping[str, Any] | None = None
) -> bytes:
    """16 bytes that say what each byte of a block's payload is: equal digests, equal meaning.

    Of every layer of every group, in order and by name: its tensors' dtype, shape of one block, place of the block
    dimension, and order of the dimensions in memory; or whose tensor it shares. Strides count by that order only: their
    values also depend on the number of blocks and on padding, neither of which is in a payload.

    Args:
        groups: all of the rank's groups, in order.
        about: what else this rank knows (JSON): attention backends, packing.

    Raises:
        LayoutError: as `group_view`.
    """
    described: list[Any] = []
    for spec in groups:
        tensors = _tensors_of(caches, spec)
        places = {_identity(tensor): place for place, (_, tensor) in enumerate(tensors)}
        layers = [[name, [places[_identity(tensor)] for tensor in _as_list(caches[name])]] for name in spec.layer_names]
        described.append([spec.block_size, layers, [_describe_tensor(name, tensor, num_blocks) for name, tensor in tensors]])
    text = json.dumps([described, about], sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.blake2b(text.encode(), digest_size=LAYOUT_DIGEST_BYTES).digest()


def _describe_tensor(name: str, tensor: Tensor, num_blocks: int) -> list[Any]:
    dim, per_block = _block_dim(name, tensor, num_blocks)
    sizes = [per_block if place == dim else size for place, size in enumerate(tensor.shape)]
    order = sorted((place for place, size in enumerate(sizes) if size > 1), key=lambda place: -tensor.stride(place))
    return [str(tensor.dtype), sizes, dim, order]


def block_layout(name: str, tensor: Tensor, num_blocks: int) -> BlockLayout:
    """Byte layout of one layer's tensor, its block dimension found from `num_blocks`.

    The block dimension is 0, or 1 behind a leading K/V dimension of size 2. Where a kernel uses smaller blocks than
    vLLM's pool, the dimension is a multiple of `num_blocks` and one block is that many consecutive kernel blocks.

    Raises:
        LayoutError: no dimension or two dimensions fit, or elements overlap.
    """
    dim, per_block = _block_dim(name, tensor, num_blocks)
    item = tensor.element_size()
    inner = [
        (size, stride * item) for i, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)) if i != dim and size > 1
    ]
    block_stride = tensor.stride(dim) * item * per_block
    if per_block > 1:
        inner.append((per_block, tensor.stride(dim) * item))
    inner.sort(key=lambda pair: -pair[1])
    run = item
    while inner and inner[-1][1] == run:
        run *= inner.pop()[0]
    shape = (*(size for size, _ in inner), run)
    strides = (*(stride for _, stride in inner), 1)
    if inner and inner[-1][1] < run:
        raise LayoutError(f"{name}: shape {tuple(tensor.shape)} with strides {tensor.stride()} has overlapping elements")
    return BlockLayout(tensor.storage_offset() * item, block_stride, shape, strides)


_Identity: TypeAlias = tuple[int, tuple[int, ...], tuple[int, ...]]


def _identity(tensor: Tensor) -> _Identity:
    """Equal for two layers that share one tensor."""
    return tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride())


def _as_list(cache: KVCache) -> list[Tensor]:
    return [cache] if isinstance(cache, Tensor) else list(cache)


def _tensors_of(caches: Mapping[str, KVCache], spec: GroupSpec) -> list[tuple[str, Tensor]]:
    """Every distinct tensor of the group (layers may share one), in layer order."""
    found: dict[_Identity, tuple[str, Tensor]] = {}
    for name in spec.layer_names:
        if name not in caches:
            raise LayoutError(f"layer {name!r} of a KV cache group was not registered; got {sorted(caches)[:8]}")
        for tensor in _as_list(caches[name]):
            found.setdefault(_identity(tensor), (name, tensor))
    return list(found.values())


def _block_dim(name: str, tensor: Tensor, num_blocks: int) -> tuple[int, int]:
    """(dimension, kernel blocks per pool block)."""
    shape = tuple(tensor.shape)
    dims = [0, 1] if len(shape) > 1 and shape[0] == 2 else [0]
    exact = [dim for dim in dims if shape and shape[dim] == num_blocks]
    fits = exact or [dim for dim in dims if shape and shape[dim] and shape[dim] % num_blocks == 0]
    if len(fits) == 1:
        return fits[0], shape[fits[0]] // num_blocks
    if not fits:
        raise LayoutError(f"{name}: no dimension of shape {shape} counts {num_blocks} blocks; dimension 0, or 1 behind a leading 2, must")
    raise LayoutError(
        f"{name}: with num_blocks={num_blocks} dimensions {fits} of shape {shape} could both count blocks; "
        "use another number of GPU blocks (num_gpu_blocks_override)"
    )


def _bytes_view(tensor: Tensor, offset: int, shape: tuple[int, ...], strides: tuple[int, ...]) -> Tensor:
    raw = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return raw.set_(tensor.untyped_storage(), offset, shape, strides)
