"""The engine as its agent sees it: who it is, and what its hooks answer.

No hook can harm the agent: it counts and logs what they raise, and goes on with the answer that shares less.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from epochkv_fence.net.agent.mailbox import Mailbox
from epochkv_fence.net.say_once import SayOnce
from epochkv_fence.protocol.agent import RemoveOld
from epochkv_fence.protocol.messages import (
    CONTROL,
    MAX_STAT_NAME,
    MAX_STATS,
    MAX_TEXT,
    MAX_VERSION_TEXT,
    MAX_VERSIONS,
    WEIGHTS_BYTES,
    Heartbeat,
    Reclaimed,
)

logger = logging.getLogger(__name__)
T = TypeVar("T")


class AgentHooks(Protocol):
    """What the engine offers; called on the agent thread, except `reclaim`."""

    def ready(self) -> bool:
        """False until vLLM has set its own root: adopt nothing."""

    def adopt(self, epoch: int) -> None:
        """Bind the root of `epoch`; the acknowledgement is sent after this returns. The lease moves after it, too."""

    def busy(self) -> bool:
        """The scheduler is inside `schedule()`: the acknowledgement is held back until this is False."""

    def carried(self) -> int:
        """Requests admitted under a root that is no longer current."""

    def private(self) -> bool:
        """The caches of this engine alone were reset, so it shares nothing before the next epoch."""

    def weights(self) -> tuple[bytes | None, str]:
        """The digest of the weights that its ranks hold, 16 bytes; or None, and why. Who changes it calls `AgentThread.poke`."""

    def tiers(self) -> tuple[str, str]:
        """Why it cannot use its tiers, or not all of them: one of `TIER_REASONS`, and a sentence with what to change. Both empty:
        it can."""

    def stats(self) -> dict[str, float]:
        """Counters for status and metrics; at most 64, of names with at most 64 characters."""

    def reclaim(self, below: int, keep: tuple[bytes, ...]) -> int | tuple[int, int]:
        """Remove the pool's keys of epochs below `below`, and unless `keep` is empty those of all weights that are not in it,
        whatever their epoch. Returns how many were removed, 0 if none were left, or (that, bytes).

        Called on a thread of its own; may take long, and may raise when it cannot tell.
        """


@dataclass(frozen=True, slots=True)
class EngineIdentity:
    """Who this engine is, for status. `pod` is empty for engines nobody provisioned; `versions` are of what it runs, by package.

    `pool`: uid of its pool; the hub takes it for no other one. Empty: whichever its keys are of. `removes`: it has a client of the
    pool's store.
    """

    engine: str
    pod: str = ""
    rank: int = 0
    fingerprint: str = ""
    versions: Mapping[str, str] = field(default_factory=dict, hash=False)
    pool: str = ""
    removes: bool = True


class GuardedEngine:
    """Asks the hooks. Used by the agent's thread; `remove_old` begins a thread of its own."""

    def __init__(
        self, boot: bytes, identity: EngineIdentity, hooks: AgentHooks, mailbox: Mailbox, counters: Counter[str], say: SayOnce
    ) -> None:
        self._boot = boot
        self._identity = identity
        self._hooks = hooks
        self._mailbox = mailbox
        self._counters = counters
        self._say = say
        self._born = time.monotonic()
        self._reported_weights: bytes | None = None
        self._reported_since = self._born
        self._removing = False

    @property
    def ready(self) -> bool:
        return self._ask("ready", self._hooks.ready, False)

    @property
    def busy(self) -> bool:
        return self._ask("busy", self._hooks.busy, True)

    def adopt(self, epoch: int) -> bool:
        try:
            self._hooks.adopt(epoch)
        except Exception as error:
            self._counters["adopt_errors"] += 1
            self._say("adopt", f"failed {epoch}", logging.ERROR, "cannot adopt epoch %d: %r; sharing nothing", epoch, error)
            return False
        self._say("adopt", f"{epoch}", logging.DEBUG, "adopted epoch %d", epoch)
        return True

    def _ask(self, name: str, call: Callable[[], T], default: T) -> T:
        try:
            return call()
        except Exception as error:
            self._counters["hook_errors"] += 1
            self._say(f"hook {name}", repr(error), logging.ERROR, "%s() failed: %r", name, error)
            return default

    # ------------------------------------------------------------------ heartbeats

    def heartbeat(self, seq: int, epoch: int | None) -> Heartbeat:
        """What the engine says of itself now, cut to what a message can carry."""
        none: dict[str, float] = {}
        stats = self._ask("stats", self._hooks.stats, none)
        weights, note = self._weights()
        tiers_off, tiers_note = self._ask("tiers", self._hooks.tiers, ("", ""))
        now = time.monotonic()
        if weights != self._reported_weights:
            self._reported_weights, self._reported_since = weights, now
        return Heartbeat(
            boot=self._boot,
            seq=seq,
            epoch=epoch,
            carried=max(0, self._ask("carried", self._hooks.carried, 0)),
            boot_age_seconds=now - self._born,
            engine=self._identity.engine[:253],
            pod=self._identity.pod[:253],
            rank=self._identity.rank,
            fingerprint=self._identity.fingerprint[:253],
            stats={name[:MAX_STAT_NAME]: value for name, value in list(stats.items())[:MAX_STATS]},
            private=bool(self._ask("private", self._hooks.private, False)),
            weights=weights,
            weights_note=note,
            weights_age_seconds=now - self._reported_since,
            tiers_off=_line(tiers_off)[:253],
            tiers_note=_line(tiers_note),
            versions={
                _line(name)[:MAX_VERSION_TEXT]: _line(version)[:MAX_VERSION_TEXT]
                for name, version in list(self._identity.versions.items())[:MAX_VERSIONS]
            },
            pool=self._identity.pool[:253],
            removes=self._identity.removes,
        )

    def _weights(self) -> tuple[bytes | None, str]:
        unknown: tuple[bytes | None, str] = None, "the engine cannot say what it holds"
        weights, note = self._ask("weights", self._hooks.weights, unknown)
        if weights is None:
            return None, _line(note)
        return (weights, "") if len(weights) == WEIGHTS_BYTES else (None, f"a digest of {len(weights)} bytes, not {WEIGHTS_BYTES}")

    # ------------------------------------------------------------------ old keys

    def remove_old(self, asked: RemoveOld) -> None:
        """Have the engine remove old keys, unless it does so already. Its answer goes into the mailbox."""
        if not self._removing:
            self._removing = True
            threading.Thread(target=self._remove_old, args=(asked,), name="epochkv-reclaim", daemon=True).start()

    def _remove_old(self, asked: RemoveOld) -> None:
        below = asked.below
        try:
            answer = self._hooks.reclaim(below, asked.keep)
            removed, num_bytes = answer if isinstance(answer, tuple) else (answer, 0)
            self._mailbox.send(Reclaimed(self._boot, below, max(0, removed), max(0, num_bytes), asked.number))
        except Exception as error:
            self._counters["reclaim_errors"] += 1
            logger.warning("cannot remove keys of older epochs (below %d) or weights: %r; another engine will be asked", below, error)
        finally:
            self._removing = False


def _line(text: str) -> str:
    return CONTROL.sub(" ", text)[:MAX_TEXT]
