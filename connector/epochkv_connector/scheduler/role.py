"""The scheduler role: one object per EngineCore, which builds the parts, puts them together and passes vLLM's calls to them; and its link
to the hub.

All of it runs on vLLM's scheduler thread, unless a method says otherwise. Every rule in the parts that looks odd is one of
`fence.md` section 3, found by running vLLM. The order inside each call is the point: *first* bring the tiers to what holds
now (`SharedState.apply`), then act. What an engine may not do is found out here, once, and logged with what to change.

The lease is checked before a hit is answered: `Pins.repin` (or, for a request that holds blocks, `SharedState.apply`) calls
`RootState.refresh` (`naming/root.py`). When the lease has expired, the root is in bypass, and so the answer is no hit.
"""

import contextlib
import itertools
import logging
import os
import secrets
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from epochkv_connector import metrics
from epochkv_connector.config import ConnectorConfig
from epochkv_connector.engine import blocks, describe, limits, patches
from epochkv_connector.engine.interface import running
from epochkv_connector.guard import Guard
from epochkv_connector.naming.identity import fingerprint, object_key, older_pattern, other_weights_pattern, pool_prefix
from epochkv_connector.naming.root import TAG_KEY, Pins, PoolMembership, RootState, is_session
from epochkv_connector.scheduler.requests import Admission, SharedState
from epochkv_connector.scheduler.stamps import Stamps
from epochkv_connector.scheduler.steps import FindWorker, SaveCandidates, Steps
from epochkv_connector.scheduler.weight_changes import WeightChanges
from epochkv_connector.stats import EpochKVStats, Reporter
from epochkv_connector.store.client import StoreClient
from epochkv_connector.store.connection import StoreSettings
from epochkv_connector.tiers.manager import TierManager
from epochkv_connector.weights.adapters import Adapters
from epochkv_connector.weights.domain import Peers
from epochkv_connector.weights.executor import EngineRanks, join
from epochkv_connector.weights.watch import Watch
from epochkv_connector.wire import RankLayout, common_slots
from epochkv_connector.worker.layout import object_bytes
from epochkv_fence.common import lease_clock
from epochkv_fence.connection import read_client_keys, read_root_secret
from epochkv_fence.launch import NAME
from epochkv_fence.net.agent import AgentHooks, AgentThread, EngineIdentity
from epochkv_fence.net.keys import ClientKeys
from epochkv_fence.protocol.messages import INSTANCE_BYTES, WEIGHTS_BYTES

logger = logging.getLogger("vllm.epochkv")

# ----------------------------------------------------------------------------------------------------------------------
# The link to the hub: credentials, the agent's thread, and a reason in words when there is none.
#
# The engine serves whatever is wrong: no hub in the configuration, unreadable credentials, an agent that does not start.
# The root then stays in bypass, and the reason is kept for status and logged once.


STOP_SECONDS = 2.0


