"""The command `epochkv` as people and scripts use it: real processes, their exit statuses, what they print and leave behind."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from epochkv_fence.cli.render import Output, show_engines, show_status, show_weights, shown_weights
from epochkv_fence.client import Engine, Pool, PoolStatus, UnknownWeights, WeightsGroup, WeightsReport
from hack.loopback import free_port
from hack.waiting import eventually
from tests.support.cli import inside
from tests.support.fence import NEW, OLD, OTHER, engine_with, push
from tests.support.hub import CLI, Agents, HubProcess, HubWorld, altered, epochkv, interruptible


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    with HubProcess(tmp_path_factory.mktemp("cli") / "state", "--lease-seconds", "2") as made:
        yield made


def test_reset_status_wait_engines(hub: HubProcess, agents: Agents) -> None:
    agent, engine = agents.start("rollout-a")
    engine.num_old_epoch = 2
    eventually(lambda: agent.view.epoch is not None)
    before = hub.target()
    done = epochkv("reset", config=hub.folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"epoch {before + 1} published in ")
    assert "2 running requests continue with what they held" in done.stdout
    shown = epochkv("status", "-o", "json", "--config", str(hub.folder / "connection.json"))
    status = json.loads(shown.stdout)
    assert (status["name"], status["target"], status["published"], status["origin"]) == ("policy", before + 1, before + 1, "Trainer")
    table = epochkv("engines", config=hub.folder).stdout
    assert "rollout-a" in table
    (row,) = json.loads(epochkv("engines", "-o", "json", config=hub.folder).stdout)
    assert (row["name"], row["epoch"], row["old_epoch_requests"]) == ("rollout-a", before + 1, 2)
    waited = epochkv("wait", str(before + 1), "-o", "json", config=hub.folder)
    assert (waited.returncode, json.loads(waited.stdout)["published"]) == (0, True)


def test_what_is_not_published_in_time_is_status_3_and_waiting_says_whom_for_and_may_be_interrupted(tmp_path: Path) -> None:
    with HubProcess(tmp_path / "patient", "--lease-seconds", "60") as patient:
        with Agents(patient.folder) as slow:
            agent, engine = slow.start("slow")
            eventually(lambda: agent.view.epoch is not None)
            engine.is_busy = True
            done = epochkv("reset", "--timeout", "8", config=patient.folder)
            assert done.returncode == 3
            assert "epochkv: epoch 1: waiting for slow" in done.stderr
            assert "not acknowledged by: slow" in done.stdout
            for arguments in (("reset", "--epoch", "1"), ("wait", "1")):
                known = epochkv(*arguments, "--timeout", "0.8", "-o", "json", config=patient.folder)
                found = json.loads(known.stdout)
                assert (known.returncode, found["epoch"], found["published"], found["laggards"]) == (3, 1, False, ["slow"])
            assert known.stderr.startswith("epochkv: epoch 1 is recorded and not published after ")
            with interruptible():
                children = [
                    subprocess.Popen([*CLI, *arguments, "--config", str(patient.folder)], stderr=subprocess.PIPE, text=True)
                    for arguments in (("reset",), ("wait", "2"))
                ]
            eventually(lambda: patient.target() == 2, "asked for")
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


def test_nothing_is_imported_before_somebody_listens_for_ctrl_c() -> None:
    """What is interrupted while the script imports ends with Python's own traceback."""
    script = "import sys; known = set(sys.modules); import epochkv_fence.cli.__main__; print(*sorted(set(sys.modules) - known))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["epochkv_fence", "epochkv_fence.cli", "epochkv_fence.cli.__main__"]


