"""What people and trainers do to a pool in a soak: resets, pauses, sleep, and pushes of weights in any way."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from epochkv_fence.client import PoolError
from hack.engine_api import EngineError
from hack.soak.faults import Actor
from hack.soak.tally import Tally
from hack.soak.world import Rank, World

UPDATE_SECONDS = 20.0
GIVE_UP_SECONDS = 180.0


class PushFailed(RuntimeError):
    """Made up by the soak: the trainer breaks off in the middle of a push."""


class Resets(Actor):
    """vLLM's own ways to clear, pause and sleep, on one engine at a time."""

    name = "reset"
    calm = (3.0, 9.0)
    PATHS = (
        ("/reset_prefix_cache?reset_external=false", ""),
        ("/reset_prefix_cache?reset_external=true", ""),
        ("/reset_prefix_cache?reset_external=true&reset_running_requests=true", ""),
        ("/pause?mode=keep&clear_cache=false", "/resume"),
        ("/pause?mode=abort&clear_cache=true", "/resume"),
        ("/sleep?level=1", "/wake_up"),
    )

    def act(self) -> None:
        rank = self.rng.choice(self.world.ranks)
        (path, undo), seconds = self.rng.choice(self.PATHS), self.rng.uniform(0.0, 1.0)
        with rank.control:
            self._post(rank, path)
            if undo:  # a pause that could not clear the caches holds all the same
                self.stop.wait(seconds)
                self._post(rank, undo)

    def _post(self, rank: Rank, path: str) -> None:
        version = rank.version
        if not rank.up:
            return
        try:
            answer = rank.engine.post(path, {}, 90.0)
        except EngineError as error:
            self.tally.count("refused resets")
            self.tally.note(f"{rank.name} {path}: {error}")
            if rank.up and rank.version == version and "no answer" in str(error):
                self.tally.problem("hanging call", engine=rank.name, path=path, error=error)
            return
        success = not isinstance(answer, dict) or answer.get("success", True)
        if path not in ("/resume", "/wake_up"):
            self.tally.count("resets" if success else "refused resets")
        self.tally.note(f"{rank.name} {path}: {'done' if success else 'refused'}")


class Trainer(Actor):
    """Pushes under pause and while engines serve, pushes that break off, resets of the pool."""

    name = "trainer"
    calm = (3.0, 9.0)

    def __init__(self, world: World, tally: Tally, seed: int, stop: threading.Event) -> None:
        super().__init__(world, tally, seed, stop)
        self._updates = 0

    def act(self) -> None:
        kind, number = self.rng.choice(("under pause", "serving", "serving", "unasked", "broken off", "reset")), self.rng.random()
        if kind == "reset":
            self._reset()
        elif kind == "broken off":
            self._break_off(number)
        elif kind == "unasked" or not all(rank.up for rank in self.world.ranks):  # a boot takes long, and no update is proved meanwhile
            self._push_unasked(number)
        else:
            self._update(number, paused=kind == "under pause")

    def update_all(self) -> None:
        """Push until it is proved that every engine holds the same, new weights."""
        deadline = time.monotonic() + GIVE_UP_SECONDS
        while time.monotonic() < deadline:
            if self._update(0.0, paused=False):
                return
            time.sleep(0.5)
        self.tally.problem("update never proved")

    def _update(self, number: float, paused: bool) -> bool:
        """Push to every engine that is up; returns whether it is proved that all hold the weights."""
        world, kind = self.world, "under pause" if paused else "while serving"
        with world.updates, world.pushing:
            folder = world.unheld(number)
            try:
                with world.trainer.weight_update(self._label(), timeout_s=UPDATE_SECONDS), self._way(paused):
                    self._push(folder)
            except (PoolError, EngineError) as error:
                self._failed(kind, error)
                return False
            self.tally.count("updates")
            self.tally.note(f"update {kind} to {folder.name}")
            return True

    def _push_unasked(self, number: float) -> None:
        """To every engine, by somebody who knows nothing of the pool."""
        with self.world.pushing:
            folder = self.world.unheld(number)
            try:
                self._push(folder)
            except EngineError as error:
                self._failed("unasked", error)
            else:
                self.tally.count("push unasked")
                self.tally.note(f"push unasked to {folder.name}")

    @contextmanager
    def _way(self, paused: bool) -> Iterator[None]:
        if not paused:
            yield
            return
        with self.world.paused(self.world.ranks):
            yield

    def _break_off(self, number: float) -> None:
        """One engine alone gets the weights, the others keep theirs."""
        with self.world.pushing:
            folder = self.world.unheld(number)
            try:
                with self.world.trainer.weight_update(self._label(), timeout_s=UPDATE_SECONDS):
                    self._push(folder, breaks=True)
            except PushFailed:
                self.tally.count("updates broken off")
            except (PoolError, EngineError) as error:
                self._failed("to one engine", error)

    def _reset(self) -> None:
        try:
            self.world.trainer.reset(timeout_s=UPDATE_SECONDS)
        except PoolError as error:
            self._failed("reset", error)
        else:
            self.tally.count("resets")
            self.tally.count("pool resets")

    def _push(self, folder: Path, breaks: bool = False) -> None:
        for rank in self.world.ranks:
            if rank.up:
                with rank.control:
                    self.world.push(rank, folder)
            if breaks:
                raise PushFailed

    def _label(self) -> str:
        self._updates += 1
        return f"soak-{self._updates}"

    def _failed(self, kind: str, error: Exception) -> None:
        self.tally.count("updates failed")
        self.tally.note(f"update {kind} failed: {error!r}")
