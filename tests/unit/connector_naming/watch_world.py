"""Ranks, names and a clock around one watch. No vLLM."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

from epochkv_connector.weights.watch import Watch, fold


def digest_of(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()


class World:
    """Ranks that hold a text each, names that are written down, and a clock that stands still.

    Attributes:
        log: everything that the watch did, in order.
        seconds: what a look takes.
        answers: changes what the ranks answer.
    """

    def __init__(self, *weights: str, has_encoder: bool = False) -> None:
        self.ranks = list(weights or ("a",))
        self.told: list[Any] = []
        self.log: list[Any] = []
        self.now = 1000.0
        self.seconds = 0.0
        self.asleep = False
        self.writes = 0
        self.asked: list[str] = []
        self.answers: Callable[[list[dict[str, Any]]], Sequence[dict[str, Any]]] = lambda answers: answers
        self.encoder_free = True
        # It never asks for adapters.
        self.watch = Watch(self, self, len(self.ranks), lambda: self.now, has_encoder=has_encoder)  # type: ignore[arg-type]

    @property
    def num_writes(self) -> int:
        return self.writes

    def digest_weights(self, number: int) -> Sequence[dict[str, Any]]:
        self.log.append("ask")
        self.now += self.seconds
        self.asked = list(self.ranks)
        return self.answers(
            [{"rank": index, "number": number, "weights": digest_of(held), "note": ""} for index, held in enumerate(self.ranks)]
        )

    def are_unchanged(self, number: int) -> bool:
        self.log.append("compare")
        return number == self.watch.number and self.asked == self.ranks

    def end_device_work(self) -> None:
        self.log.append("wait")

    def hold(self, weights: bytes | None) -> None:
        self.log.append(("hold", *self.watch.told) if weights is None else ("hold", weights))

    def end(self, weights: bytes) -> None:
        self.log.append(("end", weights))

    def tell(self) -> None:
        self.told.append(self.watch.told)

    def clear_encoder(self) -> bool:
        self.log.append("clear")
        return self.encoder_free

    def value(self) -> bytes:
        return fold(digest_of(held) for held in self.ranks)

    def step(self, seconds: float = 0.0) -> list[Any]:
        """A step after so long; what the watch did before it."""
        self.now += seconds
        self.log.clear()
        self.watch.before_schedule()
        return list(self.log)

    def push(self, weights: str, method: Any = "update_weights") -> None:
        self.watch.calling(method)
        self.ranks = [weights] * len(self.ranks)

    def started(self) -> World:
        self.step()
        self.log.clear()
        return self


def silent(rank: int, note: str) -> Callable[[list[dict[str, Any]]], list[dict[str, Any]]]:
    def answers(given: list[dict[str, Any]]) -> list[dict[str, Any]]:
        given[rank] |= {"weights": None, "note": note}
        return given

    return answers


def digest_of_one(text: str) -> bytes:
    return fold([digest_of(text)])
