"""A digest of a worker's weights where they lie: every byte, its place, the tensors' names, types and shapes. CPU and CUDA.

On the host, slabs go through XXH3 (128 bits), on several threads. On a device, rows of 16 KiB are multiplied by a fixed random
int8 matrix of 16 columns with exact int32 arithmetic (`torch._int_mm`). The results are the rows of the next level. The last
64 KiB go through SHA-256. Two sets of weights that were not chosen in view of the matrix have one digest with a chance of 2^-128.
Sums and XOR miss swapped rows and columns, negation and transposition; both ways here see them.

`Sample` keeps a few elements of every tensor, compared again after each scheduled step: weights that were written past vLLM show
there. It is the backstop; the hook on the executor is the mechanism. One comparison misses a push of one element in a thousand with a
chance of 4e-8.

Weights are everything that a worker's models hold, less a short list with reasons: parameters and buffers by name, and plain tensors
that modules, and objects of theirs, keep as attributes, since some kernels put repacked weights there. If a layer hides its weights,
the engine has no digest.
One kind may: vLLM's CPU backend hands most linear weights to oneDNN, keeps an opaque handle and empties the parameter (69 % of a small
model's parameters). The functions that do so are wrapped in every process (`engine.patches.before_packing`), and `mark` takes a digest
while the weights are still there.
"""

import functools
import hashlib
import json
import math
import random
import re
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy
import torch

ROW_BYTES = 16384
COLUMNS = 16
SLAB_BYTES = 64 << 20
HOST_SLAB_BYTES = 4 << 20
SMALL_BYTES = 256 << 10
"""Smaller tensors are collected: each would cost a launch of its own."""
LAST_BYTES = 64 << 10
MIN_ROWS = 32
"""`torch._int_mm` on CUDA takes more than 16."""


class Unreadable(RuntimeError):
    """These tensors have no digest now; the message says which one and why."""


class Hidden(Unreadable):
    """A kernel keeps them where nobody sees them, for good."""


def why_unreadable(error: Exception) -> str:
    """In words. Any error means the same: whatever these tensors are, they have no digest."""
    return str(error) if isinstance(error, Unreadable) else f"{type(error).__name__}: {error}"


