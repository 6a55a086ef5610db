"""Components are known by pid and start time; only they are ever signalled."""

from __future__ import annotations

import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hack.cluster.process import ProcessTable, start_time
from hack.waiting import poll

IGNORES_TERM = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"


def test_a_reused_pid_is_not_ours(tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"]) as stranger:
        started = start_time(stranger.pid)
        assert started is not None
        table = ProcessTable(tmp_path)
        own = table.start("own", ["sleep", "0.2"])
        assert poll(lambda: not own.alive(), 10)
        impostor = replace(own, pid=stranger.pid, start=started - 1)
        assert not impostor.alive()
        assert impostor.signal(signal.SIGKILL) is False
        impostor.end()
        assert stranger.poll() is None
        stranger.kill()


def test_what_ignores_sigterm_is_killed(tmp_path: Path) -> None:
    component = ProcessTable(tmp_path).start("deaf", [sys.executable, "-c", IGNORES_TERM])
    assert poll(lambda: component.tail() == "deaf", 20)
    component.end(grace=0.2)
    assert not component.alive()


def test_the_environment_is_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_CALLER", "x")
    component = ProcessTable(tmp_path).start("env", ["sh", "-c", "env; echo done; sleep 60"])
    assert poll(lambda: "done" in component.tail(), 10)
    component.end()
    assert "PATH=" in component.tail(100)
    assert "SECRET_OF_THE_CALLER" not in component.tail(100)
