"""One soak from start to verdict."""

from __future__ import annotations

import contextlib
import random
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hack import models
from hack.durations import clock
from hack.engine_api import EngineApi
from hack.soak.answers import Prompt, draw, work_out
from hack.soak.checks import Memory, leaks
from hack.soak.faults import Actor, FrozenEngine, Hub, KilledEngine, Lines, Master, StoreNode
from hack.soak.lone import LonePushes
from hack.soak.states import KINDS, Kind, States
from hack.soak.tally import Tally
from hack.soak.traffic import Client, ask
from hack.soak.trainer import Resets, Trainer
from hack.soak.world import World
from hack.standalone.engine import Engine
from hack.standalone.process import Popen
from hack.waiting import poll

NUM_PROMPTS = 40
CLIENTS_PER_ENGINE = 2
PROGRESS_SECONDS = 10.0
JOIN_SECONDS, DISMISS_SECONDS = 700.0, 10.0

Say = Callable[[str], None]


@dataclass(frozen=True)
class Verdict:
    """What came out. `lines` are for people; `problems` is empty when all is well."""

    closing: str
    lines: tuple[str, ...]
    problems: tuple[str, ...]
    faults: int
    resets: int
    updates: int
    hits: int
    ways: int


def make_weights(folder: Path, kind: Kind) -> list[Path]:
    """Three sets of weights for one architecture."""
    return [models.make(folder / name, seed, kind.shape) for seed, name in enumerate(("base", "new", "third"), 1)]


def work_out_answers(folder: Path, states: States, seed: int, say: Say, reference: EngineApi | None = None) -> list[Prompt]:
    """Prompts of this seed and their answers; with an engine of its own unless one without caches is given."""
    drawn = draw(NUM_PROMPTS, random.Random(f"{seed}:prompts"))
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        engine = reference or stack.enter_context(Engine("reference", states.whole[0], folder, prefix_caching=False))
        prompts = work_out(engine, states.all, drawn, say)
    say(f"answers worked out in {clock(time.monotonic() - began)}; a store, a hub and 3 engines start")
    return prompts


def soak(
    folder: Path,
    states: States,
    prompts: Sequence[Prompt],
    minutes: float,
    seed: int,
    say: Say,
    kind: Kind = KINDS["attention"],
    popen: Popen = subprocess.Popen,
) -> Verdict:
    """Run for `minutes` under faults, heal everything, and look for what is left; `popen` makes the engines' processes."""
    world, tally = World(folder, states, kind, popen), Tally(folder / "soak.log")
    crew: Crew | None = None
    try:
        began = time.monotonic()
        world.begin()
        took = clock(time.monotonic() - began)
        say(f"3 engines share after {took}; {minutes:g} minutes of faults begin (seed {seed}, log {folder / 'soak.log'})")
        crew = Crew(world, tally, prompts, seed, soon=minutes < 5)
        return _run(crew, minutes, say)
    finally:
        tally.close()
        if crew is not None:  # or they would start again what ends
            crew.stop.set()
            crew.stop_clients.set()
            deadline = time.monotonic() + DISMISS_SECONDS
            for actor in crew.actors:
                actor.join(max(0.0, deadline - time.monotonic()))
        world.end()


class Crew:
    """Everything that runs beside the processes: actors, clients, the watch on memory."""

    def __init__(self, world: World, tally: Tally, prompts: Sequence[Prompt], seed: int, soon: bool) -> None:
        self.world, self.tally, self.prompts = world, tally, prompts
        self.stop, self.stop_clients = threading.Event(), threading.Event()
        self.trainer = Trainer(world, tally, seed, self.stop)
        self.actors: list[Actor] = [kind(world, tally, seed, self.stop) for kind in (Master, Hub, Lines, FrozenEngine, Resets, LonePushes)]
        self.actors += [StoreNode(number, world, tally, seed, self.stop) for number in range(len(world.mooncake.stores))]
        self.actors += [KilledEngine(world.ranks[1:], world, tally, seed, self.stop, soon), self.trainer]
        self.clients = [
            Client(rank, world.ranks, prompts, tally, seed, 10 * rank.index + number, self.stop_clients)
            for rank in world.ranks
            for number in range(CLIENTS_PER_ENGINE)
        ]
        self.memory = Memory(world, self.stop_clients, tally.note)

    def start(self) -> None:
        for client in self.clients:
            client.start()
        for actor in self.actors:
            actor.start()
        self.memory.start()


