"""The command `epochkv` as people and scripts use it: real processes, their exit statuses, what they print and leave behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from epochkv_fence.client import Pool
from hack.loopback import free_port
from hack.waiting import eventually
from tests.support.cli import inside
from tests.support.fence import FakeEngine
from tests.support.hub import CLI, Agents, HubProcess, epochkv, interruptible, using
from tests.support.pushes import NEW, OLD, OTHER, Running, engine_with, push


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with HubProcess(tmp_path_factory.mktemp("cli") / "state", "--lease-seconds", "2") as made:
        yield made


@pytest.fixture
def agents(hub: HubProcess) -> Iterator[Agents]:
    made = Agents(hub.folder)
    yield made
    made.stop()


def target(hub: HubProcess) -> int:
    with Pool.connect(hub.folder) as pool:
        return pool.status().target


# --------------------------------------------------------------------------------------------------------------- asking


def test_reset_status_wait_engines(hub: HubProcess, agents: Agents) -> None:
    agent, engine = agents.start("rollout-a")
    engine.num_carried = 2
    eventually(lambda: agent.view.epoch is not None)
    before = target(hub)
    done = epochkv("reset", config=hub.folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"epoch {before + 1} published in ")
    assert "2 running requests go on with what they held" in done.stdout
    shown = epochkv("status", "-o", "json", "--config", str(hub.folder / "connection.json"))
    status = json.loads(shown.stdout)
    assert (status["name"], status["target"], status["published"], status["origin"]) == ("policy", before + 1, before + 1, "Trainer")
    table = epochkv("engines", config=hub.folder).stdout
    assert "rollout-a" in table
    (row,) = json.loads(epochkv("engines", "-o", "json", config=hub.folder).stdout)
    assert (row["name"], row["epoch"], row["carried"]) == ("rollout-a", before + 1, 2)
    waited = epochkv("wait", str(before + 1), "-o", "json", config=hub.folder)
    assert (waited.returncode, json.loads(waited.stdout)["published"]) == (0, True)


def test_a_named_epoch_twice_is_done_twice(hub: HubProcess) -> None:
    epoch = str(target(hub) + 3)
    first, second = (epochkv("reset", "--epoch", epoch, "-o", "json", config=hub.folder) for _ in range(2))
    assert (first.returncode, second.returncode) == (0, 0)
    assert [json.loads(done.stdout)["noop"] for done in (first, second)] == [False, True]
    assert "was published before, so nothing was reset" in epochkv("reset", "--epoch", epoch, config=hub.folder).stdout


def test_what_is_not_published_in_time_is_status_3_with_names(hub: HubProcess, agents: Agents) -> None:
    agent, engine = agents.start("stuck")
    eventually(lambda: agent.view.epoch is not None)
    engine.is_busy = True
    late = epochkv("reset", "--timeout", "0.8", config=hub.folder)
    assert late.returncode == 3
    assert "not acknowledged by: stuck" in late.stdout
    crash = epochkv("reset", "--timeout", "0.8", "--on-failure", "crash", config=hub.folder)
    assert crash.returncode == 3
    assert crash.stdout == ""
    assert crash.stderr.startswith("epochkv: epoch ")
    nobody = epochkv("wait", "9000000", "--timeout", "0.5", config=hub.folder)
    assert nobody.returncode == 3
    assert "nobody has asked for it" in nobody.stderr
    assert "is recorded" not in nobody.stderr
    engine.is_busy = False


def test_waiting_says_whom_for_and_may_be_interrupted(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "patient", "--lease-seconds", "60") as patient:
        slow = Agents(patient.folder)
        try:
            agent, engine = slow.start("slow")
            eventually(lambda: agent.view.epoch is not None)
            engine.is_busy = True
            done = epochkv("reset", "--timeout", "8", config=patient.folder)
            assert done.returncode == 3
            assert "epochkv: epoch 1: waiting for slow" in done.stderr
            for arguments in (("reset", "--epoch", "1", "--on-failure", "crash"), ("wait", "1")):
                known = epochkv(*arguments, "--timeout", "0.8", "-o", "json", config=patient.folder)
                found = json.loads(known.stdout)
                assert (known.returncode, found["epoch"], found["published"], found["laggards"]) == (3, 1, False, ["slow"])
                assert known.stderr.startswith("epochkv: epoch 1 is recorded and not published after ")
            with interruptible():
                children = [
                    subprocess.Popen([*CLI, *arguments, "--config", str(patient.folder)], stderr=subprocess.PIPE, text=True)
                    for arguments in (("reset",), ("wait", "2"))
                ]
            eventually(lambda: target(patient) == 2, "asked for")
            said = []
            for child in children:
                assert child.stderr is not None
                while "waiting for slow" not in (line := child.stderr.readline()):
                    assert line, "it ended"
                child.send_signal(signal.SIGINT)
                said.append(child.communicate(timeout=30)[1])
                assert child.returncode == 130
            recorded = (
                "interrupted. The epoch may be recorded already, and is published then without this command: `epochkv status` shows it"
            )
            assert said == [f"epochkv: {recorded}\n", "epochkv: interrupted\n"]
        finally:
            slow.stop()


def test_nobody_there_is_status_4(tmp_path: Path, hub: HubProcess) -> None:
    for name in ("hub.pub", "client.pub", "client.key", "root.secret"):
        (tmp_path / name).write_bytes((hub.folder / name).read_bytes())
    content = json.loads((hub.folder / "connection.json").read_text())
    content["hub"]["endpoint"] = f"tcp://127.0.0.1:{free_port()}"
    (tmp_path / "connection.json").write_text(json.dumps(content))
    for arguments in (("reset",), ("status",), ("engines",), ("wait", "1"), ("weights",), ("update", "--version", "v", "--", "true")):
        done = epochkv(*arguments[:1], "--timeout", "0.5", *arguments[1:], config=tmp_path)
        assert done.returncode == 4, done.stderr
        assert done.stderr.startswith("epochkv: no answer from the hub at tcp://127.0.0.1:")
        assert "Traceback" not in done.stderr
        assert ("engines go on with the KV they have" in done.stderr) == (arguments[0] in ("reset", "update"))
        assert ("COMMAND was not started, so nothing was pushed" in done.stderr) == (arguments[0] == "update")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("reset", "--epoch", "-1"), "--epoch"),
        (("reset", "--timeout", "0"), "--timeout is 0"),
        (("reset", "--on-failure", "pray"), "use 'bypass' or 'crash'"),
        (("reset", "-o", "yaml"), "--output"),
        (("wait",), "EPOCH"),
        (("update", "--version", "v"), "COMMAND"),
        (("update", "--", "true"), "--version"),
        (("update", "--version", "v", "--order", "fence_first", "--", "true"), "--order: it is gone: weights name themselves, so no order"),
        (("update", "--version", "step-\udcff", "--", "touch", "/nowhere"), "no Unicode text"),
        (
            ("reset", "--weights-version", "step-7"),
            "--weights-version: it is gone: weights name themselves. Leave it out; `epochkv update`",
        ),
        (("status", "--config", "/nowhere"), "/nowhere"),
        (("frobnicate",), "frobnicate"),
        (("hub", "--pool", "p", "--listen", "7700", "--state", "/nowhere/x"), "--listen is '7700'"),
        (("hub", "--pool", "bad name!", "--listen", "tcp://127.0.0.1:0", "--state", "/nowhere/x"), "--pool is 'bad name!'"),
        (("hub", "--pool", "", "--listen", "tcp://*:0", "--state", "/nowhere/x"), "--pool is ''"),
        (("hub", "--pool", "p", "--listen", "tcp://*:0", "--state", "/nowhere/x", "--reclaim", "RemoveAll"), "needs --store-admin"),
        (("hub", "--pool", "p", "--listen", "tcp://*:0", "--state", "/nowhere/x", "--store-admin", "m:1"), "http://host:9003"),
        (("hub", "--pool", "p", "--listen", "tcp://*:0", "--state", "/nowhere/x", "--advertise", "h"), "--advertise"),
        (("hub", "--pool", "p", "--listen", "tcp://*:0", "--state", "/nowhere/x", "--metrics", "9090"), "0.0.0.0:9090"),
        (("hub", "--pool", "p", "--listen", "tcp://*:0", "--state", "/nowhere/x", "--lease-seconds", "0"), "--lease-seconds"),
        (
            ("hub", "--pool", "p", "--listen", "tcp://*:0", "--state", "/nowhere/x", "--weights-source", "Model"),
            "--weights-source: it is gone: engines name KV by the weights that they hold, pushed or not. Leave it out",
        ),
        (
            ("hub", "--pool", "p", "--listen", "tcp://*:0", "--state", "/nowhere/x", "--join-after-seconds", "0"),
            "--join-after-seconds: it is gone: engines name KV by the weights that they hold, so no engine has to wait. Leave it out",
        ),
    ],
)
def test_wrong_usage_is_status_2_and_named(
    hub: HubProcess, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: str
) -> None:
    config = () if arguments[0] in ("hub", "frobnicate") or "--config" in arguments else ("--config", str(hub.folder))
    status, _, errors = inside(capsys, arguments[0], *config, *arguments[1:])
    assert status == 2, errors
    assert named in errors
    assert "Traceback" not in errors
    assert not Path("/nowhere").exists()


def test_without_a_configuration_it_says_what_to_give() -> None:
    done = epochkv("status")
    assert done.returncode == 2
    assert "set EPOCHKV_CONFIG" in done.stderr


@pytest.mark.parametrize("command", ["hub", "reset", "status", "wait", "engines", "weights", "update", "keys rotate", "keys retire"])
def test_help_has_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    status, text, _ = inside(capsys, *command.split(), "--help")
    assert status == 0
    assert f"  epochkv {command}" in text


def test_an_engine_that_was_reset_alone_is_shown_with_the_remedy(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "state") as hub:
        agents = Agents(hub.folder)
        try:
            engine = FakeEngine()
            agent, _ = agents.start("cleared", engine=engine)
            eventually(lambda: using(agent, 0))
            engine.reset_at = 0
            agent.poke()
            eventually(lambda: "1: 0 in use, 1 private, 0 of unknown weights, 0 behind" in epochkv("status", config=hub.folder).stdout)
            remedy = "caches reset alone; shared again after the next `epochkv reset`"
            assert f"cleared: {remedy}" in epochkv("status", config=hub.folder).stdout
            head, row = epochkv("engines", config=hub.folder).stdout.splitlines()
            assert head.split() == ["ENGINE", "STATE", "WEIGHTS", "EPOCH", "CARRIED", "AGE", "HEARD", "BOOT", "NOTE"]
            assert row.split()[:4] == ["cleared", "private", engine.weights()[0].hex()[:8], "0"]  # type: ignore[union-attr]
            assert row.endswith(remedy)
            assert json.loads(epochkv("engines", "-o", "json", config=hub.folder).stdout)[0]["state"] == "private"
            assert epochkv("reset", config=hub.folder).returncode == 0
            status = epochkv("status", config=hub.folder).stdout
            assert "1: 1 in use, 0 private, 0 of unknown weights, 0 behind" in status
            assert "caches reset alone" not in status
        finally:
            agents.stop()


def test_an_engine_of_unknown_weights_is_shown_with_its_note(hub: HubProcess, agents: Agents) -> None:
    agent, _ = agents.start("sleeper", engine=engine_with("asleep"))
    eventually(lambda: using(agent, target(hub)))
    assert "1: 0 in use, 0 private, 1 of unknown weights, 0 behind" in epochkv("status", config=hub.folder).stdout
    _, row = epochkv("engines", config=hub.folder).stdout.splitlines()
    assert row.split()[:3] == ["sleeper", "unknown", "-"]
    assert row.split()[-1] == "asleep"


# -------------------------------------------------------------------------------------------------------------- weights


def test_weights_shows_who_holds_what(hub: HubProcess, agents: Agents) -> None:
    running = [agents.start(f"rollout-{number}", engine=engine_with(NEW if number < 2 else OLD)) for number in range(3)]
    agents.start("sleeper", engine=engine_with("asleep"))
    with Pool.connect(hub.folder) as pool:
        eventually(lambda: len(pool.engines()) == 4)
        pool.wait_weights(["rollout-0", "rollout-1"], label="step-42")
        lines = [line.split() for line in epochkv("weights", config=hub.folder).stdout.splitlines()]
        assert [[*line[:3], *line[4:]] for line in lines] == [
            ["WEIGHTS", "LABEL", "ENGINES", "NAMES"],
            ["3f2a9c1e", "step-42", "2", "rollout-0,", "rollout-1"],
            ["0a0a0a0a", "-", "1", "rollout-2"],
            ["unknown", "-", "1", "sleeper:", "asleep"],
        ]
        for arguments in (("--json",), ("-o", "json")):
            found = json.loads(epochkv("weights", *arguments, config=hub.folder).stdout)
            assert found["equal"] is False
            assert [(group["id"], group["label"], group["engines"]) for group in found["groups"]] == [
                (NEW.hex(), "step-42", ["rollout-0", "rollout-1"]),
                (OLD.hex(), "", ["rollout-2"]),
            ]
            assert found["unknown"] == [{"name": "sleeper", "note": "asleep"}]
        agents.all.pop().stop()
        push(running, OTHER)
        eventually(lambda: pool.weights().ids == {OTHER.hex()})
    assert json.loads(epochkv("weights", "--json", config=hub.folder).stdout)["equal"] is True
    status = epochkv("status", config=hub.folder).stdout
    assert "weights   77777777 3 engines" in status


# --------------------------------------------------------------------------------------------------------------- update


@pytest.fixture
def pushed(tmp_path: Path) -> Iterator[HubProcess]:
    """A hub of a new pool."""
    with HubProcess(tmp_path / "state", "--lease-seconds", "5") as made:
        yield made


@pytest.fixture
def pushed_agents(pushed: HubProcess) -> Iterator[Agents]:
    made = Agents(pushed.folder)
    yield made
    made.stop()


@contextlib.contextmanager
def pushing_when(path: Path, engines: Sequence[Running], holds: bytes) -> Iterator[None]:
    """While a command runs: engines get these weights as soon as it has made this file."""
    thread = threading.Thread(target=lambda: (eventually(path.exists, "the command runs", 60), push(engines, holds)))
    thread.start()
    yield
    thread.join(60)


def test_update_runs_the_command_and_waits_for_its_weights(pushed: HubProcess, pushed_agents: Agents, tmp_path: Path) -> None:
    engines = [pushed_agents.start(engine=engine_with(OLD)) for _ in range(2)]
    eventually(lambda: all(using(agent, 0) for agent, _ in engines))
    script = "import os, sys; open(sys.argv[1], 'w').write(repr([os.environ.get(k) for k in sys.argv[2:]]))"
    seen = tmp_path / "seen"
    command = ("--", sys.executable, "-c", script, str(seen), "EPOCHKV_WEIGHTS_VERSION", "EPOCHKV_CONFIG")
    with pushing_when(seen, engines, NEW):
        done = epochkv("update", "--version", "step-1", "--config", str(pushed.folder), *command)
    assert (done.returncode, done.stdout) == (0, "all 2 engines hold 3f2a9c1e (step-1)\n"), done.stderr
    assert seen.read_text() == repr(["step-1", str(pushed.folder)])
    seen.unlink()
    with pushing_when(seen, engines, OLD):
        done = epochkv("update", "--version", "step-2", "-o", "json", *command, config=pushed.folder)
    found = json.loads(done.stdout)
    assert (done.returncode, found["equal"], found["groups"][0]["label"]) == (0, True, "step-2")
    assert target(pushed) == 0


def test_what_the_command_of_an_update_prints_is_no_part_of_the_json(pushed: HubProcess, pushed_agents: Agents) -> None:
    engines = [pushed_agents.start(engine=engine_with(OLD))]
    eventually(lambda: using(engines[0][0], 0))
    relative, marker = os.path.relpath(pushed.folder), pushed.state.parent / "marker"
    script = f"import os; print('pushed through', os.environ['EPOCHKV_CONFIG']); open({str(marker)!r}, 'w')"
    with pushing_when(marker, engines, NEW):
        done = epochkv("update", "--version", "step-1", "-o", "json", "--", sys.executable, "-c", script, config=Path(relative))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["groups"][0]["label"] == "step-1"
    assert f"pushed through {os.path.abspath(relative)}" in done.stderr


def test_an_engine_that_missed_the_push_is_status_3_and_named(pushed: HubProcess, pushed_agents: Agents, tmp_path: Path) -> None:
    engines = [pushed_agents.start(engine=engine_with(OLD)) for _ in range(2)]
    eventually(lambda: all(using(agent, 0) for agent, _ in engines))
    with pushing_when(tmp_path / "seen", engines[:1], NEW):
        done = epochkv("update", "--version", "v", "--timeout", "3", "--", "touch", str(tmp_path / "seen"), config=pushed.folder)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.splitlines() == [
        "epochkv: waiting for the new weights of engine-1",
        "epochkv: not all engines of pool policy hold the same, new weights after 3 s: engine-1 does not. "
        "Now 3f2a9c1e: engine-0; 0a0a0a0a: engine-1",
    ]
    push(engines[1:], NEW)
    with Pool.connect(pushed.folder) as pool:
        eventually(lambda: pool.weights().equal)
    done = epochkv("update", "--version", "v", "--timeout", "1", "-o", "json", "--", "true", config=pushed.folder)
    assert (done.returncode, json.loads(done.stdout)["equal"]) == (3, True)
    assert done.stderr.endswith("after 1 s: the weights did not change. Now 3f2a9c1e: engine-0, engine-1\n")


def test_a_pool_without_engines_got_no_weights(pushed: HubProcess) -> None:
    done = epochkv("update", "--version", "v", "--timeout", "0.5", "--", "true", config=pushed.folder)
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == "epochkv: not all engines of pool policy hold the same weights after 0.5 s: no engine is there\n"


def test_a_command_that_fails_passes_its_status_and_nothing_is_waited_for(pushed: HubProcess, pushed_agents: Agents) -> None:
    agent, _ = pushed_agents.start()
    eventually(lambda: using(agent, 0))
    done = epochkv("update", "--version", "step-1", "--", "sh", "-c", "echo pushing; exit 7", config=pushed.folder)
    assert (done.returncode, done.stdout) == (7, "pushing\n")
    assert done.stderr == "epochkv: the command ended with status 7; `epochkv weights` shows which engines hold what\n"
    done = epochkv("update", "--version", "step-1", "--", "sh", "-c", "kill -KILL $$", config=pushed.folder)
    assert done.returncode == 128 + 9
    assert target(pushed) == 0


def test_a_hub_that_is_gone_after_the_command_is_status_4(tmp_path: Path) -> None:
    hub = HubProcess(tmp_path / "state").start()
    assert hub.child is not None
    try:
        command = ("--timeout", "3", "--", "kill", "-STOP", str(hub.child.pid))
        done = epochkv("update", "--version", "step-1", *command, config=hub.folder)
    finally:
        hub.end()
    assert done.returncode == 4
    first, second = done.stderr.splitlines()
    assert first.startswith("epochkv: no answer from the hub at tcp://")
    assert second == "epochkv: COMMAND ended well; `epochkv weights` shows which engines hold what"


def test_an_update_that_is_interrupted_after_its_command(pushed: HubProcess, pushed_agents: Agents) -> None:
    agent, _ = pushed_agents.start("late")
    eventually(lambda: using(agent, 0))
    with interruptible():
        arguments = ("update", "--version", "v", "--config", str(pushed.folder), "--", "true")
        child = subprocess.Popen([*CLI, *arguments], stderr=subprocess.PIPE, text=True)
    assert child.stderr is not None
    assert child.stderr.readline() == "epochkv: waiting for the new weights of late\n"
    child.send_signal(signal.SIGINT)
    said = "epochkv: interrupted; COMMAND ended well; `epochkv weights` shows which engines hold what\n"
    assert (child.communicate(timeout=30)[1], child.returncode) == (said, 130)


def test_a_command_that_is_none_changes_nothing(pushed: HubProcess, tmp_path: Path) -> None:
    done = epochkv("update", "--version", "v", "--", "no-such-command-here", config=pushed.folder)
    assert done.returncode == 127
    assert "no-such-command-here is not a command; nothing was asked of the pool" in done.stderr
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x00\x01not a program")
    broken.chmod(0o755)
    assert epochkv("update", "--version", "v", "--", str(broken), config=pushed.folder).returncode == 126
    assert target(pushed) == 0


def test_signals_reach_the_whole_process_group_of_the_command(pushed: HubProcess, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 300 & echo $$ $! > {pids}.part && mv {pids}.part {pids}; wait"
    command = [*CLI, "update", "--version", "v", "--config", str(pushed.folder), "--", "sh", "-c", script]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    eventually(pids.exists, "the command runs", 60)
    shell, sleeper = (int(word) for word in pids.read_text().split())
    assert os.getpgid(shell) == os.getpgid(sleeper) == shell != os.getpgid(child.pid)
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 128 + 15
    eventually(lambda: not alive(shell) and not alive(sleeper), "shell and grandchild are gone")
    assert errors == "epochkv: the command ended with status 143; `epochkv weights` shows which engines hold what\n"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_command_has_the_terminal(pushed: HubProcess) -> None:
    """A command in a process group of its own that reads from a terminal would be stopped, and hang for ever."""
    script = "read line; echo got:$line"
    update = ("update", "--version", "v", "--timeout", "3", "--config", str(pushed.folder), "--", "sh", "-c", script)
    pid, master = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [*CLI, *update])
    text = b""
    sent = False
    deadline = time.monotonic() + 60
    try:
        while time.monotonic() < deadline:
            if not sent and target(pushed) == 0:
                os.write(master, b"hello\n")
                sent = True
            try:
                text += os.read(master, 4096)
            except OSError:
                break
            if b"no engine is there" in text:
                break
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(master)
    assert b"got:hello" in text
    assert os.waitstatus_to_exitcode(status) == 3
