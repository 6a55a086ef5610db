"""Puts the scheduler role together: names, tiers, the link to the hub and the watch over the weights of one engine.

What an engine may not do is found out here, once, and said in its log with what to change.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from epochkv_connector import halves
from epochkv_connector.config.connector_config import ConnectorConfig
from epochkv_connector.engine import blocks, describe, hashing, limits, patches, topology
from epochkv_connector.engine.limits import why_no_tiers
from epochkv_connector.guard import Guard
from epochkv_connector.hub_link import Credentials, FenceHooks, HubLink
from epochkv_connector.metrics.reporter import Reporter
from epochkv_connector.metrics.stats import EpochKVStats
from epochkv_connector.naming.identity import fingerprint
from epochkv_connector.naming.pins import Pins
from epochkv_connector.naming.root import PoolMembership, RootState
from epochkv_connector.scheduler.facade import SchedulerSide
from epochkv_connector.scheduler.steps import FindWorker
from epochkv_connector.weights.adapters import Adapters
from epochkv_connector.weights.executor import EngineRanks, NoRanks, join
from epochkv_connector.weights.watch import Watch

logger = logging.getLogger("vllm.epochkv")


def why_no_loads(vllm_config: Any) -> str | None:
    """Why this engine must not load, and what to change; None: it may."""
    transfer = vllm_config.kv_transfer_config
    if transfer.kv_role == "kv_producer":
        return "kv_role is 'kv_producer', which saves only; set it to 'kv_both' to load as well"
    if transfer.kv_load_failure_policy != "recompute":
        return (
            f"kv_load_failure_policy is {transfer.kv_load_failure_policy!r}, so a lost block would fail the request; set it to 'recompute' "
            "(below a MultiConnector: in this child's own configuration)"
        )
    return why_no_tiers(vllm_config)


def why_no_saves(vllm_config: Any) -> str | None:
    """Why this engine must not save, and what to change; None: it may."""
    if vllm_config.kv_transfer_config.kv_role == "kv_consumer":
        return "kv_role is 'kv_consumer', which loads only; set it to 'kv_both' to save as well"
    return why_no_tiers(vllm_config)


class _EngineNames:
    """What is named after the weights of this engine (`weights.watch.Names`). An error of ours leaves nothing named."""

    def __init__(self, side: SchedulerSide, core: Any | None, scheduler: Any | None, guard: Guard) -> None:
        self._weights, self._core, self._scheduler, self._guard = side.weights, core, scheduler, guard

    def hold(self, weights: bytes | None, note: str) -> None:
        """Names are made of these from now on."""
        self._guard.run("hold", lambda: self._weights.hold(weights), self._weights.break_off)

    def end(self, weights: bytes) -> None:
        """Names of these are used no more."""
        self._guard.run("end", lambda: self._weights.end(weights), self._weights.break_off)

    def tell(self) -> None:
        """The hub should hear of it."""
        self._weights.tell()

    def clear_encoder(self) -> bool:
        """Outputs of the encoder go if nobody refers to them."""
        if self._core is None or self._scheduler is None or blocks.encoder_outputs_in_use(self._scheduler):
            return False
        self._scheduler.reset_encoder_cache()
        self._core.model_executor.reset_encoder_cache()
        return True


class SchedulerRole:
    """One per EngineCore.

    Args:
        local_worker: finds the worker half when it lives in this process.

    Raises:
        ConfigError: the tiers cannot be built as configured.

    Attributes:
        side: answers vLLM.
        tiers: None when none is configured, or they could not be built.
        fingerprint: of everything that decides what a byte of a block is (64 hex digits).
        hashing: vLLM's block hashing.
    """

    def __init__(
        self, config: ConnectorConfig, vllm_config: Any, kv_cache_config: Any, guard: Guard, reporter: Reporter, local_worker: FindWorker
    ) -> None:
        self._config, self._vllm_config, self._guard, self._reporter = config, vllm_config, guard, reporter
        self.hashing = hashing.BlockHashing(vllm_config.cache_config.prefix_caching_hash_algo)
        global_root = hashing.GlobalRoot()
        credentials = Credentials(config)
        described = describe.describe_engine(vllm_config, kv_cache_config)
        core, scheduler = patches.builders()
        engine_id = str(vllm_config.kv_transfer_config.engine_id)
        ranks = NoRanks() if core is None or scheduler is None else EngineRanks(core.model_executor, engine_id)
        layouts: list[str] | None = guard.run("layouts", ranks.layouts, lambda: None)
        self.fingerprint = fingerprint({**described, "layouts": layouts})
        adapters = Adapters(ranks, topology.num_worker_ranks(vllm_config), time.monotonic, limits.why_no_adapters(vllm_config))
        self._link = HubLink(config, credentials)
        pins = self._build_pins(credentials, global_root, adapters, core)
        loads_off, saves_off = why_no_loads(vllm_config), why_no_saves(vllm_config)
        for what, why in (("loads", loads_off), ("saves", saves_off)):
            if why is not None:
                logger.warning("EpochKV: %s are off: %s", what, why)
        self.tiers: halves.SchedulerTiers | None = guard.build(
            "tiers", lambda: halves.build_scheduler_tiers(config, vllm_config, kv_cache_config), lambda: None
        )
        self.side = SchedulerSide(
            pins,
            self.tiers.books if self.tiers is not None else None,
            self._link,
            *(loads_off, saves_off),
            local_worker=local_worker,
            tokens_per_step=topology.tokens_per_step(vllm_config),
            on_error=guard.note,
        )
        self._watch_weights(ranks, adapters, core, scheduler)
        self._start_link(pins)

    def _build_pins(self, credentials: Credentials, global_root: hashing.GlobalRoot, adapters: Adapters, core: Any | None) -> Pins:
        config, vllm_config = self._config, self._vllm_config
        random_seed = hashing.hash_seed_is_random(self.hashing.algorithm)
        if random_seed and config.distributed is not None:
            logger.warning(
                "EpochKV: block hashes (%s) have a random seed in each process, so the distributed tier is off; "
                "set PYTHONHASHSEED to one value in the whole pool, or use --prefix-caching-hash-algo sha256",
                self.hashing.algorithm,
            )
        member = PoolMembership(
            config.pool.uid,
            self.fingerprint,
            credentials.secret,
            l2_allowed=not random_seed,
            adapters_applied=describe.describe_adapters(vllm_config),
            is_own_pool=config.hub is None,
            forced_bypass=limits.why_no_weights(vllm_config, getattr(core, "model_executor", None)),
        )
        return Pins(RootState(member, global_root, self._link.lease_until), self.hashing, adapters)

    def _watch_weights(self, ranks: EngineRanks | NoRanks, adapters: Adapters, core: Any | None, scheduler: Any | None) -> None:
        """Names are made of the weights that the ranks hold, from the first on."""
        weights = self.side.weights
        weights.watch = watch = Watch(
            ranks,
            _EngineNames(self.side, core, scheduler, self._guard),
            topology.num_worker_ranks(self._vllm_config),
            time.monotonic,
            has_encoder=limits.is_multimodal(self._vllm_config),
        )
        weights.adapters = adapters
        adapters.join(weights, lambda: watch.value is not None and not ranks.asleep)
        patches.hide_adapters_from_hashes()
        if self.side.pins.root.member.forced_bypass is not None:
            watch.refuse(self.side.pins.root.member.forced_bypass)
        if isinstance(ranks, EngineRanks):
            join(core, scheduler, watch, adapters, lambda work: self._guard.run("weights", work, weights.break_off))
        watch.before_schedule()

    def _start_link(self, pins: Pins) -> None:
        hooks = FenceHooks(pins, self.gauges, self.reclaim, self._told)
        self._link.start(hooks, self.fingerprint, int(self._vllm_config.parallel_config.data_parallel_rank or 0))
        if pins.root.member.forced_bypass is not None:
            logger.warning("EpochKV serves without caches: %s", pins.root.member.forced_bypass)
        elif self._config.hub is None:
            logger.info("EpochKV: no hub is configured; this engine is a pool of its own, and its root private")

    def _told(self) -> tuple[bytes | None, str]:
        """What heartbeats say of the weights. Any thread."""
        why, watch = self.side.pins.root.member.forced_bypass, self.side.weights.watch
        if why is not None or watch is None:
            return None, why or ""
        return watch.told

    def reclaim(self, below: int, keep: tuple[bytes, ...]) -> tuple[int, int]:
        """See `SchedulerTiers.reclaim`. Not for the scheduler thread.

        Raises:
            RuntimeError: the tiers could not be built; 0 would say that nothing is left.
            StoreUnavailable: the store gave no answer.
        """
        if self.tiers is not None:
            return self.tiers.reclaim(self._config.pool.uid, self.fingerprint, below, keep)
        if self._config.distributed is not None:
            raise RuntimeError("this engine has no store client: its tiers could not be built")
        return 0, 0

    def gauges(self) -> dict[str, float]:
        """What holds now. Any thread (heartbeats carry it too)."""
        unbuilt = self.tiers is None and (self._config.local is not None or self._config.distributed is not None)
        return self._reporter.gauges(self.side, self._link, broken=self.side.state.broken or unbuilt)

    def stats(self) -> EpochKVStats:
        """Counters since the last report, and what holds now."""
        return self._reporter.scheduler_stats(self.side, self.tiers, self.gauges())

    def stop(self) -> None:
        """Stop the agent, then the tiers; each within its own deadline."""
        self._guard.run("link.stop", self._link.stop, lambda: None)
        if self.tiers is not None:
            self._guard.run("tiers.close", self.tiers.close, lambda: None)
