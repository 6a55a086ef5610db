"""The only file, with `compat_kv`, that imports unstable vLLM names.

Everything here was checked against vLLM 0.32; 0.30 to 0.33 are accepted, other versions are refused at start with a
sentence (unless `allow_untested_vllm`), because a renamed global would make every name in this project a lie.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import logging
import math
import os
import platform
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import vllm

from epochkv_connector.engine.kv_caches import describe_platform
from epochkv_connector.engine.plugin import NAME
from epochkv_connector.naming.pins import PIN_ATTRIBUTE
from epochkv_connector.scheduler.views import CacheLayout, GroupKind, GroupLayout
from epochkv_connector.worker.slots import slot_stride

TESTED_VERSIONS = ((0, 30), (0, 33))
"""First and last minor version accepted."""


class UnsupportedEngine(RuntimeError):
    """This engine cannot be fenced; the message says what is wrong and what to change."""


def _unsupported(found: str) -> str:
    first, last = TESTED_VERSIONS
    return f"vLLM {found} is not supported: EpochKV was tested with {first[0]}.{first[1]} to {last[0]}.{last[1]}; install one of these"


try:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorRole,
        KVConnectorTransferResults,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
    from vllm.v1.core import kv_cache_utils
except ImportError as error:  # a version so far away that there is nothing to try
    raise UnsupportedEngine(f"{_unsupported(getattr(vllm, '__version__', '(unknown)'))} ({error})") from None

try:  # 0.32 and later
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:
    CacheHitSource = None

__all__ = [  # names of vLLM that the rest of the connector imports from here
    "KVConnectorBase_V1",
    "KVConnectorPromMetrics",
    "KVConnectorRole",
    "KVConnectorStats",
    "KVConnectorTransferResults",
    "SupportsHMA",
]

ALLOWED_SIBLINGS: frozenset[str] = frozenset({NAME})
"""What may stand, once, beside us in a MultiConnector: connectors that keep block hashes per request would outlive a re-hash."""

Hasher = Callable[[Any], list[bytes]]


def check_version(allow_untested: bool, version: str | None = None) -> None:
    """Raise `UnsupportedEngine` unless vLLM's minor version was tested.

    Args:
        allow_untested: accept any version (configuration key `allow_untested_vllm`).
        version: for tests; default `vllm.__version__`.
    """
    found = vllm.__version__ if version is None else version
    match = re.match(r"(\d+)\.(\d+)", found)
    minor = (int(match[1]), int(match[2])) if match else (-1, -1)
    first, last = TESTED_VERSIONS
    if first <= minor <= last or allow_untested:
        return
    raise UnsupportedEngine(f"{_unsupported(found)}, or set allow_untested_vllm to true in kv_connector_extra_config at your own risk")


PREFIX = "EpochKV"


class _Ours(logging.Handler):
    """Hands records to vLLM's handlers, under our name: vLLM's lines show a file's name, and nobody knows ours."""

    def emit(self, record: logging.LogRecord) -> None:
        """As `logging.Handler.emit`."""
        if not str(record.msg).startswith(PREFIX):
            record = copy.copy(record)
            record.msg = f"{PREFIX}: {record.msg}"
        for handler in logging.getLogger("vllm").handlers:
            if record.levelno >= handler.level:
                handler.handle(record)


def share_log_handlers() -> None:
    """Let our packages log as vLLM does (time, level, module, process); without handlers their lines would be bare, and
    INFO would be lost. Does nothing where somebody has set up logging for them.
    """
    handlers = logging.getLogger("vllm").handlers
    for name in ("epochkv_connector", "epochkv_fence"):
        logger = logging.getLogger(name)
        if not logger.handlers and logger.level == logging.NOTSET and handlers:
            logger.handlers = [_Ours()]
            logger.setLevel(logging.INFO)


def check_siblings(names: Sequence[str]) -> None:
    """Whether these connectors, of which one is ours, may be children of one MultiConnector.

    Raises:
        UnsupportedEngine: there is one beside ours that is not on the tested list, or ours more than once.
    """
    if names.count(NAME) > 1:
        raise UnsupportedEngine(
            "MultiConnector holds EpochKVConnector more than once: each would name the same requests anew; keep one of them"
        )
    for sibling in names:
        if sibling not in ALLOWED_SIBLINGS:
            raise UnsupportedEngine(
                f"MultiConnector holds {sibling} beside EpochKVConnector: KV that {sibling} brings in would be named "
                "by hashes it keeps from before an epoch change; remove it from the MultiConnector"
            )


