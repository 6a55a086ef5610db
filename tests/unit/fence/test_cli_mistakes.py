"""What `epochkv` says to the mistakes of newcomers: one sentence that names what was given, and a status that tells which."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from epochkv_fence.client import ConfigurationError, Connection, Pool
from epochkv_fence.net import generate_keypair
from hack.waiting import eventually
from tests.support.cli import inside
from tests.support.hub import CLI, HubWorld, interruptible

# ------------------------------------------------------------------------------------------------------------------ update


def test_a_command_that_may_not_be_executed_is_status_126_as_in_a_shell(
    world: HubWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "push.sh").write_text("#!/bin/sh\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    for name, status, why in (
        (str(tmp_path / "push.sh"), 126, "may not be executed by this user"),
        ("push.sh", 126, "may not be executed by this user"),
        (str(tmp_path), 126, "is a directory"),
        (str(tmp_path / "absent.sh"), 127, "is not a command"),
        ("absent.sh", 127, "is not a command"),
        ("state", 127, "is not a command"),  # a directory on PATH
    ):
        done = inside(capsys, "update", "--config", str(world.folder), "--version", "v", "--", name)
        assert done == (status, "", f"epochkv: {name} {why}; nothing was asked of the pool\n")
    assert world.snapshot().target == 0


# ----------------------------------------------------------------------------------------------------------- configuration


def test_a_key_of_another_pool_is_a_mistake_of_the_configuration(
    world: HubWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(world.folder, tmp_path / "other")
    path = folder / "connection.json"
    content = json.loads(path.read_text())
    right = content["pool"]["uid"]
    content["pool"]["uid"] = "another-uid"
    path.write_text(json.dumps(content))
    for arguments in (
        ("status",),
        ("engines",),
        ("reset",),
        ("wait", "1"),
        ("update", "--version", "v", "--", "touch", str(tmp_path / "x")),
    ):
        status, out, errors = inside(capsys, arguments[0], "--config", str(folder), *arguments[1:])
        assert (status, out) == (2, "")
        assert errors.startswith(f"epochkv: the key speaks for the pool with uid {right}, and {path} names policy with uid another-uid")
        assert errors.count("\n") == 1
    assert not (tmp_path / "x").exists()
    assert world.snapshot().target == 0


@pytest.mark.parametrize("whose", ["client", "hub"])
def test_a_key_that_does_not_fit_is_told_in_whole_sentences(
    world: HubWorld, tmp_path: Path, capsys: pytest.CaptureFixture[str], whose: str
) -> None:
    folder, pair = shutil.copytree(world.folder, tmp_path / "other"), generate_keypair()
    (folder / f"{whose}.pub").write_text(pair.public)
    if whose == "client":
        (folder / "client.key").write_text(pair.secret)
    status, _, errors = inside(capsys, "reset", "--config", str(folder))
    assert status == 4
    said = {
        "client": "it refuses our key, which is of no pool that this hub serves, or was retired",
        "hub": "no CURVE handshake: hub.pub is not the key of that hub, what listens there is no hub, or it hangs",
    }
    why = "Nothing was asked of the pool: engines go on with the KV they have"
    assert errors.startswith("epochkv: no answer from the hub at tcp://127.0.0.1:")
    assert errors.endswith(f": {said[whose]}. {why}\n")


def test_a_configuration_that_is_no_file_is_told_with_the_name_of_the_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for given, problem in (
        ("/", ": '/' is a directory without a connection.json; give the path of that file"),
        ("", "is ''; give the path of the pool's connection.json, or of the directory that holds it"),
        (" ", "is ' '; give the path of the pool's connection.json, or of the directory that holds it"),
        ("/nowhere", ": '/nowhere' cannot be read (No such file or directory); give the path of the pool's connection.json"),
    ):
        said = f"--config{problem}" if problem.startswith(":") else f"--config {problem}"
        assert inside(capsys, "status", "-c", given) == (2, "", f"epochkv: {said}\n")
    with pytest.raises(ConfigurationError, match=r"^the connection configuration: '/' is a directory without a connection\.json; give"):
        Pool.connect("/")
    with pytest.raises(ConfigurationError, match=r"^EPOCHKV_CONFIG: '/' is a directory without"):
        Connection.load(None, {"EPOCHKV_CONFIG": "/"})


# -------------------------------------------------------------------------------------------------------------------- wait


@pytest.mark.parametrize("epoch", ["-5", "-57", "-5.5", "x", "", "1.5", "9007199254740992", "9" * 5000])
def test_an_epoch_to_wait_for_that_is_none_names_epoch_and_its_range(capsys: pytest.CaptureFixture[str], epoch: str) -> None:
    for arguments in ((epoch, "--timeout", "1"), ("--timeout", "1", epoch), ("--", epoch)):
        status, out, errors = inside(capsys, "wait", *arguments)
        assert (status, out) == (2, "")
        assert errors.startswith("Usage: epochkv wait ")
        assert errors.endswith(f"Error: Invalid value for 'EPOCH': {epoch!r} is no epoch; give an integer from 0 to 9007199254740991.\n")


def test_an_option_of_wait_that_is_none_is_still_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--tiemout", "-x"):
        status, _, errors = inside(capsys, "wait", "7", option, "3")
        assert (status, f"No such option: {option}" in errors) == (2, True)
    assert (
        "--timeout is -5.0"
        in inside(capsys, "wait", "7", "--timeout", "-5", "--config", '{"pool":{"name":"p","uid":"u"},"hub":{"endpoint":"tcp://h:1"}}')[2]
    )


# ------------------------------------------------------------------------------------------------------------- interrupted


@pytest.mark.parametrize("arguments", [("status",), ("engines",), ("wait", "1")])
def test_a_command_that_only_looks_says_that_it_was_interrupted(world: HubWorld, tmp_path: Path, arguments: tuple[str, ...]) -> None:
    folder = shutil.copytree(world.folder, tmp_path / "other")
    content = json.loads((folder / "connection.json").read_text())
    with socket.create_server(("127.0.0.1", 0)) as silent:
        content["hub"]["endpoint"] = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        (folder / "connection.json").write_text(json.dumps(content))
        command = [*CLI, *arguments, "--timeout", "60", "--config", str(folder)]
        with interruptible():
            child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        silent.settimeout(60)
        silent.accept()[0].close()  # it asks, and nobody answers
        child.send_signal(signal.SIGINT)
        assert child.communicate(timeout=30) == ("", "epochkv: interrupted\n")
        assert child.returncode == 130


HANGS = """
import os, time
open(os.environ["STARTED"], "w").close()
try:
    time.sleep(60)
