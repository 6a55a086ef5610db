"""The authority and the store's admin: calls whose effect and whose answer come late, out of order, or not at all."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from epochkv_fence.protocol import pool as ev
from epochkv_fence.protocol.pool import PoolRecord, Term, merged_labels
from tests.model.parts import Call, HubProcess

if TYPE_CHECKING:
    from tests.model.world import World

MUST_ANSWER = ("lead", "load")
WRITES = ("record", "publish", "note", "label")
PATIENCE = 1.0
"""Seconds after which a hub gives up waiting for an answer."""


class Authority:
    """The durable record, the leadership, and the calls under way."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.record = PoolRecord()
        self.history = [self.record]
        self.leader = Term("nobody", 0)
        self.calls: list[Call] = []

    # ------------------------------------------------------------------ calls

    def call(self, process: HubProcess, kind: str, value: int, origin: Any = None) -> Call:
        call = Call(process, kind, value, process.term, self.world.late(), self.world.now + PATIENCE, origin=origin)
        if kind == "wipe" and self.world.rng.random() < self.world.profile.store_fails:
            call.not_before = self.world.now + self.world.rng.choice([1.0, 2.5, 8.0])
        if kind in MUST_ANSWER:
            call.not_before = min(call.not_before, self.world.now + PATIENCE)
            call.patience = float("inf")
        if self.world.profile.restores and kind in WRITES and process.term != self.leader:
            call.effective = True  # what can be restored is Kubernetes' record, and an operator without the Lease sends no write
        self.calls.append(call)
        return call

    def turn(self) -> bool:
        """One call takes effect, or is answered, or times out (its effect may still come); False: there is none."""
        world, now = self.world, self.world.now
        ready = [call for call in self.calls if self._ready(call, now)]
        if not ready:
            return False
        call = world.rng.choice(ready)
        luck = world.rng.random()
        if call.not_before > now:
            self._time_out(call)
        elif not call.effective and now > call.deadline:
            call.effective = True  # never, from now on
        elif not call.effective and (luck < 0.85 or call.kind == "load"):
            self.effect(call)
            call.not_before = world.late() if call.kind not in MUST_ANSWER else 0.0
        elif not call.answered:
            if call.effective and call.result is not None and luck < 0.97:
                self.answer(call)
            else:
                self._time_out(call)
        if call.effective and call.answered:
            self.calls.remove(call)
        return True

    def _ready(self, call: Call, now: float) -> bool:
        """Whether something may become of it now: its effect, or, if its process listens, the end of waiting for it."""
        held = call.not_before > now
        if call.effective or held:
            return not call.answered and (not held or now >= call.patience) and self.world.hub_side.free(call.process)
        return True

    def _time_out(self, call: Call) -> None:
        if call.kind not in MUST_ANSWER and self.world.hub_side.free(call.process):
            self.world.count("timeouts")
            self._fail(call)

    def settle(self) -> None:
        """Without faults: every call takes effect and is answered."""
        for call in list(self.calls):
            if not call.effective and self.world.now <= call.deadline:
                self.effect(call)
            if not call.answered:
                if call.result is None:
                    self._fail(call)
                else:
                    self.answer(call)
            self.calls.remove(call)

    def effect(self, call: Call) -> None:
        call.effective = True
        world, old = self.world, self.record
        call.result = True
        match call.kind:
            case "verify":
                call.result = self._verified(call)
            case "load":
                call.result = old
                if world.rules.stale_load and world.rng.random() < 0.5:
                    call.result = PoolRecord(0, 0, old.granting, labels=old.labels)
            case "record":
                self._raise(call)
            case "publish":
                if call.value > old.target:
                    call.result = None  # refused: the record was lost
                elif call.value > old.published:
                    world.note(f"authority: published {call.value} (by h{call.process.index})")
                    world.count("published")
                    self._write(replace(old, published=call.value))
            case "note":
                self._write(replace(old, granting=True))
            case "label":
                known = {} if world.rules.labels_replace else old.labels
                self._write(replace(old, labels=merged_labels(known, call.origin)))
            case "wipe" | "sweep":
                self._empty(call)
        if world.rng.random() < world.profile.ambush and not world.calm:
            self._ambush(call.process)

    def _ambush(self, process: HubProcess) -> None:
        """The worst time to freeze: between a call's effect and its answer; and meanwhile the other hub takes over."""
        process.frozen_until = self.world.now + self.world.rng.choice([1.0, 4.0, 6.0, 8.0])
        other = self.world.hubs[1 - process.index]
        self.world.count("ambushes")
        if self.world.rng.random() < 0.7 and self.world.now >= other.frozen_until:
            self.elect(other)

    def _verified(self, call: Call) -> bool:
        if self.world.rules.verify_always:
            return True
        if self.world.rules.holder_only and call.term is not None:
            return call.term.holder == self.leader.holder
        return call.term == self.leader

    def _raise(self, call: Call) -> None:
        old = self.record
        if call.value > old.target:
            self.world.note(f"authority: target {call.value} (by h{call.process.index}: {call.origin})")
            self.world.count("recorded")
            self._write(replace(old, target=call.value, origin=call.origin))
        elif self.world.rules.record_lowers:
            self._write(replace(old, target=call.value))

    def _write(self, record: PoolRecord) -> None:
        self.record = record
        self.history.append(record)

    def _empty(self, call: Call) -> None:
        world = self.world
        if world.rng.random() < world.profile.store_fails:
            call.result = None
            return
        call.result = (world.store.empty(),)
        world.count(f"{call.kind}s of the store")
        world.note(f"the store: {call.kind} for {call.value} removes {call.result[0]} keys")

    def answer(self, call: Call) -> None:
        call.answered = True
        side, process = self.world.hub_side, call.process
        if self.world.hubs[process.index] is not process:
            return
        match call.kind:
            case "verify":
                side.verified(process, call)
            case "lead":
                if process.term is None or call.term is None or process.term.transitions < call.term.transitions:
                    side.installed(process, call.term)
            case "load":
                if process.term == call.term and call.term is not None:
                    side.loaded(process, ev.Acquired(call.term, call.result))
            case "wipe" | "sweep":
                keys = call.result[0]
                side.step(process, ev.Done(_asked(call), ok=True, removed=(keys, keys * 100 if call.kind == "wipe" else None)))
            case _:
                side.step(process, ev.Done(_asked(call), ok=True))

    def _fail(self, call: Call) -> None:
        call.answered = True
        side, process = self.world.hub_side, call.process
        if self.world.hubs[process.index] is not process:
            return
        match call.kind:
            case "verify":
                if process.term == call.term:
                    process.round_running = False
                    side.step(process, ev.RoundDropped(call.value))
            case "record" | "publish" | "note" | "label" | "wipe" | "sweep":
                side.step(process, ev.Done(_asked(call), ok=False))

    # ------------------------------------------------------------------ leadership and restores

    def elect(self, process: HubProcess) -> None:
        """Leadership is taken by a write; the winner learns it when that write returns."""
        self.leader = Term(process.holder, self.leader.transitions + 1)
        self.world.note(f"h{process.index} takes leadership, {self.leader.transitions}")
        won = self.call(process, "lead", 0)
        won.term, won.effective, won.result = self.leader, True, True

    def restore(self) -> None:
        """An older record comes back, from a backup.

        That ends every write under way: the API server rejects a status that goes down, so only a backup of etcd brings one back, and
        that is restored while no API server runs. SQLite's file is replaced while its one hub is stopped.
        """
        old = self.record
        if old.published > 0:
            for call in self.calls:
                call.effective = call.effective or call.kind in WRITES
            target = self.world.rng.randrange(old.published)
            self.record = PoolRecord(target, self.world.rng.randrange(target + 1), True, None)
            self.world.count("restores")
            self.world.note(f"authority: restored to {self.record}")
            self.world.checks.restored()


def _asked(call: Call) -> ev.Call:
    match call.kind:
        case "record":
            return ev.RecordTarget(call.value, call.origin)
        case "publish":
            return ev.Publish(call.value)
        case "note":
            return ev.NoteGranting()
        case "label":
            return ev.NoteLabels(call.origin)
        case _:
            return ev.RemoveAll(call.value, call.kind == "sweep")
