"""The soak's own judgement: what it counts as wrong, failed, leaked or growing, and that a seed replays its plan."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import threading
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hack import models
from hack.engine_api import EngineError
from hack.models import Shape
from hack.soak import __main__ as program
from hack.soak import checks
from hack.soak.answers import BLOCK_TOKENS, Prompt, certain_answer, draw
from hack.soak.checks import Growth, Memory
from hack.soak.faults import Actor, start_again
from hack.soak.lone import LonePushes
from hack.soak.run import _verdict
from hack.soak.states import EMBEDDING, FLIPPED, KINDS, States, tensor_of
from hack.soak.tally import Tally
from hack.soak.traffic import ask
from hack.soak.world import HubProcess, Rank, World
from hack.standalone.engine import Engine
from hack.standalone.process import Process, ProcessError

BASE, NEW = Path("base"), Path("new")
PROMPT = Prompt((5, 6, 7), {BASE: (1, 2, 3), NEW: (4, 5, 6)})


class Server:
    """An engine's HTTP side with a made-up reply."""

    name = model = "A1"

    def __init__(self, tokens: tuple[int, ...] = (1, 2, 3), cached: int = 0, reason: str = "length") -> None:
        usage = {"prompt_tokens_details": {"cached_tokens": cached}}
        self.reply: Any = {"choices": [{"token_ids": list(tokens), "finish_reason": reason}], "usage": usage}
        self.meanwhile = lambda: None
        self.error: EngineError | None = None
        self.metrics = ""

    def post(self, path: str, body: Mapping[str, Any], seconds: float = 0.0) -> Any:
        self.meanwhile()
        if self.error:
            raise self.error
        return self.reply

    def complete(self, prompt: object, max_tokens: int = 8) -> None:
        return None

    def request(self, method: str, path: str, seconds: float = 0.0) -> bytes:
        return self.metrics.encode()


def rank_of(server: Server) -> Rank:
    return Rank(0, server, BASE)  # type: ignore[arg-type]


@pytest.fixture
def tally(tmp_path: Path) -> Tally:
    return Tally(tmp_path / "log")


def test_a_right_answer_is_judged_and_its_hit_counted(tally: Tally) -> None:
    assert ask(rank_of(Server(cached=128)), PROMPT, tally)
    assert (tally["judged"], tally["answers with a hit"], tally["wrong tokens"], tally.problems) == (1, 1, 0, [])


@pytest.mark.parametrize(("tokens", "wrong"), [((1, 9, 3), 1), ((4, 5, 6), 3), ((1, 2), 1), ((1, 2, 3, 4), 1)])
def test_every_wrong_token_is_counted_and_reported(tally: Tally, tokens: tuple[int, ...], wrong: int) -> None:
    ask(rank_of(Server(tokens)), PROMPT, tally)
    assert tally["wrong tokens"] == wrong
    (report,) = tally.problems
    assert report.startswith("wrong answers")
    assert ("new" in report) == (tokens == (4, 5, 6)), "the report names the weights that the answer belongs to"


@pytest.mark.parametrize("steps", [1, 2])
def test_an_answer_that_meets_a_push_or_a_kill_is_not_judged(tally: Tally, steps: int) -> None:
    server = Server((9, 9, 9))
    rank = rank_of(server)
    server.meanwhile = lambda: rank.move(steps)
    ask(rank, PROMPT, tally)
    assert (tally["overlapped a push"], tally["judged"], tally.problems) == (1, 0, [])
    if steps == 1:
        assert not ask(rank, PROMPT, tally), "nobody is asked in the middle of a push"


def test_a_failed_request_is_a_problem_unless_its_engine_was_killed(tally: Tally) -> None:
    server = Server()
    rank, server.error = rank_of(server), EngineError("HTTP 500")
    assert not ask(rank, PROMPT, tally)
    assert tally["failed requests"] == 1
    server.meanwhile = lambda: rank.move(2)
    ask(rank, PROMPT, tally)
    assert (tally["failed requests"], tally["requests lost with their engine"]) == (1, 1)


def test_an_aborted_answer_is_counted_apart(tally: Tally) -> None:
    ask(rank_of(Server((1,), reason="abort")), PROMPT, tally)
    assert (tally["aborted by a pause"], tally["judged"], tally.problems) == (1, 0, [])