class HubLink:
    """The agent's thread, or its absence.

    Attributes:
        secret: of the pool; None: there is no hub that can be used.
        problem: why a hub that is configured cannot be used; None: it can, or there is none.
    """

    def __init__(self, config: ConnectorConfig) -> None:
        self._config = config
        self._keys: ClientKeys | None = None
        self._thread: AgentThread | None = None
        self.secret: bytes | None = None
        self.problem: str | None = None
        if config.hub is None:
            return
        try:
            self._keys, self.secret = read_client_keys(config.hub), read_root_secret(config.hub)
        except Exception as error:  # anything unreadable is the same: no hub
            self.problem = f"the hub at {config.hub.endpoint} cannot be used: {error}"

    def start(self, hooks: AgentHooks, fingerprint: str, rank: int) -> None:
        """Start the agent if there is a hub; a failure is kept in `problem` and logged."""
        hub = self._config.hub
        if hub is None:
            return
        if self._keys is not None:
            try:
                identity = EngineIdentity(
                    engine=os.environ.get("EPOCHKV_ENGINE_NAME") or f"{socket.gethostname()}:{os.getpid()}",
                    pod=os.environ.get("POD_NAME", ""),
                    namespace=os.environ.get("POD_NAMESPACE", ""),
                    rank=rank,
                    fingerprint=fingerprint,
                    versions=running(),
                    pool=self._config.pool.uid,
                    removes=self._config.distributed is not None,
                )
                instance, keys_again = secrets.token_bytes(INSTANCE_BYTES), partial(read_client_keys, hub)  # they may be rotated
                self._thread = AgentThread(hub.endpoint, self._keys, instance, identity, hooks, credentials=keys_again)
                self._thread.start()
            except Exception as error:
                self._thread = None
                self.problem = f"the agent cannot start: {error}"
        if self.problem is not None:
            logger.warning("EpochKV serves without the pool's caches: %s", self.problem)

    def lease_until(self) -> float:
        """End of the lease on `lease_clock`; 0.0 without one."""
        return self._thread.view.lease_until if self._thread is not None else 0.0

    def counts(self) -> dict[str, int]:
        """See `AgentThread.counts`; nothing without one."""
        return self._thread.counts() if self._thread is not None else {}

    def propose(self, epoch: int) -> None:
        """Ask the hub for an epoch; best effort."""
        if self._thread is not None:
            self._thread.propose(epoch)

    def poke(self) -> None:
        """Something the hub waits for has changed: heartbeat now."""
        if self._thread is not None:
            self._thread.poke()

    def stop(self) -> None:
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.stop(STOP_SECONDS)


# ----------------------------------------------------------------------------------------------------------------------
# The tiers, and the store's client for their keys.


CLOSE_SECONDS = 2.0


@dataclass
class StoreKeys:
    """The L2 client of the scheduler role: for existence, and for the removal of keys that nobody asks for any more."""

    client: StoreClient
    object_bytes: tuple[int, ...]  # see `mean_object_bytes`

    def reclaim(self, pool_uid: str, fingerprint: str, below: int, keep: Sequence[bytes] = ()) -> tuple[int, int]:
        """Remove the pool's L2 keys of epochs below `below` and, unless `keep` is empty, of all weights that are not in it.

        Keys of every layout go. Blocks: not for the scheduler thread. Keys that the store leases to a reader stay, and puts under
        way land later, so ask again after the store's lease time.

        Returns:
            How many keys went, and the bytes of those of this engine's own layout: the size of others is not known.

        Raises:
            StoreUnavailable: the store gave no answer.
        """
        pool, keys, num_bytes = pool_prefix(pool_uid), 0, 0
        old = [partial(older_pattern, pool, below)] if below > 0 else []
        for pattern in [*old, *([partial(other_weights_pattern, pool, keep)] if keep else [])]:
            for group, size in enumerate(self.object_bytes):
                removed = self.client.remove_matching(pattern(fingerprint, group))
                keys, num_bytes = keys + removed, num_bytes + removed * size
            # Not simply the rest: an own key that lands between these calls would go uncounted.
            keys += self.client.remove_matching(pattern(fingerprint, None))
        return keys, num_bytes


