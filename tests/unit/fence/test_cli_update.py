"""`epochkv update`: a command that pushes weights, and the wait for them."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from epochkv_fence.cli.asking import environment, run
from epochkv_fence.client import Pool
from hack.cluster.process import start_time
from hack.waiting import eventually
from tests.support.fence import NEW, OLD, Running, engine_with, push
from tests.support.hub import CLI, Agents, HubProcess, epochkv, using


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    with HubProcess(tmp_path / "state", "--lease-seconds", "5") as made:
        yield made


@contextlib.contextmanager
def pushing_when(path: Path, engines: Sequence[Running], holds: bytes) -> Iterator[None]:
    """While a command runs: engines get these weights as soon as it has made this file."""
    thread = threading.Thread(target=lambda: (eventually(path.exists, "the command runs", 60), push(engines, holds)))
    thread.start()
    yield
    thread.join(60)


def test_update_runs_the_command_and_waits_for_its_weights(hub: HubProcess, agents: Agents, tmp_path: Path) -> None:
    engines = [agents.start(engine=engine_with(OLD)) for _ in range(2)]
    eventually(lambda: all(using(agent, 0) for agent, _ in engines))
    script = "import os, sys; print('pushed'); open(sys.argv[1], 'w').write(repr([os.environ.get(k) for k in sys.argv[2:]]))"
    seen = tmp_path / "seen"
    command = ("--", sys.executable, "-c", script, str(seen), "EPOCHKV_WEIGHTS_VERSION", "EPOCHKV_CONFIG")
    with pushing_when(seen, engines, NEW):
        done = epochkv("update", "--version", "step-1", "--config", str(hub.folder), *command)
    assert (done.returncode, done.stdout) == (0, "pushed\nall 2 engines hold 3f2a9c1e (step-1)\n"), done.stderr
    assert seen.read_text() == repr(["step-1", str(hub.folder)])
    seen.unlink()
    with pushing_when(seen, engines, OLD):
        done = epochkv("update", "--version", "step-2", "-o", "json", *command, config=Path(os.path.relpath(hub.folder)))
    assert seen.read_text() == repr(["step-2", str(hub.folder)]), "relative paths are the caller's"
    found = json.loads(done.stdout)
    assert "pushed" in done.stderr, "what the command prints is no part of the JSON"
    assert (done.returncode, found["equal"], found["groups"][0]["label"]) == (0, True, "step-2")
    assert hub.target() == 0


def test_weights_that_engines_held_before_are_a_line_and_a_status_on_request(hub: HubProcess, agents: Agents, tmp_path: Path) -> None:
    engines = [agents.start(engine=engine_with(OLD))]
    with Pool.connect(hub.folder) as pool:
        pool.wait_weights(label="step-0", timeout_s=30)
    held, seen = "0a0a0a0a (v): engines held these weights before, as step-0", tmp_path / "seen"
    for options, status in ((["--only-new"], 3), ([], 0)):
        for weights, said in ((NEW, False), (OLD, True)):
            with pushing_when(seen, engines, weights):
                done = epochkv("update", "--version", "v", *options, "--timeout", "30", "--", "touch", str(seen), config=hub.folder)
            seen.unlink()
            assert done.returncode == (status if said else 0), done.stderr
            assert (held in done.stderr) is said


def test_the_command_of_an_update_finds_a_configuration_in_the_home_of_its_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert environment({"EPOCHKV_CONFIG": "~/client"}, None, "")["EPOCHKV_CONFIG"] == f"{tmp_path}/client"


def test_an_engine_that_missed_the_push_is_status_3_and_named(hub: HubProcess, agents: Agents, tmp_path: Path) -> None:
    engines = [agents.start(engine=engine_with(OLD)) for _ in range(2)]
    eventually(lambda: all(using(agent, 0) for agent, _ in engines))
    with pushing_when(tmp_path / "seen", engines[:1], NEW):
        done = epochkv("update", "--version", "v", "--timeout", "3", "--", "touch", str(tmp_path / "seen"), config=hub.folder)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines() == [
        "epochkv: waiting for the new weights of engine-1",
        "epochkv: not all engines of pool policy hold the same, new weights after 3 s: engine-1 does not. "
        "Now 3f2a9c1e: engine-0; 0a0a0a0a (before-v): engine-1",
    ]


def test_a_command_that_fails_passes_its_status_and_nothing_is_waited_for(hub: HubProcess, agents: Agents, tmp_path: Path) -> None:
    agent, _ = agents.start()
    eventually(lambda: using(agent, 0))
    done = epochkv("update", "--version", "step-1", "--", "sh", "-c", "echo pushing; exit 7", config=hub.folder)
    assert (done.returncode, done.stdout) == (7, "pushing\n")
    assert done.stderr == "epochkv: the command ended with status 7; `epochkv weights` shows which engines hold what\n"
    done = epochkv("update", "--version", "step-1", "--", "sh", "-c", "kill -KILL $$", config=hub.folder)
    assert done.returncode == 128 + 9
    (none := tmp_path / "none").write_text("#!/nobody/is/here\n")
    none.chmod(0o700)
    done = epochkv("update", "--version", "step-1", "--", str(none), config=hub.folder)
    assert (done.returncode, done.stderr) == (126, f"epochkv: {none} cannot be started: No such file or directory\n")
    assert hub.target() == 0


def test_a_hub_that_is_gone_after_the_command_is_status_4(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path / "state").start()
    try:
        command = ("--timeout", "3", "--", "kill", "-STOP", str(hub.child.pid))
        done = epochkv("update", "--version", "step-1", *command, config=hub.folder)
    finally:
        hub.end()
    assert done.returncode == 4
    first, second = done.stderr.splitlines()
    assert first.startswith("epochkv: no answer from the hub at tcp://")
    assert second == "epochkv: COMMAND ended well; `epochkv weights` shows which engines hold what"


def test_signals_reach_the_whole_process_group_of_the_command(hub: HubProcess, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 300 & echo $$ $! > {pids}.part && mv {pids}.part {pids}; wait"
    command = [*CLI, "update", "--version", "v", "--config", str(hub.folder), "--", "sh", "-c", script]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    eventually(pids.exists, "the command runs", 60)
    shell, sleeper = (int(word) for word in pids.read_text().split())
    assert os.getpgid(shell) == os.getpgid(sleeper) == shell != os.getpgid(child.pid)
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 128 + 15
    eventually(lambda: start_time(shell) is start_time(sleeper) is None, "shell and grandchild are gone")
    assert errors == "epochkv: the command ended with status 143; `epochkv weights` shows which engines hold what\n"


def test_a_signal_that_is_ignored_stays_so_as_under_nohup() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert run(["sh", "-c", "kill -HUP $PPID; kill -HUP $$; exit 7"], os.environ) == 7
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_command_has_the_terminal(hub: HubProcess) -> None:
    """A command in a process group of its own that reads from a terminal would be stopped, and hang for ever."""
    script = "read line; echo got:$line"
    update = ("update", "--version", "v", "--timeout", "3", "--config", str(hub.folder), "--", "sh", "-c", script)
    pid, master = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [*CLI, *update])
    os.write(master, b"hello\n")
    text = b""
    with contextlib.suppress(OSError):  # at its end
        while True:
            text += os.read(master, 4096)
    os.close(master)
    assert b"got:hello" in text
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 3
