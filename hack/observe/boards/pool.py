"""One pool: its epoch and weights, its hits, and its store."""

from __future__ import annotations

from functools import partial
from typing import Final

from hack.observe.boards import shared
from hack.observe.boards.shared import prompt_tokens_by_tier
from hack.observe.panels import Board, Panel

_POOL: Final = '{namespace=~"$namespace", pool=~"$pool"}'
_AND: Final = _POOL.removesuffix("}")


rate: Final = partial(shared.rate, matchers=_POOL)


_EPOCH: Final = (
    Panel("Target epoch", "The highest epoch that was asked for.", "none", {"target": f"max(epochkv_pool_target_epoch{_POOL})"}, "number"),
    Panel(
        "Published epoch",
        "The highest epoch that is proved: no engine uses an older one.",
        "none",
        {"published": f"max(epochkv_pool_published_epoch{_POOL})"},
        "number",
    ),
    Panel(
        "Late by",
        "For how long a reset is unpublished beyond the lease and its margin.",
        "s",
        {"late": f"max(epochkv_pool_reset_overdue_seconds{_POOL})"},
        "number",
        bad_from=1,
    ),
    Panel(
        "Laggards",
        "Engines that are alive and not at the target. The publication waits for them, or for their lease to end.",
        "short",
        {"behind": f'sum(epochkv_pool_engines{_AND}, state="behind"}})'},
        "number",
        bad_from=1,
    ),
    Panel(
        "Engines with other weights",
        "Engines that hold other weights than most of their kind: a push missed them, or is under way.",
        "short",
        {"diverged": f"sum(epochkv_pool_weights_diverged_engines{_POOL})"},
        "number",
        bad_from=1,
    ),
    Panel(
        "Engines without tiers",
        "Engines that cannot use their tiers, or not all of them. The condition TiersUsable says why.",
        "short",
        {"off": f"sum(epochkv_pool_tiers_off_engines{_POOL})"},
        "number",
        bad_from=1,
    ),
    Panel(
        "Epochs",
        "Target and published. Where they part, a reset is under way.",
        "none",
        {
            "target {{pool}}": f"max by (pool) (epochkv_pool_target_epoch{_POOL})",
            "published {{pool}}": f"max by (pool) (epochkv_pool_published_epoch{_POOL})",
        },
    ),
    Panel(
        "Engines by state",
        "use: share KV. private: were reset alone. unknown: do not know their weights. behind: at an older epoch. silent: not heard of.",
        "short",
        {"{{state}}": f"sum by (state) (epochkv_pool_engines{_POOL})"},
        "stack",
    ),
    Panel(
        "Requests under an older epoch",
        "Requests that began before the last reset and run on. They read and write nothing that is shared.",
        "short",
        {"{{pool}}": f"sum by (pool) (epochkv_pool_carried_requests{_POOL})"},
    ),
)
_ENGINES: Final = (
    Panel(
        "Engines",
        "One line for each engine: the epoch that it adopted, the seconds that its lease still runs, and 1 where it uses no tier.",
        "short",
        {
            "Epoch": f"max by (inference_engine, pod, instance) (vllm:epochkv_epoch{_POOL})",
            "Lease": f"min by (inference_engine, pod, instance) (vllm:epochkv_lease_remaining_seconds{_POOL})",
            "Bypass": f"max by (inference_engine, pod, instance) (vllm:epochkv_bypass{_POOL})",
        },
        "table",
    ),
    Panel(
        "Engines in bypass",
        "Engines that used no tier in their last step: no lease, unknown weights, or an error.",
        "short",
        {"bypass": f"sum(vllm:epochkv_bypass{_POOL})", "private": f"count(vllm:epochkv_root_shared{_POOL} == 0)"},
        width=6,
    ),
    Panel(
        "Changes of weights",
        "What engines noticed of their weights. Unknown and late are rare outside of a push.",
        "ops",
        {"{{what}}": f"sum by (what) ({rate('vllm:epochkv_weights_events_total')})"},
        width=6,
    ),
)
_HITS: Final = (
    prompt_tokens_by_tier(_POOL),
    Panel(
        "Bytes loaded",
        "L1: from host memory to the GPU, which every load does. L2: from the store to host memory.",
        "Bps",
        {"{{tier}}": f"sum by (tier) ({rate('vllm:epochkv_load_bytes_total')})"},
    ),
    Panel(
        "Bytes saved",
        "L1: from the GPU to host memory, which every save does. L2: from host memory to the store.",
        "Bps",
        {"{{tier}}": f"sum by (tier) ({rate('vllm:epochkv_save_bytes_total')})"},
    ),
)
_STORE: Final = (
    Panel(
        "Memory of the store",
        "In use, and free. A full store evicts what was not read for longest.",
        "bytes",
        {
            "used": f"sum(master_allocated_bytes{_POOL})",
            "free": f"sum(master_total_capacity_bytes{_POOL}) - sum(master_allocated_bytes{_POOL})",
        },
        "stack",
    ),
    Panel(
        "Keys",
        "Keys in the store.",
        "short",
        {"{{pool}}": f"sum by (pool) (master_key_count{_POOL})"},
    ),
    Panel(
        "Evictions and refusals",
        "Keys that the store evicted for lack of room, and puts for which no store had any.",
        "ops",
        {
            "evicted": f"sum({rate('master_evicted_key_count')})",
            "no room": f"sum({rate('master_put_start_alloc_failures_total')})",
        },
    ),
    Panel(
        "Defects",
        "Objects with other bytes than were put under their key. They were not used. Each one is worth a look.",
        "short",
        {"{{defect}}": f"sum by (defect) (increase(vllm:epochkv_store_defects_total{_POOL}[1h]))"},
    ),
    Panel(
        "Why saves do not reach the store",
        "Dropped saves, by reason. Only later hits are lost.",
        "ops",
        {"{{reason}}": f"sum by (reason) ({rate('vllm:epochkv_put_drops_total')}) > 0"},
    ),
    Panel(
        "Given back by resets",
        "Bytes of older epochs and weights that were removed from the store since this operator leads.",
        "bytes",
        {"{{pool}}": f"max by (pool) (epochkv_pool_reclaimed_bytes{_POOL})"},
    ),
)

POOL: Final = Board(
    "epochkv-pool",
    "EpochKV / Pool",
    "One pool: its epoch, its engines and their weights, its hits, and its store.",
    {
        "namespace": "label_values(epochkv_pool_target_epoch, namespace)",
        "pool": 'label_values(epochkv_pool_target_epoch{namespace=~"$namespace"}, pool)',
    },
    {"Epoch and weights": _EPOCH, "Engines": _ENGINES, "Hits": _HITS, "Store": _STORE},
)
