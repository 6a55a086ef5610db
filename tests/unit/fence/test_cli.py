"""The command `epochkv` as people and scripts use it: real processes, their exit statuses, what they print and leave behind."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from epochkv_fence.client import Pool
from epochkv_fence.messages import Mode
from tests.helpers_cli import inside
from tests.helpers_fence import FakeEngine, eventually
from tests.helpers_hub import CLI, Agents, HubProcess, bypassing, epochkv, free_port, interruptible, using


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    """One hub whose engines join by age at once."""
    with HubProcess(tmp_path_factory.mktemp("cli") / "state", "--join-after-seconds", "0", "--lease-seconds", "2") as made:
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
    done = epochkv("reset", "--weights-version", "step-7", config=hub.folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"epoch {before + 1} published in ")
    assert "2 running requests go on with what they held" in done.stdout
    shown = epochkv("status", "-o", "json", "--config", str(hub.folder / "connection.json"))
    status = json.loads(shown.stdout)
    assert (status["name"], status["target"], status["published"], status["weights_version"], status["origin"]) == (
        "policy", before + 1, before + 1, "step-7", "Trainer",
    )  # fmt: skip
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
            eventually(lambda: target(patient) == 2, what="asked for")
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
    for arguments in (("reset",), ("status",), ("engines",), ("wait", "1"), ("update", "--version", "v", "--", "true")):
        done = epochkv(*arguments[:1], "--timeout", "0.5", *arguments[1:], config=tmp_path)
        assert done.returncode == 4, done.stderr
        assert done.stderr.startswith("epochkv: no answer from the hub at tcp://127.0.0.1:")
        assert "Traceback" not in done.stderr
        assert ("keep them paused" in done.stderr) == (arguments[0] in ("reset", "update"))
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
        (("update", "--version", "v", "--order", "x", "--", "true"), "use 'push_under_pause' or 'fence_first'"),
        (("update", "--version", "step-\udcff", "--", "touch", "/nowhere"), "no Unicode text"),
        (("reset", "--weights-version", "step-\udcff"), "no Unicode text"),
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


@pytest.mark.parametrize("command", ["hub", "reset", "status", "wait", "engines", "update", "keys rotate", "keys retire"])
def test_help_has_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    status, text, _ = inside(capsys, *command.split(), "--help")
    assert status == 0
    assert f"  epochkv {command}" in text


def test_an_engine_that_was_reset_alone_is_shown_with_the_remedy(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "state", "--join-after-seconds", "0") as hub:
        agents = Agents(hub.folder)
        try:
            engine = FakeEngine()
            agent, _ = agents.start("cleared", engine=engine)
            eventually(lambda: using(agent, 0))
            engine.reset_at = 0
            agent.poke()
            eventually(lambda: "1: 0 share, 0 in bypass, 1 private, 0 behind" in epochkv("status", config=hub.folder).stdout)
            remedy = "cleared: caches reset alone; shared again after the next `epochkv reset`"
            assert remedy in epochkv("status", config=hub.folder).stdout
            assert [line.split()[:3] for line in epochkv("engines", config=hub.folder).stdout.splitlines()] == [
                ["ENGINE", "STATE", "EPOCH"],
                ["cleared", "private", "0"],
            ]
            assert json.loads(epochkv("engines", "-o", "json", config=hub.folder).stdout)[0]["state"] == "private"
            assert epochkv("reset", config=hub.folder).returncode == 0
            status = epochkv("status", config=hub.folder).stdout
            assert "1: 1 share, 0 in bypass, 0 private, 0 behind" in status
            assert "caches reset alone" not in status
        finally:
            agents.stop()


def test_an_engine_that_is_in_bypass_is_shown_so(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "state", "--join-after-seconds", "3600") as hub:
        agents = Agents(hub.folder)
        try:
            agent, _ = agents.start("young", engine=FakeEngine())
            eventually(lambda: using(agent, 0))
            done = epochkv("reset", config=hub.folder)
            assert "1 engine serves without reuse: nobody said that it has the weights of epoch 1; `epochkv update` does" in done.stdout
            assert agent.view.mode is Mode.BYPASS
            assert "1: 0 share, 1 in bypass, 0 private, 0 behind" in epochkv("status", config=hub.folder).stdout
        finally:
            agents.stop()


# --------------------------------------------------------------------------------------------------------------- update


@pytest.fixture
def pushed(tmp_path: Path) -> Iterator[HubProcess]:
    """A hub of a pool whose engines never join by age."""
    with HubProcess(tmp_path / "state", "--join-after-seconds", "3600", "--lease-seconds", "5") as made:
        yield made


@pytest.fixture
def pushed_agents(pushed: HubProcess) -> Iterator[Agents]:
    made = Agents(pushed.folder)
    yield made
    made.stop()


def test_what_the_command_of_an_update_prints_is_no_part_of_the_json(pushed: HubProcess) -> None:
    script = "import os; print('pushed through', os.environ['EPOCHKV_CONFIG'])"
    relative = os.path.relpath(pushed.folder)
    done = epochkv("update", "--version", "step-1", "-o", "json", "--", sys.executable, "-c", script, config=Path(relative))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["weights_version"] == "step-1"
    assert f"pushed through {os.path.abspath(relative)}" in done.stderr


def test_update_runs_the_command_and_names_those_that_were_there(pushed: HubProcess, pushed_agents: Agents, tmp_path: Path) -> None:
    agent, _ = pushed_agents.start()
    eventually(lambda: using(agent, 0))
    script = "import os, sys; open(sys.argv[1], 'w').write(repr([os.environ.get(k) for k in sys.argv[2:]]))"
    seen = tmp_path / "seen"
    names = ("EPOCHKV_WEIGHTS_VERSION", "EPOCHKV_EPOCH", "EPOCHKV_CONFIG")
    command = ("--", sys.executable, "-c", script, str(seen), *names)
    done = epochkv("update", "--version", "step-1", "--config", str(pushed.folder), *command, EPOCHKV_EPOCH="99")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("epoch 1 published in ")
    assert seen.read_text() == repr(["step-1", None, str(pushed.folder)])
    assert using(agent, 1)
    done = epochkv("update", "--version", "step-2", "--order", "fence_first", "-o", "json", *command, config=pushed.folder)
    assert (done.returncode, json.loads(done.stdout)["epoch"]) == (0, 2)
    assert seen.read_text() == repr(["step-2", "2", str(pushed.folder)])
    assert using(agent, 2)


def test_a_command_that_fails_passes_its_status_and_nobody_shares(pushed: HubProcess, pushed_agents: Agents) -> None:
    agent, _ = pushed_agents.start()
    eventually(lambda: using(agent, 0))
    done = epochkv("update", "--version", "step-1", "--", "sh", "-c", "echo pushing; exit 7", config=pushed.folder)
    assert done.returncode == 7
    assert done.stdout == "pushing\n"
    assert "the command ended with status 7" in done.stderr
    assert "epoch 1: engines serve without reuse until the next weight update" in done.stderr
    eventually(lambda: bypassing(agent, 1))
    done = epochkv("update", "--version", "step-1", "--", "sh", "-c", "kill -KILL $$", config=pushed.folder)
    assert done.returncode == 128 + 9
    assert target(pushed) == 2


def test_a_fence_that_is_late_on_entry_starts_no_command(pushed: HubProcess, pushed_agents: Agents, tmp_path: Path) -> None:
    agent, engine = pushed_agents.start("stuck")
    eventually(lambda: using(agent, 0))
    engine.is_busy = True
    command = ("--timeout", "1", "--order", "fence_first", "--", "touch", str(tmp_path / "pushed"))
    done = epochkv("update", "--version", "step-1", *command, config=pushed.folder)
    assert done.returncode == 3
    first, second = done.stderr.splitlines()
    assert first.startswith("epochkv: epoch 1 is recorded and not published after ")
    assert second == "epochkv: COMMAND was not started, so nothing was pushed"
    with interruptible():
        arguments = ("update", "--version", "step-2", "--config", str(pushed.folder), "--timeout", "60", *command[2:])
        child = subprocess.Popen([*CLI, *arguments], stderr=subprocess.PIPE, text=True)
    eventually(lambda: target(pushed) == 2, what="asked for")
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=30)[1] == "epochkv: interrupted; COMMAND was not started, so nothing was pushed\n"
    assert child.returncode == 130
    assert not (tmp_path / "pushed").exists()


def test_a_reset_in_the_middle_of_an_update_warns(pushed: HubProcess, pushed_agents: Agents) -> None:
    agent, _ = pushed_agents.start()
    eventually(lambda: using(agent, 0))
    with Pool.connect(pushed.folder) as pool, pool.weight_update("step-1"):
        done = epochkv("reset", "--weights-version", "mine", "-o", "json", config=pushed.folder)
        (line,) = done.stderr.splitlines()
        assert line.startswith("epochkv: warning: a weight update to step-1 is open (process ")
        assert line.endswith("): engines do not share until it has ended")
        assert (done.returncode, json.loads(done.stdout)["epoch"]) == (0, 1)
        assert bypassing(agent, 1)
        assert epochkv("reset", "--epoch", "1", config=pushed.folder).stderr == ""  # it changes nothing
    eventually(lambda: using(agent, 2))
    assert epochkv("reset", config=pushed.folder).stderr == ""


def test_a_command_that_is_none_changes_nothing(pushed: HubProcess, tmp_path: Path) -> None:
    done = epochkv("update", "--version", "v", "--", "no-such-command-here", config=pushed.folder)
    assert done.returncode == 127
    assert "no-such-command-here is not a command; nothing was asked of the pool" in done.stderr
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x00\x01not a program")
    broken.chmod(0o755)
    assert epochkv("update", "--version", "v", "--", str(broken), config=pushed.folder).returncode == 126


def test_signals_reach_the_whole_process_group_of_the_command(pushed: HubProcess, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 300 & echo $$ $! > {pids}.part && mv {pids}.part {pids}; wait"
    command = [*CLI, "update", "--version", "v", "--config", str(pushed.folder), "--", "sh", "-c", script]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL)
    eventually(pids.exists, 60, "the command runs")
    shell, sleeper = (int(word) for word in pids.read_text().split())
    assert os.getpgid(shell) == os.getpgid(sleeper) == shell != os.getpgid(child.pid)
    child.send_signal(signal.SIGTERM)
    _, errors = child.communicate(timeout=60)
    assert child.returncode == 128 + 15
    eventually(lambda: not alive(shell) and not alive(sleeper), what="shell and grandchild are gone")
    assert "engines serve without reuse" in errors
    assert target(pushed) == 1


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_command_has_the_terminal(pushed: HubProcess) -> None:
    """A command in a process group of its own that reads from a terminal would be stopped, and hang for ever."""
    script = "read line; echo got:$line"
    pid, master = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [*CLI, "update", "--version", "v", "--config", str(pushed.folder), "--", "sh", "-c", script])
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
            if b"published in" in text:
                break
        _, status = os.waitpid(pid, 0)
    finally:
        os.close(master)
    assert b"got:hello" in text
    assert os.waitstatus_to_exitcode(status) == 0