def check_launcher(backend: object, num_ranks: int) -> None:
    """Whether ranks that are started like this (`distributed_executor_backend`) can have tiers.

    Raises:
        UnsupportedEngine: every process has a scheduler and one worker, so nobody brings their acknowledgements together.
    """
    kinds = {kind.__name__ for kind in backend.__mro__} if isinstance(backend, type) else {str(backend)}
    if num_ranks > 1 and kinds & {"external_launcher", "ExecutorWithExternalLauncher"}:
        raise UnsupportedEngine(
            f"distributed_executor_backend is external_launcher with {num_ranks} ranks: each process schedules for its own rank only "
            "and would wait for ever for the other ranks to say that a saved block was copied, until no KV block is left; "
            "use 'mp' or 'ray', or start one engine of one rank in each process"
        )


def hide_adapters_from_hashes() -> None:
    """Keep an adapter's name and path out of the block hashes of requests that we have pinned: their root says which adapter it is."""
    keys_of = getattr(kv_cache_utils, "_gen_lora_extra_hash_keys", None)
    if keys_of is None or hasattr(keys_of, "__wrapped__"):
        return

    @functools.wraps(keys_of)
    def unless_pinned(request: Any) -> list[Any]:
        pin = getattr(request, PIN_ATTRIBUTE, None)
        return [] if pin is not None and pin.adapter else list(keys_of(request))

    kv_cache_utils._gen_lora_extra_hash_keys = unless_pinned


def _builder(kind: str) -> Any | None:
    """The object of this class, or of one derived from it, whose `__init__` is building us."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "__init__" and kind in [base.__name__ for base in type(owner).__mro__]:
            return owner
    return None


def sibling_names() -> list[str]:
    """Children of the MultiConnector that is building us, ours among them; empty: there is none.

    The children's configuration does not name the parent (each child gets a copy with its own `kv_transfer_config`),
    so the parent is looked up among the callers.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if frame.f_code.co_name == "__init__" and type(owner).__name__ == "MultiConnector":
            config = frame.f_locals.get("vllm_config")
            transfer = getattr(config, "kv_transfer_config", None)
            children = (getattr(transfer, "kv_connector_extra_config", None) or {}).get("connectors", [])
            return [str(child.get("kv_connector")) for child in children]
        if frame.f_back is None:
            break
        frame = frame.f_back
    return []


def before_reset(kv_cache_manager: Any, action: Callable[[], object]) -> None:
    """Have `action` run each time before vLLM clears its own prefix cache; vLLM tells connectors afterwards, if at all."""
    clear = kv_cache_manager.reset_prefix_cache

    def reset_prefix_cache() -> bool:
        action()
        return bool(clear())

    kv_cache_manager.reset_prefix_cache = reset_prefix_cache


class GlobalRoot:
    """vLLM's module global that starts every block-hash chain, and the sentinel that tells when vLLM has set its own.

    The connector is built before vLLM's `init_none_hash` runs; a root bound earlier would be overwritten.
    """

    def __init__(self) -> None:
        # A fresh object: `is` must tell it from any value that vLLM computes, also in a second engine of the process.
        self._sentinel = bytes(bytearray(os.urandom(32)))
        kv_cache_utils.NONE_HASH = self._sentinel

    def ready(self) -> bool:
        """True once vLLM has replaced the sentinel by its own value."""
        return kv_cache_utils.NONE_HASH is not self._sentinel

    def bind(self, root: bytes) -> None:
        """Make `root` the parent of every chain begun from now on."""
        kv_cache_utils.NONE_HASH = root

    def is_bound(self, root: bytes) -> bool:
        """Whether the global is this very object (somebody else may have overwritten it)."""
        return kv_cache_utils.NONE_HASH is root


