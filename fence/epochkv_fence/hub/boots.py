"""What a hub remembers about engine boots, in memory only."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from epochkv_fence.protocol.messages import Heartbeat
from epochkv_fence.protocol.pool import EngineView, PoolConfig

NEVER = -math.inf


@dataclass(slots=True)
class BootRecord:
    """One engine boot.

    Attributes:
        newest: its newest heartbeat, for status.
        peer: where that came from.
        seq: of that heartbeat.
        key_index: which of the keys that the pool accepts now it came with, 0 the newest.
        epoch: highest epoch heard; a late heartbeat never lowers it.
        weights_at: when it first reported the weights of its newest heartbeat, to whatever hub.
        heard_at: when it was last heard from.
        granted_at: when it was last granted anything.
        live_until: when every grant of the present target is dead by its clock.
        below_until: when every grant below the present target is dead by its clock.
    """

    boot: bytes
    newest: Heartbeat
    peer: bytes = b""
    seq: int = -1
    key_index: int = 0
    epoch: int | None = None
    weights_at: float = NEVER
    heard_at: float = NEVER
    granted_at: float = NEVER
    live_until: float = NEVER
    below_until: float = NEVER

    def hear(self, peer: bytes, beat: Heartbeat, now: float, key_index: int = 0) -> bool:
        """Take a heartbeat; returns whether anything that status shows has changed."""
        before = self._shown()
        self.heard_at = now
        if beat.seq > self.seq:
            if self.seq < 0 or beat.weights != self.newest.weights:
                self.weights_at = now - beat.weights_age_seconds
            self.seq, self.peer, self.newest, self.key_index = beat.seq, peer, beat, key_index
        self._raise_epoch(beat)
        return before != self._shown()

    def keys_changed(self, before: Sequence[str], now: Sequence[str]) -> None:
        """The pool accepts other keys: what this boot used last has another place among them, or none (behind them all)."""
        key = before[self.key_index] if self.key_index < len(before) else None
        self.key_index = now.index(key) if key in now else len(now)

    def _shown(self) -> tuple[object, ...]:
        beat = self.newest
        return self.epoch, beat.carried, beat.private, beat.weights, beat.weights_note, self.key_index

    def _raise_epoch(self, beat: Heartbeat) -> None:
        if beat.epoch is not None and (self.epoch is None or beat.epoch > self.epoch):
            self.epoch = beat.epoch

    def at_least(self, epoch: int) -> bool:
        """Whether this boot has acknowledged `epoch` or a higher one."""
        return self.epoch is not None and self.epoch >= epoch

    def alive(self, config: PoolConfig, now: float) -> bool:
        """Heard from within the last lease."""
        return now < self.heard_at + config.lease_seconds

    def dead_at(self, hold: float) -> float:
        """When it may be forgotten: silent for a lease and margin (`hold`), and every grant it had is dead."""
        return max(self.heard_at + hold, self.granted_at + hold, self.live_until, self.below_until)

    def view(self, target: int, config: PoolConfig, now: float) -> EngineView:
        """This boot as status shows it; `diverged_seconds` is left for who knows the others."""
        beat = self.newest
        return EngineView(
            boot=self.boot,
            engine=beat.engine,
            pod=beat.pod,
            rank=beat.rank,
            epoch=self.epoch,
            converged=self.at_least(target),
            alive=self.alive(config, now),
            carried=beat.carried,
            age_seconds=beat.boot_age_seconds,
            silent_seconds=max(0.0, now - self.heard_at),
            fingerprint=beat.fingerprint,
            stats=dict(beat.stats),
            key_index=self.key_index,
            private=beat.private,
            weights=beat.weights,
            weights_note=beat.weights_note,
            weights_since=max(0.0, now - self.weights_at),
        )