def _run(crew: Crew, minutes: float, say: Say) -> Verdict:
    world, tally, memory = crew.world, crew.tally, crew.memory
    began = time.monotonic()
    crew.start()
    while (elapsed := time.monotonic() - began) < minutes * 60 and not tally["broken actor"]:
        time.sleep(min(PROGRESS_SECONDS, max(0.1, minutes * 60 - elapsed)))
        say(_progress(tally, memory, time.monotonic() - began, minutes * 60))
    crew.stop.set()
    elapsed = time.monotonic() - began
    for actor in crew.actors:
        if not actor.join(JOIN_SECONDS):
            tally.problem("hanging call", actor=actor.name)
    say(f"faults are over after {clock(elapsed)}; everything is healed, then looked at")
    _share_again(world, crew.trainer, crew.prompts, tally)
    crew.stop_clients.set()
    for client in crew.clients:
        if not client.join(JOIN_SECONDS):
            tally.problem("hanging call", what="a request")
    leaked = leaks(world, tally)
    say(f"healing and checks took {clock(time.monotonic() - began - elapsed)}")
    return _verdict(tally, memory, elapsed, leaked)


def _share_again(world: World, trainer: Trainer, prompts: Sequence[Prompt], tally: Tally) -> None:
    """After the last fault one update must be enough for every engine to share, and to be right."""
    trainer.update_all()
    if not poll(lambda: [engine.state for engine in world.trainer.engines()].count("sharing") == len(world.ranks), 60.0, 0.2):
        tally.problem("engines do not share again", states=[engine.state for engine in world.trainer.engines()])
        return
    before = tally["answers with a hit"]
    deadline = time.monotonic() + 60.0
    while tally["answers with a hit"] == before and time.monotonic() < deadline:
        for rank in world.ranks:
            ask(rank, prompts[0], tally)
    if tally["answers with a hit"] == before:
        tally.problem("engines do not share again", hits=0)


def _progress(tally: Tally, memory: Memory, elapsed: float, total: float) -> str:
    sizes = ", ".join(f"{name} {size:.0f}" for name, size in memory.last().items())
    return (
        f"{clock(elapsed)} of {clock(total)}, {clock(max(0.0, total - elapsed))} left: {tally['faults']} faults, {tally['resets']} resets, "
        f"{tally['updates']} updates, {tally['prompts']} prompts ({tally['answers with a hit']} with a hit), "
        f"{tally['wrong tokens']} wrong tokens, {len(tally.problems)} problems; MB: {sizes}"
    )


def _verdict(tally: Tally, memory: Memory, elapsed: float, leaked: int) -> Verdict:
    growths = memory.growths()
    for growth in growths:
        if not growth.flat:
            tally.problem("memory grows", what=str(growth))
    if memory.error is not None:
        tally.problem("nobody watched the memory", error=repr(memory.error))
    if not tally["answers with a hit"]:
        tally.problem("nothing was ever reused")
    lines = [
        "faults: " + ", ".join(f"{kind} {count}" for kind, count in tally.of("fault ").items()),
        f"answers: {tally['judged']} judged, {tally['answers with a hit']} of them with a hit, {tally['overlapped a push']} overlapped a "
        f"push, {tally['aborted by a pause']} aborted by a pause, {tally['requests lost with their engine']} lost with a killed engine, "
        f"{tally['failed requests']} failed",
        f"updates: {tally['updates']} done, {tally['updates broken off']} broken off, {tally['updates failed']} attempts failed, "
        f"{tally['pool resets']} plain resets of the pool, {tally['refused resets']} resets refused by vLLM",
        "other pushes: " + (", ".join(f"{way} {count}" for way, count in tally.of("push ").items()) or "none"),
        *(f"memory: {growth}" for growth in growths),
    ]
    closing = (
        f"{clock(elapsed)} min, {tally['faults']} faults, {tally['resets']} resets, {tally['prompts']} prompts, "
        f"{tally['wrong tokens']} wrong tokens, {leaked} leaked blocks"
    )
    faults, resets, updates, hits = (tally[kind] for kind in ("faults", "resets", "updates", "answers with a hit"))
    return Verdict(closing, tuple(lines), tuple(tally.problems), faults, resets, updates, hits, len(tally.of("push ")))