except BaseException:
    raise RuntimeError("half imported")
"""


def test_interrupted_while_it_is_loaded_it_says_no_more_than_that(tmp_path: Path) -> None:
    (tmp_path / "typer.py").write_text(HANGS)
    environ = {**os.environ, "PYTHONPATH": str(tmp_path), "STARTED": str(tmp_path / "started")}
    with interruptible():
        child = subprocess.Popen([*CLI, "status"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environ)
    eventually((tmp_path / "started").exists, "it imports", 60)
    child.send_signal(signal.SIGINT)
    assert child.communicate(timeout=30) == ("", "epochkv: interrupted\n")
    assert child.returncode == 130


PARSES = """
import signal, sys
from epochkv_fence.cli.__main__ import main
from typer.core import TyperGroup
TyperGroup.parse_args = lambda *arguments, **extra: signal.raise_signal(signal.SIGINT)
sys.argv = ["epochkv", "status"]
main()
"""


def test_interrupted_while_it_parses_it_says_so_too() -> None:
    with interruptible():
        done = subprocess.run([sys.executable, "-c", PARSES], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "epochkv: interrupted\n")


# -------------------------------------------------------------------------------------------------------------------- keys


def test_a_rotation_says_how_long_the_key_before_is_accepted(world: HubWorld, capsys: pytest.CaptureFixture[str]) -> None:
    """A grace shorter than 10 minutes is all that it has, whether an engine or a trainer uses it or not."""
    state, hub = world.options.state, world.hub
    assert hub is not None
    for grace, said in (
        ("3", "is accepted for 3 s, even if an engine still uses it"),
        ("600", "is accepted for 600 s, even if an engine still uses it"),
        ("601", "is accepted for 600 s at least and until no engine uses it, for 601 s at most"),
        ("0", "is not accepted any more: a running hub notices within a second"),
    ):
        before = hub.accepted_keys[0]
        done = inside(capsys, "keys", "rotate", "--state", str(state), "--grace", grace)
        assert done == (0, f"new client key in {state / 'client'}; the one before {said}\n", "")
        if grace == "3":
            assert inside(capsys, "keys", "rotate", "--state", str(state))[0] == 5
        if grace in ("3", "0"):
            eventually(lambda key=before: key not in hub.accepted_keys, "it is out", 20)
        else:
            assert inside(capsys, "keys", "retire", "--state", str(state))[0] == 0
