"""The Prometheus series of the connector: one table from what the roles count to what a dashboard reads.

The roles count under names of their own, in processes of their own; only the process that serves `/metrics` needs this
table. It is closed, so cardinality is bounded whatever a worker reports. A name that is not in it makes no series. What follows an
open prefix (a reason, a place) is one of the values written here or `other`. `docs/reference/metrics.md` documents
every family, and is generated from this table. Pure: no vLLM, no Prometheus.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from epochkv_connector.store.connection import StoreOutcome

PREFIX = "vllm:epochkv_"
OTHER = "other"
SCHEDULER_RANK = "scheduler"
"""Value of the label `rank` for the scheduler role's own store client."""

_OUTCOMES = tuple(outcome.value for outcome in StoreOutcome)
_FAILURES = tuple(outcome for outcome in _OUTCOMES if outcome != "ok")
_JOB = (
    "deadline", "error", "no_store", "other_rank", "shutdown", "sleep", "slot_busy", "slot_mismatch",
    "unfinished", "weights",
)  # fmt: skip
_LOAD = (*_JOB, *(f"store_{outcome}" for outcome in _FAILURES))
_PUT = tuple(dict.fromkeys((*_JOB, "stale", *_FAILURES)))
_PLACES = (
    "acknowledgement", "acks", "adopt", "allocate", "build_connector_meta", "domain", "emergency", "events", "finish_step",
    "get_num_new_matched_tokens", "has_pending_block_frees", "has_pending_push_work", "hit_sources", "isolate",
    "late", "layouts", "let_go", "link.stop", "lookup", "on_new_request", "record_loads", "register_kv_caches", "renamed",
    "request_finished", "reset", "reset_cache", "results", "schedule", "stamps", "start_step", "stats", "take", "tiers",
    "tiers.close", "update_connector_output", "update_state_after_alloc", "weights", "worker.shutdown",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Family:
    """One metric.

    Attributes:
        name: without `vllm:epochkv_`, and without the `_total` that Prometheus adds to counters.
        unit: what it counts, or measures in.
        meaning: its help text.
        labels: beside those of vLLM (model, engine) and, for a `per_rank` gauge, `rank`.
        sources: name that a role reports -> label values.
        prefix: names that begin so belong here, too; what follows is the value of the only label (of no label: it is dropped).
        values: what may follow `prefix`; anything else is `other`.
        per_rank: a gauge of each worker rank.
    """

    name: str
    unit: str
    meaning: str
    sources: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    prefix: str = ""
    values: tuple[str, ...] = ()
    per_rank: bool = False

    def series(self) -> Iterator[tuple[str, ...]]:
        """Label values of every series that there can be (without ranks)."""
        seen = dict.fromkeys(self.sources.values())
        if self.prefix:
            seen |= dict.fromkeys([(value,) for value in (*self.values, OTHER)] if self.labels else [()])
        yield from seen


def _family(
    name: str,
    unit: str,
    meaning: str,
    *sources: str,
    label: str = "",
    prefix: str = "",
    values: tuple[str, ...] = (),
    per_rank: bool = False,
    **by_value: str,
) -> Family:
    """With at most one label: `by_value` maps a reported name to the label's value. Without any source the name is its own."""
    if not label:
        return Family(name, unit, meaning, dict.fromkeys(sources or (() if prefix else (name,)), ()), prefix=prefix, per_rank=per_rank)
    return Family(name, unit, meaning, {source: (value,) for source, value in by_value.items()}, (label,), prefix, values, per_rank)


_CALLS = ("exists", "get", "put", "remove", "canary")

# fmt: off
COUNTERS: tuple[Family, ...] = (
    # hits
    _family("lookup_calls", "calls", "Times that the scheduler asked for external hits, repeated questions included.", "lookups"),
    _family("lookups", "lookups", "Answers to lookups. Of one request `deferred` (ask again) may come in every step, the others once.",
        label="result", plans_opened="hit", lookups_missed="miss", lookups_deferred="deferred"),
    _family("hit_tokens", "tokens", "Prompt tokens of accepted hits, by the tier that held them.", label="tier", tokens_hit_host="L1",
        tokens_hit_store="L2"),
    _family("hits_shrunk", "hits", "Hits cut because host slots were short."),
    _family("plans", "plans", "Reservations of hits, by how they ended.", label="end", plans_committed="committed", plans_aborted="aborted",
        plans_expired="expired", plans_over_cap="over_cap", plans_dropped="dropped"),
    _family("store_queries", "queries", "Existence queries of lookups to L2.", label="event", queries_begun="begun", queries_late="late",
        queries_failed="failed"),
    # loads and saves, as the scheduler role sees them
    _family("loads", "loads", "Loads that every rank has reported.", "loads_done"),
    _family("loads_failed", "loads", "Loads that missed at least one block; the request is recomputed."),
    _family("loads_failed_before_send", "hits", "Accepted hits that could not be loaded and were reported as failed without a transfer."),
    _family("loads_invalidated", "loads", "Loads that an epoch change or a reset overtook.", "invalidated_loads"),
    _family("load_pauses", "pauses", "Times that loads from L2 were paused after failures in a row."),
    _family("saves", "jobs", "Save jobs sent to the workers.", "saves_emitted"),
    _family("saves_deferred", "units", "Saves put off for lack of host slots."),
    _family("states_lost", "units", "Recurrent states not saved for lack of host slots."),
    _family("blocks", "blocks", "Blocks moved, by what happened to them.", label="event", blocks_loaded="loaded",
        blocks_prefetched="prefetched", blocks_saved="saved", blocks_stored="stored"),
    _family("evictions", "blocks", "Blocks evicted from L1."),
    _family("dropped_saved", "blocks", "Blocks that this engine had computed, and that left L1: evicted, doubted, or by a reset or sleep."),
    _family("dropped_unread", "blocks", "Of these, blocks that no request had loaded: with `save`, fewer of them."),
    _family("dropped_unused", "blocks", "Blocks fetched for a queued request, and dropped from L1 before any request loaded them."),
    _family("acks_ignored", "acknowledgements", "Acknowledgements of jobs that are not open."),
    # bytes and seconds, as the workers see them, all ranks together
    _family("load_bytes", "bytes", "Bytes loaded. L1: host memory to device (every load); L2: store to host memory.", label="tier",
        worker_copy_load_bytes="L1", store_get_bytes="L2"),
    _family("load_seconds", "seconds", "Seconds spent in these transfers.", label="tier", worker_copy_load_seconds="L1",
        store_get_seconds="L2"),
    _family("save_bytes", "bytes", "Bytes saved. L1: device to host memory (every save); L2: host memory to store.", label="tier",
        worker_copy_save_bytes="L1", store_put_bytes="L2"),
    _family("save_seconds", "seconds", "Seconds spent in these transfers.", label="tier", worker_copy_save_seconds="L1",
        store_put_seconds="L2"),
    _family("copied_blocks", "blocks", "Blocks copied between device and host memory.", label="direction", worker_copy_load_blocks="load",
        worker_copy_save_blocks="save"),
    _family("jobs", "jobs", "Jobs that the ranks took on.", label="direction", worker_load_jobs="load", worker_save_jobs="save"),
    _family("load_failures", "jobs", "Loads that failed on a rank, by reason.", label="reason", prefix="worker_load_failed_", values=_LOAD),
    _family("save_failures", "jobs", "Saves that failed on a rank before they were in host memory.", label="reason",
        prefix="worker_save_failed_", values=_JOB),
    _family("put_drops", "jobs", "Saves that did not reach L2, by reason.", label="reason", prefix="worker_save_put_dropped_", values=_PUT),
    # the store client, workers and scheduler role together
    Family("store_calls", "calls", "Calls to Mooncake.", labels=("call",),
        sources={f"store_{call}_calls": (call,) for call in _CALLS}),
    Family("store_call_seconds", "seconds", "Seconds spent in these calls; two may run at once.", labels=("call",),
        sources={f"store_{call}_call_seconds": (call,) for call in _CALLS}),
    Family("store_objects", "objects", "Objects by call and outcome; for `exists`, only questions without an answer.", labels=("call",
        "outcome"),
        sources={f"store_{call}_{outcome}": (call, outcome) for call in ("exists", "get", "put") for outcome in _OUTCOMES}),
    _family("store_connection", "events", "What happened to the connections to the store.", label="event", store_setups="setup",
        store_setup_failed="setup_failed", store_connected="connected", store_canary_failed="canary_failed",
        store_breaker_opened="breaker_opened", store_quarantined="quarantined"),
    _family("store_defects", "objects", "Objects with other bytes than were put under their key, by what was wrong.", label="defect",
        prefix="store_defect_", values=("magic", "sealed", "codec", "digest", "layout", "length", "no_checksum", "checksum", "torn")),
    _family("store_unexpected_codes", "objects", "Return codes of Mooncake that have no meaning here (the log names each once).",
        prefix="store_code_"),
    # names and epochs
    _family("adoptions", "epochs", "Epochs adopted."),
    _family("grants_refused", "grants", "Grants, and other messages, that the engine did not take: as a rule late ones.", label="reason",
        prefix="agent_refused_", values=("not_started", "other_instance", "unknown_seq", "expired", "lower_epoch", "adopting")),
    _family("agent_events", "events", "What happened between engine and hub; `redial` and `key_change` are no errors.", label="what",
        agent_adopt_errors="adopt_error", agent_hook_errors="hook_error", agent_reclaim_errors="reclaim_error",
        agent_credentials_errors="credentials_error", agent_wire_errors="wire_error", agent_unencodable="unencodable",
        agent_refused_by_hub="refused_by_hub", agent_sessions_failed="session_failed", agent_redials="redial",
        agent_key_changes="key_change"),
    _family("local_resets", "resets", "Resets of this engine's caches by vLLM."),
    _family("reset_effects", "resets", "Effects of these resets on the root of block hashes.", label="root", resets_rotated="rotated",
        resets_kept="kept"),
    _family("weights_digests", "digests", "Digests that were taken of the weights."),
    _family("weights_events", "events",
        "Changes of what the engine knows of its weights. `changed`: to other, known weights. `unknown`: nothing is reused or saved. "
        "`late`: a rank saw them change during a step. `unseen`: they had changed while the engine was idle. `mixed`: other data-parallel "
        "ranks began a step with other ones.",
        label="what", weights_changes="changed", weights_unknown="unknown", weights_late="late", weights_unseen="unseen",
        weights_mixed="mixed"),
    _family("roots", "roots", "Roots of block hashes bound, for epochs, resets and lost leases together.", "snapshots"),
    _family("root_overwrites", "times", "Times that somebody else had overwritten vLLM's hash root.", "root_overwritten"),
    _family("requests_renamed", "requests", "Requests that did not just take the block hashes of the current root.", label="how",
        repinned_requests="repinned", rehashed_requests="rehashed", rehash_deferred="deferred", foreign_kv_requests="foreign_kv"),
    _family("errors", "exceptions", "Exceptions of the connector that became a miss, by place.", label="where", prefix="error_",
        values=_PLACES),
)

GAUGES: tuple[Family, ...] = (
    _family("epoch", "epoch number", "Highest epoch adopted; -1 before the first."),
    _family("root_shared", "0 or 1", "1: block hashes are those of the pool's epoch; 0: private to this engine."),
    _family("bypass", "0 or 1", "1: no tier is used now."),
    _family("broken", "0 or 1", "1: an internal error, or a rank without host memory, turned the tiers off until this engine restarts."),
    _family("tiers_off", "0 or 1",
        "1: the engine cannot use its tiers, or not all of them; its log and `epochkv engines` say what to change."),
    _family("weights_known", "0 or 1", "1: the engine knows its weights and names KV after them; 0: it does not."),
    _family("weights_updating", "0 or 1", "1: a call writes weights, or a transfer of weights was started and is not finished."),
    _family("own_cache", "0 or 1", "1: the engine can never know them, and keeps its GPU cache and L1 to itself."),
    _family("lease_remaining_seconds", "seconds", "Seconds until the lease on the epoch ends; 0 without one."),
    _family("old_epoch_requests", "requests", "Running requests that continue under an older root.", "old_epoch_requests"),
    _family("old_epoch_sessions", "sessions", "Streaming-input sessions that continue under an older root."),
    _family("waiting_after_reset", "0 or 1", "1: only this engine was reset; it shares nothing until the next epoch."),
    _family("root_overwritten", "0 or 1", "1: somebody else overwrote vLLM's hash root; bypass until restart."),
    _family("hub_unusable", "0 or 1", "1: the configured hub cannot be used (address, keys); the log says why."),
    _family("plans_open", "plans", "Lookups answered and not yet accepted: hits reserved, misses remembered."),
    _family("jobs_open", "jobs", "Transfers that some rank has not acknowledged."),
    _family("jobs_overdue", "jobs", "Of these, those beyond twice their deadline."),
    _family("loads_paused", "0 or 1", "1: loads from L2 are paused after failures in a row."),
    _family("known_in_store", "blocks", "Blocks remembered to be in L2."),
    _family("slots", "slots", "Host slots (blocks) by what holds them; `total` counts all.", label="state", slots="total",
        slots_indexed="indexed", slots_other_roots="other_roots", slots_held="held", slots_reserved="reserved", slots_busy="busy"),
    _family("rank_failed", "0 or 1", "1: this rank answers every job as failed: its memory could not be laid out, or it failed.",
        "worker_failed", per_rank=True),
    _family("rank_held_slots", "slots", "Host slots that a rank is working on.", "worker_held_slots", per_rank=True),
    _family("rank_open", "transfers", "Loads and device-to-host copies under way on a rank.", label="what", per_rank=True,
        worker_open_loads="loads", worker_open_copies="copies"),
    _family("store_state", "state number", "State of the store client: 0 new, 1 probing, 2 ready, 3 draining, 4 closed.", per_rank=True),
    _family("store_breaker_open", "0 or 1", "1: the store does not answer and is not asked.", per_rank=True),
    _family("store_queue", "objects", "Objects waiting to be put or got.", label="queue", per_rank=True, store_queued_puts="puts",
        store_queued_gets="gets"),
    _family("store_in_flight", "calls", "Calls to the store that have not returned.", per_rank=True),
)

# fmt: on


class Mapped:
    """Finds the series of a reported name."""

    def __init__(self, families: tuple[Family, ...]) -> None:
        self._exact = {source: (family, values) for family in families for source, values in family.sources.items()}
        self._open = [family for family in families if family.prefix]

    def find(self, name: str) -> tuple[Family, tuple[str, ...]] | None:
        """Family and label values, or None for a name that is not in the table."""
        found = self._exact.get(name)
        if found is not None:
            return found
        for family in self._open:
            if name.startswith(family.prefix):
                rest = name[len(family.prefix) :]
                return family, ((rest if rest in family.values else OTHER,) if family.labels else ())
        return None


COUNTER_OF = Mapped(COUNTERS)
GAUGE_OF = Mapped(GAUGES)


def split(totals: Mapping[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Reported numbers as (counters, gauges); a name that is neither is taken for a counter."""
    gauges = {name: value for name, value in totals.items() if GAUGE_OF.find(name) is not None}
    return {name: value for name, value in totals.items() if name not in gauges}, gauges
