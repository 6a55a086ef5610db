"""The oracle of the scheduler layer: which weights computed every token's KV, and from which tokens.

It does not know block hashes: whatever a request finds in its blocks is compared with its own tokens, so KV under a wrong name
shows as a wrong prefix or wrong weights, whoever made the mistake.

What is computed on top of KV of other weights is a function of both, and so is its label.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.request import Request

from tests.support.scheduler_config import BLOCK, CHUNK, STATE
from tests.support.scheduler_worker import Cell, Content

if TYPE_CHECKING:
    from tests.support.scheduler import Rig

EMPTY: Content = (None,) * BLOCK
REJECTED: Cell = ("a draft that was not taken", b"")


def first_needed(kind: str, start: int) -> int:
    """First position of which a token at `start` needs what a group of this kind holds."""
    if kind in ("full", "unlike"):
        return 0
    if kind == STATE:
        return max(0, start - 1)
    if kind.startswith(CHUNK):
        length = int(kind.removeprefix(CHUNK))
        return start // length * length
    return max(0, start - int(kind) + 1)


class Running(NamedTuple):
    """Where vLLM's worker left the state of a request: of the blocks from `first` on, which a step wrote, in the `accepted`-th."""

    first: int
    accepted: int = 1

    @property
    def source(self) -> int:
        """The block that the next step begins with."""
        return self.first + self.accepted - 1


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
        self._running: dict[str, Running] = {}

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
        return tuple(self.rig.scheduler.kv_cache_manager.get_block_ids(request.request_id))

    def digests(self, request: Request) -> list[bytes]:
        return self._prefixes.setdefault(request.request_id, Prefixes()).of(self.tokens_of(request))

    def check(self, request: Request, start: int, admitted: bool) -> None:
        """Whatever the request begins this step with must be a function of its own tokens, and, on admission, of the weights."""
        if admitted:
            self._running.pop(request.request_id, None)
        stale = foreign = 0
        label = self.admitted_label(request)
        digests = self.digests(request)
        for kind, blocks in zip(self.rig.options.groups, self.blocks_of(request), strict=True):
            for position in range(first_needed(kind, start), start):
                found = self._held(request, kind, blocks, position)
                if found is None or found[1] != digests[position]:
                    foreign += 1
                elif found[0] != label:
                    stale += 1
        if admitted:
            self.stale_tokens[request.request_id] = self.stale_tokens.get(request.request_id, 0) + stale
        self.foreign_tokens[request.request_id] = self.foreign_tokens.get(request.request_id, 0) + foreign

    def _held(self, request: Request, kind: str, blocks: Sequence[int], position: int) -> Cell | None:
        """What the request finds of this position; in a group of states it is the last one."""
        if kind == STATE:
            content = self.gpu.get(blocks[self._running.get(request.request_id, Running(position // BLOCK)).source], EMPTY)
            return content[0] if len(content) == 1 else None
        return self._positions(blocks[position // BLOCK])[position % BLOCK]

    def _positions(self, block: int) -> Content:
        """What a block of attention holds: nothing where it was one of states before."""
        content = self.gpu.get(block, EMPTY)
        return content if len(content) == BLOCK else EMPTY

    def _label_behind(self, request: Request, start: int) -> str:
        """Of what is computed from `start` on: mixed if KV before it is of other weights."""
        now, parts = self.label(request), set[str]()
        for kind, blocks in zip(self.rig.options.groups, self.blocks_of(request), strict=True):
            cell = self._held(request, kind, blocks, start - 1) if start else None
            parts |= set(cell[0].split(",")) if cell is not None else set()
        return now if parts <= {now} else ",".join(sorted({*parts, now}))

    def compute(self, request: Request, start: int, end: int, num_drafts: int = 0, num_taken: int = 0) -> None:
        """The model writes KV of these positions.

        Args:
            num_drafts: the last tokens are guessed.
            num_taken: so many of them are right.
        """
        digests, label, right = self.digests(request), self._label_behind(request, start), end - num_drafts + num_taken
        cells = [(label, digests[position]) if position < right else REJECTED for position in range(start, end)]
        running = Running(-(-end // BLOCK) - 1, 1 + num_taken)
        for kind, blocks in zip(self.rig.options.groups, self.blocks_of(request), strict=True):
            if kind == STATE:
                self._write_states(blocks, running, cells[-1 - num_drafts :], end - num_drafts)
                if self.rig.options.checkpoints:
                    self._write_checkpoint(blocks, cells, end)
                continue
            for position, cell in enumerate(cells, start):
                if blocks[position // BLOCK] != self.rig.block_pool.null_block.block_id:
                    content = list(self._positions(blocks[position // BLOCK]))
                    content[position % BLOCK] = cell
                    self.gpu[blocks[position // BLOCK]] = tuple(content)
        ends_block = num_taken and right % BLOCK == 0 and right // BLOCK - 1 == running.first
        self._running[request.request_id] = Running(running.first) if ends_block else running

    def _write_checkpoint(self, blocks: Sequence[int], cells: Sequence[Cell], end: int) -> None:
        """The state inside of a chunk that ends at `end`, where vLLM's backends write it."""
        from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints

        known = inspect.signature(compute_mamba_prefill_checkpoints).parameters  # before 0.32, hits are aligned to blocks
        aligned = {"cache_hit_alignment_tokens": BLOCK} if "cache_hit_alignment_tokens" in known else {}
        (offset,), (column,) = compute_mamba_prefill_checkpoints([end], [len(cells)], BLOCK, BLOCK, 1, False, **aligned)
        if offset and blocks[column] != self.rig.block_pool.null_block.block_id:
            self.gpu[blocks[column]] = (cells[offset - 1],)

    def _write_states(self, blocks: Sequence[int], running: Running, states: Sequence[Cell], num_tokens: int) -> None:
        """States of so many tokens and of one more each, in as many blocks; that of a whole block goes where such are looked for.

        As vLLM's worker does it: the state that a step begins with is copied to where the step writes (`preprocess_mamba`), and behind
        it the one at the last boundary that the model reached (`postprocess_mamba_fused_kernel`).
        """
        assert self.rig.block_pool.null_block.block_id not in blocks[running.first : running.first + len(states)]
        for index, state in enumerate(states, running.first):
            self.gpu[blocks[index]] = (state,)
        whole = (num_tokens + running.accepted - 1) // BLOCK * BLOCK
        if whole >= num_tokens:
            self.gpu[blocks[whole // BLOCK - 1]] = (states[whole - num_tokens],)