def parts(name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensor itself, or the tensors that a wrapper keeps its bytes in (torchao, GGUF's partitions)."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    partitions = getattr(tensor, "partitions", None)
    if isinstance(partitions, dict):
        for index, part in partitions.items():
            yield from parts(f"{name}.{index}", part)
    elif is_traceable_wrapper_subclass(tensor):
        for attribute in tensor.__tensor_flatten__()[0]:
            yield from parts(f"{name}.{attribute}", getattr(tensor, attribute))
    else:
        yield name, tensor


def in_storage_order(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
    """A view whose last dimension has the smallest stride, and the order of dimensions that makes it. Dimensions of one element,
    whose strides say nothing, come first."""
    order = tuple(sorted(range(tensor.dim()), key=lambda d: (tensor.shape[d] != 1, -tensor.stride(d) if tensor.shape[d] != 1 else 0, d)))
    return (tensor.permute(order) if tensor.dim() else tensor), order


def _flat(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Its bytes (int8, one dimension) in storage order: one view, or copies of at most about a slab where there are gaps."""
    if tensor.is_contiguous():  # the stride of a single element may be any
        yield tensor.as_strided((tensor.numel(),), (1,)).view(torch.int8)
    elif tensor.dim() == 1:
        yield from _flat(tensor.contiguous())
    elif tensor[0].numel() * tensor.element_size() * 2 > SLAB_BYTES:
        for row in tensor:
            yield from _flat(row)
    else:
        for rows in tensor.split(max(1, SLAB_BYTES // (tensor[0].numel() * tensor.element_size()))):
            yield from _flat(rows.contiguous())


def digest(tensors: Iterable[tuple[str, torch.Tensor]], extra: Any = ()) -> bytes:
    """One digest (32 bytes) for all of them, and for what `extra` says (JSON). Raises Unreadable: one is on `meta` (it is being loaded)."""
    header: list[Any] = []
    sums: dict[torch.device, _Host | _Device] = {}
    seen: dict[tuple[Any, ...], str] = {}
    for name, part in (part for named in tensors for part in parts(*named)):
        tensor = part.detach()
        if tensor.is_meta:
            raise Unreadable(f"{name} is on meta: weights are being loaded")
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        if tensor.numel() and place in seen:  # tied
            header.append([name, "is", seen[place]])
            continue
        seen[place] = name
        ordered, order = in_storage_order(tensor)
        header.append([name, str(tensor.dtype), list(tensor.shape), list(order), tensor.device.type])
        if tensor.numel():
            if tensor.device not in sums:
                sums[tensor.device] = _Host() if tensor.device.type == "cpu" else _Device(tensor.device)
            for data in _flat(ordered):
                sums[tensor.device].add(data)
    final = hashlib.sha256(json.dumps([header, extra], separators=(",", ":")).encode())
    for device in sums.values():
        final.update(device.close())
    return final.digest()


class _Host:
    """XXH3 of slabs, a few of them at a time: the library lets go of the interpreter while it sums."""

    def __init__(self) -> None:
        import xxhash  # a machine whose weights are on a GPU need not have it

        self._hash: Callable[[Any], bytes] = xxhash.xxh3_128_digest
        self._num_threads = max(1, torch.get_num_threads())
        self._threads = ThreadPoolExecutor(self._num_threads, "epochkv-digest")
        self._sums: list[Future[bytes]] = []
        self._small = xxhash.xxh3_128()

    def add(self, data: torch.Tensor) -> None:
        if data.numel() < SMALL_BYTES:
            self._small.update(data.numpy())
            return
        for slab in data.split(HOST_SLAB_BYTES):
            self._sums.append(self._threads.submit(self._hash, slab.numpy()))
            if len(self._sums) > 4 * self._num_threads:  # a copy of a tensor with gaps lives until it is summed
                self._sums[-4 * self._num_threads].result()

    def close(self) -> bytes:
        try:
            return b"".join([*(one.result() for one in self._sums), self._small.digest()])
        finally:
            self._threads.shutdown()


class _Device:
    """The tree of matrix products; the host waits once, at the end."""

    def __init__(self, device: torch.device) -> None:
        self._matrix = _matrix(device)
        self._levels: list[torch.Tensor] = []
        self._small: list[torch.Tensor] = []
        self._held = 0

    def add(self, data: torch.Tensor) -> None:
        if data.numel() > SMALL_BYTES:
            self._levels += self._level(data)
            return
        self._small.append(data)
        self._held += data.numel()
        if self._held > SLAB_BYTES:
            self._collect()

    def _collect(self) -> None:
        if self._small:
            self._levels += self._level(torch.cat(self._small))
            self._small, self._held = [], 0

    def _level(self, data: torch.Tensor) -> list[torch.Tensor]:
        return [self._rows(slab) for slab in data.split(SLAB_BYTES)]

    def _rows(self, data: torch.Tensor) -> torch.Tensor:
        """int32 [rows, COLUMNS] of up to a slab of bytes; what is missing of the last row is 0."""
        num = data.numel()
        rows = -(-num // ROW_BYTES)
        if max(rows, MIN_ROWS) * ROW_BYTES != num or data.data_ptr() % 16:
            padded = torch.zeros(max(rows, MIN_ROWS) * ROW_BYTES, dtype=torch.int8, device=data.device)
            padded[:num] = data
            data = padded
        return torch._int_mm(data.view(-1, ROW_BYTES), self._matrix)[:rows]

    def close(self) -> bytes:
        self._collect()
        if not self._levels:
            return b""
        data = torch.cat(self._levels).view(-1).view(torch.int8)
        while data.numel() > LAST_BYTES:
            data = torch.cat(self._level(data)).view(-1).view(torch.int8)
        return bytes(data.cpu().numpy().tobytes())


@functools.cache
def _matrix(device: torch.device) -> torch.Tensor:
    """int8 [ROW_BYTES, COLUMNS], column-major as cuBLASLt wants it."""
    raw = bytearray(hashlib.shake_256(b"epochkv weights 1").digest(ROW_BYTES * COLUMNS))
    return torch.frombuffer(raw, dtype=torch.int8).view(COLUMNS, ROW_BYTES).to(device).t()


NUM_ELEMENTS = 16384
"""Read in a quarter of a millisecond after a forward pass, when little of it is in a cache."""
MIN_PER_TENSOR = 32
RUN = 16
"""Elements that lie together and are drawn together: memory is read by the line."""

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class OnDevice:
    """Strided views of one type and number of dimensions on one device, and what they held."""

    def __init__(self, views: list[torch.Tensor]) -> None:
        self._views = views
        self.then = torch.cat(views)

    def differs(self) -> torch.Tensor:
        """bool, on the device; nothing waits for it here."""
        return (torch.cat(self._views) != self.then).any()


class OnHost:
    """The same in host memory, without torch: a forward pass leaves its code and tables out of the caches, and finding them again took
    more than reading the sample."""

    def __init__(self, views: list[torch.Tensor]) -> None:
        self._arrays = [view.numpy() for view in views]
        self.then = numpy.concatenate(self._arrays).tobytes()

    def differs(self) -> bool:
        return numpy.concatenate(self._arrays).tobytes() != self.then


class Sample:
    """What was there when it was drawn. Every tensor has at least `MIN_PER_TENSOR` elements in it, or all of its own."""

    def __init__(
        self, tensors: Iterable[tuple[str, torch.Tensor]], num_elements: int = NUM_ELEMENTS, draw: random.Random | None = None
    ) -> None:
        draw = draw or random.Random()
        visible = [part.detach() for named in tensors for _, part in parts(*named) if part.numel() and not part.is_meta]
        total = sum(tensor.numel() for tensor in visible)
        groups: dict[tuple[torch.dtype, torch.device, int], list[torch.Tensor]] = {}
        for tensor in visible:
            ordered, _ = in_storage_order(tensor)
            if not ordered.is_contiguous():
                ordered = ordered[tuple(slice(draw.randrange(size), None) for size in ordered.shape[:-1])]  # one corner of it
                ordered = ordered[(0,) * (ordered.dim() - 1)]
            bits = _BITS.get(tensor.element_size())
            flat = ordered.reshape(-1) if bits is None else ordered.reshape(-1).view(bits)
            wanted = max(MIN_PER_TENSOR, round(num_elements * tensor.numel() / total))
            for view in _runs(flat, wanted, draw):
                if view.numel():
                    groups.setdefault((flat.dtype, flat.device, view.dim()), []).append(view)
        self.num_elements = sum(view.numel() for views in groups.values() for view in views)
        self._groups = [OnHost(views) if device.type == "cpu" else OnDevice(views) for (_, device, _), views in groups.items()]

    def compare(self) -> Callable[[], bool]:
        """Compare on the compute stream, behind what was issued there. The result says whether nothing differs; it waits for
        the device, so ask when a copy that was issued later has ended."""
        flags = [group.differs() for group in self._groups]
        return lambda: not any(map(bool, flags))

    def holds(self) -> bool:
        """Whether nothing differs now."""
        return self.compare()()


def _runs(flat: torch.Tensor, wanted: int, draw: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """About `wanted` elements: [runs, RUN] at equal distances from a random first one (odd distances, so that no column is followed),
    and the last elements that make no run."""
    whole = flat.numel() // RUN
    rows = flat[: whole * RUN].view(whole, RUN)
    step = max(1, whole // max(1, wanted // RUN)) | 1
    return rows[draw.randrange(max(1, min(step, whole))) :: step], flat[whole * RUN :]


PACKED = "_epochkv_packed"
"""Attribute of a layer: hex digest of the weights that a kernel has packed away."""

LEFT_OUT = {
    "cos_sin_cache": "rotary tables are made of the configuration, which the fingerprint has, and may be cast or grown later",
    "kv_cache": "what is named, not what names",
    "workspace": "scratch memory of kernels",
    **dict.fromkeys(("expert_map", "expert_mask", "expert_local_to_global"), "which rank has which expert: the layout, not the weights"),
}
"""Names, or ends of names behind an underscore, of tensors that are not weights, and why."""

SCRATCH = (
    "buffer", "buffers", "scratch", "deepstack_input_embeds", "per_layer_embeddings", "per_layer_inputs", "positions", "hidden_states",
    "kv_cache_k", "kv_cache_v", "staged_rows", "packed_rows", "prefetch_ids", "ring_start", "prev_num_accepted", "prev_query_len",
)  # fmt: skip
"""The same of plain attributes, and buffers of no checkpoint, that forward passes write to: rows for the tokens of a step, indices, KV."""

_LEFT_OUT, _SCRATCH = (tuple(f"_{name}" for name in names) for names in (LEFT_OUT, SCRATCH))  # as ends, of names behind an underscore
KERNEL_LIBRARIES = ("triton_kernels", "b12x")
"""They keep packed weights in objects of their own, which layers hold in place of tensors."""


def models(worker: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """The model, and the drafter's where there is one, with a prefix for names."""
    yield "", worker.get_model()
    draft = getattr(worker, "get_draft_model", lambda: None)()
    if draft is not None:
        yield "draft.", draft


def _modules(worker: Any) -> Iterator[tuple[str, torch.nn.Module]]:
    """All modules of this rank, once each, by the prefix of their tensors' names, which adapters do not change."""
    for prefix, model in models(worker):
        for path, module in model.named_modules():
            yield f"{prefix}{path}.".replace(".base_layer.", "."), module


@dataclass(frozen=True, slots=True)
class Home:
    """A weight, and where it is kept."""

    name: str
    tensor: torch.Tensor
    steps: tuple[tuple[Any, Any, Any], ...]  # (container, key, what is there), from the module's own table to the tensor


def homes(worker: Any) -> Iterator[Home]:
    """All weights of this rank, with the places that they were found in. Raises Unreadable: a layer hides its weights."""
    for name, module in _modules(worker):
        if type(module).__module__.startswith("vllm.lora.") or type(module).__name__ in ("EngramBatch", "EngramPeerExchange"):
            continue  # the adapters' own, or memory of a step; what is below such a wrapper is a module of its own
        num_bytes = 0
        for home in _own(module):
            num_bytes += home.tensor.numel() * home.tensor.element_size()
            if not any(f"_{part}".endswith(_LEFT_OUT) for part in home.name.split(".")):
                yield Home(name + home.name, home.tensor, home.steps)
        _check_visible(name, module, num_bytes)


_EXPERTS = re.compile(r"(?:^|\.)(?:routed_)?experts\.(?:(?:(?:quant_method\.)?(?:w13|w2|g[12]|gemm[12])_|_b12x_prepared_experts\.).*)?$")


def is_of_experts(name: str) -> bool:
    """Whether a tensor, or a layer whose weights were packed away, is of routed experts, of which data-parallel ranks have each a part."""
    return _EXPERTS.search(name) is not None


def weights(worker: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of all weights of this rank. Raises as `homes`."""
    return ((home.name, home.tensor) for home in homes(worker))


def mark(layer: Any) -> None:
    """Keep the digest of the layer's parameters at the layer, before they are packed away. Weights on `meta` are yet to come."""
    parameters = [(name, tensor) for name, tensor in layer._parameters.items() if tensor is not None]
    if not any(tensor.is_meta for _, tensor in parameters):
        layer.__dict__[PACKED] = digest(parameters).hex()


def packed(worker: Any) -> list[list[str]]:
    """[name, digest] of layers whose weights were packed away."""
    return [[name, str(module.__dict__[PACKED])] for name, module in _modules(worker) if module.__dict__.get(PACKED) is not None]


def scales(worker: Any, which: str, unset: float | None) -> list[list[Any]]:
    """What attention layers keep of scales as numbers: name of the layer, then those of `which` (q, k, v: its KV, o: outputs)."""
    numbers = ((name, [module.__dict__.get(f"_{one}_scale_float", unset) for one in which]) for name, module in _modules(worker))
    return [[name, *of_layer] for name, of_layer in numbers if set(of_layer) != {unset}]


_PLAIN = frozenset((bool, int, float, str, type(None), dict, OrderedDict))  # most attributes, in which no tensor is looked for


def _own(module: torch.nn.Module) -> Iterator[Home]:
    for table in (module._parameters, module._buffers):
        for attribute, tensor in table.items():
            if tensor is not None and not (attribute in module._non_persistent_buffers_set and f"_{attribute}".endswith(_SCRATCH)):
                yield Home(attribute, tensor, ((table, attribute, tensor),))
    impl = getattr(module.__dict__.get("impl"), "__dict__", {})  # of attention: kernels copy sinks, and may go on with the copy
    yield from _inside("impl.sinks", (impl, "sinks", impl.get("sinks")))
    method = module.__dict__.get("quant_method") or module._modules.get("quant_method")
    replaced = getattr(method, "old_quant_method", None)  # experts with adapters
    scheme = module.__dict__.get("scheme")  # compressed tensors
    for prefix, holder in (("", module), ("quant_method.", method), ("quant_method.", replaced), ("scheme.", scheme)):
        kept = getattr(holder, "__dict__", {})
        for attribute, value in kept.items():
            if type(value) not in _PLAIN:
                yield from _inside(prefix + attribute, (kept, attribute, value))


def _inside(name: str, *steps: tuple[Any, Any, Any]) -> Iterator[Home]:
    """The tensor that the last step leads to, or those in a list or an object of a library."""
    container, key, value = steps[-1]
    many = isinstance(value, (list, tuple))
    of_library = type(value).__module__.removeprefix("vllm.third_party.").partition(".")[0] in KERNEL_LIBRARIES
    if f"_{key}".endswith(_SCRATCH) or any(one is value for *_, one in steps[:-1]):
        return
    if isinstance(value, torch.Tensor):
        yield Home(name, value, steps)
    elif of_library or (many and not isinstance(container, (list, tuple))):
        kept = dict(enumerate(value)) if many else getattr(value, "__dict__", {})
        for part, one in kept.items():
            yield from _inside(f"{name}.{part}", *steps, (value if many else kept, part, one))


def _check_visible(name: str, module: torch.nn.Module, num_bytes: int) -> None:
    if getattr(module, "quant_method", None) is None or PACKED in module.__dict__:
        return
    linear = [getattr(module, f"{side}_size_per_partition", getattr(module, f"{side}_size", 0)) for side in ("input", "output")]
    experts = [2, *(getattr(module, name, 0) for name in ("local_num_experts", "hidden_size", "intermediate_size_per_partition"))]  # or 3
    num_weights = max(math.prod(size if isinstance(size, int) else 0 for size in sizes) for sizes in (linear, experts))
    emptied = any(parameter is not None and not parameter.numel() for parameter in module._parameters.values())
    if num_bytes * 8 < num_weights or (emptied and not num_bytes):  # less than a bit for each is no quantisation
        raise Hidden(
            f"the weights of {name[:-1]} were packed away by a kernel before anybody looked at them; choose another kernel, "
            "or on a CPU let vLLM load the plugin 'epochkv' in every process (VLLM_PLUGINS)"
        )
