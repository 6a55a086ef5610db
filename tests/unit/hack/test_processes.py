"""Components are known by pid and start time; only they are ever signalled."""

import signal
import subprocess
from dataclasses import replace
from pathlib import Path

from hack.cluster.process import ProcessTable, start_time
from hack.waiting import poll


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