class BlockHashing:
    """Hashes a request's first block under an explicit parent, and a whole request through vLLM's own hasher.

    Args:
        algorithm: `cache_config.prefix_caching_hash_algo`.
    """

    def __init__(self, algorithm: str) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name

        self.algorithm = algorithm
        self.hash_block_size = 0  # known when the block pool is bound
        self._function = get_hash_fn_by_name(algorithm)

    def first(self, request: Any, root: bytes) -> bytes | None:
        """Hash of block 0 with `root` as explicit parent; None while the request has no full block."""
        size = self.hash_block_size
        if size <= 0 or request.num_tokens < size:
            return None
        extra, _ = kv_cache_utils.generate_block_hash_extra_keys(request, 0, size, 0)
        tokens = request.all_token_ids[0:size]
        return bytes(kv_cache_utils.hash_block_tokens(self._function, root, tokens, extra))

    def chain(self, request: Any, root: bytes, inner: Hasher) -> list[bytes]:
        """All block hashes of a request that has none yet, begun with `root`; a new list.

        vLLM's hasher continues from the last hash the request holds, so it is shown a one-element list for the
        duration of the call; the request's own list is not touched.
        """
        head = self.first(request, root)
        if head is None:
            return []
        held = request.block_hashes
        request.block_hashes = [head]
        try:
            return [head, *inner(request)]
        finally:
            request.block_hashes = held


def hash_seed_is_random(algorithm: str) -> bool:
    """Whether vLLM seeds this algorithm at random in each process (non-cryptographic ones without PYTHONHASHSEED)."""
    return "xxhash" in algorithm and os.environ.get("PYTHONHASHSEED") is None


@dataclasses.dataclass(frozen=True, slots=True)
class AboutRequest:
    """What vLLM's `BlockStored` says of the request that a block was made for."""

    lora_id: int | None
    lora_name: str | None
    extra_keys: list[Any] | None
    session_id: str | None


def has_kv_events(block_pool: Any) -> bool:
    """Whether somebody listens to KV events of this engine."""
    return bool(getattr(block_pool, "enable_kv_cache_events", False))


def about_request(request: Any, start: int, end: int) -> AboutRequest:
    """The same, for the block of tokens `[start, end)`."""
    extra, _ = kv_cache_utils.generate_block_hash_extra_keys(request, start, end, 0)
    untagged = getattr(kv_cache_utils, "to_event_extra_keys", lambda keys: keys)  # 0.31 and later tag them for the hash
    lora = request.lora_request
    return AboutRequest(
        lora.adapter_id if lora else None, lora.name if lora else None, untagged([extra]), getattr(request, "session_id", None)
    )


def host_block_stored(name: bytes, group: int, parent: bytes | None, tokens: list[int], block_size: int, about: AboutRequest | None) -> Any:
    """`BlockStored` for a block in host memory; without `about` the bare name, as vLLM's own offloading announces blocks."""
    from vllm.distributed.kv_events import MEDIUM_CPU, BlockStored

    known = about or AboutRequest(None, None, None, None)
    return BlockStored(
        block_hashes=[kv_cache_utils.maybe_convert_block_hash(name)],
        parent_block_hash=kv_cache_utils.maybe_convert_block_hash(parent) if parent is not None else None,
        token_ids=tokens,
        block_size=block_size,
        lora_id=known.lora_id,
        medium=MEDIUM_CPU,
        lora_name=known.lora_name,
        extra_keys=known.extra_keys,
        group_idx=group,
        locality="LOCAL",
        session_id=known.session_id,
    )


def host_block_removed(name: bytes, group: int) -> Any:
    """`BlockRemoved` for a block in host memory."""
    from vllm.distributed.kv_events import MEDIUM_CPU, BlockRemoved

    return BlockRemoved(block_hashes=[kv_cache_utils.maybe_convert_block_hash(name)], medium=MEDIUM_CPU, group_idx=group, locality="LOCAL")


def queue_all_blocks_cleared(block_pool: Any, drop_pending: bool) -> None:
    """Queue one AllBlocksCleared on the block pool's own event queue, so that it precedes events of new blocks.

    Args:
        block_pool: the bound GPU block pool.
        drop_pending: forget events not yet taken (a reset), instead of letting them precede the clearing.
    """
    if block_pool is None or not getattr(block_pool, "enable_kv_cache_events", False):
        return
    from vllm.distributed.kv_events import AllBlocksCleared

    if drop_pending:
        block_pool.kv_event_queue.clear()
    block_pool.kv_event_queue.append(AllBlocksCleared())