def test_nobody_there_is_status_4(tmp_path: Path, hub: HubProcess) -> None:
    config = Path(altered(hub.folder, tmp_path / "client", hub={"endpoint": f"tcp://127.0.0.1:{free_port()}"}))
    for arguments in (("reset",), ("status",), ("engines",), ("wait", "1"), ("weights",), ("update", "--version", "v", "--", "true")):
        done = epochkv(*arguments[:1], "--timeout", "0.5", *arguments[1:], config=config)
        assert done.returncode == 4, done.stderr
        assert done.stderr.startswith("epochkv: no answer from the hub at tcp://127.0.0.1:")
        assert "Traceback" not in done.stderr
        assert ("engines go on with the KV they have" in done.stderr) == (arguments[0] in ("reset", "update"))
        assert ("COMMAND was not started, so nothing was pushed" in done.stderr) == (arguments[0] == "update")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (("reset", "--epoch", "-1"), "--epoch"),
        (("reset", "--epoch", "9007199254740992"), "'--epoch': Input should be less than or equal to 9007199254740991"),
        (("reset", "--timeout", "0"), "--timeout is 0"),
        (("reset", "-o", "yaml"), "--output"),
        (("wait", "9007199254740992"), "EPOCH"),
        (("update", "--version", "v"), "COMMAND"),
        (("update", "--", "true"), "--version"),
        (("status", "--config", ""), "give the path of the pool's connection.json"),
        (("frobnicate",), "frobnicate"),
        (("doctor", "--config", "x", "-n", "rl"), "--config looks at one pool"),
        (("hub", "--pool", "p", "--listen", "tcp://*:0", "--state", ""), "--state is empty"),
        (("hub", "--pool", "p", "--listen", "7700", "--state", "/nowhere/x"), "--listen is '7700'"),
        (("hub", "--pool", "p", "--listen", "tcp://*:0", "--state", "/nowhere/x", "--reclaim", "RemoveAll"), "needs --store-admin"),
        (("hub", "--pool", "p", "--listen", "tcp://*:0", "--state", "/nowhere/x", "--store-admin", "h"), "--store-admin is 'h'"),
        (("hub", "--pool", "p", "--listen", "tcp://*:0", "--state", "/nowhere/x", "--advertise", "h"), "--advertise"),
        (("hub", "--pool", "p", "--listen", "tcp://*:0", "--state", "/nowhere/x", "--metrics", "9090"), "--metrics is '9090'"),
        (("hub", "--pool", "p", "--listen", "tcp://*:0", "--state", "/nowhere/x", "--lease-seconds", "0"), "--lease-seconds"),
    ],
)
def test_wrong_usage_is_status_2(hub: HubProcess, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], named: str) -> None:
    config = () if arguments[0] in ("hub", "frobnicate") or "--config" in arguments else ("--config", str(hub.folder))
    status, _, errors = inside(capsys, arguments[0], *config, *arguments[1:])
    assert status == 2, errors
    assert named in errors
    assert "Traceback" not in errors
    assert not Path("/nowhere").exists()


def test_weights_shows_who_holds_what(hub: HubProcess, agents: Agents) -> None:
    running = [agents.start(f"rollout-{number}", engine=engine_with(NEW if number < 2 else OLD)) for number in range(3)]
    agents.start("sleeper", engine=engine_with("asleep"))
    with Pool.connect(hub.folder) as pool:
        eventually(lambda: len(pool.engines()) == 4)
        pool.wait_weights(["rollout-0", "rollout-1"], label="step-42")
        found = json.loads(epochkv("weights", "-o", "json", config=hub.folder).stdout)
        assert found["equal"] is False
        assert [(group["id"], group["label"], group["engines"]) for group in found["groups"]] == [
            (NEW.hex(), "step-42", ["rollout-0", "rollout-1"]),
            (OLD.hex(), "", ["rollout-2"]),
        ]
        assert found["unknown"] == [{"name": "sleeper", "note": "asleep"}]
        for name, holders in {"step-42": [0, 1], NEW.hex()[:8]: [0, 1], OLD.hex(): [2], NEW.hex()[:7]: [], "step-4": []}.items():
            listed = epochkv("engines", "--weights", name, "-o", "json", config=hub.folder)
            assert [engine["name"] for engine in json.loads(listed.stdout)] == [f"rollout-{number}" for number in holders], name
            assert listed.returncode == (0 if holders else 1)
        nobody = epochkv("engines", "--weights", "step-43", config=hub.folder)
        assert (nobody.returncode, nobody.stdout) == (1, "")
        assert nobody.stderr == "epochkv: no live engine holds step-43; `epochkv weights` shows what they hold\n"
        agents.all.pop().stop()
        push(running, OTHER)
        eventually(lambda: pool.weights().ids == {OTHER.hex()})
    assert json.loads(epochkv("weights", "-o", "json", config=hub.folder).stdout)["equal"] is True


