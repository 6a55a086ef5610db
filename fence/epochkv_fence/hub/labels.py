"""What weights are called: for people, kept on record so that it survives a change of hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from epochkv_fence.protocol.authority import merged_labels
from epochkv_fence.protocol.messages import Label, Labelled

MAX_LABELLING: Final = 256


class Labels:
    """Of one pool.

    Attributes:
        known: durable ones, by the digest of the weights, newest last.
    """

    def __init__(self) -> None:
        self.known: dict[bytes, str] = {}
        self._waiting: list[tuple[bytes, Label]] = []
        self._writing: list[tuple[bytes, Label]] = []

    def lead(self, recorded: Mapping[bytes, str]) -> None:
        """Another hub may have written since: the record counts, not what this one remembers."""
        self.known = dict(recorded)

    def found(self, recorded: Mapping[bytes, str]) -> bool:
        """These are on record, or were; returns whether any of them is new here."""
        before, self.known = self.known, merged_labels(recorded, self.known)
        return before != self.known

    def forget(self) -> list[bytes]:
        """Another hub leads meanwhile, and may write others; returns who waits for an answer."""
        peers = [peer for peer, _ in [*self._writing, *self._waiting]]
        self._waiting, self._writing = [], []
        return peers

    # ------------------------------------------------------------------ asks and writes

    def ask(self, peer: bytes, asked: Label) -> Labelled | None:
        """A trainer wants this label; the answer, if it is durable already. Beyond a limit the oldest ask is dropped: its
        asker asks again."""
        under_way = any(other.weights == asked.weights for _, other in [*self._writing, *self._waiting])
        if self.known.get(asked.weights) == asked.label and not under_way:
            return _answer(asked)
        self._waiting.append((peer, asked))
        del self._waiting[:-MAX_LABELLING]
        return None

    @property
    def unwritten(self) -> bool:
        """There is something to write, and no write is under way."""
        return bool(self._waiting) and not self._writing

    def write(self) -> dict[bytes, str]:
        """A write of these is under way."""
        self._writing, self._waiting = self._waiting, []
        return self._batch()

    def written(self, labels: Mapping[bytes, str]) -> list[tuple[bytes, Labelled]]:
        """They are durable; the answers, of several for the same weights to all who asked."""
        if labels != self._batch():
            return []
        self.known = merged_labels(self.known, labels)
        answers = [(peer, _answer(asked)) for peer, asked in self._writing]
        self._writing = []
        return answers

    def write_failed(self, labels: Mapping[bytes, str]) -> None:
        """They may be durable or not: whoever wants them asks again."""
        if labels == self._batch():
            self._writing = []

    def _batch(self) -> dict[bytes, str]:
        batch: dict[bytes, str] = {}
        for _, asked in self._writing:
            batch = merged_labels(batch, {asked.weights: asked.label})
        return batch


def _answer(asked: Label) -> Labelled:
    return Labelled(asked.request, asked.weights, asked.label)
