"""A `Rig` whose scheduler runs ahead of its model, as vLLM's does: with async scheduling a step is scheduled before the results
of the one before it are in, and with draft tokens a step may give several tokens, or take some back.
"""

import random
from collections import deque
from functools import partial
from typing import Any

from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from tests.support.scheduler import Rig


class AheadRig(Rig):
    """Steps run on the "device" in order, as soon as they are scheduled; the scheduler hears of them `depth` - 1 steps later.

    `source` says how many drafts are proposed and accepted.
    """

    def __init__(self, *args: Any, seed: int = 0, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.source = random.Random(seed)
        self.depth = 2 if self.options.async_scheduling else 1
        assert self.vllm_config.max_concurrent_batches == self.depth
        self.oracle.tokens_of = lambda request: self.tokens[request.request_id]
        self.tokens: dict[str, list[int]] = {}  # what the device knows; the scheduler hears of the last ones later
        self._in_flight: deque[tuple[Any, ModelRunnerOutput]] = deque()

    def step(self) -> Any:
        """Schedule and issue one step, then take in results until fewer than `depth` are under way."""
        output = self.scheduler.schedule()
        self.issue(output)
        while self._in_flight and (len(self._in_flight) >= self.depth or not output.num_scheduled_tokens):
            self.take_in()
        return output

    def issue(self, output: Any) -> None:
        metadata = output.kv_connector_metadata
        runner = self._forward(output)
        self.executor.looked(metadata)
        for worker in self.workers:
            worker.start_step(metadata)
        runner.kv_connector_output = self._connector_output(output)
        self._in_flight.append((output, runner))

    def take_in(self) -> None:
        """Tell the scheduler of the oldest step that it does not know the results of."""
        output, runner = self._in_flight.popleft()
        self.take(output, runner)
        if self.options.num_drafts and self.depth == 1:
            names = [request.request_id for request in self.scheduler.running]
            proposed = [[7] * self.source.randint(0, self.options.num_drafts) for _ in names]
            self.scheduler.update_draft_token_ids(DraftTokenIds(names, proposed))

    def run(self, max_steps: int = 200) -> int:
        """As `Rig.run`, and nothing is under way."""
        count = super().run(max_steps)
        while self._in_flight:
            self.take_in()
        return count

    def preempt_all(self) -> None:
        """As a reset of running requests does it, also while steps are under way: what they sample is dropped."""
        for request in self.scheduler.running:
            self.tokens.pop(request.request_id, None)
        self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

    def _forward(self, output: Any) -> ModelRunnerOutput:
        order, sampled = [], []
        admitted = {new.req_id for new in output.scheduled_new_reqs} | output.scheduled_cached_reqs.resumed_req_ids
        for request_id, num_scheduled in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            tokens = self.tokens.setdefault(request_id, list(request.all_token_ids))
            num_drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            given = num_scheduled - num_drafts
            begin = request.num_computed_tokens - num_scheduled  # optimistic: counts drafts that are not verified yet
            is_chunk = begin + given < len(tokens)
            start = begin if is_chunk else len(tokens) - given
            self.cached.setdefault(request_id, start)
            self.oracle.check(request, start, request_id in admitted)
            order.append(request_id)
            sampled.append([] if is_chunk else self._sample_some(request, num_drafts))
            self.oracle.compute(request, start, start + num_scheduled, num_drafts, max(0, len(sampled[-1]) - 1))
        return ModelRunnerOutput(req_ids=order, req_id_to_index={name: i for i, name in enumerate(order)}, sampled_token_ids=sampled)

    def _sample_some(self, request: Request, num_drafts: int) -> list[int]:
        tokens = self.tokens[request.request_id]
        new = [self.source.randrange(3, 500) for _ in range(1 + self.source.randint(0, num_drafts))]
        tokens.extend(new)
        return new


AsyncRig = partial(AheadRig, async_scheduling=True)
"""vLLM's default: one step ahead."""
