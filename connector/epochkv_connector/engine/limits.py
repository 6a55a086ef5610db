"""What the connector cannot serve, each with a sentence that says what to change: no start, no tiers, no names, no adapters.

Whether an engine with the connector may start is decided in `check_start` alone (with the fence, in `fenced`). It is asked twice. Whoever
makes an engine asks before a model is loaded (`plugin`). The connector asks in every process of the engine, which may have been started
without the plugin.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from epochkv_connector.config import ConnectorConfig, check_fits
from epochkv_connector.engine import blocks, describe
from epochkv_connector.engine.interface import UnsupportedEngine, check_version
from epochkv_fence.launch import NAME
from epochkv_fence.protocol.messages import TIER_REASONS, TierReason

MULTI = "MultiConnector"
ALLOWED_SIBLINGS = frozenset({"NixlConnector", "NixlPullConnector"})
"""What a MultiConnector may hold beside ours: connectors of vLLM that read one request's own blocks from another engine and find no
block by its hash. Any other could keep hashes of a request from before it was hashed again."""

LEASE_SECONDS = 30.0
"""For how long a NIXL producer keeps a request's blocks, unless `kv_lease_duration` says otherwise."""


def children_of(transfer: Any) -> list[Mapping[str, Any]]:
    """Configurations of what a MultiConnector holds, or what is derived from it; empty for any other connector (or None)."""
    return _children(getattr(transfer, "kv_connector_extra_config", None))


def _children(extra: Any) -> list[Mapping[str, Any]]:
    return list((extra or {}).get("connectors") or ())