def test_what_is_no_command_is_status_127_as_in_a_shell(world: HubWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "push.sh").write_text("#!/bin/sh\n")  # may not be executed
    for name in (str(tmp_path / "push.sh"), str(tmp_path), "absent.sh"):
        done = inside(capsys, "update", "--config", str(world.folder), "--version", "v", "--", name)
        assert done == (127, "", f"epochkv: {name} is no command that this user may execute; nothing was asked of the pool\n")
    broken = tmp_path / "broken"
    broken.write_bytes(b"\x00\x01not a program")
    broken.chmod(0o755)
    assert inside(capsys, "update", "--config", str(world.folder), "--version", "v", "--", str(broken))[0] == 126
    assert world.snapshot().target == 0


def test_a_key_of_another_pool_is_a_wrong_configuration(world: HubWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert world.hub is not None
    path = altered(world.folder, tmp_path / "other", pool={"uid": "another-uid"})
    said = f"epochkv: the key speaks for the pool with uid {world.hub.uid}, and {path} names policy with uid another-uid"
    for arguments in (("status",), ("update", "--version", "v", "--", "touch", str(tmp_path / "x"))):
        status, out, errors = inside(capsys, arguments[0], "--config", str(tmp_path / "other"), *arguments[1:])
        assert (status, out) == (2, "")
        assert errors.startswith(said)
        assert errors.count("\n") == 1
    assert not (tmp_path / "x").exists()
    assert world.snapshot().target == 0


GREET = '''
import typer
app = typer.Typer()

@app.command()
def greet(name: str) -> None:
    """Greet somebody."""
    if name == "nobody":
        import no_such_library
    print(f"hello {name}")
    raise typer.Exit(2 if name == "two" else 0)
'''


@pytest.fixture
def greeting(tmp_path: Path) -> Path:
    """A folder with an installed package that adds `greet`, `broken` (its module is not there) and a `reset` of its own."""
    (tmp_path / "greeting.py").write_text(GREET)
    info = tmp_path / "greeting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
    entries = ("greet = greeting:app [polite]", "broken = left_out.of_this_image:app", "reset = greeting:app")
    (info / "entry_points.txt").write_text("[epochkv.commands]\n" + "\n".join(entries) + "\n")
    return tmp_path


def test_an_added_command_is_listed_explained_and_run_and_replaces_none_of_ours(greeting: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(greeting), os.environ.get("PYTHONPATH", "")])
        return epochkv(*arguments, PYTHONPATH=path, PYTHONIOENCODING="ascii")

    listed = run("--help").stdout
    assert ("Greet somebody." in listed, "broken" in listed) == (True, False)
    assert "Greet somebody." in run("greet", "--help").stdout
    assert run("greet", "zoë").stdout == "hello zo\\xeb\n"
    assert run("greet", "two").returncode == 2
    missing = run("greet", "nobody")
    assert (missing.returncode, missing.stdout) == (1, "")
    assert missing.stderr == "epochkv: no_such_library is not installed, and `epochkv greet` needs it; install epochkv[polite]\n"
    broken = run("broken")
    assert (broken.returncode, "No such command" in broken.stderr) == (2, True)
    assert "Make all KV of the pool unreachable" in run("reset", "--help").stdout


def status(**changes: object) -> PoolStatus:
    return replace(PoolStatus("policy", "u-1", 3, 3, "Trainer", 30.0, ()), **changes)  # type: ignore[arg-type]


ENGINE = Engine("e1" * 16, "a", "a", "", 0, 3, "sharing", 0, 9.0, 0.0, "fp", "0a" * 16, "", 7.0)


