"""Child processes and their groups: nothing of them survives their program."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


def gone(group: int) -> bool:
    """Nobody is left of the group, once init has taken note of who was killed."""
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


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