def holds_blocks(request: Any) -> bool:
    """Whether the request holds KV blocks now (then it must never be re-hashed)."""
    from vllm.v1.request import RequestStatus

    return bool(request.num_computed_tokens > 0 or request.status in (RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.RUNNING))


def num_named_blocks(manager: Any, request: Any, block_pool: Any) -> int:
    """How many of the request's hash blocks vLLM has named in its own cache."""
    size = hash_block_size_of(block_pool)
    managers = manager.coordinator.single_type_managers
    named = (one.num_cached_block.get(request.request_id, 0) * int(one.block_size) // size for one in managers)
    return min(max(named, default=0), len(request.block_hashes))


def builders() -> tuple[Any | None, Any | None]:
    """The engine core and the scheduler that are building us, if they are."""
    return _builder("EngineCore"), _builder("Scheduler")


def why_no_weights(vllm_config: Any, executor: Any | None) -> str | None:
    """Why this engine cannot know the weights that its KV depends on, in words; None: it can."""
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    offload = getattr(getattr(vllm_config, "offload_config", None), "prefetch", None)
    kinds = [kind.__name__ for kind in type(executor).__mro__] if executor is not None else []
    if int(parallel.data_parallel_size) > 1 and bool(getattr(model, "is_moe", False)):
        return (
            "experts are spread over data-parallel ranks, so KV depends on weights of other engines, which this one does not see; "
            "give each engine all experts (data_parallel_size 1)"
        )
    if bool(getattr(parallel, "enable_eplb", False)):
        return "expert rebalancing (enable_eplb) moves experts between ranks while they serve, and no digest of a rank lasts; turn it off"
    if int(getattr(offload, "offload_group_size", 0) or 0) > 0:
        return "the prefetch offloader (offload_group_size) swaps weights in and out of the device; use cpu_offload_gb, or no offloading"
    if "RayDistributedExecutor" in kinds:
        return "vLLM's old Ray executor makes calls to workers beside running steps; set VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1, or use 'mp'"
    return None


def encoder_outputs_in_use(scheduler: Any) -> bool:
    """Whether a request refers to cached outputs of an encoder."""
    cached = getattr(getattr(scheduler, "encoder_cache_manager", None), "cached", None) or {}
    return any(cached.values())


def is_multimodal(vllm_config: Any) -> bool:
    """Whether encoder outputs (keyed by content, not by weights) can enter the KV of this engine."""
    return bool(getattr(vllm_config.model_config, "is_multimodal_model", False))


def _plain(value: Any) -> Any:
    """JSON for the values found in vLLM configurations; addresses never get in."""
    if value is None or isinstance(value, (bool, int, float, str)):
        plain: Any = value
    elif isinstance(value, dict):
        plain = {str(key): _plain(item) for key, item in value.items()}
    elif isinstance(value, (list, tuple)):
        plain = [_plain(item) for item in value]
    elif isinstance(value, (set, frozenset)):
        plain = sorted(str(_plain(item)) for item in value)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        plain = {"type": type(value).__name__, **fields}
    elif isinstance(getattr(value, "name", None), str):
        plain = value.name
    else:
        plain = re.sub(r" at 0x[0-9a-f]+", "", str(value))
    return plain


def _options(config: Any, left_out: frozenset[str] = frozenset()) -> dict[str, Any] | None:
    """Every field of one of vLLM's configurations, also those that are yet to come; None: there is no such configuration."""
    return None if config is None else {key: _plain(value) for key, value in vars(config).items() if key not in left_out}


_LORA_CAPACITIES = frozenset(
    ("max_lora_rank", "max_loras", "max_cpu_loras", "max_lora_cls_labels", "default_mm_loras", "specialize_active_lora")
)
"""Fields of `LoRAConfig` that do not say how an adapter is applied; every other one does, also those that are yet to come."""

_VOLATILE_HF_KEYS = ("_name_or_path", "transformers_version", "torch_dtype", "_attn_implementation_autoset")


def _model_digest(model_config: Any) -> str:
    hf_config = getattr(model_config, "hf_config", None)
    described = hf_config.to_dict() if hf_config is not None and hasattr(hf_config, "to_dict") else {}
    kept = {key: value for key, value in described.items() if key not in _VOLATILE_HF_KEYS}
    text = json.dumps(_plain(kept), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _remote_code(model: Any) -> list[Any] | None:
    """Where the model's own code is from; None: it runs vLLM's."""
    if not (getattr(model, "trust_remote_code", False) and getattr(getattr(model, "hf_config", None), "auto_map", None)):
        return None
    return [str(model.model), _plain(getattr(model, "revision", None)), _plain(getattr(model, "code_revision", None))]


def describe_engine(vllm_config: Any, kv_cache_config: Any) -> dict[str, Any]:
    """Everything but weights that changes KV bytes or their layout, as JSON (`identity.fingerprint` digests it). Where the model was
        loaded from does not: what its files said is in its configuration and in the digest of its weights.

    As far as the scheduler process can know it: ranks say how their tensors lie (`worker.layout.layout_digest`). Ranks are
        numbered within their engine, so an object of one number holds other heads where tensor-parallel size or the number of
        distinct shards differs. Pickle-based hash algorithms depend on the interpreter's minor version, so that is in for them.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    algorithm = str(cache.prefix_caching_hash_algo)
    groups = [
        {
            "spec": _plain(group.kv_cache_spec),
            "layers": list(group.layer_names),
            "eagle": bool(getattr(group, "is_eagle_group", False)),
        }
        for group in kv_cache_config.kv_cache_groups
    ]
    speculative = getattr(vllm_config, "speculative_config", None)
    return {
        "vllm": vllm.__version__,
        "remote_code": _remote_code(model),
        "hf_config": _model_digest(model),
        "max_model_len": _plain(getattr(model, "max_model_len", None)),  # picks LongRoPE factors and Llama 4's temperature
        "dtype": str(model.dtype),
        "quantization": _plain(getattr(model, "quantization", None)),
        "cache_dtype": str(cache.cache_dtype),
        "skip_layers": sorted(str(layer) for layer in getattr(cache, "kv_cache_dtype_skip_layers", None) or ()),
        "layout": _plain(getattr(kv_cache_config, "kv_cache_layout", None) or getattr(cache, "kv_cache_layout", None)),
        "hash_block_size": _plain(getattr(kv_cache_config, "hash_block_size", None) or getattr(cache, "prefix_match_unit", None)),
        "groups": groups,
        "platform": describe_platform(vllm_config, kv_cache_config),
        "tensor": int(parallel.tensor_parallel_size),
        "shards": num_kv_shards(vllm_config, kv_cache_config),
        "replicas": num_kv_replicas(kv_cache_config),
        "pipeline": int(parallel.pipeline_parallel_size),
        "decode_context": int(getattr(parallel, "decode_context_parallel_size", 1)),
        "prefill_context": int(getattr(parallel, "prefill_context_parallel_size", 1)),
        "context_interleave": [
            _plain(getattr(parallel, name, None)) for name in ("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size")
        ],
        "hash_algorithm": algorithm,
        "interpreter": ".".join(platform.python_version_tuple()[:2]) if "cbor" not in algorithm else "",
        "attention": _options(getattr(vllm_config, "attention_config", None)),
        "speculative": [
            _plain(getattr(speculative, "method", None)),
            _model_digest(getattr(speculative, "draft_model_config", None)),
            _plain(getattr(speculative, "num_speculative_tokens", None)),
        ]
        if speculative is not None
        else None,
    }


def describe_adapters(vllm_config: Any) -> str:
    """How adapters are applied: every option but those that say how many there may be, as text; empty without adapters."""
    lora = getattr(vllm_config, "lora_config", None)
    if lora is None:
        return ""
    options = _options(lora, _LORA_CAPACITIES)
    return hashlib.sha256(json.dumps(options, sort_keys=True, default=str).encode()).hexdigest()


def why_no_adapters(vllm_config: Any) -> str | None:
    """Why KV of adapters cannot be named by their tensors, in words; None: it can."""
    if is_multimodal(vllm_config) and getattr(getattr(vllm_config, "lora_config", None), "enable_tower_connector_lora", False):
        return "outputs of the encoder are cached by an adapter's name, whatever it holds (enable_tower_connector_lora)"
    return None


def cache_layout(vllm_config: Any, kv_cache_config: Any) -> CacheLayout:
    """The KV cache groups as the scheduler half sees them."""
    dcp = int(getattr(vllm_config.parallel_config, "decode_context_parallel_size", 1))
    groups = tuple(_group_layout(group, dcp) for group in kv_cache_config.kv_cache_groups)
    if _drops_last_block(vllm_config) and not any(group.eagle for group in groups):
        groups = tuple(dataclasses.replace(group, eagle=True) for group in groups)  # as `KVCacheCoordinator.__init__` does
    payloads = _largest_payloads(vllm_config, kv_cache_config)
    return CacheLayout(
        groups=groups,
        alignment_tokens=math.lcm(*(group.block_size for group in groups)),
        slot_bytes=slot_stride(payloads) if payloads else 0,
    )


def _largest_payloads(vllm_config: Any, kv_cache_config: Any) -> list[int]:
    """Bytes of one block by group, on the pipeline stage that has most layers, so that every rank counts the same slots.

    A rank knows its own layers only (the scheduler those of rank 0). Several groups: its own, as nothing says how stages cut them.
    """
    groups, stages = kv_cache_config.kv_cache_groups, int(vllm_config.parallel_config.pipeline_parallel_size)
    if stages == 1 or len(groups) != 1 or type(groups[0].kv_cache_spec).__name__ == "UniformTypeKVCacheSpecs":
        return [group_payload_bytes(group) for group in groups]
    from vllm.distributed.utils import get_pp_indices

    layers = int(vllm_config.model_config.get_total_num_hidden_layers())
    bounds = [get_pp_indices(layers, stage, stages) for stage in range(stages)]
    most = max(len(groups[0].layer_names), *(end - start for start, end in bounds))
    return [int(groups[0].kv_cache_spec.page_size_bytes) * most]


def _drops_last_block(vllm_config: Any) -> bool:
    """Whether vLLM drops the last block of every hit (EAGLE/MTP: its last position depends on the next token)."""
    speculative = getattr(vllm_config, "speculative_config", None)
    if speculative is None:
        return False
    drops = getattr(speculative, "use_eagle_block_drop", None) or speculative.use_eagle  # the former from 0.32 on
    return bool(drops())


def num_worker_ranks(vllm_config: Any) -> int:
    """Worker ranks that acknowledge every job."""
    return int(vllm_config.parallel_config.world_size)


def num_machines(vllm_config: Any) -> int:
    """Machines that the engine's worker ranks are spread over."""
    return max(1, int(getattr(vllm_config.parallel_config, "nnodes_within_dp", 1) or 1))


def num_kv_shards(vllm_config: Any, kv_cache_config: Any) -> int:
    """Distinct KV shards of the engine: ranks less replicas of KV heads."""
    return max(1, num_worker_ranks(vllm_config) // num_kv_replicas(kv_cache_config))


def num_kv_replicas(kv_cache_config: Any) -> int:
    """Consecutive tensor-parallel ranks that hold identical KV in every layer (unknown before 0.32: none)."""
    return int(getattr(kv_cache_config, "kv_tp_replicas", 1) or 1)


def worker_rank(vllm_config: Any) -> int:
    """This worker's rank in its engine; vLLM's world group may span the engines of a data-parallel group, one after another."""
    from vllm.distributed import parallel_state

    try:
        group = parallel_state.get_world_group()
    except AssertionError:  # nobody has set it up: a single rank
        return 0
    return int(group.rank_in_group) % num_worker_ranks(vllm_config)


def group_payload_bytes(group: Any) -> int:
    """Bytes of one block of one group on one rank, all layers."""
    spec = group.kv_cache_spec
    if type(spec).__name__ == "UniformTypeKVCacheSpecs":
        return int(spec.page_size_bytes)
    return int(spec.page_size_bytes) * len(group.layer_names)


def _group_layout(group: Any, dcp: int) -> GroupLayout:
    spec = group.kv_cache_spec
    block_size = int(spec.block_size) * (dcp if getattr(spec, "dcp_sharded", False) else 1)
    inner = spec.first_spec if type(spec).__name__ == "UniformTypeKVCacheSpecs" else spec
    name = type(inner).__name__
    eagle = bool(getattr(group, "is_eagle_group", False))
    transferable = bool(getattr(group, "enable_kv_transfer", True)) and bool(getattr(spec, "prefix_cacheable", True))
    if transferable and name in ("FullAttentionSpec", "MLAAttentionSpec"):
        return GroupLayout(GroupKind.FULL, block_size, eagle=eagle, name=name)
    if transferable and name == "SlidingWindowSpec":
        return GroupLayout(
            GroupKind.SLIDING,
            block_size,
            window_tokens=int(inner.sliding_window),
            extra_retained_tokens=int(getattr(inner, "extra_retained_tokens", 0)),
            eagle=eagle,
            name=name,
        )
    return GroupLayout(GroupKind.UNSUPPORTED, block_size, eagle=eagle, name=name)


class BlockPoolAdapter:
    """vLLM's block pool by block id (`scheduler.views.BlockPoolPort`): five stable names of it and nothing else."""

    def __init__(self, block_pool: Any) -> None:
        self._pool = block_pool

    @property
    def null_block_id(self) -> int:
        """Id of the placeholder block; it is never touched or freed (0.32 counts references to it, 0.33 does not)."""
        return int(self._pool.null_block.block_id)

    def num_references(self, block_id: int) -> int:
        """How many requests and saves hold the block."""
        return int(self._pool.blocks[block_id].ref_cnt)

    def touch(self, block_ids: Sequence[int]) -> None:
        """Take a reference on each block."""
        self._pool.touch([self._pool.blocks[block_id] for block_id in block_ids])

    def free(self, block_ids: Sequence[int]) -> None:
        """Give the references back; the first id is evicted first."""
        self._pool.free_blocks([self._pool.blocks[block_id] for block_id in block_ids])


class _Ids(Sequence[int]):
    """Ids of vLLM's blocks, looked up when asked for: a request has hundreds, and a step needs one or two."""

    __slots__ = ("_blocks",)

    def __init__(self, blocks: Sequence[Any]) -> None:
        self._blocks = blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __getitem__(self, index: Any) -> Any:
        return self._blocks[index].block_id


def group_block_ids(kv_cache_manager: Any, request_id: str) -> tuple[Sequence[int], ...]:
    """The GPU blocks of a request by group, as they are now; only to be read, and only during the call they are given to."""
    return tuple(map(_Ids, kv_cache_manager.get_blocks(request_id).blocks))


def hash_block_size_of(block_pool: Any) -> int:
    """Tokens per block hash: only the bound block pool knows (the configuration's value is None)."""
    return int(block_pool.hash_block_size)


def num_confirmed_tokens(request: Any, num_scheduled: int, num_drafts: int) -> int:
    """Length of the prefix whose KV is in the request's blocks after this step and cannot be taken back.

    `num_computed_tokens` counts placeholders and drafts optimistically; a known token's position was accepted.
    """
    return int(min(request.num_computed_tokens + num_scheduled - num_drafts, request.num_tokens))


def num_final_tokens(request: Any) -> int:
    """The same for a request that has ended, counting only steps whose results are in."""
    return int(max(0, min(request.num_computed_tokens - request.num_in_flight_tokens, request.num_tokens)))


def num_expected_tokens(request: Any) -> int:
    """How many tokens of the request may be known once the steps before this one have given their results, at most."""
    return int(request.num_tokens + request.num_in_flight_tokens)


def tokens_per_step(vllm_config: Any) -> int:
    """New tokens that a request may get in one step, at most."""
    drafts = getattr(getattr(vllm_config, "speculative_config", None), "num_speculative_tokens", None) or 0
    return 1 + int(drafts)


def hit_sources(host_tokens: int, store_tokens: int) -> dict[Any, int]:
    """Split of external tokens by tier, in vLLM's terms; empty before 0.32."""
    if CacheHitSource is None:
        return {}
    split = {CacheHitSource.HOST: host_tokens, CacheHitSource.EXTERNAL_UNSPECIFIED: store_tokens}
    return {source: tokens for source, tokens in split.items() if tokens}