def test_status_counts_engines_by_what_they_hold(capsys: pytest.CaptureFixture[str]) -> None:
    other, sleeper = replace(ENGINE, name="b", weights="3f" * 16), replace(ENGINE, name="c", state="unknown", weights="", weights_note="?")
    show_status(status(engines=(ENGINE, replace(ENGINE, name="d"), other, sleeper), labels={"3f" * 16: "step-42"}), Output.TABLE)
    text = capsys.readouterr().out
    assert re.search(r"^weights +0a0a0a0a 2 engines; 3f3f3f3f \(step-42\) 1 engine; unknown 1 engine *$", text, re.M)
    assert re.search(r"^engines +4: 3 sharing, 0 isolated, 1 unknown, 0 behind *$", text, re.M)
    assert "hub  " not in text
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", None)  # as Python has it where the caller closed it
        show_status(status(), Output.TABLE)
    alone = replace(ENGINE, state="isolated")
    show_status(status(engines=(alone,), settling_seconds=12.3), Output.TABLE)
    text = capsys.readouterr().out
    assert re.search(r"^engines +1: 0 sharing, 1 isolated, 0 unknown, 0 behind *$", text, re.M)
    assert re.search(r"^isolated +a: its names of this epoch are given up; it has asked for the next epoch *$", text, re.M)
    assert re.search(r"^hub +became leader just now; the list of engines is complete in 12 s *$", text, re.M)


def test_engines_that_lack_tiers_are_named_with_what_to_change(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    limited = replace(ENGINE, name="b", tiers_off="SavesOnly", tiers_note="loads are off: because")
    show_status(status(engines=(ENGINE, limited)), Output.TABLE)
    assert re.search(r"^tiers +b: loads are off: because *$", capsys.readouterr().out, re.M)
    show_status(status(engines=(ENGINE,)), Output.TABLE)
    assert "tiers" not in capsys.readouterr().out

    def note(engine: Engine) -> str:
        monkeypatch.setattr("epochkv_fence.cli.render.console", lambda: Console(width=80))  # a terminal
        show_engines(status(engines=(replace(engine, name="rollout-68774b944-hndq9"),)), Output.TABLE)
        rows = capsys.readouterr().out.splitlines()[1:]
        return " ".join(row[rows[0].index("e1e1e1e1") + 8 :].strip() for row in rows).strip()

    assert note(limited) == "loads are off: because"
    unknown = replace(limited, weights="", state="unknown", weights_note="asleep")
    assert note(unknown) == "asleep; loads are off: because"
    assert note(replace(unknown, tiers_note="the engine serves without caches: asleep")) == "the engine serves without caches: asleep"
    assert note(replace(limited, tiers_note="", tiers_off="Later")) == "Later"
    show_engines(status(engines=(limited,)), Output.JSON)
    assert json.loads(capsys.readouterr().out)[0]["tiers_note"] == "loads are off: because"


def test_weights_of_two_fingerprints_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    narrow, wide = WeightsGroup("0a" * 16, "", ("a", "b"), 192.0, "1111111122"), WeightsGroup("3f" * 16, "run:100:b", ("c",), 4.0, "2222")
    report = WeightsReport((narrow, wide), (UnknownWeights("d", ""), UnknownWeights("e", "asleep")))
    show_weights(report, Output.TABLE)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["WEIGHTS", "LABEL", "ENGINES", "SINCE", "FINGERPRINT", "NAMES"],
        ["0a0a0a0a", "-", "2", "3m12s", "11111111", "a,", "b"],
        ["3f3f3f3f", "run:100:b", "1", "4s", "2222", "c"],
        ["unknown", "-", "1", "-", "-", "d"],
        ["unknown", "-", "1", "-", "-", "e:", "asleep"],
    ]
    assert shown_weights(report) == "all 2 engines hold 0a0a0a0a\nthe only engine holds 3f3f3f3f (run:100:b)"
    assert (report.equal, replace(report, unknown=()).equal) == (False, True)
    show_weights(WeightsReport((wide,)), Output.TABLE)
    shown = capsys.readouterr().out.split()
    assert shown == ["WEIGHTS", "LABEL", "ENGINES", "SINCE", "NAMES", "3f3f3f3f", "run:100:b", "1", "4s", "c"]
