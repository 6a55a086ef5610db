"""A real vLLM `Scheduler` with our connector, and a worker made of dictionaries.

GPU blocks, host slots and store objects hold, for each token position, *which weights computed it from which tokens*.
"""

import hashlib
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from tests.support.scheduler_config import BLOCK, EngineOptions, kv_cache_config, rank_layout, vllm_config, write_credentials
from tests.support.scheduler_oracle import Oracle
from tests.support.scheduler_worker import EngineCore, FakeExecutor, FakeWorker, SharedStore


class Rig:
    """One engine: scheduler, connector, fake worker ranks, and the oracle, whose tiers it shows.

    Attributes:
        cached: request id -> tokens that its first scheduling found computed.
        handed: request id -> `kv_transfer_params` of its answer.
        connector: ours, also where it is a MultiConnector's child.
        side, pins, tiers: of our connector.
        watch: its look at the weights.
    """

    hash_size = BLOCK  # tokens of a block hash

    def __init__(
        self,
        tmp: Path,
        *,
        store: SharedStore | None = None,
        monkeypatch: Any = None,
        weights: str = "w0",
        num_adapters: int = 8,
        oracle: Callable[[Any], Oracle] = Oracle,
        change_config: Callable[[VllmConfig], object] = lambda config: None,
        **options: Any,
    ) -> None:
        self.options = EngineOptions(**options)
        self._weights = weights
        layouts = [rank_layout(self.options, rank) for rank in range(self.options.num_ranks)]
        self.executor = FakeExecutor(weights, layouts, num_adapters)
        self.store: Any = store
        self.lease_until = float("inf")
        self.cached: dict[str, int] = {}
        self.outputs: dict[str, list[int]] = {}
        self.handed: dict[str, dict[str, Any]] = {}
        self.finished: set[str] = set()
        self._next_id = 0
        if store is not None:
            monkeypatch.setattr("epochkv_connector.scheduler.role.StoreClient", lambda _settings: store)
        self.vllm_config = vllm_config(tmp, self.options, has_store=store is not None)
        change_config(self.vllm_config)
        self.kv_cache_config = kv_cache_config(self.options)
        self.core = EngineCore(self.executor, self._make_scheduler)
        self.scheduler = self.core.scheduler
        self.block_pool = self.scheduler.kv_cache_manager.block_pool
        self.free_at_start = self.block_pool.get_num_free_blocks()
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(self.hash_size, sha256)
        self.oracle = oracle(self)
        self.gpu, self.stale_tokens, self.foreign_tokens = self.oracle.gpu, self.oracle.stale_tokens, self.oracle.foreign_tokens
        self.workers = [FakeWorker(self, rank) for rank in range(self.options.num_ranks)]
        self._aggregator = KVOutputAggregator(expected_finished_count=len(self.workers)) if len(self.workers) > 1 else None
        made: Any = self.scheduler.connector
        self.connector: Any = next((one for one in getattr(made, "sub_connectors", ()) if hasattr(one, "scheduler")), made)
        fence = getattr(self.scheduler, "epochkv_fence", None)
        if fence is not None or hasattr(self.connector, "_guard"):
            self.guard, self.side = (fence.guard, fence.role) if fence is not None else (self.connector._guard, self.connector.scheduler)
            self.pins, self.tiers, self.watch = self.side.pins, self.side.tiers, self.side.weights.watch
            self.pins.root._lease_until = lambda: self.lease_until

    def _make_scheduler(self) -> Scheduler:
        kind = AsyncScheduler if self.options.async_scheduling else Scheduler
        manager = StructuredOutputManager(self.vllm_config)
        given: Any = {"vllm_config": self.vllm_config, "kv_cache_config": self.kv_cache_config, "structured_output_manager": manager}
        return kind(**given, log_stats=True, block_size=BLOCK, hash_block_size=self.hash_size)

    # ------------------------------------------------------------------ what tests reach for
    @property
    def weights(self) -> str:
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
            request_id=request_id, prompt_token_ids=list(tokens), sampling_params=sampling, pooling_params=None, block_hasher=self.hasher
        )

    def add(self, tokens: Sequence[int], **kwargs: Any) -> Request:
        request = self.request(tokens, **kwargs)
        self.scheduler.add_request(request)
        return request

    # ------------------------------------------------------------------ steps
    def step(self) -> Any:
        output = self.scheduler.schedule()
        self.update(output)
        return output

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def update(self, output: Any) -> None:
        runner = self._forward(output)
        self.executor.looked(output.kv_connector_metadata)
        for worker in self.workers:
            if output.kv_connector_metadata is not None:
                worker.start_step(output.kv_connector_metadata)
        runner.kv_connector_output = self._connector_output(output)
        self.take(output, runner)

    def take(self, output: Any, runner: ModelRunnerOutput) -> None:
        for core_outputs in self.scheduler.update_from_output(output, runner).values():
            for item in core_outputs.outputs:
                self.outputs.setdefault(item.request_id, []).extend(item.new_token_ids)
                if item.finish_reason is not None:
                    self.finished.add(item.request_id)
                if item.kv_transfer_params is not None:
                    self.handed[item.request_id] = item.kv_transfer_params
        self.oracle.recorded()

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
            self.oracle.check(request, start, request_id in admitted)
            self.oracle.compute(request, start, end)
            order.append(request_id)
            done = end >= request.num_tokens
            sampled.append([self._sample(request)] if done else [])
        return ModelRunnerOutput(req_ids=order, req_id_to_index={name: i for i, name in enumerate(order)}, sampled_token_ids=sampled)

    def _sample(self, request: Request) -> int:
        digest = hashlib.sha256(json.dumps([self.oracle.label(request), list(request.all_token_ids)]).encode()).digest()
        return 3 + int.from_bytes(digest[:4], "big") % 500

    def run(self, max_steps: int = 200) -> int:
        """Step until nothing lives and nothing is pending; returns the steps it took."""
        for count in range(max_steps):
            if not self.scheduler.has_requests():
                return count
            self.step()
        raise AssertionError(f"not idle after {max_steps} steps: requests {sorted(self.scheduler.requests)}, leaks {self.leaks()}")

    def serve(self, tokens: Sequence[int], **kwargs: Any) -> str:
        request = self.add(tokens, **kwargs)
        self.run()
        assert request.request_id in self.finished, f"{request.request_id} did not finish"
        return request.request_id

    # ------------------------------------------------------------------ ends
    def leaks(self) -> dict[str, int]:
        return {name: count for name, count in self.side.leak_report().items() if count}

    def check_clean(self) -> None:
        """Nothing is left: no pin, plan, job, request, GPU reference; and nobody ever saw another prompt's KV."""
        assert self.leaks() == {}
        assert self.block_pool.get_num_free_blocks() == self.free_at_start
        assert not any(self.foreign_tokens.values()), f"KV of other tokens: {self.foreign_tokens}"
        assert not any(self.stale_tokens.values()), f"KV of other weights: {self.stale_tokens}"
        errors = dict(self.guard.errors)
        assert errors == {}, f"our code raised: {errors}"

    def close(self) -> None:
        if self.connector is not None:
            self.connector.shutdown()


def prompt(seed: int, length: int) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(3, 500) for _ in range(length)]


def global_root() -> bytes:
    return kv_cache_utils.NONE_HASH


class OwnRoot:
    """In place of `hashing.GlobalRoot`, where several engines share a process: hashed with an explicit parent, nothing reads the global."""

    def __init__(self, root: bytes) -> None:
        self._root = root

    def ready(self) -> bool:
        return True

    def bind(self, root: bytes) -> None:
        self._root = root

    def is_bound(self, root: bytes) -> bool:
        return self._root is root


__all__ = ["BLOCK", "OwnRoot", "RequestStatus", "Rig", "SharedStore", "global_root", "prompt", "write_credentials"]
