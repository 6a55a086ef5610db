"""One engine: how fast it answers, what its tiers give, and what it knows of its epoch and weights."""

from __future__ import annotations

from functools import partial
from typing import Final

from hack.observe.boards import shared
from hack.observe.boards.shared import prompt_tokens_by_tier
from hack.observe.panels import Board, Panel

_ENGINE: Final = '{namespace=~"$namespace", pool=~"$pool", instance=~"$engine"}'
_AND: Final = _ENGINE.removesuffix("}")


rate: Final = partial(shared.rate, matchers=_ENGINE)


def _shares(series: str, *shares: float) -> dict[str, str]:
    return {f"{share:.0%}": f"histogram_quantile({share}, sum by (le) ({rate(series + '_bucket')}))" for share in shares}


def _speed(what: str) -> str:
    return f"sum by (tier) ({rate(f'vllm:epochkv_{what}_bytes_total')}) / sum by (tier) ({rate(f'vllm:epochkv_{what}_seconds_total')})"


_ANSWERS: Final = (
    Panel(
        "Time to the first token",
        "How long users wait for an answer to begin. Hits shorten it.",
        "s",
        _shares("vllm:time_to_first_token_seconds", 0.5, 0.95, 0.99),
    ),
    Panel(
        "Time between tokens",
        "How fast answers run.",
        "s",
        _shares("vllm:inter_token_latency_seconds", 0.5, 0.99),
    ),
    Panel(
        "Requests",
        "Running, and waiting for room.",
        "short",
        {
            "running": f"sum(vllm:num_requests_running{_ENGINE})",
            "waiting": f"sum(vllm:num_requests_waiting{_ENGINE})",
            "under an older root": f"sum(vllm:epochkv_carried_requests{_ENGINE})",
        },
    ),
)
_HITS: Final = (
    prompt_tokens_by_tier(_ENGINE),
    Panel(
        "Lookups",
        "Answers to vLLM's question for hits. Paused: loads from L2 are paused after failures.",
        "ops",
        {"{{result}}": f"sum by (result) ({rate('vllm:epochkv_lookups_total')})"},
    ),
    Panel(
        "Hits that were not loaded",
        "Failed: a block was missing when it was loaded. Poisoned: a reset came first. vLLM computes these tokens.",
        "ops",
        {
            "failed": f"sum({rate('vllm:epochkv_loads_failed_total')})",
            "doomed": f"sum({rate('vllm:epochkv_loads_doomed_total')})",
            "poisoned": f"sum({rate('vllm:epochkv_loads_poisoned_total')})",
        },
    ),
)
_TIERS: Final = (
    Panel(
        "L1",
        "Blocks of host memory by what holds them. Indexed and other roots are cache; held, reserved and busy are in use.",
        "short",
        {"{{state}}": f'sum by (state) (vllm:epochkv_slots{_AND}, state=~"indexed|other_roots|held|reserved|busy"}})'},
        "stack",
    ),
    Panel(
        "Speed of loads",
        "Bytes in a second of transfer. L1: host memory to GPU. L2: store to host memory.",
        "Bps",
        {"{{tier}}": _speed("load")},
    ),
    Panel(
        "Speed of saves",
        "Bytes in a second of transfer. L1: GPU to host memory. L2: host memory to store.",
        "Bps",
        {"{{tier}}": _speed("save")},
    ),
    Panel(
        "Seconds of transfers",
        "Seconds spent in transfers in each second, all ranks together.",
        "short",
        {
            "load {{tier}}": f"sum by (tier) ({rate('vllm:epochkv_load_seconds_total')})",
            "save {{tier}}": f"sum by (tier) ({rate('vllm:epochkv_save_seconds_total')})",
        },
    ),
    Panel(
        "Failures",
        "Loads, saves and puts that failed, by reason. Each one is a miss, and no error of a request.",
        "ops",
        {
            "load {{reason}}": f"sum by (reason) ({rate('vllm:epochkv_load_failures_total')}) > 0",
            "save {{reason}}": f"sum by (reason) ({rate('vllm:epochkv_save_failures_total')}) > 0",
            "put {{reason}}": f"sum by (reason) ({rate('vllm:epochkv_put_drops_total')}) > 0",
        },
    ),
    Panel(
        "Evictions from L1",
        "Blocks that made room for others.",
        "ops",
        {"{{instance}}": f"sum by (instance) ({rate('vllm:epochkv_evictions_total')})"},
    ),
    Panel(
        "Breaker",
        "Red: the store does not answer this rank, and is not asked. The rank `scheduler` only asks what exists.",
        "none",
        {"{{instance}} {{rank}}": f"max by (instance, rank) (vllm:epochkv_store_breaker_open{_ENGINE})"},
        "states",
        width=8,
        bad_from=1,
    ),
    Panel(
        "Queues to the store",
        "Objects that wait to be put or got.",
        "short",
        {"{{queue}}": f"sum by (queue) (vllm:epochkv_store_queue{_ENGINE})"},
    ),
    Panel(
        "Transfers that are late",
        "Transfers that some rank has not acknowledged, and those beyond twice their deadline.",
        "short",
        {"open": f"sum(vllm:epochkv_jobs_open{_ENGINE})", "late": f"sum(vllm:epochkv_jobs_overdue{_ENGINE})"},
    ),
)
_FLAGS: Final = {
    "bypass": "vllm:epochkv_bypass",
    "broken": "vllm:epochkv_broken",
    "tiers off": "vllm:epochkv_tiers_off",
    "loads paused": "vllm:epochkv_loads_paused",
    "reset alone": "vllm:epochkv_waiting_after_reset",
    "root distrusted": "vllm:epochkv_root_distrusted",
    "hub unusable": "vllm:epochkv_hub_unusable",
}
_NAMES: Final = (
    Panel(
        "Flags",
        "Red: it is so. Docs: reference/metrics.md says what each means.",
        "none",
        {
            **{f"{name} {{{{instance}}}}": f"max by (instance) ({series}{_ENGINE})" for name, series in _FLAGS.items()},
            "weights unknown {{instance}}": f"1 - max by (instance) (vllm:epochkv_weights_known{_ENGINE})",
        },
        "states",
        bad_from=1,
    ),
    Panel(
        "Lease",
        "Seconds until the lease on the epoch ends. Near 0, heartbeats are late. An idle engine shows its last step.",
        "s",
        {"{{instance}}": f"min by (instance) (vllm:epochkv_lease_remaining_seconds{_ENGINE})"},
        width=12,
    ),
    Panel(
        "Epoch",
        "The highest epoch that the engine adopted; -1 before the first.",
        "none",
        {"{{instance}}": f"max by (instance) (vllm:epochkv_epoch{_ENGINE})"},
    ),
    Panel(
        "New names",
        "Epochs adopted, roots bound, and times that somebody else overwrote vLLM's root.",
        "short",
        {
            "epochs": f"sum(increase(vllm:epochkv_adoptions_total{_ENGINE}[$__rate_interval]))",
            "roots": f"sum(increase(vllm:epochkv_roots_total{_ENGINE}[$__rate_interval]))",
            "overwritten": f"sum(increase(vllm:epochkv_root_overwrites_total{_ENGINE}[$__rate_interval]))",
        },
    ),
    Panel(
        "Weights",
        "changed: to other, known weights. unknown: nothing is reused. late: a rank saw them change in a step. unseen: changed while idle.",
        "short",
        {"{{what}}": f"sum by (what) (increase(vllm:epochkv_weights_events_total{_ENGINE}[$__rate_interval]))"},
    ),
    Panel(
        "Errors that became misses",
        "Exceptions inside the connector, by place. Report them with the engine's log.",
        "short",
        {"{{where}}": f"sum by (where) (increase(vllm:epochkv_errors_total{_ENGINE}[$__rate_interval])) > 0"},
        width=12,
    ),
    Panel(
        "Defects in the store",
        "Objects with other bytes than were put under their key. They were not used.",
        "short",
        {"{{defect}}": f"sum by (defect) (increase(vllm:epochkv_store_defects_total{_ENGINE}[1h]))"},
        width=12,
    ),
)

ENGINE: Final = Board(
    "epochkv-engine",
    "EpochKV / Engine",
    "One engine: how fast it answers, what its tiers give, and what it knows of its epoch and weights.",
    {
        "namespace": "label_values(vllm:epochkv_lookup_calls_total, namespace)",
        "pool": 'label_values(vllm:epochkv_lookup_calls_total{namespace=~"$namespace"}, pool)',
        "engine": 'label_values(vllm:epochkv_lookup_calls_total{namespace=~"$namespace", pool=~"$pool"}, instance)',
    },
    {"Answers": _ANSWERS, "Hits": _HITS, "Tiers": _TIERS, "Epoch and weights": _NAMES},
)
