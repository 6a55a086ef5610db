"""Which blocks of the running requests are worth saving now.

A block is saved once: what L1 holds, what another job is saving and what L2 is known to hold is left out. How far a
request has been looked at is remembered, so a step costs only its new blocks; slots are taken unit by unit (all groups
of one alignment unit or none), and what finds no slot is tried again while the request lives.
"""

from __future__ import annotations

from collections.abc import Container

import msgspec

from epochkv_connector.scheduler.hits import align_down
from epochkv_connector.scheduler.index import HostIndex, Key
from epochkv_connector.scheduler.lookup import KnownInStore
from epochkv_connector.scheduler.tracker import Tracker
from epochkv_connector.scheduler.views import CacheLayout, ScheduledRequestView
from epochkv_connector.wire.jobs import BlockMove


class SaveDraft(msgspec.Struct, frozen=True):
    """A save that holds its slots: a contiguous range of tokens and the blocks of it that need something."""

    request_id: str
    namespace: str | None
    start_token: int
    end_token: int
    moves: tuple[BlockMove, ...]


class _Cursor(msgspec.Struct, frozen=True):
    root: bytes
    namespace: str | None
    token: int


class SavePlanner:
    """Chooses, and takes slots. The names under way are told back with `over`."""

    def __init__(self, layout: CacheLayout, index: HostIndex, known: KnownInStore, tracker: Tracker | None = None) -> None:
        self._layout = layout
        self._index = index
        self._known = known
        self._tracker = tracker
        self._cursors: dict[str, _Cursor] = {}
        self._saving: set[Key] = set()
        self._needs: dict[str, int] = {}  # request -> slots that its next unit needs and did not find
        self._lacking: dict[int, dict[str, None]] = {}  # the same by number of slots, the longest deferred first
        self.num_deferred = 0

    @property
    def num_cursors(self) -> int:
        """Requests being followed."""
        return len(self._cursors)

    @property
    def num_saving(self) -> int:
        """Names under way."""
        return len(self._saving)

    @property
    def num_lacking(self) -> int:
        """Requests whose save waits for slots."""
        return len(self._needs)

    def continuable(self, scheduled: Container[str]) -> list[str]:
        """Of these requests, those whose save was deferred and finds slots now: no more than there are slots for."""
        available = self._index.num_available if self._lacking else 0
        found: list[str] = []
        for needed in sorted(self._lacking):
            for request_id in self._lacking[needed]:
                if needed > available:
                    return found
                if request_id in scheduled:
                    found.append(request_id)
                    available -= needed
        return found

    def give_up(self, request_id: str) -> None:
        """What was deferred of the request is not asked for again before its next block."""
        needed = self._needs.pop(request_id, None)
        if needed is None:
            return
        waiting = self._lacking[needed]
        del waiting[request_id]
        if not waiting:
            del self._lacking[needed]

    def forget_request(self, request_id: str) -> None:
        """The request is finished."""
        self._cursors.pop(request_id, None)
        self.give_up(request_id)

    def over(self, moves: tuple[BlockMove, ...]) -> None:
        """A save has ended, one way or the other."""
        for move in moves:
            self._saving.discard((move.group, move.block_hash))

    def clear(self) -> None:
        """The names changed: everything begins anew."""
        self._cursors.clear()
        self._needs.clear()
        self._lacking.clear()

    def draft(self, view: ScheduledRequestView, namespace: str | None, null_block: int) -> SaveDraft | None:
        """Take slots for the request's new blocks, or None if nothing is to be saved."""
        unit = self._layout.alignment_tokens
        known_tokens = min(view.num_confirmed_tokens, len(view.block_hashes) * view.hash_block_size)
        end = align_down(known_tokens, unit)
        cursor = self._cursors.get(view.request_id)
        start = 0
        if cursor is not None and cursor.root == view.root and cursor.namespace == namespace:
            start = cursor.token
        self.give_up(view.request_id)
        moves: list[BlockMove] = []
        token = start
        while token < end:
            of_unit = self._moves_of_unit(view, token, namespace, null_block)
            if of_unit is None:
                self.num_deferred += 1
                break
            moves.extend(of_unit)
            token += unit
        self._cursors[view.request_id] = _Cursor(view.root, namespace, token)
        if not moves:
            return None
        return SaveDraft(view.request_id, namespace, start, token, tuple(moves))

    def _moves_of_unit(self, view: ScheduledRequestView, token: int, namespace: str | None, null_block: int) -> list[BlockMove] | None:
        """Blocks of one alignment unit with their slots, or None if the slots cannot be had (nothing is taken)."""
        wanted = self._wanted(view, token, namespace, null_block)
        held = [slot for *_, slot, _ in wanted if slot is not None]
        num_new = len(wanted) - len(held)
        needed = num_new + sum(1 for slot in held if self._index.is_idle(slot))
        if needed > self._index.num_available:
            self._needs[view.request_id] = needed
            self._lacking.setdefault(needed, {})[view.request_id] = None
            return None
        self._index.pin(held)
        fresh = iter(self._index.allocate(num_new))
        moves = []
        for group, block, gpu_block, name, slot, put in wanted:
            move_slot = next(fresh) if slot is None else slot
            moves.append(BlockMove(group, block, gpu_block, move_slot, name, copy=slot is None, put=put))
            self._saving.add((group, name))
        return moves

    def _wanted(
        self, view: ScheduledRequestView, token: int, namespace: str | None, null_block: int
    ) -> list[tuple[int, int, int, bytes, int | None, bool]]:
        wanted = []
        for group, spec in enumerate(self._layout.groups):
            gpu_blocks = view.group_block_ids[group]
            scale = spec.block_size // view.hash_block_size
            first = token // spec.block_size
            for block in range(first, first + self._layout.alignment_tokens // spec.block_size):
                if block >= len(gpu_blocks) or gpu_blocks[block] == null_block:
                    continue  # outside the sliding window by now
                name = bytes(view.block_hashes[(block + 1) * scale - 1])
                if (group, name) in self._saving:
                    continue
                slot = self._index.get(group, name)
                if slot is not None and self._tracker is not None:
                    self._tracker.confirm([(group, name)])  # it may have been forgotten there; L1 holds it
                put = namespace is not None and (group, name) not in self._known
                if not put and (slot is not None or not self._index.indexed):
                    continue
                wanted.append((group, block, gpu_blocks[block], name, slot, put))
        return wanted
