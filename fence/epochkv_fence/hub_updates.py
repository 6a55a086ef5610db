"""What a hub does about weight updates: it lets one begin when the record says so, and ends those whose trainer has died.

Of the hub's state machine; `hub` says when. Whose update is open is in `updates`, what that means for weights in `hub_rules`.
"""

from __future__ import annotations

from epochkv_fence import hub_events as ev
from epochkv_fence.authority import Origin, PoolRecord
from epochkv_fence.hub_store import HubStore
from epochkv_fence.messages import MAX_EPOCH, Source, Status
from epochkv_fence.pool_state import Round
from epochkv_fence.versions import failed_version


class HubUpdates(HubStore):
    """The part of `hub.Hub` that keeps the updates of trainers."""

    def _lead_updates(self, record: PoolRecord, now: float) -> None:
        self._trainers.updates.lead(record.update, now + self._hold(), now)

    def _update_noted(self, event: ev.UpdateNoted | ev.UpdateNoteFailed, now: float) -> list[ev.Action]:
        match event:
            case ev.UpdateNoted(note):
                self._trainers.updates.written(note)
            case ev.UpdateNoteFailed():
                self._trainers.updates.write_failed()
                self._retry_at = now + ev.RETRY_SECONDS
        return []

    def _note_update(self, now: float) -> list[ev.Action]:
        note = self._update_to_note()
        if note is None or now < self._retry_at:
            return []
        self._trainers.updates.write(note)
        return [ev.NoteUpdate(note)]

    def _failing_epoch(self, now: float) -> int | None:
        """A trainer was heard from for the last time in the middle of a push: the epoch that is to say so."""
        if self.term is None or now < self._trainers.updates.expires_at() or self._wanted() >= MAX_EPOCH:
            return None
        return self._wanted() + 1

    def _failed(self, epoch: int) -> Origin:
        version = self._trainers.updates.fail(epoch)
        return Origin(Source.TRAINER, failed_version(version, f"#{epoch}"))

    def _tell(self, peer: bytes, question: Status, current: Round, now: float) -> list[ev.Action]:
        """Who opens a weight update, or goes on with one, is heard in the order of questions; a hold counts from before the read.
        Who opens one is answered by a round that began when the record said so."""
        asked = question.update
        if asked is not None:
            self._trainers.updates.ask(asked, current.began + self._hold(), now, admit=self._led_long_enough(now))
            shown = self._trainers.updates.shown(now)
            if shown is not None and shown.number == asked.number and not self._may_push(shown.number, asked.since_seconds, current):
                self._trainers.ask(peer, question)
                return []
        return [ev.Send(peer, self._status(question, now))]
