"""What people call the weights. The record keeps it, so that it survives a change of hub."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from epochkv_fence.protocol.authority import merged_labels
from epochkv_fence.protocol.messages import Label, Labelled

MAX_LABELLING: Final = 256


class Labels:
    """The labels of one pool.

    Attributes:
        known: the durable labels by the digest of their weights, the newest last.
    """

    def __init__(self) -> None:
        self.known: dict[bytes, str] = {}
        self._waiting: list[tuple[bytes, Label]] = []
        self._writing: list[tuple[bytes, Label]] = []

    def lead(self, recorded: Mapping[bytes, str]) -> None:
        """A term begins. Another hub may have written since, so the record counts, not what this one remembers."""
        self.known = dict(recorded)

    def found(self, recorded: Mapping[bytes, str]) -> bool:
        """These labels are on record, or were; return whether any of them is new here."""
        before, self.known = self.known, merged_labels(recorded, self.known)
        return before != self.known

    def forget(self) -> list[bytes]:
        """A term ends, and another hub may write other labels. Returns who waits for an answer."""
        peers = [peer for peer, _ in [*self._writing, *self._waiting]]
        self._waiting, self._writing = [], []
        return peers

    # ------------------------------------------------------------------ asks and writes

    def ask(self, peer: bytes, asked: Label) -> Labelled | None:
        """A trainer wants this label; return the answer if the label is durable already.

        Beyond a limit the oldest ask goes, because its trainer asks again.
        """
        under_way = any(other.weights == asked.weights for _, other in [*self._writing, *self._waiting])
        if self.known.get(asked.weights) == asked.label and not under_way:
            return _answer(asked)
        self._waiting.append((peer, asked))
        del self._waiting[:-MAX_LABELLING]
        return None

    @property
    def unwritten(self) -> bool:
        """A label waits to be written, and no write is under way."""
        return bool(self._waiting) and not self._writing

    def write(self) -> dict[bytes, str]:
        """Begin to write what waits; return it."""
        self._writing, self._waiting = self._waiting, []
        return self._batch()

    def written(self, labels: Mapping[bytes, str]) -> list[tuple[bytes, Labelled]]:
        """These labels are durable; return the answers, to everyone who asked."""
        if labels != self._batch():
            return []
        self.known = merged_labels(self.known, labels)
        answers = [(peer, _answer(asked)) for peer, asked in self._writing]
        self._writing = []
        return answers

    def write_failed(self, labels: Mapping[bytes, str]) -> None:
        """These labels may be durable or not. Whoever wants them asks again."""
        if labels == self._batch():
            self._writing = []

    def _batch(self) -> dict[bytes, str]:
        batch: dict[bytes, str] = {}
        for _, asked in self._writing:
            batch = merged_labels(batch, {asked.weights: asked.label})
        return batch


def _answer(asked: Label) -> Labelled:
    return Labelled(asked.request, asked.weights, asked.label)
