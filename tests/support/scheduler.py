"""A real vLLM `Scheduler` with our connector, and a worker made of dictionaries.

The oracle does not know block hashes: GPU blocks, host slots and store objects hold, for each token position, *which weights
computed it from which tokens*. Whatever a request finds in its blocks is compared with its own tokens, so KV under a wrong
name shows as a wrong prefix or wrong weights, whoever made the mistake.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import zmq
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVEventsConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.support.scheduler_worker import Cell, Content, EngineCore, FakeExecutor, FakeWorker, Prefixes, SharedStore

BLOCK = 16

MODEL_CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 512,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def write_model_dir(path: Path) -> Path:
    """A Hugging Face configuration without weights."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(MODEL_CONFIG))
    return path


def write_credentials(path: Path, secret: str = "ab" * 32) -> Path:
    """A credentials directory whose hub nobody listens to; grants are given by the tests."""
    path.mkdir(parents=True, exist_ok=True)
    hub_public, _ = zmq.curve_keypair()
    public, private = zmq.curve_keypair()
    for name, value in (("hub.pub", hub_public), ("client.pub", public), ("client.key", private)):
        (path / name).write_bytes(value)
    (path / "root.secret").write_text(secret)
    return path


class Rig:
    """One engine: scheduler, connector, fake worker ranks, and the oracle.

    Attributes:
        stale_tokens: token positions that a request was admitted with (at first or after a preemption) although weights
            other than the engine's had computed them, by request id. A load that vLLM has recorded is an admission.
        foreign_tokens: positions whose KV was made from other tokens (must never happen).
        cached: request id -> tokens that its first scheduling found computed.
    """

    scheduler_class: type[Scheduler] = Scheduler

    def __init__(
        self,
        tmp: Path,
        *,
        num_blocks: int = 64,
        l1_bytes: int | None = 1 << 20,
        store: SharedStore | None = None,
        hub: bool = True,
        num_ranks: int = 1,
        groups: Sequence[str] = ("full",),
        max_batched_tokens: int = 8192,
        max_num_seqs: int = 16,
        extra: dict[str, Any] | None = None,
        transfer: dict[str, Any] | None = None,
        kv_events: bool = False,
        monkeypatch: Any = None,
        weights: str = "w0",
        pool_uid: str = "6f1c2d3e-0000-4000-8000-000000000001",
        caching: bool = True,
        connector: bool = True,
        num_adapters: int = 8,
        num_drafts: int = 0,
    ) -> None:
        self._weights = weights
        self.executor = FakeExecutor(weights, num_ranks, num_adapters)
        self.store = store
        self.gpu: dict[int, Content] = {}
        self.lease_until = float("inf")
        self.stale_tokens: dict[str, int] = {}
        self.foreign_tokens: dict[str, int] = {}
        self.cached: dict[str, int] = {}
        self.recorded_weights: dict[str, str] = {}  # loads that vLLM has recorded and not yet promoted
        self.outputs: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self._prefixes: dict[str, Prefixes] = {}
        self.max_num_seqs = max_num_seqs
        self.num_drafts = num_drafts
        self.groups = tuple(groups)
        self._next_id = 0
        config: dict[str, Any] = {
            "pool": {"name": "policy", "namespace": "default", "uid": pool_uid},
            "lookup_wait_ms": 50.0,
            "lookup_deadline_ms": 200.0,
            **(extra or {}),
        }
        if hub:
            config["hub"] = {"endpoint": "tcp://127.0.0.1:9", "credentials_dir": str(write_credentials(tmp / "fence"))}
        if l1_bytes is not None:
            config["local"] = {"capacity_bytes": l1_bytes}
        if store is not None:
            config["distributed"] = {"master_address": "127.0.0.1:1"}
            monkeypatch.setattr("epochkv_connector.scheduler.build.start_client", lambda _settings: store)
        self.vllm_config = self._vllm_config(tmp, num_blocks, max_batched_tokens, num_ranks, config, transfer, kv_events, caching)
        if not connector:
            self.vllm_config.kv_transfer_config = None
        self.kv_cache_config = self._kv_cache_config(num_blocks, groups)
        self.core = EngineCore(
            self.executor,
            lambda: self.scheduler_class(
                vllm_config=self.vllm_config,
                kv_cache_config=self.kv_cache_config,
                log_stats=True,
                block_size=BLOCK,
                hash_block_size=BLOCK,
                structured_output_manager=StructuredOutputManager(self.vllm_config),
            ),
        )
        self.scheduler = self.core.scheduler
        self.connector: Any = self.scheduler.connector
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        if self.connector is not None:
            self.pins.root._lease_until = lambda: self.lease_until
        self.workers = [FakeWorker(self, rank) for rank in range(num_ranks)]
        self._aggregator: Any = None
        if num_ranks > 1:
            from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator

            self._aggregator = KVOutputAggregator(expected_finished_count=num_ranks)
        self.block_pool = self.scheduler.kv_cache_manager.block_pool
        self.free_at_start = self.block_pool.get_num_free_blocks()

    def _vllm_config(
        self,
        tmp: Path,
        num_blocks: int,
        max_batched_tokens: int,
        num_ranks: int,
        config: dict[str, Any],
        transfer: dict[str, Any] | None,
        kv_events: bool,
        caching: bool,
    ) -> VllmConfig:
        model = ModelConfig(
            model=str(write_model_dir(tmp.parent / "model")), skip_tokenizer_init=True, dtype="float32", max_model_len=4096, seed=0
        )
        cache = CacheConfig(block_size=BLOCK, gpu_memory_utilization=0.9, enable_prefix_caching=caching)
        cache.num_gpu_blocks = num_blocks
        vllm_config = VllmConfig(
            model_config=model,
            cache_config=cache,
            scheduler_config=SchedulerConfig(
                max_num_seqs=self.max_num_seqs,
                max_num_batched_tokens=max_batched_tokens,
                max_model_len=4096,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                disable_hybrid_kv_cache_manager=False,
                async_scheduling=False,
                watermark=0.0,
            ),
            device_config=DeviceConfig("cpu"),
            parallel_config=ParallelConfig(),
            kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="null") if kv_events else None,
            kv_transfer_config=KVTransferConfig(
                **{
                    "kv_connector": "EpochKVConnector",
                    "kv_connector_module_path": "epochkv_connector.connector",
                    "kv_role": "kv_both",
                    "kv_load_failure_policy": "recompute",
                    "kv_connector_extra_config": config,
                    **(transfer or {}),
                }
            ),
        )
        vllm_config.parallel_config.world_size = num_ranks
        if self.num_drafts:
            vllm_config.speculative_config = SpeculativeConfig(
                method="ngram",
                num_speculative_tokens=self.num_drafts,
                prompt_lookup_max=2,
                target_model_config=model,
                target_parallel_config=vllm_config.parallel_config,
            )
        return vllm_config

    @staticmethod
    def _kv_cache_config(num_blocks: int, groups: Sequence[str]) -> KVCacheConfig:
        import torch

        made = []
        for index, kind in enumerate(groups):
            common = {"block_size": BLOCK, "num_kv_heads": 1, "head_size": 16, "dtype": torch.float32}
            spec = FullAttentionSpec(**common) if kind == "full" else SlidingWindowSpec(**common, sliding_window=int(kind))
            made.append(KVCacheGroupSpec([f"layer{index}"], spec))
        return KVCacheConfig(num_blocks=num_blocks, kv_cache_tensors=[], kv_cache_groups=made)

    # ------------------------------------------------------------------ what tests reach for

    @property
    def weights(self) -> str:
        """What the engine computes with."""
        return self._weights

    @weights.setter
    def weights(self, weights: str) -> None:
        """A push by an RPC to the workers, as frameworks make it."""
        self.executor.collective_rpc("update_weights", kwargs={"weights": weights})
        self._weights = weights

    def write_past(self, weights: str, rank: int | None = None) -> None:
        """Somebody writes to the weights (of one rank) without a word to vLLM."""
        self.executor.write(weights, rank)
        self._weights = self.executor.engine_weights

    @property
    def watch(self) -> Any:
        """Our look at the weights."""
        return self.connector.scheduler.weights.watch

    @property
    def side(self) -> Any:
        """Our facade."""
        return self.connector.scheduler

    @property
    def pins(self) -> Any:
        """Our pins, and the root that they follow."""
        return self.connector.scheduler.pins

    @property
    def books(self) -> Any:
        """Our bookkeeping."""
        return self.connector.scheduler.books

    def adopt(self, epoch: int, weights: str | None = None) -> None:
        """What the agent thread does for an accepted grant; with `weights`, the engine has them from now on."""
        if weights is not None:
            self.weights = weights
        self.pins.root.adopt(epoch)

    def request(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int = 1,
        request_id: str | None = None,
        params: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Request:
        """A request as the engine core makes it: hashed when it is made, with the global of that moment."""
        if request_id is None:
            self._next_id += 1
            request_id = f"r{self._next_id}"
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, **kwargs)
        sampling.update_from_generation_config({}, 2)
        if params is not None:
            sampling.extra_args = {"kv_transfer_params": params}
        return Request(
            request_id=request_id,
            prompt_token_ids=list(tokens),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self.hasher,
        )

    def add(self, tokens: Sequence[int], **kwargs: Any) -> Request:
        """Make a request and hand it to the scheduler."""
        request = self.request(tokens, **kwargs)
        self.scheduler.add_request(request)
        return request

    # ------------------------------------------------------------------ steps

    def step(self) -> Any:
        """schedule, forward, update; returns the scheduler's output."""
        output = self.scheduler.schedule()
        self.update(output)
        return output

    def update(self, output: Any) -> None:
        """Forward pass and results of a scheduled step."""
        if output.kv_connector_metadata is not None and output.kv_connector_metadata.settle:
            for worker in self.workers:
                worker.settle()
        runner = self._forward(output)
        self.executor.looked(output.kv_connector_metadata)
        for worker in self.workers:
            if output.kv_connector_metadata is not None:
                worker.start_step(output.kv_connector_metadata)
        runner.kv_connector_output = self._connector_output(output)
        for core_outputs in self.scheduler.update_from_output(output, runner).values():
            for item in core_outputs.outputs:
                self.outputs.setdefault(item.request_id, []).extend(item.new_token_ids)
                if item.finish_reason is not None:
                    self.finished.add(item.request_id)
        for request_id in self.scheduler.finished_recving_kv_req_ids - self.scheduler.failed_recving_kv_req_ids:
            recorded = self.scheduler.requests.get(request_id)
            self.recorded_weights.setdefault(request_id, self.label(recorded) if recorded is not None else self.weights)

    def _connector_output(self, output: Any) -> KVConnectorOutput:
        made = []
        for worker in self.workers:
            finished, failed = worker.results()
            made.append(KVConnectorOutput(finished_recving=finished, failed_recving=failed, kv_connector_worker_meta=worker.poll_acks()))
        if self._aggregator is None:
            return made[0]
        merged = self._aggregator.aggregate([ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=one) for one in made])
        return merged.kv_connector_output

    def _forward(self, output: Any) -> ModelRunnerOutput:
        order, sampled = [], []
        admitted = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        scheduled = [self.scheduler.requests[request_id] for request_id in output.num_scheduled_tokens]
        self.executor.activate({request.lora_request for request in scheduled if request.lora_request is not None})
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            end = request.num_computed_tokens
            start = end - num_scheduled
            if request_id not in self.cached:
                self.cached[request_id] = start
            self._check(request, start, request_id in admitted)
            self._compute(request, start, end)
            order.append(request_id)
            done = end >= request.num_tokens
            sampled.append([self._sample(request)] if done else [])
        return ModelRunnerOutput(req_ids=order, req_id_to_index={name: i for i, name in enumerate(order)}, sampled_token_ids=sampled)

    def _sample(self, request: Request) -> int:
        digest = hashlib.sha256(json.dumps([self.label(request), list(request.all_token_ids)]).encode()).digest()
        return 3 + int.from_bytes(digest[:4], "big") % 500

    def _blocks(self, request: Request) -> tuple[list[int], ...]:
        return tuple(self.scheduler.kv_cache_manager.get_block_ids(request.request_id))

    def label(self, request: Request) -> str:
        """What the KV that this request computes now is a function of, besides its tokens."""
        if request.lora_request is None:
            return self.weights
        return f"{self.weights}+{self.executor.adapters[0].text_of(request.lora_request)}"

    def admitted_label(self, request: Request) -> str:
        """What the KV that the request begins this step with should have been computed under."""
        return self.recorded_weights.pop(request.request_id, None) or self.label(request)

    def _digests(self, request: Request) -> list[bytes]:
        return self._prefixes.setdefault(request.request_id, Prefixes()).of(request.all_token_ids)

    def _check(self, request: Request, start: int, admitted: bool) -> None:
        """Whatever the request begins this step with must be a function of its own tokens, and, on admission, of the weights."""
        stale = foreign = 0
        label = self.admitted_label(request)
        digests = self._digests(request)
        for kind, blocks in zip(self.groups, self._blocks(request), strict=True):
            first = 0 if kind == "full" else max(0, start - int(kind) + 1)
            for index in range(first // BLOCK, -(-start // BLOCK)):
                positions = range(max(first, index * BLOCK), min(start, (index + 1) * BLOCK))
                held = self.gpu.get(blocks[index], (None,) * BLOCK)
                for position in positions:
                    found = held[position % BLOCK]
                    if found is None or found[1] != digests[position]:
                        foreign += 1
                    elif found[0] != label:
                        stale += 1
        if admitted:
            self.stale_tokens[request.request_id] = self.stale_tokens.get(request.request_id, 0) + stale
        self.foreign_tokens[request.request_id] = self.foreign_tokens.get(request.request_id, 0) + foreign

    def _compute(self, request: Request, start: int, end: int) -> None:
        digests, label = self._digests(request), self.label(request)
        for group_blocks in self._blocks(request):
            for position in range(start, end):
                block = group_blocks[position // BLOCK]
                if block == self.block_pool.null_block.block_id:
                    continue
                content: list[Cell | None] = list(self.gpu.get(block, (None,) * BLOCK))
                content[position % BLOCK] = (label, digests[position])
                self.gpu[block] = tuple(content)

    def run(self, max_steps: int = 200) -> int:
        """Step until nothing lives and nothing is pending; returns the steps it took."""
        for count in range(max_steps):
            if not self.scheduler.has_requests():
                return count
            self.step()
        raise AssertionError(f"not idle after {max_steps} steps: requests {sorted(self.scheduler.requests)}, leaks {self.leaks()}")

    def serve(self, tokens: Sequence[int], **kwargs: Any) -> str:
        """Add one request and run until idle; returns its id."""
        request = self.add(tokens, **kwargs)
        self.run()
        assert request.request_id in self.finished, f"{request.request_id} did not finish"
        return request.request_id

    # ------------------------------------------------------------------ ends

    def leaks(self) -> dict[str, int]:
        """What is left open, without zeros."""
        return {name: count for name, count in self.side.leak_report().items() if count}

    def check_clean(self) -> None:
        """Nothing is left: no pin, plan, job, request, GPU reference; and nobody ever saw another prompt's KV."""
        assert self.leaks() == {}
        assert self.block_pool.get_num_free_blocks() == self.free_at_start
        assert not any(self.foreign_tokens.values()), f"KV of other tokens: {self.foreign_tokens}"
        assert not any(self.stale_tokens.values()), f"KV of other weights: {self.stale_tokens}"
        errors = dict(self.connector._guard.errors)
        assert errors == {}, f"our code raised: {errors}"

    def close(self) -> None:
        """Stop the agent thread."""
        if self.connector is not None:
            self.connector.shutdown()


def prompt(seed: int, length: int) -> list[int]:
    """Varied tokens."""
    source = random.Random(seed)
    return [source.randrange(3, 500) for _ in range(length)]


def sum_stale(rigs: Iterable[Rig]) -> int:
    """Stale tokens over all requests of these engines."""
    return sum(sum(rig.stale_tokens.values()) for rig in rigs)


def global_root() -> bytes:
    """vLLM's module global as it is now."""
    return kv_cache_utils.NONE_HASH


__all__ = [
    "BLOCK",
    "FakeWorker",
    "RequestStatus",
    "Rig",
    "SharedStore",
    "global_root",
    "prompt",
    "sum_stale",
    "write_credentials",
    "write_model_dir",
]
