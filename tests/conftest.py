"""Keep how long every test took in `.build/durations.json`: its set-up, itself, and what it tears down. Run coroutines. End in order.

The set-up of a fixture that tests share counts for the first of them.
"""

import asyncio
import fcntl
import inspect
import json
import signal
import time
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
DURATIONS = ROOT / ".build/durations.json"
"""Test -> `[seconds, when it ended]`, of its last run in this checkout."""
_seconds: dict[str, float] = defaultdict(float)


def pytest_configure() -> None:
    """SIGTERM is as Ctrl-C: what tests have started ends with them."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine runs in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
    return True


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    _seconds[report.nodeid] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput") or not _seconds or not DURATIONS.parent.exists():
        return  # the process that started the workers of xdist hears of all their tests
    with DURATIONS.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # layers run beside each other
        file.seek(0)
        try:
            known = json.loads(file.read() or "{}")
        except ValueError:
            known = {}
        known |= {name: [round(seconds, 3), round(time.time())] for name, seconds in _seconds.items()}
        kept = {name: known[name] for name in sorted(known) if (ROOT / name.split("::")[0]).exists()}
        file.truncate(0)
        file.write(json.dumps(kept, indent=0) + "\n")
