"""What people and trainers do to a pool in a soak: resets, pauses, sleep, and weight updates in both safe orders."""

from __future__ import annotations

import threading
import time
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
    """Weight updates under pause and fence first, updates that break off, plain resets of the pool."""

    name = "trainer"
    calm = (3.0, 9.0)

    def __init__(self, world: World, tally: Tally, seed: int, stop: threading.Event) -> None:
        super().__init__(world, tally, seed, stop)
        self._updates = 0

    def act(self) -> None:
        kind = self.rng.choice(("under pause", "under pause", "fence first", "fence first", "broken off", "plain"))
        others = [folder for folder in self.world.weights[1:] if folder != self.world.current]
        folder = others[int(self.rng.random() * len(others))]
        with self.world.updates:
            if kind == "under pause":
                self.under_pause(folder)
            elif kind == "plain":
                self._plain()
            else:
                self._fence_first(folder, breaks=kind == "broken off")

    def under_pause(self, folder: Path) -> None:
        """Pause, push, raise, resume. Once weights were pushed, engines stay paused until an update is published."""
        world, deadline = self.world, time.monotonic() + GIVE_UP_SECONDS
        with world.updates, world.paused(world.ranks) as taken:
            idle = [rank for rank in world.ranks if rank.up and rank not in taken]
            if idle:
                self.tally.problem("hanging call", path="/pause", engines=[rank.name for rank in idle])
                return
            begun = False
            while time.monotonic() < deadline:
                try:
                    with world.trainer.weight_update(self._version(), timeout_s=UPDATE_SECONDS) as update:
                        begun = True
                        self._push(folder)
                    assert update.reset is not None
                    if update.reset.published or world.trainer.wait(update.reset.epoch, timeout_s=60.0).published:
                        self._done(folder, "under pause")
                        return
                except (PoolError, EngineError) as error:
                    self._failed("under pause", error)
                    if not begun:
                        return
                time.sleep(0.5)
            self.tally.problem("update never published", folder=folder.name)

    def _fence_first(self, folder: Path, breaks: bool) -> None:
        try:
            with self.world.trainer.weight_update(self._version(), order="fence_first", timeout_s=UPDATE_SECONDS):
                self._push(folder, breaks)
        except PushFailed:
            self.tally.count("updates broken off")
        except (PoolError, EngineError) as error:
            self._failed("fence first", error)
        else:
            self._done(folder, "fence first")

    def _plain(self) -> None:
        """By age: for pools in which everybody has the same weights."""
        known = {rank.weights for rank in self.world.ranks}
        if len(known) > 1 or None in known:
            return
        try:
            self.world.trainer.reset(timeout_s=UPDATE_SECONDS)
        except PoolError as error:
            self._failed("plain reset", error)
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

    def _version(self) -> str:
        self._updates += 1
        return f"soak-{self._updates}"

    def _done(self, folder: Path, kind: str) -> None:
        self.world.current = folder
        self.tally.count("resets")
        self.tally.count("updates")
        self.tally.note(f"update {kind} to {folder.name}")

    def _failed(self, kind: str, error: Exception) -> None:
        self.tally.count("updates failed")
        self.tally.note(f"update {kind} failed: {error!r}")
