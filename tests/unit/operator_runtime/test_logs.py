"""What reaches the log when something unexpected happens: the place, never what local variables hold."""

import subprocess
import sys

import pytest

SCRIPT = """
import structlog
from epochkv_operator import logs
from epochkv_operator.settings import LogFormat

logs.configure(LogFormat("{format}"), "info")

def work():
    root_secret = "very" + "secret"
    raise ValueError("broken")

try:
    work()
except ValueError:
    structlog.get_logger("x").exception("operator ends")
"""


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_a_traceback_shows_no_local_variable(log_format: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{format}", log_format)], capture_output=True, text=True, timeout=60, check=True
    )
    assert "operator ends" in done.stdout
    assert "in work" in done.stdout
    assert "ValueError: broken" in done.stdout
    assert "verysecret" not in done.stdout + done.stderr