def _held(connector: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The connector itself, and what it holds where it is a MultiConnector."""
    yield connector
    for child in _children(connector.get("kv_connector_extra_config")):
        yield from _held(child)


def all_connectors(transfer: Any) -> list[Mapping[str, Any]]:
    """Configurations of all connectors of an engine: one, and what MultiConnectors hold, also through each other; or none."""
    if transfer is None or transfer.kv_connector is None:
        return []
    names = ("kv_connector", "kv_connector_module_path", "kv_connector_extra_config")
    whole = {name: getattr(transfer, name) for name in names}
    return list(_held(whole))


def connectors_of(transfer: Any) -> list[Mapping[str, Any]]:
    """The same without those that hold others."""
    return [one for one in all_connectors(transfer) if not _children(one.get("kv_connector_extra_config"))]


def handoff_seconds(connectors: Sequence[Mapping[str, Any]]) -> float:
    """How long blocks that are handed over surely stay the request's: half of the lease. The other half is for clocks that differ."""
    siblings = [one.get("kv_connector_extra_config") or {} for one in connectors if one.get("kv_connector") != NAME]
    leases = [extra.get("kv_lease_duration", LEASE_SECONDS) for extra in siblings]
    return min(map(float, leases), default=LEASE_SECONDS) / 2


def check_start(vllm_config: Any, extra: Mapping[str, Any], siblings: Sequence[Mapping[str, Any]], *, here: bool) -> ConnectorConfig:
    """The connector's configuration, if this engine can start with it.

    Args:
        extra: `kv_connector_extra_config` of our connector.
        siblings: children of the MultiConnector that ours is in, ours among them, as configured; empty: there is none.
        here: ranks of the engine are on this machine, so its memory counts.

    Raises:
        ConfigurationError, UnsupportedEngine: it cannot; the message says what to change.
    """
    config = ConnectorConfig.parse(extra)
    check_version(config.allow_untested_vllm)
    check_siblings(siblings)
    check_parallel(vllm_config.parallel_config)
    check_encoder_transfer(vllm_config)
    if getattr(vllm_config.model_config, "is_encoder_decoder", False):  # vLLM asserts it once the model is loaded
        raise UnsupportedEngine("encoder-decoder models have no prefixes to share; start the engine without EpochKV")
    if here and config.local is not None:
        given = config.local.capacity_bytes
        check_fits(given, "local.capacity_bytes", given)
    return config


def check_before_load(vllm_config: Any) -> None:
    """`check_start` for each connector of ours that this engine will make, alone or as a child of a MultiConnector."""
    transfer = vllm_config.kv_transfer_config
    children = children_of(transfer)
    for one in children or connectors_of(transfer):
        if one.get("kv_connector") == NAME:
            extra = one.get("kv_connector_extra_config") or {}
            check_start(vllm_config, extra, children, here=describe.has_ranks_here(vllm_config))


def check_siblings(children: Sequence[Mapping[str, Any]]) -> None:
    """Raise `UnsupportedEngine` where a MultiConnector holds one beside ours that is not on the tested list, or ours more than once."""
    siblings = [child for child in children if child.get("kv_connector") != NAME]
    if len(children) - len(siblings) > 1:
        raise UnsupportedEngine(
            "MultiConnector holds EpochKVConnector more than once: each would name the same requests anew; keep one of them"
        )
    for sibling in siblings:
        name = sibling.get("kv_connector")
        if name not in ALLOWED_SIBLINGS or sibling.get("kv_connector_module_path"):
            raise UnsupportedEngine(
                f"MultiConnector holds {name} beside EpochKVConnector: KV that {name} brings in would be named by hashes it keeps from "
                "before an epoch change; remove it from the MultiConnector (only vLLM's own NixlConnector may be there)"
            )


def check_parallel(parallel_config: Any) -> None:
    """Raise `UnsupportedEngine` where vLLM goes on behind a step that has failed, or where every process of an engine of several ranks has
    a scheduler of its own.

    Nobody would bring such ranks together: one would wait for ever for the other's word that a saved block was copied, and an epoch
    that comes between two of them would make them schedule differently.
    """
    if getattr(parallel_config, "enable_fault_tolerance", False):  # from 0.31 on
        raise UnsupportedEngine(
            "enable_fault_tolerance is set: after a fault vLLM goes on with blocks that were named and computed without the experts of a "
            "rank, or never; leave out --enable-fault-tolerance and --fault-tolerance-config"
        )
    backend, num_ranks = parallel_config.distributed_executor_backend, int(parallel_config.world_size)
    kinds = {kind.__name__ for kind in backend.__mro__} if isinstance(backend, type) else {str(backend)}
    if num_ranks > 1 and kinds & {"external_launcher", "ExecutorWithExternalLauncher"}:
        raise UnsupportedEngine(
            f"distributed_executor_backend is external_launcher with {num_ranks} ranks: each process schedules for its own rank only, and "
            "ranks that nobody brings together would hang; use 'mp' or 'ray', or engines of one rank and data_parallel_size 1"
        )


def check_encoder_transfer(vllm_config: Any) -> None:
    """Raise `UnsupportedEngine` where engines give each other outputs of encoders."""
    if vllm_config.ec_transfer_config is not None:
        raise UnsupportedEngine(
            "ec_transfer_config is set: encoder outputs of other engines are keyed by content only, whatever weights made them, and "
            "KV that is computed from them would be under a wrong name; remove ec_transfer_config"
        )


def keep_embeddings_out(resolve: Callable[[Any], None], vllm_config: Any) -> None:
    """vLLM takes `kv_both` for the receiver of a hand-over: its front end then accepts media as embeddings, and without any. Here nobody
    brings their KV, and the first such request would end the engine."""
    if [one.get("kv_connector") for one in connectors_of(vllm_config.kv_transfer_config)] != [NAME]:
        resolve(vllm_config)


def why_no_tiers(vllm_config: Any) -> str | None:
    """Why KV must neither leave nor enter this engine's blocks, in words; None: it may."""
    model, cache, on_cpu = vllm_config.model_config, vllm_config.cache_config, describe.on_cpu()
    quantized = str(cache.cache_dtype) not in ("auto", "float16", "bfloat16", "float32")
    reasons = (
        (
            getattr(model, "runner_type", None) == "pooling" and not model.is_prefix_caching_supported,
            "this kind of pooling reads a whole prompt in one pass, so vLLM ends where a part is cached; start the engine without EpochKV",
        ),
        (
            describe.is_set("VLLM_BATCH_INVARIANT") and not cache.enable_prefix_caching,
            "VLLM_BATCH_INVARIANT is set, and vLLM keeps no prefixes, as answers of this attention backend depend on what is cached; "
            "choose another backend",
        ),
        (
            on_cpu and bool(getattr(model, "use_mla", False)),
            "this model has multi-head latent attention, and vLLM's reference kernel for it, which runs on CPUs without AMX, ignores "
            "cached context, so every hit would answer wrongly; the one for AMX hides its weights; use a GPU",
        ),
        (
            bool(getattr(model, "is_diffusion", False)),
            "this model writes answers by diffusion, and vLLM counts tokens as computed whose KV is that of a draft "
            "(diffusion_read_only); start the engine without EpochKV",
        ),
        (
            quantized and not on_cpu and describe.is_set("VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT"),
            "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT is set and KV is quantized: its scales lie outside of the blocks, so no connector can "
            "restore them; unset it, or set kv_cache_dtype to auto",
        ),
        (
            _returns_routes(vllm_config) and not _caps_hits(),
            "answers say which experts each token went to, which this version of vLLM knows of no block that a tier brings; use 0.33, or "
            "leave out --enable-return-routed-experts",
        ),
        (
            quantized and bool(getattr(cache, "calculate_kv_scales", False)),  # before 0.32
            "calculate_kv_scales is on: each start takes the scales of quantized KV from its first prompt, and another engine would "
            "read blocks with other ones; turn it off and have the checkpoint bring them",
        ),
    )
    return next((why for holds, why in reasons if holds), None)


def _returns_routes(vllm_config: Any) -> bool:
    """Whether answers say which experts each token went to."""
    aux = getattr(vllm_config, "aux_output_config", None)  # from 0.32 on
    return bool(getattr(aux, "enabled", False) or getattr(vllm_config.model_config, "enable_return_routed_experts", False))


def _caps_hits() -> bool:
    """Whether vLLM takes only those blocks of a tier whose routes it has kept."""
    try:
        from vllm.distributed.aux_output_connector.connector import AuxOutputSchedulerConnector
    except ImportError:
        return False
    return hasattr(AuxOutputSchedulerConnector, "cap_external_hit")


class Own(NamedTuple):
    """Why no digest of this engine says all that its KV depends on, so that it names for itself alone."""

    why: str  # in words, with what to change
    asks: bool  # its ranks can be asked for samples of what they hold, which last while nobody writes to them


NO_DOMAIN = "the data-parallel ranks that hold the experts could not be asked to tell each other what they hold"
NO_STORE = "the engine is in its user's process, where data-parallel ranks cannot tell what they hold; set VLLM_ENABLE_V1_MULTIPROCESSING=1"


def is_wide(vllm_config: Any) -> bool:
    """Whether experts lie on several data-parallel ranks, so that KV of one depends on weights of all (`weights.domain`)."""
    return int(vllm_config.parallel_config.data_parallel_size) > 1 and bool(getattr(vllm_config.model_config, "is_moe", False))


def why_own(vllm_config: Any, executor: Any | None, *, fenced: bool = False) -> Own | None:
    """Whether this engine cannot know the weights that its KV depends on; None: it can."""
    parallel = vllm_config.parallel_config
    offload = getattr(getattr(vllm_config, "offload_config", None), "prefetch", None)
    media = getattr(vllm_config.model_config, "multimodal_config", None)
    own_scales = getattr(media, "mm_encoder_attn_dtype", None) == "fp8" and getattr(media, "mm_encoder_fp8_scale_path", None) is None
    kinds = [kind.__name__ for kind in type(executor).__mro__] if executor is not None else []
    for holds, why in (
        (
            bool(getattr(parallel, "enable_eplb", False)),
            "expert rebalancing (enable_eplb) moves experts between ranks while they serve, and no digest of a rank lasts; turn it off",
        ),
        (
            int(getattr(offload, "offload_group_size", 0) or 0) > 0,
            "the prefetch offloader (offload_group_size) swaps weights in and out of the device; use cpu_offload_gb, or no offloading",
        ),
        (own_scales, "the encoder makes its fp8 scales of what it sees (mm_encoder_attn_dtype); give them by mm_encoder_fp8_scale_path"),
        (
            "RayDistributedExecutor" in kinds,
            "vLLM's old Ray executor makes calls to workers beside running steps; set VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1, or use 'mp'",
        ),
    ):
        if holds:
            return Own(why, asks=False)
    if is_wide(vllm_config) and fenced:
        why = "experts lie on other data-parallel ranks, with which EPOCHKV_FENCE compares no step; use EpochKVConnector"
        return Own(why, asks=True)
    return None


def why_no_adapters(vllm_config: Any) -> str | None:
    """Why KV of adapters is named for one request alone, in words; None: it is not."""
    if is_multimodal(vllm_config) and getattr(getattr(vllm_config, "lora_config", None), "enable_tower_connector_lora", False):
        return "outputs of the encoder are cached by an adapter's name, whatever it holds (enable_tower_connector_lora)"
    return None


def why_adapters_alone(vllm_config: Any, own: Own | None) -> str | None:
    """Why tensors of this engine's adapters do not say what KV depends on, in words; None: they do."""
    if own is not None and not own.asks:
        return own.why
    if is_wide(vllm_config):
        return "experts lie on other data-parallel ranks, and each loads the adapter by itself"
    return None


def is_multimodal(vllm_config: Any) -> bool:
    """Whether encoder outputs (keyed by content, not by weights) can enter the KV of this engine."""
    return bool(getattr(vllm_config.model_config, "is_multimodal_model", False))


# ----------------------------------------------------------------------------------------------------------------------
# What of its tiers an engine does not use, and why: found out in one place, when the engine starts.
#
# The log says it in one line. What the user did not ask for also goes to the hub, which shows it in status and conditions, and
# makes the gauge `tiers_off` 1. Each sentence ends with what to change.


NOTHING, NO_LOADS, NO_SAVES = "no tier is used", "loads are off", "saves are off"


class Unused(NamedTuple):
    """`what`: is not used, in words; `why`: with what to change; `reason`: for status; None: the user asked for it."""

    what: str
    why: str
    reason: TierReason | None


BROKEN = Unused(NOTHING, "an error turned the tiers off; restart the engine, and report the error in its log", "TiersBroken")
"""While the engine runs (`SharedState.broken`)."""


def why_no_l2(vllm_config: Any) -> str | None:
    """Why blocks of this engine are of no use to others, nor theirs to it, in words; None: they are."""
    algorithm = str(vllm_config.cache_config.prefix_caching_hash_algo)
    if blocks.hash_seed_is_random(algorithm):
        return (
            f"block hashes ({algorithm}) have a random seed in each process; "
            "use --prefix-caching-hash-algo sha256, or set PYTHONHASHSEED to one value in the whole pool"
        )
    if _returns_routes(vllm_config):
        return (
            "vLLM takes blocks only with the routes of their tokens, which stay in the engine that computed them; "
            "leave out --enable-return-routed-experts"
        )
    return None


def kept_to_itself(why: str) -> Unused:
    return Unused("the engine keeps its cache to itself", why, "OwnCache")


def find_unused(
    config: ConnectorConfig,
    vllm_config: Any,
    *,
    policy: str,
    own: Own | None,
    error: str,
    layout_problem: str | None,
    refusals: Sequence[str],
    no_l2: str | None,
) -> list[Unused]:
    """Everything at once, so that one restart is enough.

    Args:
        policy: the `kv_load_failure_policy` that vLLM follows: that of a MultiConnector, and of none of its children.
        own, no_l2, layout_problem: of `why_own`, `why_no_l2` and `CacheLayout.problem`.
        error: why the tiers could not be built; empty: they were, or there are none.
        refusals: why a rank takes no job, by rank; empty where it does.
    """
    found = [kept_to_itself(own.why)] if own is not None else []
    if not config.has_tiers:
        return found
    if (why := why_no_tiers(vllm_config)) is not None:
        found.append(Unused(NOTHING, why, "TiersOff"))
    if layout_problem is not None:
        found.append(Unused(NOTHING, layout_problem, "LayoutUnsupported"))
    if error:
        found.append(Unused(NOTHING, f"the tiers could not be built ({error}); remove the cause, and restart the engine", "TiersBroken"))
    if refusing := [(rank, why) for rank, why in enumerate(refusals) if why]:
        rank, why = refusing[0]
        which = f"rank {rank}" if len(refusing) == 1 else f"{len(refusing)} ranks, such as rank {rank},"
        text = f"{which} cannot copy KV blocks ({why}); remove the cause, and restart the engine"
        found.append(Unused(NOTHING, text, "TiersBroken"))
    role = getattr(vllm_config.kv_transfer_config, "kv_role", None)
    if role == "kv_producer":
        found.append(Unused(NO_LOADS, "kv_role is 'kv_producer', which saves only; set it to 'kv_both' to load as well", None))
    elif policy != "recompute":
        text = f"the MultiConnector's kv_load_failure_policy is {policy!r}, so a lost block would fail the request; set it to 'recompute'"
        found.append(Unused(NO_LOADS, text, "SavesOnly"))
    if role == "kv_consumer":
        found.append(Unused(NO_SAVES, "kv_role is 'kv_consumer', which loads only; set it to 'kv_both' to save as well", None))
    if no_l2 is not None and config.distributed is not None:
        found.append(Unused("L2 is off", no_l2, "L1Only" if config.local is not None else "TiersOff"))
    return found


def unused_line(unused: Iterable[Unused]) -> str:
    return "; ".join(f"{one.what}: {one.why}" for one in unused)


def told_unused(unused: Iterable[Unused]) -> tuple[str, str]:
    """What status shows: the worst reason, and a sentence. Both empty: nothing but what the user asked for."""
    problems = [one for one in unused if one.reason is not None]
    worst = next((reason for reason in TIER_REASONS if any(one.reason == reason for one in problems)), "")
    return worst, unused_line(problems)
