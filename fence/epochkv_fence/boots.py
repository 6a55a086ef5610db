"""What a hub remembers about engine boots, in memory only, and whether one may use the target epoch."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from epochkv_fence.messages import Heartbeat, Mode
from epochkv_fence.pool import EngineView, PoolConfig

NEVER = -math.inf


@dataclass(slots=True)
class BootRecord:
    """One engine boot.

    Attributes:
        peer: where its newest heartbeat came from.
        seq: of its newest heartbeat.
        epoch: highest epoch heard; a late heartbeat never lowers it.
        mode: reported for that epoch; USE stays USE.
        born: upper bound for the time of its start on the hub's clock, from the ages it reports: a heartbeat that comes
            late makes it look younger, and ages are discounted by the clock rate that the margin allows for (a fast clock
            would otherwise let a young boot grow into an epoch that was asked for before its weights were there).
        heard_at: when it was last heard from.
        granted_at: when it was last granted anything.
        live_until: when every grant of the present target is dead by its clock.
        below_until: when every grant below the present target is dead by its clock.
        newest: its newest heartbeat, for status.
    """

    boot: bytes
    newest: Heartbeat
    peer: bytes = b""
    seq: int = -1
    epoch: int | None = None
    mode: Mode = Mode.BYPASS
    born: float = math.inf
    heard_at: float = NEVER
    granted_at: float = NEVER
    live_until: float = NEVER
    below_until: float = NEVER

    def hear(self, peer: bytes, beat: Heartbeat, now: float, max_rate: float) -> bool:
        """Take a heartbeat; returns whether anything that status shows has changed. `max_rate`: of the engine's clock."""
        before = (self.epoch, self.mode, self.newest.carried)
        self.heard_at = now
        self.born = min(self.born, now - beat.boot_age_seconds / max_rate)
        if beat.seq > self.seq:
            self.seq, self.peer, self.newest = beat.seq, peer, beat
        self._raise_epoch(beat)
        return before != (self.epoch, self.mode, self.newest.carried)

    def _raise_epoch(self, beat: Heartbeat) -> None:
        if beat.epoch is None:
            return
        if self.epoch is None or beat.epoch > self.epoch:
            self.epoch, self.mode = beat.epoch, beat.mode
        elif beat.epoch == self.epoch and beat.mode is Mode.USE:
            self.mode = Mode.USE

    def at_least(self, epoch: int) -> bool:
        """Whether this boot has acknowledged `epoch` or a higher one."""
        return self.epoch is not None and self.epoch >= epoch

    def silent_since(self) -> float:
        """Since when nothing was heard from or said to it."""
        return max(self.heard_at, self.granted_at)

    def view(self, target: int, config: PoolConfig, now: float) -> EngineView:
        """This boot as status shows it."""
        return EngineView(
            boot=self.boot,
            engine=self.newest.engine,
            pod=self.newest.pod,
            rank=self.newest.rank,
            epoch=self.epoch,
            mode=self.mode,
            converged=self.at_least(target),
            alive=now < self.heard_at + config.lease_seconds,
            carried=self.newest.carried,
            age_seconds=self.newest.boot_age_seconds,
            silent_seconds=max(0.0, now - self.heard_at),
            fingerprint=self.newest.fingerprint,
            stats=dict(self.newest.stats),
        )


@dataclass(slots=True)
class Gate:
    """Who has the weights of the target epoch (design page "fence", section 5).

    Attributes:
        asked_at: when the target was asked for; None: unknown, or asked for with a list of boots.
        marked: the boots of that list.
    """

    asked_at: float | None = None
    marked: set[bytes] = field(default_factory=set)

    def mode(self, boot: BootRecord, target: int, config: PoolConfig) -> Mode:
        """The mode `boot` gets at `target`."""
        if config.weights_source == "Model" or target == 0:
            return Mode.USE
        if boot.epoch == target and boot.mode is Mode.USE:
            return Mode.USE  # granted before, perhaps by another hub
        if boot.boot in self.marked:
            return Mode.USE
        if self.asked_at is not None and boot.born + config.join_after_seconds <= self.asked_at:
            return Mode.USE
        return Mode.BYPASS
