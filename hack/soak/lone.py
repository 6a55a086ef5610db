"""Weights of one engine alone, in every way that they may change, while the others keep theirs."""

from __future__ import annotations

import threading
from pathlib import Path

from hack.engine_api import EngineError
from hack.soak.faults import Actor
from hack.soak.tally import Tally
from hack.soak.world import Rank, World


class LonePushes(Actor):
    """A push to one engine, one there and back, half of one, a write past vLLM: each way once, then each once more, and so on."""

    name = "lone push"
    calm = (2.0, 6.0)
    WAYS = ("to one", "there and back", "half", "past vLLM")

    def __init__(self, world: World, tally: Tally, seed: int, stop: threading.Event) -> None:
        super().__init__(world, tally, seed, stop)
        self._ways: list[str] = []

    def act(self) -> None:
        self._ways = self._ways or self.rng.sample(self.WAYS, len(self.WAYS))
        way, rank, number = self._ways.pop(), self.rng.choice(self.world.ranks), self.rng.random()
        with self.world.pushing, rank.control:
            if not rank.up:
                return
            try:
                done = self._change(way, rank, number)
            except EngineError as error:
                self.tally.note(f"{rank.name} push {way} failed: {error!r}")
                return
        if done:
            self.tally.count(f"push {way}")
            self.tally.note(f"{rank.name} push {way}: it holds {rank.weights.name if rank.weights else 'nobody knows what'}")

    def _change(self, way: str, rank: Rank, number: float) -> bool:
        world, states = self.world, self.world.states
        before = rank.weights
        others = [folder for folder in states.whole if folder != before]
        other = others[int(number * len(others))]
        if way == "to one":
            return world.push(rank, other)
        if way == "there and back":
            back = before if before in states.whole else other
            return world.push(rank, states.donors[back]) and world.push(rank, back)
        if before not in (states.flips if way == "past vLLM" else states.halves) and not world.push(rank, other):
            return False
        return world.write_past(rank, self._unnoticed) if way == "past vLLM" else world.push_half(rank)

    def _unnoticed(self, rank: Rank, state: Path) -> None:
        self.tally.problem("a write that nobody noticed", engine=rank.engine.name, weights=state.name)
