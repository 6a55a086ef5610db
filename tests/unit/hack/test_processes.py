"""Components are known by pid and start time; only they are ever signalled."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hack.cluster.process import ProcessTable, log_tail, start_time
from hack.cluster.provider import ClusterError
from hack.waiting import poll

IGNORES_TERM = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"


def test_start_log_session_and_end(tmp_path: Path) -> None:
    table = ProcessTable(tmp_path)
    component = table.start("sleeper", ["sh", "-c", "echo hello; exec sleep 60"])
    try:
        assert component.alive()
        assert os.getsid(component.pid) == component.pid
        assert poll(lambda: component.tail() == "hello", 10)
        # A second table, as a later command makes it, knows the same process.
        assert ProcessTable(tmp_path).get("sleeper") == component
    finally:
        component.end()
    assert not component.alive()
    assert start_time(component.pid) is None
    table.forget("sleeper")
    assert table.all() == []


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


def test_a_stopped_process_is_alive_and_can_be_ended(tmp_path: Path) -> None:
    component = ProcessTable(tmp_path).start("stopped", ["sleep", "60"])
    component.signal(signal.SIGSTOP)
    assert component.alive()
    component.end(grace=5)
    assert not component.alive()


def test_the_environment_is_not_inherited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_CALLER", "x")
    component = ProcessTable(tmp_path).start("env", ["sh", "-c", "env; echo done; sleep 60"])
    assert poll(lambda: "done" in component.tail(), 10)
    component.end()
    assert "PATH=" in component.tail(100)
    assert "SECRET_OF_THE_CALLER" not in component.tail(100)


def test_launcher_that_dies_is_an_error_with_its_words(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="no way"):
        ProcessTable(tmp_path).start("child", ["true"], prefix=["sh", "-c", "echo no way; exit 1", "sh"])


def test_damaged_records_read_as_absent(tmp_path: Path) -> None:
    table = ProcessTable(tmp_path)
    table.pids.mkdir()
    (table.pids / "a.json").write_text("{")
    (table.pids / "b.json").write_text('{"pid": 1}')
    assert table.get("a") is None
    assert table.all() == []


def test_log_tail_of_long_and_absent_files(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert log_tail(file, 2) == "line 99998\nline 99999"
    assert "no log" in log_tail(tmp_path / "absent")