def test_what_an_idle_engine_holds_is_a_leak(tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    server = Server()

    class World:
        ranks = (rank_of(server),)

    clean = 'vllm:epochkv_slots{state="total",engine="0"} 60\nvllm:epochkv_jobs_open{engine="1"} 0.0\n'
    server.metrics = clean
    assert checks.leaks(World(), tally, 0.2) == 0  # type: ignore[arg-type]
    for held in (
        'vllm:kv_cache_usage_perc{engine="0"} 0.025',
        'vllm:epochkv_jobs_open{engine="0"} 1',
        'vllm:epochkv_slots{state="busy",engine="0"} 2',
        'vllm:epochkv_rank_open{what="copies",rank="1",engine="0"} 1',
    ):
        server.metrics = f"{clean}{held}\n"
        before = len(tally.problems)
        assert checks.leaks(World(), tally, 0.2) == 1  # type: ignore[arg-type]
        assert len(tally.problems) == before + 1
    server.metrics = ""
    assert checks.leaks(World(), tally, 0.2) == 1, "an engine without metrics of the connector"  # type: ignore[arg-type]


@pytest.mark.parametrize(("minutes", "grown_mb", "flat"), [(10, 10, True), (10, 39, True), (10, 60, False), (1, 30, False), (30, 49, True)])
def test_what_counts_as_flat(minutes: float, grown_mb: float, flat: bool) -> None:
    assert Growth("A1", minutes, 800e6, 800e6 + grown_mb * 1e6).flat is flat


def test_growth_is_told_from_medians_after_the_warm_up() -> None:
    memory = Memory(None, threading.Event())  # type: ignore[arg-type]
    memory._samples["A1"] = [(float(at), 500 if at < 120 else 1000 + (100 if at > 600 else 0)) for at in range(0, 700, 5)]
    memory._samples["short"] = [(float(at), 1) for at in range(0, 145, 5)]
    (growth,) = memory.growths()
    assert (growth.name, growth.begin, growth.end) == ("A1", 1000, 1100)


def test_memory_is_told_by_process_and_a_process_that_has_ended_has_none() -> None:
    child = subprocess.Popen(["sleep", "0"], start_new_session=True)
    while "(sleep) Z" not in Path(f"/proc/{child.pid}/stat").read_text():
        time.sleep(0.01)
    assert checks.group_memory(child.pid) == {}
    child.wait()
    assert sum(checks.group_memory(os.getpgrp()).values()) > 5 << 20


@pytest.fixture
def states(tmp_path: Path) -> States:
    small = Shape(vocab=8, hidden=4, intermediate=4, layers=1, heads=1, kv_heads=1, head_dim=4)
    return States.make(tmp_path, [models.make(tmp_path / name, seed, small) for seed, name in enumerate(("base", "new", "third"), 1)])


def test_every_state_of_weights_is_a_folder_that_differs_from_the_others_as_it_should(states: States) -> None:
    base, new, third = states.whole
    assert (states.donors[base], states.donors[third]) == (new, base)
    half, flipped = states.halves[third], states.flips[base]
    assert tensor_of(half, EMBEDDING) == tensor_of(base, EMBEDDING) != tensor_of(third, EMBEDDING)
    assert tensor_of(half, "lm_head.weight") == tensor_of(third, "lm_head.weight") != tensor_of(base, "lm_head.weight")
    assert array("f", tensor_of(flipped, FLIPPED)).tolist() == [-value for value in array("f", tensor_of(base, FLIPPED))]
    assert tensor_of(flipped, EMBEDDING) == tensor_of(base, EMBEDDING)
    assert states.flips[flipped] == base
    assert len(states.all) == len({(folder / "model.safetensors").read_bytes() for folder in states.all}) == 9
    assert all((folder / "config.json").exists() for folder in states.all)


@dataclass
class Logged:
    log: Path


class Held(Server):
    """An engine whose log says what it holds, and which writes what is ordered when it makes a step; `deaf`: and does not notice."""

    def __init__(self, folder: Path, deaf: bool) -> None:
        super().__init__()
        self.process = Logged(folder / "log")
        self._log("EpochKV: weights 11111111, seen")
        self._orders, self._deaf = folder / "A1.orders", deaf
        self._orders.mkdir()

    def _log(self, line: str) -> None:
        with self.process.log.open("a") as log:
            log.write(f"{line}\n")

    def complete(self, prompt: object, max_tokens: int = 8) -> None:
        for order in self._orders.glob("*.order"):
            assert order.read_text() == "-1"
            order.unlink()
            if not self._deaf:
                self._log("EpochKV: weights 22222222, seen")


@pytest.mark.parametrize("deaf", [False, True])
def test_a_write_past_vllm_counts_when_the_engine_says_so_and_silence_is_a_problem(
    states: States, tally: Tally, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deaf: bool
) -> None:
    monkeypatch.setattr("hack.soak.world.WRITE_SECONDS", 0.2)
    base = states.whole[0]
    lone, rank = LonePushes(World(tmp_path, states, KINDS["attention"]), tally, 1, threading.Event()), Rank(0, Held(tmp_path, deaf), base)  # type: ignore[arg-type]
    assert lone._change("past vLLM", rank, 0.0) is not deaf
    assert rank.weights == (None if deaf else states.flips[base])
    assert rank.version == 2
    assert [problem.split(":")[0] for problem in tally.problems] == (["a write that nobody noticed"] if deaf else [])


def test_half_a_push_leaves_what_its_folder_holds_and_a_dead_engine_nothing(states: States, tmp_path: Path) -> None:
    world, server, base = World(tmp_path, states, KINDS["attention"]), Server(), states.whole[0]
    rank = Rank(0, server, base)  # type: ignore[arg-type]
    server.error = EngineError("HTTP 500: the push broke off")
    assert world.push_half(rank)
    assert (rank.weights, rank.version) == (states.halves[base], 2)
    rank.weights, server.error = base, EngineError("no answer")
    with pytest.raises(EngineError):
        world.push_half(rank)
    assert rank.weights is None, "nobody knows, so nobody asks it"
    rank.weights, rank.up = base, False
    assert not world.push_half(rank)


def test_a_push_to_all_changes_something(states: States, tmp_path: Path) -> None:
    world, (base, new, third) = World(tmp_path, states, KINDS["attention"]), states.whole
    for held, targets in (
        ((base, base), {new, third}),
        ((base, new), {third}),
        ((states.halves[base], new), {base, third}),
        ((base, new, third), {new, third}),
    ):
        world.ranks = [Rank(index, Server(), weights) for index, weights in enumerate(held)]  # type: ignore[arg-type]
        assert {world.unheld(number / 10) for number in range(10)} == targets


class Recorder(Actor):
    name = "recorder"
    calm = (0.0, 0.001)

    def act(self) -> None:
        self.tally.note(str(self.rng.random()))
        self.tally.count("acts")
        if self.tally["acts"] == 20:
            self.stop.set()


def test_a_seed_replays_prompts_and_faults(tmp_path: Path) -> None:
    logs = []
    for name, seed in (("one", 7), ("two", 7), ("three", 8)):
        tally = Tally(tmp_path / name)
        actor = Recorder(None, tally, seed, threading.Event())  # type: ignore[arg-type]
        actor.start()
        assert actor.join(10.0)
        logs.append([line.split()[1] for line in (tmp_path / name).read_text().splitlines()])
    assert len(logs[0]) == 20
    assert logs[0] == logs[1] != logs[2]
    assert draw(5, random.Random("7")) == draw(5, random.Random("7")) != draw(5, random.Random("8"))
    assert all(len(prompt) >= BLOCK_TOKENS for prompt in draw(50, random.Random("9")))


def test_a_broken_actor_is_a_problem(tally: Tally) -> None:
    class Broken(Actor):
        name, calm = "broken", (0.0, 0.001)

        def act(self) -> None:
            raise RuntimeError("no such thing")

    actor = Broken(None, tally, 1, threading.Event())  # type: ignore[arg-type]
    actor.start()
    assert actor.join(10.0)
    assert tally["broken actor"] == 1
    assert "no such thing" in tally.problems[0]


def test_what_fails_while_everything_is_being_ended_is_no_problem(tally: Tally, tmp_path: Path) -> None:
    tally.problem("failed requests", engine="A")
    tally.close()
    tally.problem("broken actor", name="engine", error="its boot was cut short")
    assert (len(tally.problems), tally["failed requests"], tally["broken actor"]) == (1, 1, 0)
    assert "after the end: broken actor: name=engine" in (tmp_path / "log").read_text()


def test_an_engine_that_dies_in_the_middle_of_an_answer_gave_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer_half() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")

        thread = threading.Thread(target=answer_half)
        thread.start()
        engine = Engine.__new__(Engine)  # no process
        engine.name, engine.port = "A1", listener.getsockname()[1]
        with pytest.raises(EngineError, match="A1 /health: no answer: IncompleteRead"):
            engine.request("GET", "/health", seconds=10.0)
        thread.join(10.0)


def test_what_started_too_slowly_is_ended_before_the_next_attempt(tmp_path: Path, tally: Tally, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    started: list[Process] = []

    def start() -> Process:
        assert not [process for process in started if process.alive()], "it keeps the port"
        started.append(Process("slow", ["sleep", "60"], tmp_path / "log"))
        if len(started) < 3:
            raise ProcessError("not ready")
        return started[-1]

    start_again(start, lambda: started[-1], tally)
    assert [process.alive() for process in started] == [False, False, True]
    started[-1].end()


def test_an_answer_that_hangs_on_rounding_is_none() -> None:
    server = Server()
    choice = server.reply["choices"][0]
    choice["logprobs"] = {"top_logprobs": [{"a": -0.1, "b": -3.0}, {"a": -0.5, "b": -0.6}]}
    assert certain_answer(server, (1,)) == (1, 2, 3)  # type: ignore[arg-type]
    choice["logprobs"]["top_logprobs"].append({"a": -0.70001, "b": -0.70002})
    assert certain_answer(server, (1,)) is None  # type: ignore[arg-type]


def test_the_verdict_names_every_problem_and_ends_with_the_figures(tally: Tally) -> None:
    memory = Memory(None, threading.Event())  # type: ignore[arg-type]
    memory._samples["A1"] = [(float(at), 1_000_000_000 + (200_000_000 if at > 600 else 0)) for at in range(0, 700, 5)]
    for kind, count in {"faults": 812, "resets": 95, "prompts": 4211, "answers with a hit": 9, "fault master kill": 3}.items():
        tally.count(kind, count)
    verdict = _verdict(tally, memory, 1200.4, 0)
    assert verdict.closing == "20:00 min, 812 faults, 95 resets, 4211 prompts, 0 wrong tokens, 0 leaked blocks"
    assert any("master kill 3" in line for line in verdict.lines)
    (problem,) = verdict.problems
    assert problem.startswith("memory grows: what=A1 1000 -> 1200 MB")


def test_a_soak_in_which_nothing_was_reused_shows_nothing(tally: Tally) -> None:
    assert _verdict(tally, Memory(None, threading.Event()), 60.0, 0).problems == ("nothing was ever reused: ",)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["0", "-1", "-0.5", "nan", "inf", "two", ""])
def test_a_soak_without_a_duration_is_refused_with_a_sentence(
    given: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["hack.soak", f"--minutes={given}"])
    with pytest.raises(SystemExit) as end:
        program.main()
    assert end.value.code == 2
    said = capsys.readouterr()
    assert f"{given!r} is no duration of faults; give minutes above 0" in said.err
    assert said.out == "", "nothing was begun"


def test_a_world_that_could_not_begin_ends_what_it_had_started(tmp_path: Path) -> None:
    """Its hub cannot use its folder, and is known all the same; an engine stands still in its start."""
    folder = tmp_path / "hub"
    folder.write_text("no folder")
    world = World(tmp_path, States((BASE,), {}, {}, {}), KINDS["attention"])
    frozen = tmp_path / "python"
    frozen.write_text("#!/bin/sh\nkill -STOP $$\n")
    frozen.chmod(0o755)
    world.ranks.append(Rank(0, Engine("A1", BASE, tmp_path, python=frozen), BASE))
    world.hub = HubProcess(tmp_path)
    with pytest.raises(ProcessError, match=r"hub ended with status \d+ before leading"):
        world.hub.start()
    world.end()
    assert [process.alive() for process in (world.hub.process, world.ranks[0].engine.process)] == [False, False]
    world.end()