def build_tiers(
    config: ConnectorConfig, vllm_config: Any, kv_cache_config: Any, layouts: Sequence[RankLayout]
) -> tuple[TierManager | None, StoreKeys | None]:
    """Nothing where no tier is configured: the fence works alone. Without `layouts` of all ranks, the tiers have no slots."""
    if not config.has_tiers:
        return None, None
    layout = describe.cache_layout(vllm_config, kv_cache_config)
    settings = StoreSettings.of(config)
    store = StoreClient(settings) if settings is not None else None  # without memory of its own
    if store is not None:
        store.start()
    num_ranks = describe.num_worker_ranks(vllm_config)
    shards = [range(num_ranks // replicas) for replicas in describe.group_replicas(vllm_config, kv_cache_config)]

    def keys_of(namespace: str, group: int, block_hash: bytes) -> Sequence[str]:
        return [object_key(namespace, group, shard, block_hash) for shard in shards[group]]

    tiers = TierManager(
        config,
        layout,
        num_ranks=num_ranks,
        num_slots=common_slots(layouts, num_ranks),
        store=store,
        ids=itertools.count(1),
        clock=time.monotonic,
        keys_of=keys_of,
    )
    tiers.state.settles = num_ranks > 1 and limits.is_wide(vllm_config)
    return tiers, None if store is None else StoreKeys(store, mean_object_bytes(layouts, len(layout.groups)))


def mean_object_bytes(layouts: Sequence[RankLayout], num_groups: int) -> tuple[int, ...]:
    """Size of an L2 object by KV cache group; ranks may hold unlike numbers of layers. 0 where no rank knows."""
    known = [layout.payload_bytes for layout in layouts]
    sizes = [[object_bytes(payloads[group]) for payloads in known if group in payloads] for group in range(num_groups)]
    return tuple(round(sum(one) / len(one)) if one else 0 for one in sizes)


# ----------------------------------------------------------------------------------------------------------------------
# The role.


class SchedulerRole:
    """See the module's docstring.

    Args:
        local_worker: finds the worker role when it lives in this process.
        fenced: there are no worker roles, which compare each step with what it was to be (`EPOCHKV_FENCE`).

    Attributes:
        tiers: None when none is configured, or they could not be built: the fence works alone.
        store_keys: None when there is no L2.
        fingerprint: of everything that decides what a byte of a block is (64 hex digits).
        stamps, admission, weights, steps: the parts, which share `state`.
    """

    def __init__(
        self,
        config: ConnectorConfig,
        vllm_config: Any,
        kv_cache_config: Any,
        guard: Guard,
        reporter: Reporter,
        local_worker: FindWorker,
        *,
        fenced: bool = False,
    ) -> None:
        self._config, self._vllm_config, self._guard, self._reporter = config, vllm_config, guard, reporter
        self.hashing = blocks.BlockHashing(vllm_config.cache_config.prefix_caching_hash_algo)
        global_root = blocks.GlobalRoot()
        described = describe.describe_engine(vllm_config, kv_cache_config)
        core, scheduler = patches.builders()
        executor = core.model_executor if core is not None and scheduler is not None else None
        ranks = EngineRanks(executor, describe.engine_id(vllm_config))
        layouts: list[RankLayout] | None = guard.run("layouts", ranks.layouts, lambda: None)
        digests = None if layouts is None else [layout.digest.hex() for layout in layouts]
        self.fingerprint = fingerprint({**described, "layouts": digests})
        self._link = HubLink(config)
        self._no_l2 = limits.why_no_l2(vllm_config)
        self._own = limits.why_own(vllm_config, getattr(core, "model_executor", None), fenced=fenced)
        whys = limits.why_no_adapters(vllm_config), limits.why_adapters_alone(vllm_config, self._own)
        adapters = Adapters(ranks, describe.num_worker_ranks(vllm_config), time.monotonic, *whys)
        adapters.num_kept = int(getattr(getattr(vllm_config, "lora_config", None), "max_cpu_loras", None) or 1)
        self._peers: Peers | None = None
        if self._own is None and limits.is_wide(vllm_config):
            self._own = guard.run("domain", lambda: self._join_domain(ranks, core), lambda: limits.Own(limits.NO_DOMAIN, asks=True))
        # vLLM's scheduler reads the configuration of a MultiConnector, and that of none of its children.
        transfer = patches.parent_config() or vllm_config.kv_transfer_config
        self.pins = self._build_pins(global_root, adapters, limits.handoff_seconds(limits.connectors_of(transfer)))
        if fenced and not config.trust_media_ids:  # no connector of vLLM's own stops where an id of a client begins
            media = limits.is_multimodal(vllm_config)  # a later input of a session may bring an id
            self.pins.maker.stays_here = lambda one: blocks.first_client_media(one) is not None or (media and is_session(one))
        self.tiers, self.store_keys = guard.run(
            "tiers", lambda: build_tiers(config, vllm_config, kv_cache_config, layouts or []), lambda: (None, None)
        )
        if transfer is not None and transfer.kv_connector == NAME:  # vLLM reads it next, and a block that a cache has lost is a miss
            transfer.kv_load_failure_policy = "recompute"
        policy = str(getattr(transfer, "kv_load_failure_policy", "recompute"))  # without a connector nobody loads
        self._unused = self._find_unused(layouts or [], policy)
        off = {one.what for one in self._unused}
        self.state = state = SharedState(self.pins, self.tiers, guard.note, core, trust_media_ids=config.trust_media_ids)
        self.requests, self.counters = state.requests, state.counters
        tokens_per_step = describe.tokens_per_step(vllm_config)
        self.stamps = Stamps(
            lambda: self.weights.watch,
            *(adapters, self.pins.root, self._stored),
            all_requests=config.stamp,
            tokens_per_step=tokens_per_step,
        )
        self.admission = Admission(state, self.stamps, may_load=not off & {limits.NOTHING, limits.NO_LOADS})
        self.weights = WeightChanges(state, self.admission, self._link, core, scheduler, self._kept_own)
        candidates = SaveCandidates(state, tokens_per_step, config.save)
        self.steps = Steps(state, self.weights, candidates, not off & {limits.NOTHING, limits.NO_SAVES}, local_worker)
        self._watch_weights(ranks, adapters, core, scheduler)
        patches.listen_on_both_families()
        self.hooks = FenceHooks(self)
        self._link.start(self.hooks, self.fingerprint, int(vllm_config.parallel_config.data_parallel_index))
        if config.hub is None and self._own is None:
            logger.info("EpochKV: no hub is configured: this engine shares no KV with others")

    def _join_domain(self, ranks: EngineRanks, core: Any) -> limits.Own | None:
        """Before the first step of any rank. None: all workers of this one will tell the others what they hold."""
        store: Any = getattr(core, "dp_store", None)
        why = ranks.join_domain() if store is not None else limits.NO_STORE
        if not why:
            parallel = self._vllm_config.parallel_config
            size, rank = int(parallel.data_parallel_size), int(parallel.data_parallel_rank)
            self._peers = Peers(size, rank, core.dp_store, self._link.poke)
        return limits.Own(why, asks=True) if why else None

    def _kept_own(self, why: str) -> None:
        self._own = limits.Own(why, asks=True)
        self._unused = [*self._unused, limits.kept_to_itself(why)]

    def _build_pins(self, global_root: blocks.GlobalRoot, adapters: Adapters, handoff_seconds: float) -> Pins:
        member = PoolMembership(
            self._config.pool.uid,
            self.fingerprint,
            self._link.secret,
            l2_allowed=self._no_l2 is None,
            adapters_applied=describe.describe_adapters(self._vllm_config),
            is_own_pool=self._config.hub is None,
            handoff_seconds=handoff_seconds,
        )
        root = RootState(member, global_root, self._link.lease_until)
        if self._own is not None:
            root.keep_own()
        return Pins(root, self.hashing, adapters)

    def _stored(self, request: Any) -> tuple[int, int]:
        if self.tiers is None or self.store_keys is None or self.state.broken:
            return 0, 0
        return self.tiers.stored(self.state.names_for_tiers(request)[: request.num_prompt_tokens // self.state.hash_block_size])

    def _find_unused(self, layouts: Sequence[RankLayout], policy: str) -> list[limits.Unused]:
        """What this engine cannot use, said in one line."""
        silent = describe.num_worker_ranks(self._vllm_config) - len(layouts)
        found = limits.find_unused(
            self._config,
            self._vllm_config,
            policy=policy,
            own=self._own,
            error=self._guard.first.get("tiers", ""),
            layout_problem=self.tiers.state.layout.problem() if self.tiers is not None else None,
            refusals=[
                *("" if one.num_slots else one.refusal or "it has no host memory for them" for one in layouts),
                *["it did not answer"] * silent,
            ],
            no_l2=self._no_l2,
        )
        if found:
            logger.warning("EpochKV: %s", limits.unused_line(found))
        return found

    def _watch_weights(self, ranks: EngineRanks, adapters: Adapters, core: Any | None, scheduler: Any | None) -> None:
        """Names are made of the weights that the ranks hold, from the first on."""
        weights = self.weights
        weights.watch = watch = Watch(
            ranks,
            weights,
            describe.num_worker_ranks(self._vllm_config),
            time.monotonic,
            has_encoder=limits.is_multimodal(self._vllm_config),
            peers=self._peers,
        )
        weights.adapters = adapters
        asks = self._own is None or self._own.asks
        adapters.join(weights, lambda: not asks or watch.value is not None)
        patches.mend_hashes()
        if self._own is not None:
            watch.keep_own(self._own.why, asks=self._own.asks)
        if core is not None and scheduler is not None:
            join(core, scheduler, ranks, watch, adapters, lambda work: self._guard.run("weights", work, weights.break_off))
        if scheduler is not None:
            self.stamps.join(scheduler, self._guard)
            if not getattr(self._vllm_config, "use_v2_model_runner", False):
                patches.keep_covered_media()
        self._guard.run("weights", watch.before_schedule, weights.break_off)

    def bind(self, manager: Any) -> None:
        """The cache manager exists: learn the hash block size, which the configuration lacks, and reach the GPU block pool."""
        state, block_pool = self.state, manager.block_pool
        state.manager, state.pool, state.hash_block_size = manager, block_pool, int(block_pool.hash_block_size)
        self.hashing.hash_block_size = state.hash_block_size
        patches.around(manager, "reset_prefix_cache", self.steps.reset)  # vLLM tells connectors afterwards, if at all
        if self.tiers is not None:
            self.tiers.bind_block_pool(blocks.BlockPoolAdapter(block_pool), state.hash_block_size)
        state.outgoing.bind(block_pool, self.tiers)

    def on_new_request(self, request: Any) -> None:
        """Pin, and begin the L2 lookup."""
        if (adapter := getattr(request, "lora_request", None)) is not None:
            self.weights.adapters.arrived(adapter, self.requests.adapters[adapter.lora_int_id])
        self.requests.see(request)
        self.stamps.open(request)
        self.admission.arrive(request)

    def request_finished(self, request: Any) -> tuple[bool, dict[str, Any] | None]:
        """Forget the request; GPU pins protect its saves, so frees are never delayed."""
        tag = self.pins.maker.tag(request) if self._may_hand_off(request) else None
        self.steps.save_last_blocks(request)
        self.pins.release(request)
        self.requests.finish(request.request_id)
        self.steps.candidates.boundaries.forget(request.request_id)
        if self.tiers is not None:
            self.tiers.finish(request.request_id)
        return False, ({TAG_KEY: tag} if tag is not None else None)

    def _may_hand_off(self, request: Any) -> bool:
        """A P/D producer's request under a current, shareable pin: its KV may be named by our tag."""
        params = request.kv_transfer_params
        pin = self.pins.pin_of(request)
        return bool(params and params.get("do_remote_decode") and pin is not None and self.pins.may_save(pin))

    def reset_cache(self) -> bool:
        """vLLM's own reset: clear on every tier. Always True: the names make it true."""
        rotated = self.pins.root.reset()
        self.state.apply()
        self.state.clear()
        self.counters["local_resets"] += 1
        if rotated:
            self.weights.ask_for_next_epoch()
            self._link.poke()
        return True

    @property
    def has_pending_work(self) -> bool:
        """Keep a multiprocess engine stepping: a save holds GPU blocks, ranks wait for word, a load that must fail is not finally
        reported, or routers wait for events. All have deadlines; the last takes one step."""
        return self.requests.must_fail or (self.tiers is not None and self.tiers.saves.is_pending()) or self.state.must_tell

    @property
    def is_idle(self) -> bool:
        """No step follows this one unless a request comes."""
        return len(self.requests) == 0 and not self.has_pending_work

    def tiers_told(self) -> tuple[str, str]:
        """What heartbeats say of tiers that this engine cannot use (`limits.told_unused`). Any thread."""
        return limits.told_unused([*self._unused, *([limits.BROKEN] if self.state.broken else [])])

    def reclaim(self, below: int, keep: tuple[bytes, ...]) -> tuple[int, int]:
        """See `StoreKeys.reclaim`. Raises RuntimeError, too: the tiers could not be built, and 0 would say that nothing is left."""
        if self.store_keys is not None:
            return self.store_keys.reclaim(self._config.pool.uid, self.fingerprint, below, keep)
        if self._config.distributed is not None:
            raise RuntimeError("this engine has no store client: its tiers could not be built")
        return 0, 0

    def gauges(self) -> dict[str, float]:
        """What holds now, for heartbeats and metrics. Any thread."""
        root = self.pins.root
        snapshot = root.refresh()  # an idle engine, too, notices (and logs) that its lease is over
        has_slots = self.tiers is not None and self.tiers.state.index.num_slots > 0
        gauges = {
            "epoch": snapshot.epoch,
            "root_shared": snapshot.shared,
            "bypass": not snapshot.in_use,
            "broken": self.state.broken or (self._config.has_tiers and not has_slots),
            "tiers_off": self.tiers_told() != ("", ""),
            "own_cache": snapshot.in_use and self._own is not None,
            "weights_updating": self.weights.watch.updating,
            "weights_known": root.weights is not None and self._own is None,
            "old_epoch_requests": self.pins.old_epoch_requests(),
            "old_epoch_sessions": self.pins.old_epoch_requests(sessions=True),
            "waiting_after_reset": root.waiting_after_reset,
            "root_overwritten": root.overwritten,
            "hub_unusable": self._link.problem is not None,
            "lease_remaining_seconds": max(0.0, self._link.lease_until() - lease_clock()),
            "errors": sum(dict(self._guard.errors).values()),
        }
        if self.tiers is not None:
            with contextlib.suppress(RuntimeError):  # a dictionary that the scheduler thread changes meanwhile
                gauges.update(self.tiers.stats())
        return {name: float(value) for name, value in gauges.items()}

    def stats(self) -> EpochKVStats:
        """Counters since the last report, and what holds now."""
        # `dict` copies at once; the agent's thread counts there meanwhile.
        totals: dict[str, float] = {**dict(self.counters), **dict(self.pins.counters)}
        totals |= {f"weights_{name}": count for name, count in dict(self.weights.watch.counters).items()}
        totals |= {f"agent_{name}": count for name, count in self._link.counts().items()}
        store = {} if self.store_keys is None else self.store_keys.client.stats()
        counted, held = metrics.split(self.gauges())
        of_store, client = metrics.split({f"store_{name}": value for name, value in store.items()})
        return self._reporter.report({**totals, **counted, **of_store}, held, metrics.SCHEDULER_RANK, client)

    def leak_report(self) -> dict[str, int]:
        """What is still open; all zero when the engine is idle and every acknowledgement arrived."""
        report = {
            **self.requests.leak_report(),
            "boundaries": len(self.steps.candidates.boundaries),
            "stamps": len(self.stamps),
            "old_epoch_requests": self.pins.old_epoch_requests() + self.pins.old_epoch_requests(sessions=True),
        }
        if self.tiers is not None:
            report.update({f"tiers.{name}": count for name, count in self.tiers.leak_report().items()})
        return report

    def stop(self) -> None:
        """Stop the agent, then the tiers; each within its own deadline."""
        self.pins.root.leave()
        self._guard.run("link.stop", self._link.stop, lambda: None)
        if self._peers is not None:
            self._peers.stop()
        if (keys := self.store_keys) is not None:
            self._guard.run("tiers.close", lambda: keys.client.close(CLOSE_SECONDS), lambda: None)


class FenceHooks:
    """What the agent's thread may ask of this engine; `epochkv_fence.net.agent.AgentHooks` says what each answer means."""

    def __init__(self, role: SchedulerRole) -> None:
        self._role, self._root = role, role.pins.root
        self.ready, self.isolated = self._root.ready, self._root.isolated
        self.busy, self.old_epoch_requests = role.pins.busy, role.pins.old_epoch_requests
        self.labelled, self.tiers, self.reclaim = role.stamps.label, role.tiers_told, role.reclaim

    def adopt(self, epoch: int) -> None:
        self._root.adopt(epoch)
        self._role.state.tell_soon()

    def weights(self) -> tuple[bytes | None, str]:
        if lost := self._root.lost:
            return None, lost
        value, note = self._role.weights.watch.tells()
        return (None if value is None else value[:WEIGHTS_BYTES]), note

    def stats(self) -> dict[str, float]:
        """Heartbeats go on without a hub: so routers hear of a lost lease."""
        gauges = self._role.gauges()
        self._role.state.tell_soon()
        return gauges
