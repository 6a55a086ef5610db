"""The oracle of the scheduler layer: which weights computed every token's KV, and from which tokens.

It does not know block hashes: whatever a request finds in its blocks is compared with its own tokens, so KV under a wrong name
shows as a wrong prefix or wrong weights, whoever made the mistake.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vllm.v1.request import Request

from tests.support.scheduler_config import BLOCK
from tests.support.scheduler_worker import Cell, Content

if TYPE_CHECKING:
    from tests.support.scheduler import Rig


class Prefixes:
    """Digests of every prefix of one growing sequence of tokens: what the KV at a position is a function of, but for weights."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._tokens: list[int] = []
        self._digests: list[bytes] = []
        self._hash = hashlib.sha256()

    def of(self, tokens: Sequence[int]) -> list[bytes]:
        """One digest per position; at least as many as there are tokens."""
        known = len(self._tokens)
        if list(tokens[:known]) != self._tokens[: len(tokens)]:
            self._begin()
            known = 0
        for token in tokens[known:]:
            self._hash.update(b"%d," % token)
            self._digests.append(self._hash.digest())
            self._tokens.append(token)
        return self._digests


class Oracle:
    """Looks at one rig's GPU blocks.

    Attributes:
        gpu: what each block holds.
        stale_tokens: token positions that a request was admitted with (at first or after a preemption) although weights
            other than the engine's had computed them, by request id. A load that vLLM has recorded is an admission.
        foreign_tokens: positions whose KV was made from other tokens (must never happen).
        recorded_weights: of loads that vLLM has recorded and not yet promoted.
        tokens_of: what the model knows of a request.
    """

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.gpu: dict[int, Content] = {}
        self.stale_tokens: dict[str, int] = {}
        self.foreign_tokens: dict[str, int] = {}
        self.recorded_weights: dict[str, str] = {}
        self.tokens_of: Callable[[Request], Sequence[int]] = lambda request: request.all_token_ids
        self._prefixes: dict[str, Prefixes] = {}

    def label(self, request: Request) -> str:
        """What the KV that this request computes now is a function of, besides its tokens."""
        if request.lora_request is None:
            return self.rig.weights
        return f"{self.rig.weights}+{self.rig.executor.adapters[0].text_of(request.lora_request)}"

    def admitted_label(self, request: Request) -> str:
        """What the KV that the request begins this step with should have been computed under."""
        return self.recorded_weights.pop(request.request_id, None) or self.label(request)

    def recorded(self) -> None:
        """Results are in: remember what the engine held when vLLM recorded a load."""
        scheduler = self.rig.scheduler
        for request_id in scheduler.finished_recving_kv_req_ids - scheduler.failed_recving_kv_req_ids:
            request = scheduler.requests.get(request_id)
            self.recorded_weights.setdefault(request_id, self.label(request) if request is not None else self.rig.weights)

    def blocks_of(self, request: Request) -> tuple[list[int], ...]:
        """Per group."""
        return tuple(self.rig.scheduler.kv_cache_manager.get_block_ids(request.request_id))

    def digests(self, request: Request) -> list[bytes]:
        """Of its prefixes."""
        return self._prefixes.setdefault(request.request_id, Prefixes()).of(self.tokens_of(request))

    def check(self, request: Request, start: int, admitted: bool) -> None:
        """Whatever the request begins this step with must be a function of its own tokens, and, on admission, of the weights."""
        stale = foreign = 0
        label = self.admitted_label(request)
        digests = self.digests(request)
        for kind, blocks in zip(self.rig.options.groups, self.blocks_of(request), strict=True):
            first = 0 if kind in ("full", "unlike") else max(0, start - int(kind) + 1)
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

    def compute(self, request: Request, start: int, end: int) -> None:
        """The model writes KV of these positions."""
        digests, label = self.digests(request), self.label(request)
        for group_blocks in self.blocks_of(request):
            for position in range(start, end):
                block = group_blocks[position // BLOCK]
                if block == self.rig.block_pool.null_block.block_id:
                    continue
                content: list[Cell | None] = list(self.gpu.get(block, (None,) * BLOCK))
                content[position % BLOCK] = (label, digests[position])
                self.gpu[block] = tuple(content)
