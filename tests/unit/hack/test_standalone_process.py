"""A child process and its group: nothing of it survives `end`, and nobody who ends in time is killed."""

from __future__ import annotations

import os
import signal
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


def gone(process: Process) -> bool:
    """Nobody is left of the group, once init has taken note of who was killed."""
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        try:
            os.killpg(process.popen.pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


def test_the_first_process_may_end_its_children_itself(tmp_path: Path) -> None:
    process = start(tmp_path, "lambda *_: print('the child was told', flush=True)", "kill()")
    process.end(20.0, whole_group=False)
    assert gone(process)
    assert (process.popen.returncode, "the child was told" in process.tail()) == (0, False)
    assert "the leader has ended its child" in process.tail()
    process.end()


def test_everybody_is_told_unless_asked_otherwise(tmp_path: Path) -> None:
    process = start(tmp_path, "lambda *_: print('the child was told', flush=True)", "kill()")
    process.end(20.0)
    assert gone(process)
    assert "the child was told" in process.tail()


@pytest.mark.parametrize("whole_group", [True, False])
def test_who_is_deaf_or_frozen_is_killed_after_the_grace(tmp_path: Path, whole_group: bool) -> None:
    process = start(tmp_path, "signal.SIG_IGN", "terminate()")
    process.signal(signal.SIGSTOP)
    begun = time.monotonic()
    process.end(0.5, whole_group=whole_group)
    assert gone(process)
    assert time.monotonic() - begun >= 0.5
    assert process.popen.returncode != 0
