"""All pools, and the operators: is anything wrong, and where do I look next?"""

from __future__ import annotations

from typing import Final

from hack.observe.panels import Board, Panel

_POOLS: Final = 'namespace=~"$namespace"'


def _sum_rate(series: str, by: str, matchers: str = "") -> str:
    return f"sum by ({by}) (rate({series}{matchers}[$__rate_interval]))"


def _late(series: str, by: str, share: float) -> str:
    labels = ", ".join(label for label in ("le", by) if label)
    return f"histogram_quantile({share}, sum by ({labels}) (rate({series}_bucket[$__rate_interval])))"


_NOW: Final = (
    Panel("Pools", "Pools that a hub serves.", "short", {"pools": f"count(epochkv_pool_target_epoch{{{_POOLS}}})"}, "number"),
    Panel("Engines", "Engine processes that the hubs hear of.", "short", {"engines": f"sum(epochkv_pool_engines{{{_POOLS}}})"}, "number"),
    Panel(
        "Engines that share KV",
        "Share of the engines that use the epoch of their pool. The others serve correctly, and share nothing.",
        "percentunit",
        {"in use": f'sum(epochkv_pool_engines{{{_POOLS}, state="use"}}) / sum(epochkv_pool_engines{{{_POOLS}}})'},
        "number",
        bad_below=0.9,
    ),
    Panel(
        "Resets that are late",
        "Pools whose newest epoch is unpublished for longer than the lease and its margin.",
        "short",
        {"late": f"sum(epochkv_pool_reset_overdue_seconds{{{_POOLS}}} > bool 0)"},
        "number",
        bad_from=1,
    ),
    Panel(
        "Pools with diverged weights",
        "Pools in which some engines hold other weights than most. They answer correctly, and share less.",
        "short",
        {"diverged": f"sum(epochkv_pool_weights_diverged_engines{{{_POOLS}}} > bool 0)"},
        "number",
        bad_from=1,
    ),
    Panel(
        "Operators that lead",
        "One for each release. With none, leases end and engines share nothing.",
        "short",
        {"leaders": "sum(epochkv_operator_leader)"},
        "number",
        bad_below=1,
    ),
)
_OF_POOLS: Final = (
    Panel(
        "Pools",
        "One line for each pool: epochs asked for and published, engines, and those that lack weights or tiers.",
        "short",
        {
            "Target": f"sum by (namespace, pool) (epochkv_pool_target_epoch{{{_POOLS}}})",
            "Published": f"sum by (namespace, pool) (epochkv_pool_published_epoch{{{_POOLS}}})",
            "Engines": f"sum by (namespace, pool) (epochkv_pool_engines{{{_POOLS}}})",
            "Other weights": f"sum by (namespace, pool) (epochkv_pool_weights_diverged_engines{{{_POOLS}}})",
            "Tiers off": f"sum by (namespace, pool) (epochkv_pool_tiers_off_engines{{{_POOLS}}})",
        },
        "table",
        width=24,
    ),
    Panel(
        "Engines by state",
        "use: share KV. private: were reset alone. unknown: do not know their weights. behind: at an older epoch. silent: not heard of.",
        "short",
        {"{{state}}": f"sum by (state) (epochkv_pool_engines{{{_POOLS}}})"},
        "stack",
    ),
    Panel(
        "How long resets take",
        "From recording an epoch to publishing it, of the resets of the last hour.",
        "s",
        {
            f"{share:.0%}": f"histogram_quantile({share}, sum by (le) (increase(epochkv_pool_reset_seconds_bucket{{{_POOLS}}}[1h])))"
            for share in (0.5, 0.99)
        },
    ),
    Panel(
        "Resets",
        "Resets that were published in an hour, by pool.",
        "short",
        {"{{namespace}}/{{pool}}": f"sum by (namespace, pool) (increase(epochkv_pool_reset_seconds_count{{{_POOLS}}}[1h]))"},
    ),
)
_OF_OPERATORS: Final = (
    Panel(
        "Leader",
        "1 while this operator holds the Lease.",
        "short",
        {"{{namespace}} {{pod}}": "max by (namespace, pod) (epochkv_operator_leader)"},
    ),
    Panel(
        "Loop lag",
        "By how much the loops are late, of 99 in 100 measurements. The first sign of too little CPU.",
        "s",
        {"{{loop}}": _late("epochkv_operator_loop_lag_seconds", "loop", 0.99)},
    ),
    Panel(
        "Time between renewals of the Lease",
        "Of 99 in 100 renewals. At two thirds of the Lease's duration the operator ends.",
        "s",
        {"99 in 100": _late("epochkv_operator_lease_renewal_seconds", "", 0.99)},
    ),
    Panel(
        "Waiting to be reconciled",
        "Objects in the queue.",
        "short",
        {"{{pod}}": "max by (pod) (epochkv_operator_queue_depth)"},
    ),
    Panel(
        "Oldest that waits",
        "How long the oldest object has waited, or has been worked on.",
        "s",
        {"{{pod}}": "max by (pod) (epochkv_operator_queue_oldest_seconds)"},
    ),
    Panel(
        "Time to reconcile",
        "From the first event of an object until it was served, of 99 in 100.",
        "s",
        {"{{kind}}": _late("epochkv_operator_reconcile_seconds", "kind", 0.99)},
    ),
    Panel(
        "Writes to the API server",
        "Objects written, by kind and operation. A quiet cluster has few.",
        "ops",
        {"{{operation}} {{kind}}": _sum_rate("epochkv_operator_api_writes_total", "kind, operation")},
    ),
    Panel(
        "Answers of the API server",
        "Requests by the code of the answer.",
        "reqps",
        {"{{code}}": _sum_rate("epochkv_operator_api_requests_total", "code")},
    ),
    Panel(
        "Messages of the hub",
        "What the hubs took, sent, rejected and failed at. Outcomes that end in `_failed` are defects.",
        "ops",
        {"{{outcome}}": _sum_rate("epochkv_hub_messages_total", "outcome")},
    ),
)

FLEET: Final = Board(
    "epochkv-fleet",
    "EpochKV / Fleet",
    "All pools and the operators.",
    {"namespace": "label_values(epochkv_pool_target_epoch, namespace)"},
    {"Now": _NOW, "Pools": _OF_POOLS, "Operators": _OF_OPERATORS},
)
