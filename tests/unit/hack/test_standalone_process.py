"""Child processes and their groups: nothing of them survives `end`, a failed start or a program, and nobody who ends in time is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hack.standalone.process import Process

CHILD = "import signal, time; signal.signal(signal.SIGTERM, {handler}); print('child', flush=True); time.sleep(60)"
LEADER = """
import signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", {child!r}])
def stop(number, frame):
    time.sleep(0.3)
    child.{farewell}
    child.wait()
    print("the leader has ended its child", flush=True)
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
time.sleep(60)
"""


def start(folder: Path, handler: str, farewell: str) -> Process:
    leader = LEADER.format(child=CHILD.format(handler=handler), farewell=farewell)
    process = Process("group", [sys.executable, "-c", leader], folder / "log")
    process.wait_until(lambda: "child" in process.tail(), 30.0, "started")
    return process


def gone(process: Process | int) -> bool:
    """Nobody is left of the group, once init has taken note of who was killed."""
    group = process if isinstance(process, int) else process.popen.pid
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("whole_group", [True, False])
def test_who_is_deaf_or_frozen_is_killed_after_the_grace(tmp_path: Path, whole_group: bool) -> None:
    process = start(tmp_path, "signal.SIG_IGN", "terminate()")
    process.signal(signal.SIGSTOP)
    begun = time.monotonic()
    process.end(0.5, whole_group=whole_group)
    assert gone(process)
    assert time.monotonic() - begun >= 0.5
    assert process.popen.returncode != 0


# -- programs that end ----------------------------------------------------------------------------------------------------

PROGRAM = """
import sys, threading, time
from pathlib import Path
from hack.standalone.process import Process, ProcessError, nothing_left

def child() -> Process:
    process = Process("child", ["sleep", "60"], Path(sys.argv[1]))
    print("started", process.popen.pid, flush=True)
    return process

def mend(process: Process) -> None:
    try:
        while True:
            process.popen.wait()
            process = child()
    except ProcessError as error:
        print(error, flush=True)

with nothing_left(lambda text: print(text, flush=True)):
    child()
    threading.Thread(target=mend, args=[child()], daemon=True).start()
    print("up", flush=True)
    if sys.argv[2] == "fails":
        raise RuntimeError("of its own")
    time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT, "fails"])
def test_nothing_of_a_program_is_left_whatever_ends_it(tmp_path: Path, how: signal.Signals | str) -> None:
    """Signalled twice, while a thread starts again what ends."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "log"), str(how)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout
        lines = []
        while "up" not in lines:
            lines.append(program.stdout.readline().strip())
        if isinstance(how, signal.Signals):
            program.send_signal(how)
            program.send_signal(how)
        rest, _ = program.communicate(timeout=60)
    lines += rest.splitlines()
    assert program.returncode == (128 + how if isinstance(how, signal.Signals) else 1)
    assert (f"{how.name}: ending what was started" in lines) if isinstance(how, signal.Signals) else True
    assert "child is not started: everything ends" in lines
    groups = [int(line.split()[1]) for line in lines if line.startswith("started")]
    assert len(groups) >= 2
    assert all(gone(group) for group in groups)
