"""What a hub remembers about engine boots, in memory only, and whether one may use the target epoch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from epochkv_fence.messages import Heartbeat, Mode, Moment
from epochkv_fence.pool import EngineView, PoolConfig

NEVER = -math.inf


@dataclass(slots=True)
class BootRecord:
    """One engine boot.

    Attributes:
        peer: where its newest heartbeat came from.
        seq: of its newest heartbeat.
        key_index: which of the keys that the pool accepts now its newest heartbeat came with, 0 the newest.
        epoch: highest epoch heard; a late heartbeat never lowers it.
        mode: reported for that epoch; USE stays USE, also when it was taken back for a while (a store being wiped).
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
    key_index: int = 0
    epoch: int | None = None
    mode: Mode = Mode.BYPASS
    born: float = math.inf
    heard_at: float = NEVER
    granted_at: float = NEVER
    live_until: float = NEVER
    below_until: float = NEVER

    def hear(self, peer: bytes, beat: Heartbeat, now: float, max_rate: float, key_index: int = 0) -> bool:
        """Take a heartbeat; returns whether anything that status shows has changed. `max_rate`: of the engine's clock."""
        before = self._shown()
        self.heard_at = now
        self.born = min(self.born, now - beat.boot_age_seconds / max_rate)
        if beat.seq > self.seq:
            self.seq, self.peer, self.newest, self.key_index = beat.seq, peer, beat, key_index
        self._raise_epoch(beat)
        return before != self._shown()

    def keys_changed(self, before: Sequence[str], now: Sequence[str]) -> None:
        """The pool accepts other keys: what this boot used last has another place among them, or none (behind them all)."""
        key = before[self.key_index] if self.key_index < len(before) else None
        self.key_index = now.index(key) if key in now else len(now)

    def _shown(self) -> tuple[object, ...]:
        return self.epoch, self.current_mode, self.newest.carried, self.newest.private, self.key_index

    def _raise_epoch(self, beat: Heartbeat) -> None:
        if beat.epoch is None:
            return
        if self.epoch is None or beat.epoch > self.epoch:
            self.epoch, self.mode = beat.epoch, beat.mode
        elif beat.epoch == self.epoch and beat.mode is Mode.USE:
            self.mode = Mode.USE

    @property
    def current_mode(self) -> Mode:
        """The mode of its newest heartbeat, if that speaks of the highest epoch heard."""
        return self.newest.mode if self.newest.epoch == self.epoch else self.mode

    def at_least(self, epoch: int) -> bool:
        """Whether this boot has acknowledged `epoch` or a higher one."""
        return self.epoch is not None and self.epoch >= epoch

    def drained(self, target: int) -> bool:
        """Whether its newest heartbeat says that it reads nothing from the store, and begins nothing, at `target`."""
        beat = self.newest
        return beat.epoch is not None and beat.epoch >= target and beat.mode is Mode.BYPASS and beat.loading == 0

    def quiet_at(self) -> float:
        """When it cannot read from the store any more, whatever it says: its grants are dead, or never allowed a read."""
        if self.epoch is None and self.below_until == NEVER:
            return NEVER
        return max(self.live_until, self.below_until)

    def alive(self, config: PoolConfig, now: float) -> bool:
        """Heard from within the last lease."""
        return now < self.heard_at + config.lease_seconds

    def dead_at(self, hold: float) -> float:
        """When it may be forgotten: silent for a lease and margin (`hold`), and every grant it had is dead."""
        return max(self.heard_at + hold, self.granted_at + hold, self.live_until, self.below_until)

    def view(self, target: int, config: PoolConfig, now: float) -> EngineView:
        """This boot as status shows it."""
        return EngineView(
            boot=self.boot,
            engine=self.newest.engine,
            pod=self.newest.pod,
            rank=self.newest.rank,
            epoch=self.epoch,
            mode=self.current_mode,
            converged=self.at_least(target),
            alive=self.alive(config, now),
            carried=self.newest.carried,
            age_seconds=self.newest.boot_age_seconds,
            silent_seconds=max(0.0, now - self.heard_at),
            fingerprint=self.newest.fingerprint,
            stats=dict(self.newest.stats),
            loading=self.newest.loading,
            key_index=self.key_index,
            private=self.newest.private,
        )


@dataclass(slots=True)
class Gate:
    """Who has the weights of the target epoch (design page "fence", section 5).

    Attributes:
        asked_at: when the target was asked for; None: unknown, or asked for with a list of boots.
        marked: the boots of that list.
        held: its owner has not said yet that the weights are ready; until then no age proves anything.
        listed: there is such a list, so that the age of a boot never proves anything any more.
        request: of the trainer's ask that this gate follows.
        held_for: the weights that its owner is to call ready.
        goes_on_from: the epoch before, if this one has the same weights: who reports that it uses that one has them. It
            matters after a change of hub, when the new one has not heard everybody yet.
        refused: proposals that came from boots while nobody had the weights, by boot and the moment of their reset.
    """

    asked_at: float | None = None
    marked: set[bytes] = field(default_factory=set)
    held: bool = False
    listed: bool = False
    request: int | None = None
    held_for: str = ""
    goes_on_from: int | None = None
    refused: dict[bytes, Moment | None] = field(default_factory=dict)

    def close(self) -> None:
        """From now on only the list counts."""
        self.asked_at, self.held, self.listed = None, False, True

    def hold(self, version: str) -> bool:
        """Wait for the owner of these weights; False: it does already, or a list decides."""
        if self.listed or self.held:
            return False
        self.held, self.held_for = True, version
        return True

    def stale(self, boot: bytes, moment: Moment | None, *, hopeless: bool) -> bool:
        """Whether this proposal was refused once; `hopeless`: it is now, because nobody has the weights."""
        if hopeless:
            self.refused[boot] = moment
        return boot in self.refused and self.refused[boot] == moment

    def mode(self, boot: BootRecord, target: int, config: PoolConfig) -> Mode:
        """The mode `boot` gets at `target`."""
        if config.weights_source == "Model" or target == 0:
            return Mode.USE
        if boot.epoch == target and boot.mode is Mode.USE:
            return Mode.USE  # granted before, perhaps by another hub
        if boot.boot in self.marked:
            return Mode.USE
        if boot.epoch is not None and boot.epoch == self.goes_on_from and boot.mode is Mode.USE:
            return Mode.USE
        if self._old_enough(boot, config) and not self.held:
            return Mode.USE
        return Mode.BYPASS

    def _old_enough(self, boot: BootRecord, config: PoolConfig) -> bool:
        """It was there before the push began, and is still the same boot."""
        return self.asked_at is not None and boot.born + config.join_after_seconds <= self.asked_at
