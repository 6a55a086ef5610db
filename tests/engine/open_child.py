"""The process of an `OpenEngine`, which the server nursery forks: a whole engine, core and (with one rank) worker, and a socket by
which tests look at the scheduler itself instead of trusting metrics alone.

    python -m tests.engine.open_child SOCKET START      (START: a pickled `Start`)
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from vllm import LLM, SamplingParams
from vllm.distributed.parallel_state import get_pp_group
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.worker import cpu_model_runner

from epochkv_connector.connector import EpochKVConnector
from tests.engine.open_engine import Output, Request, Start

JOIN_SECONDS = 60.0


class NoStream:
    """Of CUDA's streams and events what vLLM's runner uses to copy sampled tokens: on a CPU they are where they should be."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.device = torch.device("cpu")

    def wait_stream(self, other: Any) -> None:
        """Nothing runs elsewhere."""

    def record(self, *args: Any) -> None:
        """Nothing runs elsewhere."""

    def synchronize(self) -> None:
        """Nothing runs elsewhere."""


@contextlib.contextmanager
def no_stream_context(stream: Any) -> Iterator[None]:
    yield


def schedule_ahead() -> None:
    """vLLM switches asynchronous scheduling off on CPUs ("not required"), silently: switch it on, and replace CUDA's streams.

    Scheduler, batch queue and model are vLLM's own.
    """
    settle = CpuPlatform.check_and_update_config.__func__

    def settle_and_schedule_ahead(cls: type[CpuPlatform], vllm_config: Any) -> None:
        settle(cls, vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = classmethod(settle_and_schedule_ahead)
    cuda: Any = torch.cuda
    cuda.Stream = cuda.Event = NoStream
    cuda.current_stream = NoStream
    cuda.stream = no_stream_context


def receive_between_stages() -> None:
    """vLLM's CPU runner makes the buffer for what the stage before sends in its warm-up, which it leaves out without compilation:
    every pipeline then ends with an AssertionError in `sync_and_gather_intermediate_tensors`. Make the buffer."""
    runner = cpu_model_runner.CPUModelRunner
    load = runner.load_model

    def load_and_make_buffer(self: Any, *args: Any, **kwargs: Any) -> None:
        load(self, *args, **kwargs)
        if not get_pp_group().is_first_rank:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.dtype, device=self.device
            )

    runner.load_model = load_and_make_buffer


def picture(seed: int) -> Image.Image:
    return Image.frombytes("RGB", (112, 112), random.Random(seed).randbytes(112 * 112 * 3))


class Served:
    """An engine in this process, and what its scheduler was seen to do."""

    def __init__(self, start: Start) -> None:
        receive_between_stages()
        if start.schedule_ahead:
            schedule_ahead()
        if start.prepare:
            start.prepare()
        self._llm = LLM(**start.arguments)
        self.core: Any = self._llm.llm_engine.engine_core.engine_core
        self._scheduler: Any = self.core.scheduler
        self._seen: Counter[str] = Counter()
        self._preempted: dict[tuple[int, ...], list[int]] = {}
        self._watch()
        self._join()

    def _watch(self) -> None:
        schedule, preempt = self._scheduler.schedule, self._scheduler._preempt_request

        def watched(*args: Any, **kwargs: Any) -> Any:
            self._seen["schedules_ahead"] += len(self.core.batch_queue or ()) > 0
            decision = schedule(*args, **kwargs)
            for request_id in decision.num_scheduled_tokens:
                request = self._scheduler.requests[request_id]
                self._seen["cut_prompts"] += request.num_computed_tokens < request.num_prompt_tokens
            return decision

        def watched_preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
            self._preempted.setdefault(tuple(request.prompt_token_ids), []).append(request.num_output_tokens)
            return preempt(request, *args, **kwargs)

        self._scheduler.schedule, self._scheduler._preempt_request = watched, watched_preempt

    def _join(self) -> None:
        """Wait until the connector may use its tiers."""
        connector = self._scheduler.connector
        if not isinstance(connector, EpochKVConnector) or not connector._epochkv_config.hub:
            return
        deadline = time.monotonic() + JOIN_SECONDS
        while connector.scheduler.pins.root.refresh().in_use is False:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not in use of the pool's epoch after {JOIN_SECONDS} s")
            time.sleep(0.02)

    def run(self, requests: list[Request]) -> list[Output]:
        prompts, parameters = [], []
        for request in requests:
            prompt: dict[str, Any] = {"prompt_token_ids": list(request.tokens)}
            if request.image is not None:
                prompt["multi_modal_data"] = {"image": picture(request.image)}
            if request.uuid is not None:
                prompt["multi_modal_uuids"] = {"image": [request.uuid]}
            prompts.append(prompt)
            parameters.append(SamplingParams(temperature=0, max_tokens=request.max_tokens, ignore_eos=True, detokenize=False, logprobs=2))
        return [self._output(answer) for answer in self._llm.generate(prompts, parameters, use_tqdm=False)]

    def _output(self, answer: Any) -> Output:
        best = answer.outputs[0]
        steps = [sorted((entry.logprob for entry in step.values()), reverse=True) for step in best.logprobs]
        return Output(
            tuple(best.token_ids),
            answer.num_cached_tokens or 0,
            tuple(step[token].logprob for token, step in zip(best.token_ids, best.logprobs, strict=True)),
            tuple(step[0] - step[1] for step in steps),
            tuple(self._preempted.pop(tuple(answer.prompt_token_ids), ())),
        )

    def forget(self, _: None) -> bool:
        return bool(self._scheduler.reset_prefix_cache(reset_connector=False))

    def do(self, function: Callable[[Served], Any]) -> Any:
        return function(self)

    def facts(self, _: None) -> dict[str, Any]:
        facts: dict[str, Any] = {
            **{name: self._seen[name] for name in ("schedules_ahead", "cut_prompts")},
            "ranks": self.core.vllm_config.parallel_config.world_size,
            "blocks_in_use": self._blocks_in_use(),
        }
        for metric in self._llm.get_metrics():
            value = getattr(metric, "value", None)
            labels = [metric.labels[key] for key in ("source", "event") if key in metric.labels]
            if value is not None:
                facts["/".join([metric.name.removeprefix("vllm:"), *labels])] = value
        connector = self._scheduler.connector
        if isinstance(connector, EpochKVConnector):
            facts["leaks"] = {name: count for name, count in connector.scheduler.leak_report().items() if count}
            facts["errors"] = dict(connector._guard.errors)
            if connector.scheduler.tiers is not None:
                facts["half"] = connector.scheduler.tiers.stats()
        return facts

    def _blocks_in_use(self) -> int:
        pool = self._scheduler.kv_cache_manager.block_pool
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())

    def end(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


def main() -> None:
    """Start the engine, and answer calls until nobody is there to call."""
    served = Served(pickle.loads(Path(sys.argv[2]).read_bytes()))
    with Listener(sys.argv[1], "AF_UNIX") as listener, listener.accept() as connection, contextlib.suppress(EOFError):
        while True:
            command, argument = connection.recv()
            try:
                connection.send((True, getattr(served, command)(argument)))
            except Exception:
                connection.send((False, traceback.format_exc()))
    served.end()


if __name__ == "__main__":
    main()
